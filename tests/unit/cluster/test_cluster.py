"""The processes of a run, with links that only note what goes over them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.cluster import cluster as cluster_module
from hetero_framework.cluster.cluster import Cluster
from hetero_framework.cluster.direct_links import Boundaries
from hetero_framework.cluster.membership import Event, Membership, WorkerState
from hetero_framework.config import Config
from hetero_framework.core import messages as m
from hetero_framework.core.devices import Device
from hetero_framework.core.messages import Body, Message
from hetero_framework.engine.hosts import DirectLost, HostEvent, LinkLost, StagesLost, WorkerLeaving
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.stage_api import Residence
from hetero_framework.errors import NetworkError, PeerLostError, StoppedEarly, UserError
from hetero_framework.security.access import Plaintext
from tests.cases import raising
from tests.unit.cluster.conftest import star

PLAN = ["local", 1, 2]


class Direct:
    """`DirectLinks` without workers: all links can be had, but for `problems`."""

    def __init__(self) -> None:
        self.open: set[frozenset[Any]] = set()
        self.problems: dict[frozenset[Any], str] = {}

    def connect(self, pairs: Any, timeout_s: float) -> dict[frozenset[Any], str]:
        return dict(self.problems)

    def drop(self, pair: frozenset[Any]) -> None:
        self.open.discard(pair)

    def forget(self, worker: Any) -> None:
        self.open = {pair for pair in self.open if worker not in pair}


class Links:
    """`WorkerLinks` without a wire. `events` are what `receive` gives or raises, in order."""

    post = fail = None

    def __init__(self) -> None:
        self.workers = [1, 2]
        self.sent: list[tuple[Any, str]] = []
        self.events: list[Any] = []
        self.back: Callable[[Any], bool] = lambda worker: False
        self.direct = Direct()
        self.members = Membership(self.workers)
        self.ready: dict[Any, m.Ready] = {}
        self.small_packets: set[Any] = set()

    def listen(self) -> None: ...

    def send(self, worker: Any, message: Message) -> None:
        self.sent.append((worker, message.name))
        if isinstance(message.body, m.Setup):
            self.ready.pop(worker, None)

    def receive(self, timeout_s: float) -> HostEvent | None:
        event = self.events.pop(0) if self.events else None
        if isinstance(event, Exception):
            raise event
        if event is not None and isinstance(event.message.body, m.Ready):
            self.ready[event.worker] = event.message.body
        return event

    def reconnect(self, worker: Any, wait_s: float | None = None) -> bool:
        self.ready.pop(worker, None)
        return self.back(worker)

    def let_go(self, worker: Any, goodbye: Message) -> None:
        self.sent.append((worker, goodbye.name))

    def await_in_background(self, worker: Any) -> None: ...

    def connect_all(self, workers: Any) -> dict[Any, Any]:
        return {}

    def route(self, stages: Any, expectation: Any) -> None: ...
    def close(self, goodbye: Message, drain_s: float = 0) -> None:
        self.sent.append(("all", goodbye.name))


def config(links: str = "auto", plan: Sequence[Any] = PLAN, **training: Any) -> Config:
    workers = [{"id": i, "ip": f"192.0.2.{i}", "port": 9999} for i in (1, 2)]
    return star(workers, plan, links=links, training=training)


def ready(worker: int) -> HostEvent:
    stage = m.LoadedStage(worker, (m.Parameter(f"layer {worker}", (worker,)),), {})
    return HostEvent(worker, None, Message(m.Ready((stage,))))


@pytest.fixture
def links(monkeypatch):
    made = Links()
    monkeypatch.setattr(cluster_module, "WorkerLinks", lambda *args, **options: made)
    monkeypatch.setattr(cluster_module, "Pipeline", lambda *args, **options: FakePipeline())
    host = SimpleNamespace(data={}, expectation=SimpleNamespace())
    monkeypatch.setattr(cluster_module, "StageHost", lambda *args, **more: host)
    return made


class FakePipeline:
    def __init__(self) -> None:
        self.repeated: list[Any] = []
        self.asked: list[tuple[str, Any]] = []
        self.alive = {1, 2}

    def answering(self, questions: Any, timeout_s: float) -> set[Any]:
        return self.alive

    def share_tied_weights(self) -> None: ...
    def abort(self) -> None: ...
    def forget_commits(self) -> None:
        self.asked.append(("forget commits", None))

    def renew(self, worker: Any) -> None:
        self.asked.append(("renew", worker))

    def close(self) -> None: ...
    def repeat_commit(self, worker: Any) -> None:
        self.repeated.append(worker)


class LocalStage:
    index, input_requires_grad, residence = 0, True, Residence()

    def __init__(self) -> None:
        self.fingerprint: dict[str, str] = {}
        self.ties: dict[str, str] = {}

    def trainable(self) -> list[Any]:
        return []


def cluster(**changes: Any) -> Cluster:
    return Cluster(
        config(**changes),
        max_frame_bytes=1 << 20,
        build=lambda *args: [LocalStage()],
        access=Plaintext(everywhere=True),
    )


def started(links: Links, **changes: Any) -> Cluster:
    made = cluster(**changes)
    for worker in links.workers:
        made.members.on(worker, Event.DIAL)
    return made


def names(links: Links, *kinds: type[Body]) -> list[tuple[Any, str]]:
    return [entry for entry in links.sent if entry[1] in {kind.spec.name for kind in kinds}]


@pytest.fixture
def assembled(links):
    """A run whose workers are ready."""
    made = started(links)
    links.events = [ready(1), ready(2)]
    made.assemble(config())
    return made


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.event for record in caplog.records if hasattr(record, "event")]


def test_workers_are_set_up_and_started_once_all_are_ready(links):
    cluster = started(links)
    links.events = [ready(2), ready(1)]
    cluster.assemble(config())
    sent = [(1, "SETUP"), (2, "SETUP"), (1, "START"), (2, "START")]
    assert names(links, m.Setup, m.Start) == sent
    assert cluster.loaded.trainable == [[], [("layer 1", (1,))], [("layer 2", (2,))]]
    assert cluster.loaded.needs == [False, False, True]


def test_f20_another_torch_version_is_reported(links, logged, monkeypatch):
    monkeypatch.setattr(cluster_module.LocalWorkers, "start", lambda self: None)
    here = torch.__version__.split("+")[0]
    builds = {1: f"{here}+cu126", 2: "0.4.0"}
    links.connect_all = lambda workers: {  # type: ignore[method-assign]
        worker: m.Welcome(build, "cpu", "cpu", 1, 1) for worker, build in builds.items()
    }
    cluster().start()
    (line,) = [line for line in logged if "equal to the last bit only" in line]
    assert "worker 2 has torch 0.4.0" in line


def test_the_thread_that_starts_it_makes_its_device_the_current_one(links, monkeypatch):
    used: list[threading.Thread] = []

    class Recording(Device):
        def use(self) -> None:
            used.append(threading.current_thread())

    monkeypatch.setattr(cluster_module, "open_device", lambda name: Recording())
    monkeypatch.setattr(cluster_module.LocalWorkers, "start", lambda self: None)
    links.connect_all = lambda workers: {}  # type: ignore[method-assign]
    cluster().start()
    assert used == [threading.current_thread()]


def test_a_short_loss_of_a_link_during_loading_is_recovered(links):
    cluster = started(links)
    links.events = [ready(1), LinkLost(1, "reset"), ready(2), ready(1)]
    cluster.assemble(config())
    assert names(links, m.Setup) == [(1, "SETUP"), (2, "SETUP"), (1, "SETUP")]
    assert names(links, m.Start) == [(1, "START"), (2, "START")]


def test_worker_that_loads_for_too_long_is_named(links, monkeypatch):
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr(cluster_module.time, "monotonic", lambda: next(now))
    cluster = started(links)
    links.events = [ready(1)]
    with pytest.raises(PeerLostError, match="worker 2 has not loaded its stages in 900 s"):
        cluster.assemble(config(load_timeout_s=900))


def test_files_that_cannot_be_read_in_time_end_the_wait(links, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(Cluster, "_expected_weights", lambda self: go.wait(30.0) and None)
    cluster = started(links)
    links.events = [ready(1), ready(2)]
    try:
        with pytest.raises(UserError, match="has not read the model's files in 1 s"):
            cluster.assemble(config(load_timeout_s=1.0))
    finally:
        go.set()


def test_worker_that_comes_back_is_told_of_the_commit_again(assembled, links):
    links.back = lambda worker: True
    assembled.recovery.recover(LinkLost(1, "reset"))
    assert assembled.pipeline.repeated == [1]  # type: ignore[attr-defined]
    assert assembled.members.state(1) is WorkerState.READY
    assert m.Commit.spec.name not in dict(links.sent).values()


def test_a_worker_without_its_stages_makes_the_run_go_back(assembled, links):
    with pytest.raises(StagesLost) as raised:
        assembled.recovery.recover(LinkLost(1, "reset"))
    assert raised.value.worker == 1
    links.sent.clear()
    links.events = [ready(1)]
    assembled.recovery._rejoin()
    assert links.sent == [(1, "SETUP"), (1, "START")]
    assert assembled.pipeline.asked == [("forget commits", None), ("renew", 1)]  # type: ignore[attr-defined]
    assert assembled.members.those(WorkerState.READY) == [1, 2]


def test_link_between_workers_that_breaks_while_one_loads_is_relayed_for(assembled, links, logged):
    """The other end of a dead process's link may notice late."""
    links.direct.open = {frozenset((1, 2))}
    with pytest.raises(StagesLost):
        assembled.recovery.recover(LinkLost(1, "reset"))
    assert links.direct.open == set()
    links.direct.open = {frozenset((1, 2))}
    links.events = [DirectLost(2, 1, "silent"), ready(1)]
    assembled.recovery._rejoin()
    assert links.direct.open == set()
    assert assembled.members.those(WorkerState.READY) == [1, 2]
    assert any("lost the link between workers 1 and 2 (silent)" in line for line in logged)


