"""`hetero launch --ssh --run`: a real run over a real ssh server, on two machines with a network of
their own. What it says and sends is in tests/integration/test_launch_ssh.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.network import Network, open_network
from tests import sshd
from tests.faults import networked
from tests.integration.test_parity import LORA
from tests.samples import save_llama, save_texts

WHY = networked.needs() or sshd.needs()
pytestmark = [pytest.mark.faults, pytest.mark.skipif(WHY is not None, reason=str(WHY))]
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 200.0


class Place:
    def __init__(self, at: Path, network: Network, server: sshd.Server) -> None:
        self.at, self.network, self.server = at, network, server
        hosts = [{"ip": ip, "port": port, "num_threads": 1} for ip, port in network.reach]
        raw = {
            "coordinator": hosts[0],
            "workers": [{**hosts[1], "id": 1}],
            "shard_plan": [
                {"id": "local", "start": 0, "end": 3},
                {"id": 1, "start": 3, "end": 6},
            ],
            "model": {"name_or_path": str(save_llama(at / "llama"))},
            "adapter": LORA,
            "data": {"train": str(save_texts(at / "texts.json", 32)), "max_length": 64},
            "training": {**networked.TRAINING, "output_dir": str(at / "run")},
        }
        self.file = at / "config.json"
        self.file.write_text(json.dumps(raw))
        hetero = at / "hetero"
        hetero.write_text(
            f"#!/bin/sh\nPYTHONPATH='{ROOT}' HF_HUB_OFFLINE=1 HETERO_CACHE= exec "
            f"'{sys.executable}' -m hetero_framework \"$@\"\n"
        )
        hetero.chmod(0o700)
        options = [word for o in server.options for word in ("--ssh-option", o)]
        self.words = ["--config", str(self.file), "--hetero", str(hetero), *options]
        self.words += ["--directory", str(at / "there")]

    @contextmanager
    def launched(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        within = ["nsenter", "-t", str(self.network.places[0].namespace_pid), "-n"]
        words = [sys.executable, "-m", "hetero_framework", "launch", "--ssh", "--run"]
        with (self.at / "said").open("ab") as said:
            process = subprocess.Popen(
                [*within, *words, *self.words, *more],
                stderr=said,
                cwd=self.at,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)
            self.soon(lambda: not self.left(), "processes are left")

    def left(self) -> list[psutil.Process]:
        """The processes of this configuration, on either machine."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if "hetero_framework" in words and (str(self.at) in words or "--life-line" in words):
                found.append(process)
        return found

    def said(self) -> str:
        return (self.at / "said").read_text()

    def soon(self, is_so: object, otherwise: str) -> None:
        assert callable(is_so)
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{otherwise}: {self.said()}"
            time.sleep(0.05)  # nothing announces what other processes do


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with open_network("100mbit", 2) as network:
        address = network.places[1].address
        enter = ["nsenter", "-t", str(network.places[1].namespace_pid), "-n"]
        with sshd.ssh_server(tmp_path / "sshd", 2222, address, enter) as server:
            yield Place(tmp_path, network, server)


def test_a_run_is_started_stopped_and_continued(place: Place) -> None:
    run = place.at / "run"
    with place.launched("--set", "training.num_train_epochs=200") as process:
        metrics = run / "metrics.jsonl"
        place.soon(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, "no steps")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()
    assert [*(run / "checkpoints").glob("step_*")], place.said()
    assert "worker 1 | " in place.said()
    assert "coordinator | " in place.said()
    steps = json.loads(metrics.read_text().splitlines()[-1])["step"]
    changed = ("--set", f"training.max_steps={steps + 3}")
    with place.launched(*changed, "--", "--resume", "latest") as process:
        assert process.wait(WAIT_S) == 0, place.said()
    assert (run / "adapter" / "adapter_model.safetensors").exists(), place.said()
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == steps + 3
