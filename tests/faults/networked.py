"""A real run on machines with a network of their own: each process in a network namespace.

    with machines(model, texts, directory) as cluster:
        with cluster.run("name") as run:
            run.after_step(3)
            cluster.cut(1)
            ...
            run.finish()

Machine 0 is the coordinator, the others are workers that serve one run after the other. The
networks are those of the benchmarks; a fault is made with routes and with `tc`, for there are
kernels without packet filters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machines import Child, Machines
from benchmarks.network import Network, can_make_namespaces, open_network
from hetero_framework.cluster.worker import serve
from hetero_framework.commands.diagnosis import diagnose
from hetero_framework.config import Config
from hetero_framework.engine.loading import load_stages
from hetero_framework.security.access import Access, KeyOptions, Plaintext, access_of
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress
from tests.integration.test_parity import LORA

NETWORK = "100mbit"
PATIENCE_S = 240.0
BOUNDS = (0, 2, 4, 6)
ACCESS = Plaintext(everywhere=True)
TRAINING = {
    **{"num_train_epochs": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    **{"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "visualize": False},
    **{"verify_architecture": False, "connect_timeout_s": 60.0},
}


def needs() -> str | None:
    """Why there can be no namespaces here."""
    return None if can_make_namespaces() else "network namespaces need root, ip, tc and unshare"


class Tell(Progress):
    """Sends what a user would see."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._connection.send(("step", metrics["step"]))

    def message(self, text: str) -> None:
        self._connection.send(("said", text))


def access(config: Config, process: int | str, keys: Path | None) -> Access:
    """By a directory of keys, or without."""
    return ACCESS if keys is None else access_of(config, process, KeyOptions(keys))


def coordinate(connection: Connection, raw: dict[str, Any], keys: Path | None = None) -> None:
    """The coordinator's process."""
    config = Config.from_dict(raw)
    train(config, progress=Tell(connection), access=access(config, "local", keys))
    connection.send(("done", None))


def work(
    connection: Connection, raw: dict[str, Any], worker: int, logs: str, keys: Path | None = None
) -> None:
    """A worker's process; what it says is in `logs`."""
    folder = Path(logs)
    folder.mkdir(parents=True)
    with (folder / "said.log").open("wb", buffering=0) as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    config = Config.from_dict(raw)
    own = access(config, worker, keys)
    serve(config, worker, build=load_stages, keep=True, logs=folder, access=own)


def doctor(connection: Connection, raw: dict[str, Any]) -> None:
    """`hetero doctor --config` on the coordinator's machine."""
    options = KeyOptions(insecure=True)
    connection.send(diagnose(Config.from_dict(raw), options=options)["findings"])


