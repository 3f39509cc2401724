"""The order of recovery after a loss, with a training loop and links that only note the requests to
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetero_framework.cluster.membership import Event, WorkerState
from hetero_framework.cluster.recovery import Recovery
from hetero_framework.engine.hosts import LinkLost, StagesLost, WorkerLeaving
from hetero_framework.errors import PeerAwayError, PeerLostError
from tests.unit.cluster.test_cluster import FakePipeline, Killer, Links, config

LEAVING = "it was stopped on its own machine (SIGTERM)"


class Local(Killer):
    """`LocalWorkers` that has started none of them."""

    def exit_text(self, worker: Any) -> None: ...
    def starts(self, worker: Any) -> bool:
        return False


class Loop:
    """Each of its steps raises the next of `troubles`, in a run with workers 1 and 2."""

    def __init__(self, *troubles: Exception, absence: bool = False) -> None:
        self.done: list[str] = []
        self.troubles = list(troubles)
        self.links = Links()
        self.links.let_go = lambda worker, goodbye: self.done.append(f"let go {worker}")  # type: ignore[method-assign]
        self.is_absent = absence
        self.links.reconnect = self.reconnect  # type: ignore[method-assign]
        self.recovery = Recovery(config(), self.links, Local(), self.load, None)  # type: ignore[arg-type]
        for worker in (1, 2):
            for event in (Event.DIAL, Event.FRESH, Event.PLANNED, Event.LOADED):
                self.recovery.members.on(worker, event)
        self.recovery.pipeline = Pipeline(self)  # type: ignore[assignment]

    def reconnect(self, worker: Any, wait_s: float | None = None) -> bool:
        if self.is_absent:
            raise PeerAwayError(f"worker {worker} does not come back")
        return False

    def load(self) -> None:
        for worker in self.recovery.members.those(WorkerState.JOINING):
            self.done.append(f"load {worker}")
            self.recovery.members.on(worker, Event.PLANNED)
            self.recovery.members.on(worker, Event.LOADED)

    def steps(self) -> str:
        while self.troubles:
            self.recovery.retrying(self.step)
        return "finished"

    def step(self) -> None:
        self.done.append("step")
        raise self.troubles.pop(0)

    def hand_over(self) -> None:
        self.done.append("hand over")

    def rewind(self, trouble: StagesLost | WorkerLeaving) -> None:
        self.done.append("rewind")

    def without(self, lost: PeerLostError) -> Callable[[], None]:
        raise PeerLostError(lost.message, hint="the others cannot go on without it")


class Pipeline(FakePipeline):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def abort(self) -> None:
        self._loop.done.append("abort")

    def forget_commits(self) -> None:
        self._loop.done.append("forget commits")


def test_a_dead_worker_loads_after_the_abort_and_before_the_rewind():
    loop = Loop(LinkLost(1, "reset"))
    assert loop.recovery.run(loop) == "finished"
    assert loop.done == ["step", "forget commits", "abort", "load 1", "rewind"]


def test_a_worker_that_leaves_hands_over_before_it_is_let_go():
    loop = Loop(WorkerLeaving(2, LEAVING))
    assert loop.recovery.run(loop) == "finished"
    assert loop.done == [
        *("step", "abort", "hand over", "let go 2", "forget commits", "abort", "load 2", "rewind")
    ]


def test_a_run_that_cannot_go_on_without_a_worker_ends():
    loop = Loop(LinkLost(1, "reset"), absence=True)
    with pytest.raises(PeerLostError, match="worker 1 does not come back") as raised:
        loop.recovery.run(loop)
    assert raised.value.hint == "the others cannot go on without it"
    assert loop.done == ["step"]


@pytest.mark.parametrize("loads", [False, True])
def test_an_action_that_loads_all_stages_finds_none_loaded_before(loads):
    loop = Loop(StagesLost(1, "killed"))
    for event in (Event.DIAL, Event.FRESH):
        loop.recovery.members.on(1, event)
    loop.recovery.outlive(lambda: loop.step() if loop.troubles else None, loads=loads)
    assert loop.done == ["step", *([] if loads else ["forget commits", "abort", "load 1"])]
