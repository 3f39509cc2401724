"""One worker in a thread, with stages that only count, and coordinators that are bare links."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hetero_framework import control, log
from hetero_framework.cluster import link_probe, model_allowlist
from hetero_framework.cluster import worker as worker_module
from hetero_framework.cluster.worker import Worker
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.config import Config, StageSpec
from hetero_framework.core import addresses, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.connection import Connection
from hetero_framework.core.devices import Device
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Message
from hetero_framework.core.session import Phase
from hetero_framework.core.threads import in_background
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.engine.stage_api import GradientReport, Residence, StepInfo
from hetero_framework.engine.wire_forms import step_message
from hetero_framework.errors import NetworkError, PeerLostError, ProtocolError, StoppedEarly
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.security import acceptor
from tests.cases import raising
from tests.framed import framed
from tests.installed import needs
from tests.samples import free_ports
from tests.unit.cluster.conftest import Caller, star
from tests.waiting import WAIT_S, wait_until


class StandIn:
    """A stage that refers to itself, as real ones and their shards do."""

    def __init__(self, spec: StageSpec) -> None:
        self.index, self.is_first, self.is_last = spec.index, spec.is_first, spec.is_last
        self.input_requires_grad = self.differentiates = True
        self.residence = Residence()
        self.weights = torch.zeros(8)
        self.fingerprint: dict[str, str] = {}
        self.ties: dict[str, str] = {}
        self.awaits_sums = False
        self.itself = self

    def begin(self, info: StepInfo, take: Any = None) -> None: ...
    def abort(self) -> None: ...
    def trainable(self) -> list[tuple[str, tuple[int, ...]]]:
        return [("w", (0,))]

    def report_gradients(self) -> GradientReport:
        return GradientReport(torch.zeros(1))


class Served:
    """A worker that serves in a thread; `say` and the stages that it has made are kept."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        keep: bool = False,
        reconnect_s: float = 60.0,
        run_id: str | None = None,
    ) -> None:
        (self.port,) = free_ports(1)
        self.config = star(
            [{"id": 1, "ip": "127.0.0.1", "port": self.port, "device": "cpu"}],
            ["local", 1],
            training={"rejoin_wait_s": reconnect_s},
        )
        self.said: list[str] = []
        lines = log.Lines(lambda level, text: self.said.append(text))
        stack.enter_context(log.log_to("INFO", lines))
        self.weights: list[weakref.ref[torch.Tensor]] = []
        self.loading: Callable[[], object] = lambda: None
        self.stack = stack
        self._over = threading.Event()
        self._worker = Worker(self.config, 1, keep=keep, build=self._build, run_id=run_id)
        self._running = in_background(lambda: self._worker.serve(self._over.is_set), "served")
        stack.callback(self.stop)

    def _build(
        self, config: Config, specs: Sequence[StageSpec], device: Device, pool: ReusePool
    ) -> list[Any]:
        self.loading()
        stages = [StandIn(spec) for spec in specs]
        self.weights += [weakref.ref(stage.weights) for stage in stages]
        return stages

    @property
    def is_free(self) -> bool:
        """Whether it has forgotten the last run."""
        return self._worker._run is None

    def stop(self) -> None:
        self._over.set()
        self.end()

    def end(self) -> BaseException | None:
        """Wait for it: the error with which it has ended, if any."""
        return self._running.exception(WAIT_S)

    def dial(self, run_id: str = "run", process: str = "p", *session: Any) -> Coordinator:
        return Coordinator(self, run_id, process, *session)


class Coordinator(Caller):
    """One without a run behind it."""

    epochs = itertools.count(1)

    def __init__(self, served: Served, run_id: str, process: str, *session: Any) -> None:
        super().__init__(served.port, served.stack)
        self._config = served.config
        self.send(m.Hello(run_id, 1, process, next(self.epochs), 1 << 20, *session))

    def set_up(self) -> Coordinator:
        self.expect(m.Welcome)
        return self.assign()

    def assign(self) -> Coordinator:
        """Layers for the worker that has welcomed this coordinator."""
        self.send(m.Setup(self._config.to_dict(), (1,)))
        self.expect(m.Ready)
        self.send(m.Start((1,), 1 << 20))
        return self

    def hang_up(self) -> None:
        self.link.close(drain_s=0)


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(timeouts, "TICK_S", 0.02)
    threads = set(threading.enumerate())
    with ExitStack() as stack:
        yield lambda **options: Served(stack, **options)
    wait_until(lambda: set(threading.enumerate()) <= threads)


