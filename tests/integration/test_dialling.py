"""Workers without a port dial the coordinator; from then on nothing is different."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.cluster import roles
from hetero_framework.commands import diagnosis
from hetero_framework.config import Config
from hetero_framework.core import addresses
from hetero_framework.security.access import KeyOptions, access_of
from hetero_framework.security.keys import KeyDirectory
from hetero_framework.trainer.coordinator import train
from tests.certificates import keys_of
from tests.fault_proxy import FaultProxy
from tests.pools import TRAINING, Notes, read_metrics, started, with_end
from tests.samples import free_ports, plan_of

PLAN = plan_of(("local", 2), (1, 4), (2, 6))
MACHINE = {"ip": "127.0.0.1", "device": "cpu"}
AWAY = {"id": 1, "hostname": "laptop.invalid", "device": "cpu"}


class Worker:
    """A process of its own, whose file may name another port of the coordinator: a proxy's."""

    def __init__(self, id: int, config: dict[str, Any], folder: Path, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        file, self.log = folder / f"config-{id}.json", folder / f"worker-{id}.log"
        file.write_text(json.dumps(config))
        words = ["worker", "--keep", "--supervised", "--config", str(file), "--worker-id", str(id)]
        self.process = started(self.log, *words, *more, stdin=subprocess.PIPE)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)

    def waits_for(self, text: str) -> None:
        """Until its log says this."""
        while text not in self.log.read_text():
            with_end(self.process, self.log)


@contextmanager
def workers(*made: Worker) -> Iterator[None]:
    with ExitStack() as stack:
        for worker in made:
            stack.callback(worker.close)
        yield


@pytest.fixture
def raw(llama, texts, tmp_path):
    """Worker 1 dials, worker 2 is dialled. The coordinator starts neither."""
    ports = free_ports(2)
    return {
        "coordinator": {**MACHINE, "port": ports[0]},
        "workers": [AWAY, {**MACHINE, "id": 2, "port": ports[1]}],
        "shard_plan": PLAN,
        "model": {"name_or_path": str(llama)},
        "data": {"train": str(texts), "max_length": 64},
        "training": {**TRAINING, "num_train_epochs": 2, "output_dir": str(tmp_path / "run")},
    }


@pytest.fixture
def whole(losses):
    return losses([], "whole", training={"num_train_epochs": 2})


@pytest.mark.usefixtures("nothing_left_here")
def test_a_worker_that_dials_trains_and_redials_after_a_cut_link(raw, tmp_path, whole):
    proxy = FaultProxy(("127.0.0.1", raw["coordinator"]["port"]))
    through = {**raw, "coordinator": {**raw["coordinator"], "port": proxy.port}}
    first, second = Worker(1, through, tmp_path / "w"), Worker(2, raw, tmp_path / "w")

    listening: list[Any] = []

    def cut(step: int) -> None:
        if step == 2:
            proxy.reset()
        found = psutil.Process(first.process.pid).net_connections("inet")
        listening.extend(c.laddr for c in found if c.status == psutil.CONN_LISTEN)

    notes = Notes(cut)
    with proxy, workers(first, second):
        second.waits_for("listens on")
        asked = diagnosis.MachineView(Config.from_dict(raw), roles.Role(True, ())).workers
        assert [asked[worker].problem for worker in (1, 2)] == [None, None]
        assert asked[1].facts is not None
        train(Config.from_dict(raw), debug=True, progress=notes)
        assert read_metrics(tmp_path / "run") == whole
    assert listening == []
    said = "\n".join(notes.lines)
    assert "lost the link to worker 1" in said
    assert "worker 1 is back" in said
    # Worker 2 cannot dial it; it can dial worker 2.
    assert '"direct link opened"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert f"worker 1 dials 127.0.0.1:{proxy.port}" in first.log.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left_here")
def test_own_workers_without_ports_open_none_and_come_back_in_a_new_process(raw, tmp_path, whole):
    raw["workers"] = [{**MACHINE, "id": 1}, {**MACHINE, "id": 2}]
    listening: list[str | None] = []

    class Kill(Notes):
        def step(self, metrics: dict[str, Any]) -> None:
            super().step(metrics)
            if metrics["step"] == 3:
                listening.append(addresses.port_holder(raw["coordinator"]["port"]))
                found = next(line for line in self.lines if "worker 1: started as" in line)
                os.kill(int(found.split("process ")[1].split(";")[0]), signal.SIGTERM)

    train(Config.from_dict(raw), debug=True, progress=Kill())
    assert read_metrics(tmp_path / "run") == whole
    assert listening == [f"python (process {os.getpid()})"]


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left_here")
def test_over_tls_a_worker_that_dials_is_held_to_its_own_certificate(raw, tmp_path, whole):
    raw["workers"] = [AWAY, {**AWAY, "id": 2}]
    keys = keys_of(tmp_path / "keys", "local", 1, 2)
    stolen = KeyDirectory(tmp_path / "stolen")
    stolen.write_bundle(keys.identity(2), keys.read("worker-2.pem").split(b"\n", 1)[1])
    (stolen.path / "worker-2.pem").rename(stolen.path / "worker-1.pem")
    text = (stolen.path / "worker-1.pem").read_text()
    (stolen.path / "worker-1.pem").write_text(text.replace("worker/2", "worker/1", 1))
    given = ("--keys", str(keys.path))
    first, second = (Worker(i, raw, tmp_path / "w", *given) for i in (1, 2))
    thief = Worker(1, raw, tmp_path / "thief", "--keys", str(stolen.path))
    other = Worker(1, raw, tmp_path / "other", *given)

    def hold(step: int) -> None:
        """Until both that do not belong have been told."""
        if step == 3:
            thief.waits_for("the certificate is that of worker 2, not worker 1")
            with socket.create_connection(("127.0.0.1", raw["coordinator"]["port"])) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)

    with workers(first, second, thief, other):
        access = access_of(Config.from_dict(raw), "local", KeyOptions(keys.path))
        train(Config.from_dict(raw), debug=True, progress=Notes(hold), access=access)
        assert read_metrics(tmp_path / "run") == whole
        refused = [worker.log.read_text() for worker in (first, other)]
        assert sum("worker 1 is connected from 127.0.0.1" in text for text in refused) == 1
