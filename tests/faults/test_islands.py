"""Islands as real processes, with torchft's lighthouse: any of them may end at any point.

In each run every step is committed once, with all of its samples and the loss of one process;
islands that were away come back by the same command; at the end all have the same bits.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import islands as processes
from benchmarks.islands import Islands, Tell, configuration, lighthouse
from benchmarks.machines import Machines
from benchmarks.replanning import Here
from hetero_framework.cluster.worker import serve
from hetero_framework.config import Config
from hetero_framework.engine.loading import load_stages
from hetero_framework.trainer.coordinator import train
from tests.extras.islands.optional import need_torchft
from tests.fault_proxy import FaultProxy
from tests.pools import Notes
from tests.samples import free_ports, save_llama, save_texts, save_tokenizer

pytestmark = pytest.mark.islands

LAYERS = 4
SAMPLES = 6
NUM_TEXTS = 4 * SAMPLES - 1  # an epoch's last step is short
Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def torchft():
    need_torchft()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("islands")
    save_llama(made / "model", layers=LAYERS)
    save_tokenizer(made / "words")
    save_texts(made / "texts.jsonl", NUM_TEXTS)
    return made


def raw_of(
    folder: Path, at: Path, name: str, port: int, steps: int, **island: Any
) -> dict[str, Any]:
    training = {"max_steps": steps, "gradient_accumulation_steps": SAMPLES, "learning_rate": 1e-3}
    training["output_dir"] = str(at / name)
    raw = configuration(folder, name, port, layers=LAYERS, island=island, **training)
    raw["adapter"] = {"r": 4, "lora_alpha": 8}
    return raw


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The losses of one process."""
    known: list[float] = []

    def losses(steps: int) -> list[float]:
        if len(known) < steps:
            raw = raw_of(folder, tmp_path_factory.mktemp("alone"), "whole", 1, steps)
            del raw["island"]
            raw["training"]["lr_scheduler_type"] = "constant"
            known[:] = train(Config.from_dict(raw), progress=Notes()).losses
        return known[:steps]

    return losses


@pytest.fixture
def server():
    """What `hetero lighthouse` opens."""
    with lighthouse() as made:
        yield made


class Run:
    """A run of some islands, of which some die."""

    def __init__(self, raws: dict[str, dict[str, Any]], alone: Callable[[int], list[float]]):
        for raw in raws.values():
            raw["training"]["lr_scheduler_type"] = "constant"
        self.raws, self._alone = raws, alone
        [self.steps] = {raw["training"]["max_steps"] for raw in raws.values()}

    def check(self, islands: Islands, *names: str) -> None:
        """What holds at the end, on these islands."""
        committed, losses = islands.committed(), self._alone(self.steps)
        assert sorted(committed) == list(range(1, self.steps + 1))
        for step, line in committed.items():
            assert line["loss"] == pytest.approx(losses[step - 1], rel=1e-5), step
        ids = {
            step - 1: [k for own in line["island"]["sample_ids"].values() for k in own]
            for step, line in committed.items()
        }
        assert_each_sample_once(ids, self.steps, 4)
        assert_same_result({name: self.raws[name] for name in names})


@pytest.fixture
def make(folder, tmp_path, server, alone):
    """Runs of islands with one-letter names, beside that lighthouse or another."""

    def run(names: str, steps: int, *, port: int = server.port, **more: Any) -> Run:
        raws = {name: raw_of(folder, tmp_path, name, port, steps, **more) for name in names}
        return Run(raws, alone)

    return run


def assert_same_result(raws: dict[str, dict[str, Any]]) -> None:
    first, *others = [_weights(Path(raw["training"]["output_dir"])) for raw in raws.values()]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first)


def _weights(output: Path) -> dict[str, torch.Tensor]:
    files = [*output.glob("adapter/*.safetensors"), *output.glob("model/*.safetensors")]
    assert files
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def assert_each_sample_once(ids: dict[int, list[int]], steps: int, of_epoch: int) -> None:
    """The samples of each committed step, by its number, are those of the data in each epoch; a
    last epoch that is not whole has none twice. Each epoch has `of_epoch` steps."""
    assert sorted(ids) == list(range(steps))
    for first in range(0, steps, of_epoch):
        trained = [k for step in range(first, min(first + of_epoch, steps)) for k in ids[step]]
        assert len(trained) == len(set(trained)), first
        if first + of_epoch <= steps:
            assert set(trained) == set(range(NUM_TEXTS)), first