def lost(served: Served) -> Callable[[], bool]:
    return lambda: any("lost the coordinator" in line for line in served.said)


# ---- what it may load


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/etc/x", "worker 1 may not load the model '/etc/x': its own configuration permits none"),
        ("/etc/\x1b[2J", "model.name_or_path: holds a control character"),
        (7, "model.name_or_path: must be a text"),
    ],
)
def test_a_worker_refuses_a_model_not_in_its_file_and_stays_up(name, said, keep, serve):
    served = serve(keep=keep)
    stranger = served.dial("stranger")
    stranger.expect(m.Welcome)
    asked = {**served.config.to_dict(), "model": {"name_or_path": name}}
    stranger.send(m.Setup(asked, (1,)))
    error = stranger.expect(m.Error)
    assert error.kind == "ConfigError"
    assert said in error.message
    assert any("refused: " in line and said in line for line in served.said)
    wait_until(lambda: served.is_free)
    served.dial("another").set_up()
    assert len(served.weights) == 1


@needs("planner")
def test_a_worker_measures_only_models_that_its_own_file_permits(serve):
    """`hetero plan --measure` asks for it: "hetero.measure" is one more way to name a model."""
    served = serve()
    coordinator = served.dial().set_up()
    fields = {**model_allowlist.TINY, "num_hidden_layers": 2}
    named = (
        {"name_or_path": "/etc/x"},
        {"name_or_path": "org/name"},
        {"from_config": {**fields, "hidden_size": 1 << 20}, "tokenizer": "t"},
    )
    for number, model in enumerate(named):
        asked = {**served.config.to_dict(), "model": model}
        data = {"config": asked, "model": fields, "worker": 1}
        coordinator.link.send(control.request(number, model_allowlist.MEASURE, data))
        answer = coordinator.expect(m.Control)
        assert answer.answers == number
        assert "worker 1 may not load the model" in str(answer.error)


# ---- what another worker may ask of it


def peer_of(served: Served) -> Caller:
    """Worker 2, over a link of its own."""
    peer = Caller(served.port, served.stack)
    peer.send(m.PeerHello("run", 1, 2, 1 << 30))
    peer.expect(m.PeerWelcome)
    return peer


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("gpu_reset", None, "CONTROL 'gpu_reset' came from a worker, which may ask for"),
        (model_allowlist.MEASURE, {}, "'hetero.measure' came from a worker, which may ask for"),
        (model_allowlist.LEFT_OUT, "x", "'hetero.left-out' came from a worker"),
        (link_probe.PEER, {"peer": 1, "bytes": 9}, "'hetero.peer' came from a worker"),
        ("hetero.about", None, "'hetero.about' came from a worker"),
        (link_probe.SOURCE, {"bytes": 1 << 30}, "'hetero.source' of 1073741824 bytes"),
    ],
)
def test_another_worker_may_ask_for_the_links_speed_alone(name, data, said, serve, monkeypatch):
    called: list[Any] = []
    monkeypatch.setitem(control._handlers, "gpu_reset", called.append)
    served = serve()
    coordinator = served.dial("run").set_up()
    peer = peer_of(served)
    peer.link.send(control.request(1, link_probe.SINK, None))
    assert peer.expect(m.Control).error is None
    peer.link.send(control.request(2, link_probe.SOURCE, {"bytes": 1000}))
    assert peer.next().payload_bytes == 1000
    peer.link.send(control.request(3, name, data))
    error = peer.expect(m.Error)
    assert error.kind == "ProtocolError"
    assert said in error.message
    wait_until(lambda: peer.link.closed)
    told = coordinator.expect(m.Error)
    assert said in told.message
    assert called == []


def test_another_worker_may_not_send_a_long_header(serve):
    served = serve()
    served.dial("run").set_up()
    peer = peer_of(served)
    peer.send(m.Error("ProtocolError", "x" * 100_000))
    wait_until(lambda: peer.link.closed)


