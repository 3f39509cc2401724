"""A run that changes its plan equals one process, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import log
from hetero_framework.cluster.direct_links import DirectLinks
from hetero_framework.cluster.worker import serve
from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.engine.loading import load_stages
from hetero_framework.errors import StoppedEarly
from hetero_framework.extras.planner.replanning import ChosenPlan, Replanning
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.plans import PlanChange
from hetero_framework.trainer.setup import replanned
from tests.faults.final_state import assert_same_run
from tests.integration.test_parity import LORA
from tests.pools import TRAINING, Notes, is_listening
from tests.reads import note_reads
from tests.samples import machines_here, plan_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("nothing_left_here")

Cut = list[tuple[Any, int]]  # owners, and the layers before which their parts end
CUTS: dict[int, Cut] = {
    3: [("local", 1), (1, 5), (2, 6)],
    5: [("local", 3), (2, 6)],
    7: [("local", 1), (2, 2), (1, 4), (2, 6)],
}
THREE: Cut = [("local", 2), (1, 4), (2, 6)]


def make(llama: Path, texts: Path, output: Path, cut: Cut, **sections: Any):
    """Workers of this machine, which the coordinator starts where nobody listens yet."""
    training = {"max_steps": 9, "verify_architecture": False, **sections.pop("training", {})}
    return Config.from_dict(
        {
            **machines_here(*cut),
            "model": {"name_or_path": str(llama)},
            "data": {"train": str(texts), "max_length": 64},
            "training": {**TRAINING, "output_dir": str(output), **training},
            **sections,
        }
    )


def assert_equals_one_process(config: Config) -> None:
    """Train once more, in one process, and compare."""
    raw, whole = config.to_dict(), config.output_dir.with_name("whole")
    training = {**raw["training"], "output_dir": str(whole)}
    alone = {**raw, "workers": [], "shard_plan": plan_of(("local", 6)), "training": training}
    train(Config.from_dict(alone))
    assert not events(whole, "plan changed")
    assert_same_run(config.output_dir, whole)


def events(output: Path, what: str) -> list[dict[str, Any]]:
    lines = (output / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["what"] == what]


@pytest.fixture
def cut_at(monkeypatch):
    """Runs take the plans of CUTS after those steps."""

    def changes(self: Any, cluster: Any) -> Iterator[PlanChange]:
        prepared = self.prepared
        cut = CUTS.get(log.current_step() or 0)
        if cut and prepared.config.workers:
            other = replanned(prepared, plan_of(*cut), self.facts, "a test")
            yield ChosenPlan(other, "a test", None, away=())

    monkeypatch.setattr(Replanning, "changes", changes)


@pytest.mark.usefixtures("cut_at")
@pytest.mark.parametrize(
    "adapter", [LORA, pytest.param(None, marks=pytest.mark.long)], ids=["lora", "full"]
)
def test_changes_of_plan_change_no_bit(adapter, llama, texts, tmp_path):
    run = make(llama, texts, tmp_path / "run", THREE, adapter=adapter)
    train(run, replan=True, progress=Notes())
    assert_equals_one_process(run)
    assert [event["to_step"] for event in events(tmp_path / "run", "plan changed")] == [3, 5, 7]


@pytest.mark.long
@pytest.mark.usefixtures("cut_at")
def test_ctrl_c_during_a_change_of_plan_keeps_the_state(llama, texts, tmp_path, monkeypatch):
    config = make(llama, texts, tmp_path / "run", THREE, adapter=LORA)

    def interrupted(self: Replanning, change: PlanChange) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Replanning, "taken", interrupted)
        with pytest.raises(StoppedEarly, match="while a worker was waited for") as stopped:
            train(config, replan=True, progress=Notes())
    assert "after step 3" in stopped.value.hint
    assert not events(tmp_path / "run", "plan changed")
    train(config, replan=True, progress=Notes())
    assert_equals_one_process(config)


@pytest.mark.long
@pytest.mark.usefixtures("cut_at")
def test_a_direct_link_that_does_not_come_about_under_another_plan_ends_no_run(
    llama, texts, tmp_path, monkeypatch
):
    real, asked = DirectLinks.connect, 0

    def connect(self: DirectLinks, pairs: Any, timeout_s: float) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            return real(self, pairs, timeout_s)
        self._links.clear()
        return {frozenset(pair): "its machine lets nobody in any more" for pair in pairs}

    monkeypatch.setattr(DirectLinks, "connect", connect)
    run = make(llama, texts, tmp_path / "run", THREE, adapter=LORA, links="direct")
    train(run, replan=True)
    assert asked > 1
    assert_equals_one_process(run)
    assert events(tmp_path / "run", "no direct link")


@pytest.mark.usefixtures("cut_at")
def test_layers_that_stay_are_not_read_again(llama, texts, tmp_path, monkeypatch):
    """Both processes are threads here, so that what they read can be counted."""
    read: list[tuple[str, str]] = []

    def note(name: str) -> None:
        if ".layers." in name:
            read.append((threading.current_thread().name, name.split(".")[2]))

    note_reads(monkeypatch, note)
    monkeypatch.setitem(CUTS, 3, [("local", 3), (1, 6)])
    monkeypatch.setitem(CUTS, 5, [("local", 2), (1, 5), ("local", 6)])
    monkeypatch.delitem(CUTS, 7)
    config = make(llama, texts, tmp_path / "run", [("local", 2), (1, 6)], adapter=LORA)
    over = threading.Event()
    worker = threading.Thread(
        name="worker",
        target=lambda: serve(config, 1, build=load_stages, keep=True, should_stop=over.is_set),
    )
    worker.start()
    try:
        # Only then: a process's lines go to those who asked last, so that a worker that begins
        # within the run would keep the coordinator's events from their file.
        while not is_listening(config.workers[0].port or 0):
            worker.join(0.05)
            assert worker.is_alive()
        train(config, replan=True, progress=Notes())
    finally:
        over.set()
        worker.join()
    here = threading.current_thread().name
    assert len(events(tmp_path / "run", "plan changed")) == 2
    assert {layer for thread, layer in read if thread == here} == {"0", "1", "2", "5"}
    assert {layer for thread, layer in read if thread == "worker"} == {"2", "3", "4", "5"}
    # A layer has nine tensors; the worker's third was given away and is read again.
    times = Counter(read)
    assert {key for key, count in times.items() if count == 2 * 9} == {("worker", "2")}
    assert set(times.values()) == {9, 2 * 9}


class Worker:
    """Worker 2 as a process of its own, which nobody but the test starts."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self.log = folder / "worker.json", folder / "worker.log"
        self._config.write_text(json.dumps(config.to_dict()))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetero_framework", "worker", "--keep", "--supervised"]
                + ["--config", str(self._config), "--worker-id", "2"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def await_line(self, words: str) -> None:
        """Wait for its log to say so."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.log.read_text():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)  # a log announces nothing

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process = None


class At(Notes):
    """Does something after some steps, each once."""

    def __init__(self, **jobs: Callable[[], None]) -> None:
        super().__init__()
        self._jobs = {int(name.removeprefix("step_")): job for name, job in jobs.items()}

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        if job := self._jobs.pop(metrics["step"], None):
            job()


@pytest.fixture
def config(request, llama, texts, tmp_path):
    """Of a run of an adapter, or of what a test gives instead."""
    changes = {"adapter": LORA, "training": {}, **getattr(request, "param", {})}
    training = {"max_steps": 12, "replicate_steps": 2, **changes.pop("training")}
    return make(llama, texts, tmp_path / "run", THREE, training=training, **changes)


@pytest.fixture
def worker(config, tmp_path):
    """Worker 2 of that configuration, started."""
    made = Worker(config, tmp_path)
    made.start()
    try:
        made.await_line("listens on")
        yield made
    finally:
        made.kill()


@pytest.mark.long
def test_a_worker_that_stays_away_is_done_without_and_taken_back(
    config, worker, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "REPLAN_S", 1.0)

    def flap() -> None:
        """Something answers at its port and hangs up, as a machine does that starts or ends."""
        with socket.create_server(("127.0.0.1", config.worker(2).port or 0)) as port:
            port.settimeout(60)
            for _ in range(2):
                caller, _ = port.accept()
                with caller:
                    caller.recv(1)

    def return_() -> None:
        worker.start()
        worker.await_line("serving the run of")

    train(config, replan=True, progress=At(step_5=worker.kill, step_7=flap, step_8=return_))
    assert_equals_one_process(config)
    without, again = events(tmp_path / "run", "plan changed")
    assert without["reason"] == "worker 2 stays away"
    assert "worker 2" not in without["plan"]
    assert (again["reason"], again["from_step"]) == ("worker 2 is back", again["to_step"])
    there = "layers 0-1 on coordinator, layers 2-3 on worker 1, layers 4-5 on worker 2"
    assert again["plan"] == there


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [{"adapter": None, "training": {"save_strategy": "steps", "save_steps": 3}}],
    indirect=True,
    ids=["full"],
)
def test_full_training_goes_on_without_a_worker_from_the_last_checkpoint(
    config, worker, tmp_path, monkeypatch
):
    """What the others have in memory is two steps further than what they go on from."""
    monkeypatch.setattr(timeouts, "REPLAN_S", 1.0)
    train(config, replan=True, progress=At(step_5=worker.kill))
    assert_equals_one_process(config)
    [without] = events(tmp_path / "run", "plan changed")
    assert (without["reason"], without["to_step"]) == ("worker 2 stays away", 3)
    assert without["from_step"] == 5
    assert "worker 2" not in without["plan"]


@pytest.mark.long
@pytest.mark.parametrize("point", ["load", "load-state"])
def test_a_worker_lost_during_a_change_of_plan_restarts_the_change(
    point, config, worker, tmp_path, monkeypatch
):
    monkeypatch.setattr(timeouts, "REPLAN_S", 5.0)
    # The loss is noticed in the next step, or where the state is copied before it.
    monkeypatch.setenv("HETERO_FAILPOINT", f"worker-1/{point}@5,worker-1/{point}@6")
    train(config, replan=True, progress=At(step_5=worker.kill))
    monkeypatch.delenv("HETERO_FAILPOINT")
    assert_equals_one_process(config)
    assert [e["worker"] for e in events(tmp_path / "run", "worker restarted")] == [1]
    # One that is started again slowly is done without first, too, and then taken back.
    last = events(tmp_path / "run", "plan changed")[-1]
    assert "worker 2" not in last["plan"]


@pytest.mark.long
def test_a_coordinator_killed_during_a_change_of_plan_continues(config, worker, tmp_path):
    config = config.with_changes(training={"rejoin_wait_s": 2.0})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    command = [sys.executable, "-m", "hetero_framework", "train", "--replan", "--config", str(file)]
    points = "coordinator/load@6,coordinator/step@6:sleep:8"
    killed = subprocess.Popen(command, env={**os.environ, "HETERO_FAILPOINT": points})
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 5:
            assert killed.poll() is None
            time.sleep(0.05)  # a file announces nothing
        worker.kill()
        assert killed.wait(timeout=120) == -signal.SIGKILL
    finally:
        killed.kill()
        killed.wait()
    worker.start()
    worker.await_line("listens on")
    subprocess.run(command, check=True, timeout=240)
    assert_equals_one_process(config)