@dataclass
class Run:
    """One run of the coordinator."""

    output: Path
    child: Child
    said: list[str] = field(default_factory=list)

    def after_step(self, step: int) -> None:
        """Wait until so many steps are done."""
        self._until(lambda what, value: what == "step" and value >= step)

    def finish(self) -> None:
        self._until(lambda what, value: what == "done")

    def _until(self, wanted: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            what, value = self.child.receive(max(0.1, deadline - time.monotonic()))
            if what == "said":
                self.said.append(value)
            if wanted(what, value):
                return


def events(directory: Path) -> list[dict[str, Any]]:
    """What an events.jsonl has, with `at`, by time.time()."""
    file = directory / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [{**e, "at": datetime.fromisoformat(e["time"]).timestamp()} for e in found]


def event_after(directory: Path, what: str, at: float, within_s: float) -> float:
    """When such an event came, in seconds after `at`; waits for it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        times = [e["at"] for e in events(directory) if e["what"] == what and e["at"] >= at]
        if times:
            return times[0] - at
        time.sleep(0.05)  # nothing announces what another process writes
    raise AssertionError(f"no {what!r} in {directory} within {within_s} s: {events(directory)}")


class Cluster:
    """The machines of a network, with workers that serve one run after the other."""

    def __init__(
        self,
        network: Network,
        started: Machines,
        base: dict[str, Any],
        at: Path,
        bounds: Sequence[int],
    ) -> None:
        self.network = network
        self.at = at
        self._machines = started
        self._base = base
        entries = [
            {"hostname": f"machine-{k}", "ip": ip, "port": port, "device": "cpu", "num_threads": 1}
            for k, (ip, port) in enumerate(network.reach)
        ]
        self._entries = {
            "coordinator": entries[0],
            "workers": [{**entry, "id": k} for k, entry in enumerate(entries) if k],
        }
        self._layers = bounds[-1]
        self._plan = [
            {"id": k or "local", "start": start, "end": end}
            for k, (start, end) in enumerate(pairwise(bounds))
        ]
        self.workers = [
            started.start(place, work, self.config("worker"), k, str(self.worker_logs(k)))
            for k, place in enumerate(network.places[1:], start=1)
        ]

    @property
    def pids(self) -> list[int]:
        """The workers' processes."""
        return [worker.pid for worker in self.workers]

    def worker_logs(self, worker: int) -> Path:
        return self.at / f"worker-{worker}"

    def config(
        self, name: str, whole: bool = False, links: str = "auto", **training: Any
    ) -> dict[str, Any]:
        alone = {
            "coordinator": self._entries["coordinator"],
            "shard_plan": [{"id": "local", "start": 0, "end": self._layers}],
        }
        cut = {**self._entries, "shard_plan": self._plan, "links": links}
        settings = {**TRAINING, "output_dir": str(self.at / name), **training}
        return {**self._base, **(alone if whole else cut), "training": settings}

    @contextmanager
    def run(self, name: str, **options: Any) -> Iterator[Run]:
        """A run that is going on; `options` as of `config`."""
        raw = self.config(name, **options)
        child = self._machines.start(self.network.places[0], coordinate, raw)
        try:
            yield Run(self.at / name, child)
        finally:
            child.end()
            child.join()

    # -- faults -----------------------------------------------------------------------------------

    def lose(self, source: int, target: int) -> None:
        """What `source` sends to `target` is lost from now on, and neither is told."""
        self._tool(source, "ip", "route", "add", "blackhole", self._address(target))

    def cut(self, machine: int) -> None:
        """As if its cable were pulled, some way off: nothing passes, and nobody is told."""
        for other in range(len(self.network.places)):
            if other != machine:
                self.lose(machine, other)
                self.lose(other, machine)

    def heal(self) -> None:
        for source in range(len(self.network.places)):
            for target in range(len(self.network.places)):
                with suppress(subprocess.CalledProcessError):  # there is no such route
                    self._tool(source, "ip", "route", "del", "blackhole", self._address(target))

    def shape(self, machine: int, rate: str, limit: str = "1mb", burst: str = "16kb") -> None:
        """What a machine sends has this rate from now on; what does not fit `limit` is lost."""
        shape = ["rate", rate, "burst", burst, "limit", limit]
        self._tool(machine, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)

    def drop_large(self, machine: int) -> None:
        """What a machine sends is lost where a packet has more than 1,300 bytes, and nobody is
        told: a tunnel with a smaller MTU whose messages a firewall keeps back."""
        self.shape(machine, NETWORK, burst="1300")

    def diagnosed(self) -> list[dict[str, str]]:
        """What `hetero doctor --config` finds on the coordinator's machine."""
        child = self._machines.start(self.network.places[0], doctor, self.config("doctor"))
        try:
            return child.receive(PATIENCE_S)
        finally:
            child.end()
            child.join()

    def dropped(self, machine: int) -> int:
        """Packets that did not fit the queue of its port so far."""
        shown = self._tool(machine, "tc", "-s", "-j", "qdisc", "show", "dev", "eth0")
        return sum(int(queue["drops"]) for queue in json.loads(shown))

    @contextmanager
    def stopped(self, worker: int) -> Iterator[None]:
        """Within the block its process does nothing at all."""
        os.kill(self.pids[worker - 1], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[worker - 1], signal.SIGCONT)

    def _address(self, machine: int) -> str:
        return self.network.places[machine].address

    def _tool(self, machine: int, *command: str) -> str:
        pid = self.network.places[machine].namespace_pid
        whole = ["nsenter", "-t", str(pid), "-n", *command]
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout


@contextmanager
def machines(
    model: Path, texts: Path, at: Path, network: str = NETWORK, bounds: Sequence[int] = BOUNDS
) -> Iterator[Cluster]:
    """A coordinator's machine and workers', which listen; `bounds` are those of their layers."""
    base = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(texts), "max_length": 64},
        "adapter": LORA,
    }
    with ExitStack() as stack:
        places = stack.enter_context(open_network(network, len(bounds) - 1))
        yield Cluster(places, stack.enter_context(Machines()), base, at, bounds)