def test_an_activation_of_a_stage_that_the_sender_does_not_hold_is_refused(serve):
    """Worker 2 answers for the coordinator, which has the stage before."""
    served = serve()
    served.dial("run").set_up()
    peer = peer_of(served)
    tensor = WireTensor("float32", (1, 2, 3), memoryview(bytes(24)))
    peer.link.send(Message(m.Forward(0, 0, 1, 0), (tensor,)))
    assert "FORWARD of stage 0 came from one that does not hold it" in peer.expect(m.Error).message


# ---- what is too much


def test_coordinator_that_floods_it_is_told_and_memory_stays_bounded(serve, monkeypatch):
    """The main thread hangs in a handler, and nobody looks at what comes."""
    go_on = threading.Event()
    monkeypatch.setitem(control._handlers, "slow", lambda data: go_on.wait(WAIT_S))
    monkeypatch.setattr("hetero_framework.core.connection.MOST_MESSAGES", 50)
    served = serve()
    coordinator = served.dial().set_up()
    try:
        coordinator.link.send(control.request(1, "slow", None))
        with suppress(PeerLostError):  # it may have hung up before the sixtieth
            for _ in range(60):
                coordinator.send(m.Control("x"))
        said = coordinator.expect(m.Error).message
    finally:
        go_on.set()
    assert "it sends faster than it is heard: more than 50 messages wait" in said


# ---- whose worker it is


def test_run_whose_link_is_lost_keeps_its_worker_and_finds_its_stages(serve):
    served = serve(keep=True)
    first = served.dial("first", "p", "training", "names").set_up()
    busy = served.dial("second").expect(m.Reject)
    assert busy.code == "busy"
    held = r"busy with the training of run names from 127\.0\.0\.1, since \d\d:\d\d by its clock"
    assert re.search(held, busy.message)
    first.hang_up()
    wait_until(lost(served))
    busy = served.dial("second").expect(m.Reject)
    assert busy.code == "busy"
    assert "it keeps the stages of the training of run names from 127.0.0.1" in busy.message
    assert "60 s more" in busy.message
    assert served.dial("first").expect(m.Welcome).run_id == "first"
    assert served.weights[0]() is not None


def test_stages_are_kept_without_a_limit_only_where_they_are_worth_it():
    run = worker_module._Run("first", "the training of run names").afresh(math.inf)
    run.lost = time.monotonic() - 1e6
    assert run.is_kept
    assert str(run).endswith("ago, until it is back")
    measuring = worker_module._Run("second", keeps=False).afresh(math.inf)
    measuring.lost = time.monotonic() - 1.0
    assert not measuring.is_kept


@pytest.mark.parametrize(("run_id", "reconnect_s"), [("first", 60.0), ("second", 0.001)])
def test_coordinator_that_comes_back_hears_why_its_link_broke(run_id, reconnect_s, serve):
    """A frame that arrived damaged, say: only the worker knows. Another run hears nothing of it."""
    served = serve(keep=True, reconnect_s=reconnect_s)
    first = served.dial("first").set_up()
    with log.log_to("INFO", log.Lines(served._worker.show_to_coordinator)):
        first.hang_up()
        wait_until(lambda: any("lost the" in text for _, text in served._worker._lines))
        run = served._worker._run
        wait_until(lambda: run_id == "first" or run is None or not run.is_kept)
        again = served.dial(run_id)
        again.expect(m.Welcome)
        again.send(m.Setup(served.config.to_dict(), (1,)))
        said = []
        while isinstance(body := again.inbox.get(timeout=WAIT_S).body, m.Log):
            said.append(body.text)
    assert any("lost the coordinator" in text for text in said) == (run_id == "first")


@pytest.mark.parametrize("session", ["chat", "generation", "measurement"])
def test_session_without_a_result_is_named_and_loses_its_stages_with_its_link(session, serve):
    served = serve(keep=True)
    first = served.dial("first", "p", session).set_up()
    busy = served.dial("second").expect(m.Reject)
    assert f"it is busy with the {session} from 127.0.0.1, since " in busy.message
    first.hang_up()
    wait_until(lambda: served.is_free)
    assert served.weights[0]() is None
    assert served.dial("second").expect(m.Welcome).run_id is None