def members(islands: Islands) -> dict[int, str]:
    """By step, who took part in it."""
    return {k: "".join(line["island"]["members"]) for k, line in islands.committed().items()}


def start(islands: Islands, *names: str) -> None:
    for name in names:
        islands.start(name)


HELD_S = 4.0


class Held(Islands):
    """Islands of which each step of the last third takes HELD_S until there is nothing left to wait
    for but the end: else they could be done before another one has started again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._told: dict[str, int] = {}  # steps before the present process

    def start(self, name: str, failpoint: str = "") -> None:
        island = self.of[name]
        self._told[name] = len(island.steps)
        pause = self._sleep_s.get(name, 0.0)
        island.child = self._started.start(Here(), live_held, island.raw, failpoint, pause)

    def until_done(self, *names: str) -> None:
        begun = [name for name in names if not self.of[name].is_done]
        while any(len(self.of[name].steps) == self._told[name] for name in begun):
            self._hear_something(*names)
        for island in self.of.values():
            end_of(island.raw).touch()
        super().until_done(*names)


def live_held(connection: Any, raw: dict[str, Any], failpoint: str, pause_s: float) -> None:
    class Holding(Tell):
        def step(self, metrics: Mapping[str, Any]) -> None:
            super().step(metrics)
            until = time.monotonic() + HELD_S
            while metrics["step"] > raw["training"]["max_steps"] * 2 // 3:
                if end_of(raw).exists() or time.monotonic() > until:
                    return
                time.sleep(0.02)

    processes.Tell = Holding  # type: ignore[misc]
    processes.live(connection, raw, failpoint, pause_s, 0.0)


def end_of(raw: dict[str, Any]) -> Path:
    return Path(raw["training"]["output_dir"] + ".end")


Deaths = list[tuple[str, str]]


def live_through(islands: Islands, deaths: Deaths) -> list[str]:
    """Start all islands, each armed with the first of its deaths, and after that with the next,
    until all are done; those that happened."""
    left = {name: deque(point for who, point in deaths if who == name) for name in islands.of}
    happened: list[str] = []
    armed: dict[str, str] = {}

    def start(name: str) -> None:
        armed[name] = left[name].popleft() if left[name] else ""
        islands.start(name, f"coordinator/{armed[name]}" if armed[name] else "")

    for name in islands.of:
        start(name)
    while not all(island.is_done for island in islands.of.values()):
        assert islands.hear(90.0), f"they hang: {islands.last_words()}"
        for name, island in islands.of.items():
            if island.child is None and not island.is_done:
                said = islands.of[name].said[-5:]
                assert islands.ended[name] == -signal.SIGKILL, f"{name} ended: {said}"
                assert armed[name], f"{name} was killed: {said}"
                happened.append(f"{name}/{armed[name]}")
                start(name)
    assert not any(left.values()), left
    return happened


DEATHS = pytest.mark.timeout(900)
"""Of tests in which one island after the other is started again; twice what they need beside much
other work."""
POINTS: Deaths = [
    *(("b", "step@2"), ("c", "forward@3"), ("a", "island-gradients@4"), ("b", "island-vote@5")),
    *(("a", "island-decision@6"), ("a", "island-told@7"), ("c", "commit@8")),
    *(("a", "commit-done@9"), ("b", "optimizer-half@10")),
    *(("b", "island-meet"), ("a", "island-state")),
    # One gives its state to the island that was away, or one takes it, and dies.
    *(("c", "island-vote@11"), ("c", "load-state")),
    # Two at once.
    *(("b", "backward@13"), ("c", "norms@13"), ("a", "island-told@14"), ("b", "commit@14")),
]


@DEATHS
def test_every_point_at_which_an_island_dies_leaves_all_with_the_same_bits(make):
    """Three islands, of which none trains without the others, so that each death happens."""
    run = make("abc", 16, min_islands=3)
    with Machines() as started:
        islands = Islands(started, run.raws)
        happened = live_through(islands, POINTS)
    assert len(happened) == len(POINTS)
    run.check(islands, "a", "b", "c")
    assert set(members(islands).values()) == {"abc"}


NAMES = pytest.mark.parametrize("names", [pytest.param("ab", marks=pytest.mark.long), "abc"])


@NAMES
def test_the_remaining_islands_go_on_while_others_are_away(names, make):
    """All but the last die, one after the other or at once, and come back when steps were made
    without them."""
    *dying, last = names
    run = make(names, 30)
    with Machines() as started:
        islands = Held(started, run.raws, dict.fromkeys(names, 0.02))
        start(islands, *names)
        islands.until_step(3, *names)
        for name in dying:
            islands.send(name, signal.SIGKILL)
        for name in dying:
            islands.await_end(name)
        islands.until_step(islands.reached(last) + 3, last)
        start(islands, *dying)
        islands.until_done(*names)
    run.check(islands, *names)
    who = members(islands)
    assert who[3] == who[30] == names
    assert last in who.values()


def test_islands_join_late_leave_in_order_and_return(make):
    run = make("abc", 45)
    with Machines() as started:
        islands = Held(started, run.raws, dict.fromkeys("abc", 0.02))
        start(islands, "b", "c")
        islands.until_step(3, "b", "c")
        islands.start("a")
        islands.until_step(islands.reached("b") + 1, "a")
        islands.send("b", signal.SIGTERM)
        assert islands.await_end("b") == 1
        assert "StoppedEarly" in islands.of["b"].said[-1]
        islands.until_step(islands.reached("a") + 2, "a", "c")
        islands.start("b")
        islands.until_done("a", "b", "c")
    run.check(islands, "a", "b", "c")
    who = members(islands)
    assert {"bc", "abc", "ac"} <= set(who.values())
    assert who[45] == "abc"


def test_a_frozen_island_holds_the_others_up_for_a_while_only(make):
    run = make("abc", 40)
    for raw in run.raws.values():
        raw["training"]["liveness_timeout_s"] = 3.0
    with Machines() as started:
        islands = Held(started, run.raws, dict.fromkeys("abc", 0.025))
        start(islands, *"abc")
        islands.until_step(3, *"abc")
        islands.send("b", signal.SIGSTOP)
        islands.until_step(islands.reached("a") + 4, "a", "c")
        islands.send("b", signal.SIGCONT)
        islands.until_done("a", "b", "c")
    run.check(islands, "a", "b", "c")
    assert members(islands)[40] == "abc"


def test_an_island_that_returns_after_the_end_trains_nothing(make):
    """Though one island is enough to train."""
    run = make("ab", 12)
    with Machines() as started:
        islands = Held(started, run.raws, {"a": 0.01, "b": 0.01})
        start(islands, "a", "b")
        islands.until_step(4, "a", "b")
        islands.kill("b")
        islands.until_done("a")
        reached = islands.reached("b")
        islands.start("b")
        islands.await_end("b")
        assert "have finished their training after step 12, without island b" in last(islands, "b")
        assert "the result is with a" in last(islands, "b")
        assert islands.reached("b") == reached
    run.check(islands, "a")


def test_an_island_that_misses_the_last_decision_gets_the_result(make):
    """The one that decides tells one and dies; that one is done, and gives its state to the other
    though there are fewer than are wanted."""
    run = make("abc", 6, min_islands=3)
    with Machines() as started:
        islands = Islands(started, run.raws)
        islands.start("a", "coordinator/island-told@6")
        start(islands, "b", "c")
        assert islands.await_end("a") == -signal.SIGKILL
        islands.until_done("b", "c")
        islands.start("a")
        islands.await_end("a")
        assert "without island a" in last(islands, "a")
    run.check(islands, "b", "c")


def last(islands: Islands, name: str) -> str:
    return islands.of[name].said[-1]


def test_too_few_islands_save_their_state_and_continue_later(make):
    run = make("ab", 10, min_islands=2, wait_s=2.0)
    for raw in run.raws.values():
        raw["training"]["save_strategy"] = "steps"
        raw["training"]["save_steps"] = 1000
    with Machines() as started:
        islands = Islands(started, run.raws)
        islands.start("a")
        islands.start("b", "coordinator/step@5")
        assert islands.await_end("b") == -signal.SIGKILL
        islands.await_end("a")
        assert "of the 2 islands that this run wants there were 1 island" in last(islands, "a")
        assert "continue after step 4" in last(islands, "a")
        start(islands, *"ab")
        islands.until_done("a", "b")
    run.check(islands, "a", "b")


def test_a_second_living_island_of_one_name_is_refused(make):
    """It comes while the two that live wait for a third, and cannot end before it was refused."""
    run = make("abcd", 6, min_islands=3)
    run.raws["d"]["island"]["name"] = "a"
    with Machines() as started:
        islands = Islands(started, run.raws)
        start(islands, "a", "b")
        islands.start("c", "coordinator/step@4")
        assert islands.await_end("c") == -signal.SIGKILL
        islands.start("d")
        islands.await_end("d")
        assert "another living island is called a" in last(islands, "d")
        islands.start("c")
        islands.until_done("a", "b", "c")
    run.check(islands, "a", "b", "c")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("abc", "ab", id="fewer", marks=pytest.mark.long),
        pytest.param("ab", "abc", id="more"),
    ],
)
def test_a_run_goes_on_with_other_islands_and_plans(before, after, make):
    """Those of `before` train and those of `after` go on. Who is new waits for those that have the
    run's checkpoint, which `min_islands` is for."""
    run = make("abc", 24)
    with Machines() as started:
        islands = Held(started, run.raws, dict.fromkeys("abc", 0.01))
        leave_one_after_the_other(islands, 6, before)
        go_on_in_other_plans(started, islands, after)
    run.check(islands, *after)
    assert members(islands)[24] == after


