"""Three machines, each in a network namespace, pair and train by the commands of the page alone.

The last one has no port and a name that nobody knows, not itself either: its key says who it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.network import open_network
from tests.faults.networked import needs
from tests.samples import save_llama, save_texts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "three_machines.md"
WAIT_S = 240.0
COMMAND = (sys.executable, "-m", "hetero_framework")
skipped = pytest.mark.skipif(needs() is not None, reason=str(needs()))


@dataclass(frozen=True)
class Machine:
    """A machine: its network namespace, a directory where its user works, and nothing shared."""

    enter: list[str]
    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        told = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        told |= {"cwd": self.folder, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
        command = [*self.enter, *COMMAND, *words]
        return subprocess.Popen(command, stderr=subprocess.STDOUT, **told)

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        said, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, said


@pytest.fixture
def machines(tmp_path):
    with ExitStack() as stack:
        network = stack.enter_context(open_network("1gbit", 3))
        made = []
        for number, place in enumerate(network.places):
            folder = tmp_path / f"machine-{number}"
            folder.mkdir()
            made.append(Machine(["nsenter", "-t", str(place.namespace_pid), "-n"], folder))
        yield network, made


def ended(process: subprocess.Popen[str], deadline: float) -> tuple[int, str]:
    said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    return process.returncode, said


def test_the_commands_are_those_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for command in (
        "hetero invite 1 2 --config cluster.json",
        "hetero join 192.168.1.10:9998 HT1-... --config cluster.json",
        "hetero train --config cluster.json",
        "--worker laptop:-",
    ):
        assert command in text


@skipped
def test_three_machines_pair_and_train(machines, figure):
    network, (coordinator, *boxes) = machines
    began = time.monotonic()
    addresses = [place.address for place in network.places]
    model = save_llama(coordinator.folder / "model")
    for box in boxes:
        shutil.copytree(model, box.folder / "model")  # each reads it from its own disk
    texts = save_texts(coordinator.folder / "train.jsonl", 12)
    workers = ["--worker", f"{addresses[1]}:9999:cpu", "--worker", "laptop:-:cpu"]
    code, said = coordinator.run(
        *("init", "--non-interactive", "--model", str(model), "--adapter", "none"),
        *("--data", str(texts), "--coordinator", f"{addresses[0]}:9998:cpu", *workers),
        *("--output", "cluster.json"),
    )
    assert code == 0, said
    assert "hetero invite 1 2 --config cluster.json" in said
    raw = json.loads((coordinator.folder / "cluster.json").read_text())
    raw["training"].update(max_steps=3, save_strategy="no", report_to="none", visualize=False)
    (coordinator.folder / "cluster.json").write_text(json.dumps(raw, indent=2))

    # Before it was invited, a machine that was sent the file alone is told what to do.
    (boxes[0].folder / "cluster.json").write_text(json.dumps(raw))
    code, said = boxes[0].run("train", "--config", "cluster.json")
    assert (code, "hetero invite" in said) == (3, True), said

    for number, box in enumerate(boxes, 1):
        inviting = coordinator.start("invite", str(number), "--config", "cluster.json")
        line = inviting.stdout.readline()
        while inviting.poll() is None and not line.startswith("hetero join"):
            line = inviting.stdout.readline()
        assert re.fullmatch(
            rf"hetero join {addresses[0]}:9998 HT1-[a-z2-7]+-[a-z2-7]+ --config cluster\.json\n",
            line,
        )
        _, address, token = line.split()[1:4]
        code, said = box.run("join", address, token, "--config", "cluster.json")
        assert code == 0, said
        code, said = ended(inviting, time.monotonic() + WAIT_S)
        assert (code, f"worker {number} has joined" in said) == (0, True), said
        # A second time the same line is good for nothing.
        code, said = box.run("join", address, token, "--config", "cluster.json", "--keys", "other")
        assert code == 2, said  # nobody listens any more
        assert (box.folder / "cluster.json").read_text() == (
            coordinator.folder / "cluster.json"
        ).read_text()
    paired = time.monotonic()

    running = [m.start("train", "--config", "cluster.json") for m in (*boxes, coordinator)]
    try:
        outcomes = [ended(process, time.monotonic() + WAIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [code for code, _ in outcomes] == [0, 0, 0], outcomes
    assert (coordinator.folder / "runs/default/model/model.safetensors").exists()
    secret = (coordinator.folder / "hetero_keys/authority.pem").read_text().split("\n")[1]
    for machine in (coordinator, *boxes):
        own = machine.folder / "hetero_keys"
        assert own.stat().st_mode & 0o077 == 0
        others = [f for f in machine.folder.rglob("*") if f.is_file() and f.parent != own]
        assert not [f for f in others if secret.encode() in f.read_bytes()]
    figure(
        "three machines paired by their page",
        f"{paired - began:.0f} s with init, then 3 steps over TLS",
        "no other command",
    )