def test_run_that_has_no_stages_yet_does_not_reserve_the_worker(serve):
    served = serve(keep=True)
    stranger = served.dial("stranger")
    stranger.expect(m.Welcome)
    stranger.hang_up()
    wait_until(lost(served))
    assert served.dial("run").expect(m.Welcome).run_id is None


def test_coordinator_that_does_not_come_back_in_time_loses_its_stages(serve):
    served = serve(keep=True, reconnect_s=0.2)
    served.dial("first").set_up().hang_up()
    wait_until(lambda: served.weights[0]() is None)
    assert "the coordinator did not come back; its stages are freed" in served.said
    assert served.dial("second").expect(m.Welcome).run_id is None


def test_a_worker_without_keep_ends_when_no_coordinator_returns(serve, monkeypatch):
    monkeypatch.setattr(timeouts, "COORDINATOR_S", 0.3)
    served = serve(reconnect_s=0.1)
    served.dial().set_up().hang_up()
    assert isinstance(served.end(), PeerLostError)


def test_coordinator_that_was_started_again_takes_its_worker_at_once(serve, monkeypatch):
    """It has the id of the one that died, whose link may still stand for all the worker knows."""
    served = serve(keep=True)
    served.dial("run").set_up()
    monkeypatch.setattr(Coordinator, "epochs", itertools.count(1))  # it begins to count anew
    served.dial("run", "another").set_up()
    assert len(served.weights) == 2
    assert served.weights[0]() is None


@contextmanager
def loading(served: Served) -> Iterator[None]:
    """Meanwhile it loads the stages of the run "first"."""
    go_on = threading.Event()
    first = served.dial("first").set_up()
    served.loading = lambda: go_on.wait(WAIT_S)
    first.send(m.Abort(0, 0))
    first.expect(m.Aborted)
    first.send(m.Setup(served.config.to_dict(), ()))
    wait_until(lambda: served.said[-1].startswith("loading"))
    try:
        yield
    finally:
        go_on.set()


def test_hello_is_answered_while_the_worker_is_busy(serve):
    served = serve(keep=True)
    with loading(served):
        assert served.dial("second").expect(m.Reject).code == "busy"
        assert served.dial("first").expect(m.Welcome)


def test_the_welcome_tells_free_host_memory_beside_the_devices_own(serve, monkeypatch):
    assert serve().dial().expect(m.Welcome).host_free is None
    monkeypatch.setattr(Device, "one_memory", False)
    welcome = serve().dial().expect(m.Welcome)
    assert welcome.host_free is not None
    assert 0 < welcome.host_free <= welcome.memory_total


def test_large_frame_may_follow_the_welcome_at_once(serve):
    """The reader thread welcomes a returning coordinator; the main one may compute for long."""
    served = serve(keep=True)
    with loading(served):
        back = served.dial("first")
        back.expect(m.Welcome)
        tensor = WireTensor("uint8", (1 << 18,), memoryview(bytes(1 << 18)))
        back.link.send(Message(m.Control("large", request=1), [tensor]))
        back.link.ping()  # answered when that has been read
        wait_until(lambda: back.link.clock.round_trip_s is not None or back.link.closed)
        assert not back.link.closed
    assert back.expect(m.Control).answers == 1


def test_plain_dial_that_a_crowd_has_used_up_the_pace_for_is_tried_again(serve, monkeypatch):
    """The crowd and the coordinator come from one address."""
    monkeypatch.setattr(acceptor, "_BURST", 3.0)
    monkeypatch.setattr(acceptor, "_RATE_PER_S", 2.0)
    monkeypatch.setattr(timeouts, "BUSY_PAUSE_S", 0.6)
    served = serve()
    for _ in range(3):
        connect("127.0.0.1", served.port, WAIT_S).close()
    links = WorkerLinks(served.config, "run", 1 << 20)
    assert links.connect_all().keys() == {1}
    links.close(Message(m.Bye("the run is over")))
    served.end()


