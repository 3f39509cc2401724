"""The chaos tool as a maintainer runs it, on a small model of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import programs
from tests.faults.soak import configuration
from tests.samples import free_ports, save_llama, save_texts

pytestmark = pytest.mark.faults


def test_chaos_says_that_the_results_are_the_same(tmp_path: Path, figure: Any) -> None:
    save_llama(tmp_path / "llama")
    save_texts(tmp_path / "texts.jsonl", 40)
    file = configuration(tmp_path, "run", 12, free_ports(3))
    words = ["--config", file, "--json", "--output-dir", tmp_path / "chaos"]
    done = programs.run("chaos", *words, "--steps", 12, "--kills", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["same"]
    assert verdict["steps"] == 12
    assert verdict["commands"] == 2
    figure("chaos, 3 kills in 12 steps", f"the same in {verdict['seconds']:.0f} s", "same")
