"""Islands as `hetero train` has them, where torchft cannot be imported: one leaves in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.islands import configuration
from tests.extras.islands.helpers import StandIn, serving
from tests.samples import save_llama, save_texts, save_tokenizer

STEPS = 60
DEADLINE_S = 240.0
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM there")


class Island:
    """One `hetero train`."""

    def __init__(self, folder: Path, name: str, port: int) -> None:
        self.output = folder / name
        raw = configuration(folder, name, port, layers=2, max_steps=STEPS, island={"sync_steps": 1})
        path = folder / f"{name}.json"
        path.write_text(json.dumps(raw), encoding="utf-8")
        search = [str(folder / "without"), str(Path(__file__).parents[3])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hetero_framework", "train", "--config", str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def members(self) -> list[list[str]]:
        """Of each step that is done."""
        try:
            lines = (self.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        done: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
        return [line["island"]["members"] for line in done if "island" in line]

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=DEADLINE_S)[0]
        return self.process.returncode, said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.long
def test_an_island_without_torchft_leaves_in_order_and_the_other_goes_on(tmp_path):
    save_llama(tmp_path / "model", layers=2)
    save_tokenizer(tmp_path / "words")
    save_texts(tmp_path / "texts.jsonl", 24)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torchft.py").write_text('raise ImportError("not in this test")')
    quorums = StandIn()
    quorums.least = 2
    with serving(quorums) as lighthouse, ExitStack() as stack:
        a, b = (Island(tmp_path, name, lighthouse.port) for name in "ab")
        for island in (a, b):
            stack.callback(island.kill)
        deadline = time.monotonic() + DEADLINE_S
        while len(b.members()) < 3:
            assert time.monotonic() < deadline
            assert b.process.poll() is None, b.end()
            time.sleep(0.02)
        b.process.send_signal(signal.SIGTERM)
        code, said = b.end()
        assert code == 75, said
        assert "stopped" in said
        code, said = a.end()
        assert code == 0, said
    assert "island b leaves in order" in said
    members = a.members()
    assert len(members) == STEPS
    assert members[0] == ["a", "b"]
    assert members[-1] == ["a"]