def test_worker_of_another_run_of_its_machine_refuses_at_once(serve):
    served = serve(run_id="mine")
    refusal = served.dial("yours").expect(m.Reject)
    assert refusal.code == "identity"
    assert "started by another run of its machine" in refusal.message
    assert '"port" for worker 1' in refusal.hint
    first = served.dial("mine", "p", "chat").set_up()
    assert served.dial("yours").expect(m.Reject).code == "busy"  # soon over, so it is waited for
    first.hang_up()


# ---- the end of a run


@pytest.mark.parametrize("how", ["goodbye", "failure"])
def test_stages_of_a_run_are_freed_before_the_next_one_is_told_of_the_memory(serve, how):
    served = serve(keep=True)
    first = served.dial("first").set_up()
    if how == "goodbye":
        first.send(m.Bye("the run is over"))
    else:
        first.send(m.Loss(0, 0, 0, 0.0))  # out of order
        first.expect(m.Error)
    wait_until(lambda: first.link.closed)
    # It is busy until its stages are freed.
    wait_until(lambda: isinstance(served.dial("second").next().body, m.Welcome))
    assert served.weights[0]() is None


def test_goodbye_ends_a_worker_and_a_failed_run_leaves_it_for_the_next(serve):
    served = serve()
    served.dial("first").set_up().send(m.Error("PeerLostError", "worker 2 is gone"))
    wait_until(lambda: served.weights[0]() is None)
    assert "the coordinator stopped: worker 2 is gone" in served.said
    served.dial("second").set_up().send(m.Bye("the run is over"))
    assert served.end() is None


# ---- what must not end it


def test_worker_that_was_measured_waits_for_the_run_that_is_planned(serve, monkeypatch):
    monkeypatch.setitem(control._handlers, model_allowlist.MEASURE, lambda data: {})
    served = serve()
    first = served.dial("first").set_up()
    first.link.send(control.request(7, model_allowlist.MEASURE, {}))
    assert first.expect(m.Control).answers == 7
    first.send(m.Bye("the run is over"))
    deadline = time.monotonic() + WAIT_S
    # It has not heard yet that the first one is gone.
    while isinstance((second := served.dial("second")).next().body, m.Reject):
        assert time.monotonic() < deadline
    second.assign().send(m.Bye("the run is over"))
    assert served.end() is None


@needs("planner")
def test_worker_that_the_plan_leaves_out_says_so_and_ends(serve, monkeypatch):
    monkeypatch.setitem(control._handlers, model_allowlist.MEASURE, lambda data: {})
    served = serve()
    coordinator = served.dial().set_up()
    for number, question in enumerate((model_allowlist.MEASURE, model_allowlist.LEFT_OUT)):
        coordinator.link.send(control.request(number, question, "it is too slow"))
        assert coordinator.expect(m.Control).answers == number
    coordinator.send(m.Bye("the run is over"))
    assert served.end() is None
    assert any("no layers for it: it is too slow" in line for line in served.said)


def test_out_of_memory_in_a_reader_is_reported_as_such(serve, monkeypatch):
    """Memory that runs out in a reader thread is no broken link."""

    def unpack(message: Message, device: Device) -> None:
        if isinstance(message.body, m.Abort):
            raise MemoryError("out of memory")

    monkeypatch.setattr(worker_module, "unpack", unpack)
    served = serve(keep=True)
    coordinator = served.dial().set_up()
    coordinator.send(m.Abort(0, 0))
    error = coordinator.expect(m.Error)
    assert error.kind == "OutOfMemory"
    assert "memory ran out" in error.message


def test_attempt_whose_memory_ran_out_is_told_and_the_worker_stays(serve, monkeypatch):
    """In a reader thread, as on a GPU; also of an attempt whose STEP another worker heard first."""

    def unpack(message: Message, device: Device) -> Any:
        if isinstance(message.body, m.Inputs):
            of = message.body.step, message.body.attempt
            raise StepOutOfMemory.of(of, "stage 1: memory ran out", "fewer layers")
        return real(message, device)

    real = worker_module.unpack
    monkeypatch.setattr(worker_module, "unpack", unpack)
    served = serve()
    coordinator = served.dial().set_up()
    schedule = StepSchedule((1, 1))
    for attempt in (1, 2):
        info = StepInfo(step=0, attempt=attempt, train=True, micro_batches=1, num_items=1)
        coordinator.link.send(step_message(info, schedule))
        for of in (attempt, attempt + 5):
            coordinator.send(m.Inputs(0, of, 1, 0, (), {"attention_mask": (1, 2)}))
            failed = m.StepFailed(0, of, "stage 1: memory ran out", "fewer layers")
            assert coordinator.expect(m.StepFailed) == failed
        coordinator.send(m.Abort(0, attempt))
        assert coordinator.expect(m.Aborted) == m.Aborted(0, attempt)
    assert not served.is_free
    coordinator.send(m.Bye("the run is over"))
    assert served.end() is None


