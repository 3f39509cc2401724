"""Real worker processes on the loopback, started once and used by one run after the other.

A coordinator that finds its workers listening uses them, so a test pays for a training run but not
for importing torch in every process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.cluster.worker import serve
from hetero_framework.config import Config
from hetero_framework.engine.loading import load_stages
from hetero_framework.models.verify import equivalence
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress
from tests.samples import DEVICE, free_ports, plan_of, read_jsonl, save_llama, save_texts
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKERS = 4
TRAINING = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "report_to": "none",
    "visualize": False,
    "connect_timeout_s": 180.0,  # starting takes a minute where much else runs
}


@dataclass(frozen=True)
class Pool:
    """Worker processes 1..NUM_WORKERS, their logs, and the addresses at which they listen."""

    machines: dict[str, Any]
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def check(self) -> None:
        """All of them still serve: nothing that a coordinator or a network does may end them."""
        for process, log, worker in zip(
            self.processes, self.logs, self.machines["workers"], strict=True
        ):
            assert process.poll() is None, log.read_text()
            assert is_listening(worker["port"]), log.read_text()

    def config(
        self, output: Path, cuts: list[int], layers: int = 6, **sections: Any
    ) -> dict[str, Any]:
        """A configuration of local + one worker per further stage; `training` is merged."""
        ends = zip(("local", *range(1, len(cuts) + 1)), (*cuts, layers), strict=True)
        training = {**TRAINING, "output_dir": str(output), **sections.pop("training", {})}
        plan = sections.pop("shard_plan", None) or plan_of(*ends)
        used = {entry["id"] for entry in plan}
        workers = [w for w in self.machines["workers"] if w["id"] in used]
        return {
            "coordinator": self.machines["coordinator"],
            "workers": workers,
            "shard_plan": plan,
            "training": training,
            **sections,
        }


class Notes(Progress):
    """Keeps what the user would read, and may do something after each step."""

    def __init__(self, after_step: Callable[[int], object] = lambda step: None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.after_step = after_step

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        self.after_step(metrics["step"])

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="session")
def _verdicts():
    return {}


@pytest.fixture
def verdicts(_verdicts, monkeypatch):
    """What was found of a tiny copy is remembered from test to test, and nothing else is.

    As between runs of a user, who has a cache. Training the copies took 1.0 of 2.3 s of a short run
    of the Llama here and 2.5 of 6.1 s of one of Gemma 3n, and most runs ask the same: a question
    names settings, cut, versions and code. A refusal is never remembered. What a verdict is, and
    its cache, is tested in tests/unit/models/verify/test_equivalence.py.
    """

    def recall(kind: str, question: str) -> Any:
        return _verdicts.get(f"{kind} {question}")

    def remember(kind: str, question: str, answer: Any) -> None:
        _verdicts[f"{kind} {question}"] = answer

    monkeypatch.setattr(equivalence, "recall", recall)
    monkeypatch.setattr(equivalence, "remember", remember)


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pool")
    ports = free_ports(NUM_WORKERS + 1)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": DEVICE}
    machines = {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [
            {**machine, "id": i, "port": ports[i], "models": ["*"]}
            for i in range(1, NUM_WORKERS + 1)
        ],
    }
    plan = plan_of(("local", 1), *((i, i + 1) for i in range(1, NUM_WORKERS + 1)))
    config = directory / "pool.json"
    config.write_text(json.dumps({**machines, "shard_plan": plan}))
    logs = [(directory / f"worker-{i}.log").open("wb") for i in range(1, NUM_WORKERS + 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.greedy_buffers", "worker", "--keep", "--supervised"]
            + ["--config", str(config), "--worker-id", str(i)],
            cwd=ROOT,  # of `tests`
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for i, log in enumerate(logs, 1)
    ]
    try:
        for process, port in zip(processes, ports[1:], strict=True):
            while not is_listening(port):
                with_end(process)
        yield Pool(machines, processes, [Path(log.name) for log in logs])
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait(timeout=WAIT_S)
        for log in logs:
            log.close()


def is_listening(port: int) -> bool:
    """By connecting: a probe that binds the port could keep the worker from it."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def hetero(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run `hetero` with these words; return its exit code and output."""
    program = [sys.executable, "-m", "hetero_framework", *words]
    return subprocess.run(program, capture_output=True, text=True, **{"timeout": 300, **how})