def go_on_in_other_plans(started: Machines, islands: Islands, names: str) -> None:
    """By themselves, and done with the run."""
    started.start(Here(), work, cut(islands.of["b"].raw))
    for name in names:
        islands.of[name].raw["island"]["min_islands"] = len(names)
        islands.start(name)
    islands.until_done(*names)


def leave_one_after_the_other(islands: Islands, step: int, names: str) -> None:
    """They train until `step`; the last to leave is the furthest."""
    start(islands, *names)
    islands.until_step(step, *names)
    for name in reversed(names):
        islands.send(name, signal.SIGTERM)
        islands.await_end(name)
        assert "StoppedEarly" in last(islands, name)


def cut(raw: dict[str, Any]) -> dict[str, Any]:
    """The same island, with a worker that has half of the layers."""
    [port] = free_ports(1)
    raw["workers"] = [{**raw["coordinator"], "id": 1, "port": port}]
    raw["shard_plan"] = [{"id": "local", "start": 0, "end": 2}, {"id": 1, "start": 2, "end": 4}]
    return raw


def test_a_lighthouse_that_is_started_again_costs_no_step(make):
    with lighthouse() as second, Machines() as started, ExitStack() as first:
        before = first.enter_context(lighthouse())
        at = ("127.0.0.1", before.port)
        proxy = first.enter_context(FaultProxy(at, follows_frames=False))
        run = make("ab", 40, port=proxy.port)
        islands = Held(started, run.raws, dict.fromkeys("ab", 0.02))
        start(islands, *"ab")
        islands.until_step(3, *"ab")
        proxy._target = ("127.0.0.1", second.port)
        proxy.reset()
        islands.until_step(islands.reached("a") + 3, *"ab")
        islands.kill("b")
        islands.start("b")
        islands.until_done("a", "b")
    run.check(islands, "a", "b")
    assert members(islands)[40] == "ab"


def test_a_lost_worker_is_recovered_within_its_island(make):
    run = make("ab", 40)
    half = cut(run.raws["a"])
    with Machines() as started:
        islands = Held(started, run.raws, {"b": 0.01})
        worker = started.start(Here(), work, half)
        start(islands, *"ab")
        for step in (1, 6, 12):
            islands.until_step(step, *"ab")
            os.kill(worker.pid, signal.SIGKILL)
            worker = started.start(Here(), work, half)
        islands.until_done("a", "b")
    run.check(islands, "a", "b")


def work(connection: Any, raw: dict[str, Any]) -> None:
    """The worker of an island."""
    serve(Config.from_dict(raw), 1, build=load_stages, keep=True)