@pytest.mark.parametrize("size", [1, 2**27])
def test_strangers_bytes_are_never_unpacked(size, serve, monkeypatch):
    """A frame of 86 bytes made a worker fill any amount of memory. Who sent it is looked at before
    its size."""
    unpacked: list[Message] = []
    monkeypatch.setattr(worker_module, "unpack", lambda message, device: unpacked.append(message))
    served = serve()
    stranger = served.dial()
    other = connect("127.0.0.1", served.port, WAIT_S)
    other.set_tick(WAIT_S)
    bomb = Message(m.Inputs(0, 0, 1, 0, (), {"a": (size,), "b": (size,)}))
    other.write(deque([memoryview(framed(bomb))]))
    assert other.read(memoryview(bytearray(1))) == 0
    other.close()
    stranger.expect(m.Welcome)
    assert unpacked == []


def test_no_more_strangers_than_a_few_are_let_in(serve):
    """A new one takes an old one's place, so that nobody can keep the coordinator out."""
    served = serve()
    streams = [connect("127.0.0.1", served.port, WAIT_S) for _ in range(16)]
    wait_until(lambda: served._worker._acceptor.strangers == 16)
    served.dial().expect(m.Welcome)

    def sent_away() -> int:
        return [stream.read(memoryview(bytearray(1))) for stream in streams].count(0)

    for stream in streams:
        stream.set_tick(0.01)
    wait_until(lambda: sent_away() == 1)
    for stream in streams:
        stream.close()
    wait_until(lambda: not served._worker._acceptor.strangers)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOBUFS, errno.EHOSTUNREACH])
@pytest.mark.parametrize("refusal", [NetworkError("no thread for the link"), MemoryError()])
def test_a_worker_goes_on_accepting_after_a_failed_accept(code, refusal, serve, monkeypatch):
    """No descriptors, then no thread or memory for a connection, then all again."""
    refusals = [OSError(code, os.strerror(code))]
    accept, start = Listener.accept, Connection.start

    def accepting(listener: Listener) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    def starting(connection: Connection) -> None:
        monkeypatch.setattr(Connection, "start", start)
        refusals.append(OSError(code, os.strerror(code)))
        raise refusal

    monkeypatch.setattr(timeouts, "ACCEPT_PAUSE_S", 0.0)
    monkeypatch.setattr(Listener, "accept", accepting)
    monkeypatch.setattr(Connection, "start", starting)
    served = serve()
    first = connect("127.0.0.1", served.port, WAIT_S)
    assert first.read(memoryview(bytearray(1))) == 0
    first.close()
    served.dial().expect(m.Welcome)
    assert served._worker._acceptor.strangers == 0