def with_end(process: subprocess.Popen[bytes], log: Path | None = None) -> None:
    """Wait a moment for a starting process; fail if it ended, with its log."""
    try:
        code = process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(f"a worker ended with {code}: {log and log.read_text()}")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """21 lines: with batch 2 and accumulation 4, every epoch ends in a partial batch and step."""
    return save_texts(tmp_path_factory.mktemp("data") / "texts.jsonl", 21)


@pytest.fixture
def configured(pool, llama, texts, tmp_path, verdicts):
    """Configurations with the given cuts and sections: the llama over the texts, if no others are
    given, into `tmp_path / name`."""

    def make(cuts: list[int], name: str = "run", **sections: Any) -> Config:
        sections.setdefault("model", {"name_or_path": str(llama)})
        sections.setdefault("data", {"train": str(texts), "max_length": 64})
        return Config.from_dict(pool.config(tmp_path / name, cuts, **sections))

    return make


@pytest.fixture
def losses(configured, tmp_path):
    """Train with the given cuts and sections; (loss, grad_norm, learning_rate) of every step."""

    def run(cuts: list[int], name: str = "run", **sections: Any) -> list[tuple]:
        train(configured(cuts, name, **sections), debug=True)
        return read_metrics(tmp_path / name)

    return run


def read_metrics(output: Path) -> list[tuple]:
    lines = read_jsonl(output / "metrics.jsonl")
    return [
        (line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines if "loss" in line
    ]


def with_own_worker(config: Config) -> Config:
    """Worker 1 at a new port, where no process of the pool is: the coordinator starts it itself."""
    raw = config.to_dict()
    raw["workers"][0]["port"] = free_ports(1)[0]
    return Config.from_dict(raw)


@contextlib.contextmanager
def serving(config: Config, by: Callable[..., object] = serve, **how: Any) -> Iterator[None]:
    """Within the block the first worker serves in a thread of this process, and listens."""
    (worker, *_), over = config.workers, threading.Event()
    settings = {"build": load_stages, "should_stop": over.is_set, **how}
    thread = threading.Thread(
        target=by, args=(config, worker.id), kwargs=settings, name=f"worker {worker.id}"
    )
    thread.start()
    try:
        while not is_listening(worker.port):
            thread.join(0.05)
            assert thread.is_alive()
        yield
    finally:
        over.set()
        thread.join()


def started(log: Path, *words: str, **how: Any) -> subprocess.Popen[bytes]:
    """A process of `hetero` with these words, which writes what it says into the log."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "hetero_framework", *words],
            **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **how},
        )


@pytest.fixture
def nothing_left(pool):
    """No test may leave a thread, a socket or a child behind, or end a worker of the pool."""
    with leaving_nothing():
        yield
        pool.check()


@pytest.fixture
def nothing_left_here():
    """The same where the pool is not needed."""
    with leaving_nothing():
        yield


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Within the block no thread, socket or child may be left behind."""
    me = psutil.Process()
    before = (threads(), sockets(me), children(me))
    yield
    deadline = time.monotonic() + WAIT_S
    while (threads(), sockets(me), children(me)) != before and time.monotonic() < deadline:
        time.sleep(0.05)  # nothing announces that a socket or a process is gone
    assert threads() == before[0]
    assert sockets(me) == before[1]
    assert children(me) == before[2]


def threads() -> list[str]:
    """Their names, but for tqdm's, and those that end by themselves without events of a device."""
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name not in ("watch events", "tqdm_monitor"))


def sockets(process: psutil.Process) -> int:
    return len(process.net_connections())


def children(process: psutil.Process) -> list[int]:
    return sorted(child.pid for child in process.children())
