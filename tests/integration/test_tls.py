"""Training over TLS: the same bits, nothing readable on the wire, and nobody else gets in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.security.access import KeyOptions, access_of
from hetero_framework.trainer.coordinator import train
from tests.certificates import keys_of
from tests.fault_proxy import FaultProxy
from tests.integration.conftest import TRAINING, Notes, is_listening, read_metrics, with_end
from tests.samples import free_ports

SEED = {"seed": 5}


class Cluster:
    """Two workers with keys, each behind a proxy, and the configuration of their coordinator."""

    def __init__(self, folder: Path, llama: Path, texts: Path) -> None:
        self.folder = folder
        self.keys = keys_of(folder / "keys", "local", 1, 2, 3)
        self.ports = free_ports(2)
        self.proxies = [FaultProxy(("127.0.0.1", port)) for port in self.ports]
        machine = {"ip": "127.0.0.1", "device": "cpu"}
        self.raw: dict[str, Any] = {
            "coordinator": {**machine, "port": free_ports(1)[0]},
            "workers": [{**machine, "id": i, "port": p} for i, p in enumerate(self.ports, 1)],
            "shard_plan": [
                {"id": "local", "start": 0, "end": 2},
                {"id": 1, "start": 2, "end": 4},
                {"id": 2, "start": 4, "end": 6},
            ],
            "model": {"name_or_path": str(llama)},
            "data": {"train": str(texts), "max_length": 64},
            "training": {**TRAINING, "num_train_epochs": 2, "reconnect_timeout_s": 60.0},
        }
        file = folder / "workers.json"
        file.write_text(json.dumps(self.raw))
        self.logs = [folder / f"worker-{i}.log" for i in (1, 2)]
        self.processes = [self._start(i, file, log) for i, log in enumerate(self.logs, 1)]

    def _start(self, worker: int, config: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hetero_framework", "worker", "--keep", "--supervised"]
        command += ["--config", str(config), "--worker-id", str(worker)]
        command += ["--keys", str(self.keys.path)]
        with log.open("wb") as output:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)

    def wait(self) -> None:
        for process, port in zip(self.processes, self.ports, strict=True):
            while not is_listening(port):
                with_end(process)

    def config(self, name: str, **training: Any) -> Config:
        """Through the proxies."""
        workers = [
            {**worker, "port": proxy.port}
            for worker, proxy in zip(self.raw["workers"], self.proxies, strict=True)
        ]
        output = {"output_dir": str(self.folder / name)}
        own = {"workers": workers, "training": {**self.raw["training"], **output, **training}}
        return Config.from_dict({**self.raw, **own})

    def train(self, name: str, **training: Any) -> tuple[list[tuple], list[str]]:
        config, notes = self.config(name, **training), Notes()
        access = access_of(config, "local", KeyOptions(self.keys.path))
        train(config, debug=True, progress=notes, access=access)
        return read_metrics(self.folder / name), notes.lines

    def adapter(self, name: str) -> bytes:
        [file] = (self.folder / name).glob("*/*.safetensors")
        return file.read_bytes()

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)
        for proxy in self.proxies:
            proxy.stop()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, llama: Path, texts: Path
) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("tls"), llama, texts)
    try:
        made.wait()
        yield made
    finally:
        made.close()


def test_run_over_tls_equals_the_plain_one_to_the_last_bit(
    cluster: Cluster, losses: Callable[..., list[tuple]]
) -> None:
    found, lines = cluster.train("plain-equal")
    assert found == losses([2, 4], training={"num_train_epochs": 2})
    assert not [line for line in lines if "repeat" in line or "lost" in line]