def test_a_coordinator_may_announce_frames_up_to_half_of_the_memory(serve, monkeypatch):
    memory = SimpleNamespace(total=9000, available=9000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    served = serve()
    coordinator = served.dial()
    coordinator.expect(m.Welcome)
    tensor = WireTensor("uint8", (5000,), memoryview(bytes(5000)))
    coordinator.link.send(Message(m.Control("large"), [tensor]))
    wait_until(lost(served))
    assert any("at most 4500 are agreed" in line for line in served.said)


def test_hello_of_an_earlier_dialling_comes_too_late(serve):
    served = serve()
    first = served.dial().set_up()
    late = Caller(served.port, served.stack)
    late.send(m.Hello("run", 1, "p", 0, 1 << 20))
    assert late.expect(m.Reject).code == "stale"
    assert not first.link.closed


# ---- being told to end


def tell_to_end(served: Served) -> None:
    """What the handler of SIGTERM does."""
    wait_until(lambda: served._worker._run is not None and served._worker._run.started)
    served._worker.told_to_end("it was stopped on its own machine (SIGTERM)", False)


def test_worker_that_is_told_to_end_says_so_and_still_answers(serve):
    served = serve(keep=True)
    coordinator = served.dial().set_up()
    tell_to_end(served)
    assert "SIGTERM" in coordinator.expect(m.Leaving).reason
    coordinator.send(m.Abort(0, 0))
    coordinator.expect(m.Aborted)
    coordinator.send(m.Bye("the run was stopped"))
    assert isinstance(served.end(), StoppedEarly)


def test_a_worker_ends_even_where_the_signal_cannot_raise(serve):
    served = serve(keep=True)
    with pytest.raises(BaseException, match="SIGTERM"):
        # In another thread than the loop, which so hears as little of it as from a finalizer.
        served._worker.told_to_end("it was stopped on its own machine (SIGTERM)", False)
    assert isinstance(served.end(), StoppedEarly)


@pytest.mark.parametrize("gone", [True, False])
def test_worker_that_is_told_to_end_does_not_wait_for_ever(serve, gone):
    served = serve(keep=True)
    coordinator = served.dial().set_up()
    tell_to_end(served)
    coordinator.expect(m.Leaving)
    if gone:
        coordinator.hang_up()
    else:
        served._worker._leave_by = 0.0
    assert isinstance(served.end(), StoppedEarly)


# ---- where it listens


def test_a_loopback_own_name_is_refused_with_a_remote_coordinator(monkeypatch):
    monkeypatch.setattr(addresses, "resolve", lambda name: ("127.0.1.1",))
    monkeypatch.setattr(addresses, "primary_address", lambda: "192.168.1.20")
    box = [{"id": 1, "ip": "box", "port": 9999, "device": "cpu"}]
    far = star(box, ["local", 1], coordinator={"ip": "192.0.2.1", "port": 1})
    worker = Worker(far, 1, keep=False, build=lambda *_: [])
    with pytest.raises(NetworkError, match="the name 'box' of worker 1 is a loopback") as raised:
        worker.serve(lambda: True)
    assert "192.168.1.20" in str(raised.value.hint)
    near = star(box, ["local", 1])
    worker_module._check_name(near, near.worker(1))


@pytest.mark.parametrize("phase", [Phase.CLOSED, Phase.READY])
def test_a_report_that_crosses_a_goodbye_is_no_protocol_error(phase):
    send = raising(ProtocolError("out of order"))
    worker: Any = SimpleNamespace(_connection=SimpleNamespace(send=send, phase=phase))
    expected = worker_module.LinkGone if phase is Phase.CLOSED else ProtocolError
    with pytest.raises(expected):
        Worker._send(worker, Message(m.BackwardDone(0, 0, 0)))


def test_worker_looks_again_when_a_task_has_waited_enough_for_anothers_turn():
    stages = SimpleNamespace(waits_s=0.0)
    worker: Any = SimpleNamespace(_run=SimpleNamespace(stages=stages))
    idle_s = Worker._idle_s.fget  # type: ignore[attr-defined]
    assert idle_s(worker) == timeouts.TICK_S
    stages.waits_s = timeouts.TICK_S / 4
    assert idle_s(worker) == timeouts.TICK_S / 4
    stages.waits_s = 1e9
    assert idle_s(worker) == timeouts.TICK_S
    worker._run = None
    assert idle_s(worker) == timeouts.TICK_S


@pytest.mark.parametrize(
    ("other", "said"), [(1, "is served on this machine already"), (2, "in use")]
)
def test_a_port_in_use_by_the_same_worker_is_reported(other, said):
    """Started by hand, where the coordinator has started it, too; else it is just a taken port."""
    port = free_ports(1)[0]
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))"
    code += "; print('up', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(port), "--worker-id", str(other)]
    config = star([{"id": 1, "ip": "127.0.0.1", "port": port}], ["local", 1])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(NetworkError, match=said) as raised:
            Worker(config, 1, keep=False, build=lambda *args: []).serve(lambda: True)
        assert (f"(process {process.pid})" in raised.value.message) is (other == 1)
        process.stdin.close()