@pytest.mark.parametrize("lost", [LinkLost(1, "reset"), DirectLost(1, 2, "reset")], ids=type)
def test_a_link_lost_during_the_liveness_question_ends_no_worker(lost, assembled, monkeypatch):
    killer = Killer()
    monkeypatch.setattr(assembled.recovery, "_local", killer)
    monkeypatch.setattr(assembled.pipeline, "answering", raising(lost))
    assembled.recovery._end_hanging("nothing has moved")
    assert killer.killed == []


class Killer:
    """`LocalWorkers` of which one is ours."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def kill(self, worker: Any) -> bool:
        self.killed.append(worker)
        return bool(worker == 1)


@pytest.mark.parametrize("hanging", [{1}, {2}, {1, 2}])
def test_hanging_workers_are_killed_here_and_told_to_quit_elsewhere(
    hanging, assembled, links, monkeypatch
):
    killer = Killer()
    monkeypatch.setattr(assembled.recovery, "_local", killer)
    assembled.pipeline.alive = {1, 2} - hanging  # type: ignore[attr-defined]
    links.sent.clear()
    assembled.recovery._end_hanging("nothing has moved")
    assert killer.killed == sorted(hanging)
    assert links.sent == [(2, "QUIT")] * (2 in hanging)


def test_step_that_stands_still_though_all_workers_answer_ends_the_run(assembled):
    with pytest.raises(PeerLostError, match="nothing has moved; every worker answers"):
        assembled.recovery._end_hanging("nothing has moved")


def test_workers_hear_how_a_run_was_stopped_and_not_how_to_resume_it():
    why = "stopped by SIGTERM after step 3"
    stopped = StoppedEarly(why, hint="continue with --resume latest")
    assert cluster_module._goodbye(stopped) == m.Bye(f"the run ended: {why}")


def test_the_link_of_a_pair_is_reported_once(links, caplog):
    links.direct.open = {frozenset((1, 2))}
    with caplog.at_level(logging.INFO, "hetero_framework"):
        started(links, plan=["local", 1, 2, 1, 2])._connect_workers()
    assert [event["workers"] for event in events(caplog)] == ["1, 2"]


def test_worker_that_leaves_is_an_event_of_the_run(assembled, caplog):
    leaving = WorkerLeaving(2, "it was stopped on its own machine (SIGTERM)")
    with caplog.at_level(logging.INFO, "hetero_framework"), pytest.raises(WorkerLeaving):
        assembled.retrying(raising(leaving))
    left = next(event for event in events(caplog) if event["what"] == "worker left")
    assert left["worker"] == 2
    assert "SIGTERM" in left["reason"]


def test_step_whose_memory_ran_out_is_done_again_once(assembled, caplog):
    fates: list[StepOutOfMemory | None] = []

    def action() -> str:
        if (fate := fates.pop(0)) is not None:
            raise fate
        return "done"

    def lack(attempt: int) -> StepOutOfMemory:
        return StepOutOfMemory.of((3, attempt), "worker 2: memory ran out", None, worker=2)

    fates[:] = [lack(1), lack(1), None]  # two processes said so of one attempt
    with caplog.at_level(logging.INFO, "hetero_framework"):
        assert assembled.retrying(action) == "done"
    told = [e for e in events(caplog) if e["what"] == "memory ran out"]
    assert {(e["worker"], e["action"]) for e in told} == {(2, "step repeated")}
    fates[:] = [lack(2), lack(3), None]
    with pytest.raises(StepOutOfMemory):
        assembled.retrying(action)
    assert fates == [None]


def test_boundaries_know_where_a_direct_link_is_possible():
    boundaries = Boundaries(config(plan=["local", 1, 2, "local", 1, 2, 2]))
    between = [(a.index, b.index) for a, b in boundaries.between_workers]
    assert between == [(1, 2), (4, 5)]
    assert boundaries.direct({frozenset((1, 2))}) == {1, 4}
    assert boundaries.direct(set()) == set()
    assert Boundaries(config(links="relay")).between_workers == []


def test_direct_link_that_cannot_be_had_is_an_error_where_it_was_asked_for(links):
    cluster = started(links)
    links.direct.problems = {frozenset((1, 2)): "worker 1 cannot reach worker 2: refused"}
    cluster._connect_workers()
    cluster._config = config(links="direct")
    with pytest.raises(NetworkError, match="no direct link between layer 1 and layer 2: worker 1"):
        cluster._connect_workers()
