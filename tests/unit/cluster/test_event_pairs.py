"""Every event of one worker, in every state of it and of another one, is handled.

Table, `Cluster` and the loop of `Coordinator` are the real ones; links and stages only note what is
asked of them. `tests/faults/event_sweep.py` does the same with processes.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetero_framework.cluster import cluster as cluster_module
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.cluster.membership import Membership, WorkerState
from hetero_framework.config import Config
from hetero_framework.core.messages import LoadedStage, Message, Parameter, Ready, Setup
from hetero_framework.engine.hosts import DirectLost, HostEvent, LinkLost, StagesLost, WorkerLeaving
from hetero_framework.errors import PeerAwayError, PeerLostError
from hetero_framework.trainer.coordinator import Coordinator
from hetero_framework.trainer.plans import Plans
from hetero_framework.trainer.train_state import TrainState
from tests.unit.cluster.test_cluster import Direct, FakePipeline, config
from tests.unit.cluster.test_cluster import cluster as cluster_of

EVENTS = {
    "leaves": WorkerLeaving(1, "it was stopped on its own machine (SIGTERM)"),
    "link is cut": LinkLost(1, "reset"),
    "dies": LinkLost(1, "reset"),
    "stays away": LinkLost(1, "reset"),
    "loses the other": DirectLost(1, 2, "reset"),
}
WITHOUT_LAYERS = (WorkerState.ABSENT, WorkerState.SPARE, WorkerState.LEFT)
RECEIVED = 4
"""The event comes as the first, ..., fourth thing that is received after the start."""


class World:
    """Links to two workers that do as they are told; `event` comes when so much was received."""

    post = fail = None

    def __init__(self, event: str, after: int, states: dict[Any, WorkerState]) -> None:
        self.workers = [1, 2]
        self.ready: dict[Any, Ready] = {}
        self.plan: dict[Any, int] = {w: n + 1 for n, w in enumerate(planned(states))}
        self.has_stages = {worker: state not in FRESH for worker, state in states.items()}
        self.is_linked = {worker: state in LINKED for worker, state in states.items()}
        self.told = {worker for worker, state in states.items() if state is WorkerState.LOADING}
        self.direct = Direct()
        self.direct.open = {frozenset((1, 2))}
        self.members = Membership(self.workers)
        self.members._states.update(states)
        self.small_packets: set[Any] = set()
        self.is_done = self._ends_next = False
        self._event, self._after = event, after

    def send(self, worker: Any, message: Message) -> None:
        if not self.is_linked[worker]:
            raise LinkLost(worker, "the link is closed")
        if isinstance(message.body, Setup):
            self.ready.pop(worker, None)
            self.told.add(worker)

    def receive(self, timeout_s: float) -> HostEvent | None:
        if not self._after and not self.is_done and self.is_linked[1]:
            self.is_done = True
            self._happens()
            raise EVENTS[self._event]
        self._after = max(0, self._after - 1)
        if self._ends_next:
            self._ends_next = False
            raise LinkLost(1, "the peer closed the connection")
        for worker in sorted(self.told):
            self.told.remove(worker)
            self.has_stages[worker] = True
            k = self.plan.get(worker)
            parameter = (Parameter(f"layer {k}", (k or 0,)),)
            stages = () if k is None else (LoadedStage(k, parameter, {}),)
            self.ready[worker] = Ready(stages)
            return HostEvent(worker, None, Message(Ready(stages)))
        return None

    def _happens(self) -> None:
        """What is so, whether anybody knows it or not."""
        if self._event == "loses the other":
            return
        self.told.discard(1)
        leaves = self._event == "leaves"
        self.is_linked[1] = leaves and self.has_stages[1]
        self._ends_next = leaves and not self.has_stages[1]
        if self._event != "link is cut" and not self.is_linked[1]:
            self.has_stages[1] = False

    def let_go(self, worker: Any, goodbye: Message) -> None:
        """Nothing more is heard of this link."""
        self.is_linked[worker] = self.has_stages[worker] = False
        self._ends_next = self._ends_next and worker != 1

    def reconnect(self, worker: Any, wait_s: float | None = None) -> bool:
        if worker == 1 and self._event == "stays away" and self.is_done:
            raise PeerAwayError("worker 1 does not come back")
        self.ready.pop(worker, None)
        self.told.discard(worker)
        self._ends_next = self._ends_next and worker != 1  # of the link before
        self.is_linked[worker] = True
        return self.has_stages[worker]

    def await_in_background(self, worker: Any) -> None: ...
    def route(self, stages: Any, expectation: Any) -> None: ...


FRESH = (*WITHOUT_LAYERS, WorkerState.JOINING, WorkerState.LOADING)
LINKED = (
    *(WorkerState.JOINING, WorkerState.LOADING, WorkerState.READY),
    *(WorkerState.SPARE, WorkerState.LEAVING),
)


def planned(states: dict[Any, WorkerState]) -> list[Any]:
    return [worker for worker, state in states.items() if state not in WITHOUT_LAYERS]


class Pipeline(FakePipeline):
    """Reads what comes while it waits, as the real one does."""

    def __init__(self, links: World) -> None:
        super().__init__()
        self._links = links

    def abort(self) -> None:
        self._links.receive(0)

    share_tied_weights = abort


class Run(Coordinator):
    """The loop of a run: one step is a look at what has come."""

    def __init__(self, cluster: Cluster, world: World, config: Config) -> None:
        self._cluster, self._world, self._config = cluster, world, config
        self._state = TrainState()
        self._stop = SimpleNamespace(waiting=nullcontext, requested=None)  # type: ignore[assignment]
        self._plans = Plans(cast(Any, SimpleNamespace(memory=[], memory_limits=None)), {})
        self._replicas = SimpleNamespace(went_back=lambda state: None, close=lambda why: None)  # type: ignore[assignment]
        held = TrainState()
        look = lambda: cluster.retrying(lambda: world.receive(0))  # noqa: E731
        self._checkpoints = SimpleNamespace(  # type: ignore[assignment]
            hold=lambda state: look(),
            rewind=lambda: (look(), held)[1],
            advice=lambda error=None: "go on",
            keep_newest=lambda: None,
            close=lambda: None,
        )
        self._data = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        self.deaths = 0

    def start(self, checkpoint: Any, continued: bool) -> None: ...
    def _note_death(self, lost: StagesLost) -> None:
        self.deaths += 1
        assert self.deaths < 6, "it goes round in circles"

    def _return_to(self, state: TrainState) -> None: ...

    def steps(self) -> Any:
        members = self._cluster.members
        for worker in members.those(WorkerState.LOST):
            self._cluster.recovery.recover(LinkLost(worker, "reset"))
        for worker in members.those(WorkerState.LEAVING):
            raise WorkerLeaving(worker, "it was stopped on its own machine (SIGTERM)")
        for worker in members.those(WorkerState.JOINING, WorkerState.LOADING):
            raise StagesLost(worker, "its process is another one")
        for _ in range(RECEIVED + 1):
            self._cluster.retrying(lambda: self._world.receive(0))
        return "finished"


@pytest.fixture
def stubbed(monkeypatch):
    """The world that the next cluster's links lead to."""
    worlds: list[World] = []
    monkeypatch.setattr(cluster_module, "WorkerLinks", lambda *args, **options: worlds[-1])
    monkeypatch.setattr(cluster_module, "Pipeline", lambda *args, **more: Pipeline(worlds[-1]))
    nothing = SimpleNamespace(data={}, expectation=SimpleNamespace())
    monkeypatch.setattr(cluster_module, "StageHost", lambda *args, **more: nothing)
    return worlds


def begun(worlds: list[World], states: dict[Any, WorkerState], event: str, after: int) -> Run:
    """A run that has its stages, then with the workers in these states."""
    calm = dict.fromkeys((1, 2), WorkerState.JOINING)
    calm.update({w: WorkerState.SPARE for w, state in states.items() if state in WITHOUT_LAYERS})
    worlds.append(World(event, 10**6, calm))
    plan = ["local", *planned(states)]
    made, cluster = config(plan=plan), cluster_of(plan=plan)
    cluster.assemble(made)
    world = World(event, after, states)
    cluster._peers = cluster.recovery._links = world  # type: ignore[assignment]
    cluster.pipeline._links = world  # type: ignore[assignment]
    cluster.members = cluster.recovery.members = world.members
    for worker, state in states.items():
        if state is WorkerState.LEAVING:
            cluster.members.leaves(worker, "it was stopped on its own machine (SIGTERM)")
    return Run(cluster, world, made)


def how_it_ends(run: Run) -> PeerLostError | None:
    """None where it is finished."""
    try:
        assert run.run(None) == "finished"
    except PeerLostError as error:
        return error
    return None


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("own", "other"),
    [
        pytest.param(
            *(own, other),
            id=f"{own.name}-{other.name}",
            marks=[pytest.mark.long] if (i + j) % 2 else [],
        )
        for i, own in enumerate(WorkerState)
        for j, other in enumerate(WorkerState)
    ],
)
def test_an_event_of_one_worker_while_another_is_busy_is_recovered(event, own, other, stubbed):
    for after in range(RECEIVED):
        states = {1: own, 2: other}
        run = begun(stubbed, states, event, after)
        members = run._cluster.members
        if (lost := how_it_ends(run)) is not None:
            assert event == "stays away", lost
            assert lost.message == "worker 1 does not come back"
            assert members.state(1) is WorkerState.LEFT
            continue
        taking_part = planned(states)
        assert all(members.state(worker) is WorkerState.READY for worker in taking_part), after
        assert all(run._world.has_stages[worker] for worker in taking_part)
        others = {1, 2}.difference(taking_part)
        assert all(members.state(worker) is not WorkerState.READY for worker in others)
