"""A worker: listens, loads the stages that a coordinator gives it, and serves them.

Threads: one accepts connections. The links' readers unpack and queue arriving messages. One may
send tensors that have to be copied first. Only the main thread touches the stages. When the
coordinator's link breaks, the worker keeps its stages for `rejoin_wait_s`, for the same run only.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero_framework import control, errors, log
from hetero_framework.cluster import link_probe
from hetero_framework.cluster import worker_info as _worker_info  # noqa: F401 - registers its answer
from hetero_framework.cluster.child import serving
from hetero_framework.cluster.model_allowlist import LEFT_OUT, MEASURE, check_permitted
from hetero_framework.cluster.outbound_worker import OutboundWorker
from hetero_framework.cluster.peer_links import PeerLinks, accepted_frame_bytes, most_bytes
from hetero_framework.cluster.stop_signals import StopSignals
from hetero_framework.config import Config, WorkerConfig, host_and_port
from hetero_framework.core import addresses, failpoints, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.connection import Connection
from hetero_framework.core.devices import open_device
from hetero_framework.core.dial import Listener
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import HANDSHAKE_MAX_FRAME_BYTES
from hetero_framework.core.identity import Identity, key_owner
from hetero_framework.core.messages import Message
from hetero_framework.core.session import Phase
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.engine import wire_forms
from hetero_framework.engine.boundary_io import ArrivalMeter, meter_of, unpack
from hetero_framework.engine.expectation import check_sender
from hetero_framework.engine.loading import BuildStages, report_of, take_apart
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.stage_api import GradientPart, Outcome, StageInterface, StepInfo
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    StoppedEarly,
)
from hetero_framework.models.cut.reuse import ReusePool
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.access import Access, access_of

_log = logging.getLogger(__name__)
_MAX_LINES = 100  # that wait for the coordinator
_BUSY_HINT = "wait, end that, or start this worker again"
# Phases in which tasks run; after a lost link the coordinator first ends or commits the attempt.
_WORKING = (Phase.STEP, Phase.EVALUATION)


class _Terminated(BaseException):
    """This process was told to end, and holds nothing that would be lost, or has to end at once.
    The text is the reason."""


@dataclass
class _Run:
    """The stages of one run and their state; they outlive its link by `grace_s` seconds."""

    run_id: str
    what: str = ""  # a description for people
    keeps: bool = True  # whether its stages are worth waiting for a lost coordinator
    began: float = field(default_factory=time.monotonic)
    lost: float | None = None
    grace_s: float = 0.0  # 0: a run without stages loses nothing
    process: str = ""
    epoch: int = 0
    stages: StageHost | None = None
    meter: ArrivalMeter | None = None
    owners: dict[int, WorkerId] = field(default_factory=dict)
    started: bool = False
    measured: bool = False  # it was measured for a plan; the planned run comes next

    @classmethod
    def of(cls, hello: m.Hello, peer: str) -> _Run:
        """The run of a coordinator whose address is `peer`."""
        name = f" of run {hello.name}" if hello.name else ""
        what = f"the {hello.session}{name} from {peer.rpartition(':')[0]}"
        is_training = hello.session == "training"
        return cls(hello.run_id, what, is_training, process=hello.process, epoch=hello.epoch)

    def afresh(self, grace_s: float) -> _Run:
        """The same run before it has loaded anything."""
        grace_s = grace_s if self.keeps else 0.0
        return replace(
            self, lost=None, grace_s=grace_s, stages=None, meter=None, owners={}, started=False
        )

    @property
    def is_kept(self) -> bool:
        """Whether the run's coordinator is connected or may come back."""
        return self.lost is None or time.monotonic() < self.lost + self.grace_s

    def __str__(self) -> str:
        """The reason why another coordinator has to wait."""
        now = time.monotonic()
        if self.lost is None:
            began = time.strftime("%H:%M", time.localtime(time.time() + self.began - now))
            lasts = _duration(now - self.began)
            return f"it is busy with {self.what}, since {began} by its clock ({lasts})"
        left = max(0.0, self.lost + self.grace_s - now)
        return (
            f"it keeps the stages of {self.what}, whose link was lost "
            f"{_duration(now - self.lost)} ago, "
            + ("until it is back" if left == math.inf else f"for {_duration(left)} more")
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class _WorkerSink:
    """Output of a run's stages. A lost link is ignored, since its reader reports it."""

    worker: Worker
    run: _Run

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Send a tensor to its stage, directly where the schedule says so."""
        stages, body = self.run.stages, message.expect(m.BoundaryTensor)
        assert stages is not None
        boundary = body.stage - 1 if isinstance(body, m.Forward) else body.stage
        if boundary in stages.schedule.direct:
            self.worker.peers.send(self.run.owners[body.stage], message, done)
        else:
            self.worker.to_coordinator(message, done)

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        self.worker.to_coordinator(wire_forms.loss_message(info, micro_batch, outcome))

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self.worker.to_coordinator(Message(m.BackwardDone(info.step, info.attempt, micro_batch)))

    def failed(self, error: Exception) -> None:
        self.worker.failed(self.run, error)


def _check_name(config: Config, entry: WorkerConfig) -> None:
    """Check that other machines can reach the name: on Debian a machine's own name is 127.0.1.1."""
    if not addresses.is_loopback_by_name(entry.ip):
        return
    what = f"the name {entry.ip!r} of worker {entry.id} is a loopback address on this machine"
    hint = f'give its "ip" as {addresses.primary_address()}, or correct this machine\'s /etc/hosts'
    if not addresses.is_local_address(config.coordinator.ip):
        raise NetworkError(f"{what}; the coordinator cannot reach it there", hint=hint)
    _log.warning("%s; other machines cannot reach it: %s", what, hint)


def serve(
    config: Config,
    worker_id: WorkerId,
    *,
    build: BuildStages,
    keep: bool = False,
    logs: Path | None = None,
    run_id: str | None = None,
    orders: StopSignals | None = None,
    access: Access | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve one run as worker `worker_id` (with `keep`, run after run) and return.

    Log lines go to standard error and to the coordinator. A request to end (`orders`, among them
    signals) is passed to the coordinator, which may save the run's state first. This needs the main
    thread.

    Args:
        logs: Directory for events.jsonl.
        run_id: The only run to serve.
        access: Who may connect; default: by the keys that lie beside the configuration.

    Raises NetworkError when the port is taken, IdentityError without keys where they are needed,
    DeviceError when there is no such device, PeerLostError when a run was lost and not taken up
    again, StoppedEarly when told to end, and the run's own error, after the coordinator was told.
    """
    worker = Worker(config, worker_id, keep=keep, build=build, run_id=run_id, access=access)
    to_coordinator = log.Lines(worker.show_to_coordinator)
    # No line that quotes a peer.
    to_coordinator.addFilter(lambda record: not hasattr(record, "peer"))
    handlers: list[logging.Handler] = [log.Lines(log.to_stderr), to_coordinator]
    if logs is not None:
        events = log.Events(logs / log.EVENTS_FILE, f"worker {worker_id}")
        events.open()
        handlers.append(events)
    try:
        with (
            log.log_to(config.training.log_level, *handlers),
            failpoints.armed(f"worker-{worker_id}"),
            (orders or StopSignals()).obeyed_by(worker.told_to_end),
            control.sending_by(worker.to_coordinator),
        ):
            worker.serve(should_stop)
    except _Terminated as ended:  # before it served
        raise _stopped(str(ended)) from None


class Worker:
    """The process behind one entry of `workers`."""

    def __init__(
        self,
        config: Config,
        worker_id: WorkerId,
        *,
        keep: bool,
        build: BuildStages,
        run_id: str | None = None,
        access: Access | None = None,
    ) -> None:
        self._config = config
        self._entry = config.worker(worker_id)
        self._bandwidth = BandwidthScheduler()
        access = access or access_of(config, worker_id)
        self._acceptor = Acceptor(access, self._greet)
        call = m.Call(self._entry.id, secrets.token_hex(8))
        self._outbound = OutboundWorker(config.coordinator, call, access, self._call)
        self._only_run = run_id
        self._leave_by = math.inf
        self._own_port: int | None = None  # see WELCOME
        self._told: str | None = None  # why it has to end
        self._ending: str | None = None  # the reason, once the process must not go on
        self._winds_down = False  # it ends anyway: nothing may interrupt what is left to do
        self._gone_since: float | None = None
        self._keep = keep
        self._build = build
        self._device = open_device(self._entry.device)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MAX_LINES)
        self.peers = PeerLinks(
            self._entry.id,
            lambda stream, name, limit: self._begin(stream, name, limit, m.DIALLER),
            lambda results: self._later(self._send, Message(m.Connected(results))),
            access,
        )
        self._run: _Run | None = None
        self._done = False

    # -- the loop -------------------------------------------------------------------------------

    def serve(self, should_stop: Callable[[], bool]) -> None:
        entry = self._entry
        self._device.use()
        what = f"{self._device.name}, {self._device.label}"
        ways: list[tuple[Callable[[], None], Callable[[], None]]] = []  # for peers, and their ends
        if entry.port is None:
            ways.append((self._outbound.run, self._outbound.close))
            cards = [w for w in self._config.workers if key_owner(w.id) == key_owner(entry.id)]
            if len(cards) > 1:
                listener = Listener(addresses.LOOPBACK, 0)
                self._own_port = listener.port
                ways.append((partial(self._acceptor.run, listener), listener.close))
            _log.info("worker %s dials %s (%s)", entry.id, self._outbound.where, what)
        else:
            _check_name(self._config, entry)
            listener = self._listener(entry.port)
            ways.append((partial(self._acceptor.run, listener), listener.close))
            where = host_and_port(entry.ip, entry.port)
            _log.info("worker %s listens on %s (%s)", entry.id, where, what)
        bringing = [in_background(bring, "peers") for bring, _ in ways]
        try:
            try:
                self._serve_runs(bringing, should_stop)
            finally:
                self._winds_down = True
        except _Terminated as ended:
            # Otherwise the coordinator would wait for a link that breaks.
            if self._told is None:
                self._told = str(ended)
                with suppress(HeteroError, LinkGone):
                    self._send(Message(m.Leaving(self._told)))
        finally:
            for _, end in ways:
                end()
            self._acceptor.close()
            if self._connection is not None:
                self._connection.close()
            self._forget_run()
            for way in bringing:
                way.result(timeouts.EXIT_S)
        if self._told is not None:
            raise _stopped(self._told)

    def _serve_runs(self, bringing: list[Future[None]], should_stop: Callable[[], bool]) -> None:
        while not self._done and not should_stop():
            for way in bringing:
                if way.done():  # no peer would come that way any more
                    way.result()
            if self._ending is not None:  # was raised where Python drops exceptions
                raise _Terminated(self._ending)
            try:
                self._turn()
                continue
            except StepOutOfMemory as error:
                # Not in the handler, as below.
                self._later(self._on_step_out_of_memory, self._run, error.copied())
                continue
            except Exception as error:
                # The coordinator hears of any error before this process may end.
                text = f"{type(error).__name__}: {error}"
                known = errors.as_hetero_error(error) or HeteroError(text)
                # A process whose device is broken would fail every later run as well.
                if not self._keep or not self._device.works():
                    self._report(known)
                    raise
                failed = type(known)(known.message, hint=known.hint)
                del known
            # After the handler: an error in it would keep the traceback, which holds stages.
            self._report(failed)
            _log.error("the run failed here: %s", failed.message)
            self._leave()

    def _listener(self, port: int) -> Listener:
        try:
            return Listener(self._entry.ip, port)
        except NetworkError as error:
            if (other := serving(self._entry.id, port)) is None:
                raise
            where = host_and_port(self._entry.ip, port)
            raise NetworkError(
                f"worker {self._entry.id} at {where} is served on this machine already (process "
                f"{other})",
                hint="one is enough: a run uses that one, and a coordinator on this machine has "
                "started it by itself where nobody else had",
            ) from error

    def told_to_end(self, reason: str, at_once: bool) -> None:
        """End in order, or at once if there is nothing to hand over, or if `at_once`. Called in the
        main thread between any two of its instructions. Python drops the exception in a finalizer
        or a callback of a weak reference; then the loop raises it again."""
        if self._winds_down:
            return
        if at_once or self._run is None or not self._run.started:
            self._winds_down, self._ending = True, reason
            raise _Terminated(reason)
        if self._leave_by == math.inf:
            self._leave_by = time.monotonic() + timeouts.HAND_OVER_S
            self._later(self._on_told_to_end, reason)

    def _later(self, job: Callable[..., None], *args: Any) -> None:
        """Have the main thread, which owns the stages, do this. Callable from any thread."""
        self._jobs.put(partial(job, *args))

    def _turn(self) -> None:
        """Do the queued jobs, then one task; wait when there is neither."""
        self._send_lines()
        while self._do_job(0):
            pass
        if self._compute() or self._do_job(self._idle_s):
            return
        if self._connection is None or time.monotonic() > self._leave_by:
            self._give_up()

    @property
    def _idle_s(self) -> float:
        """Seconds to wait for the next job, at most until a task may run."""
        host = self._run.stages if self._run is not None else None
        return min(host.waits_s or timeouts.TICK_S, timeouts.TICK_S) if host else timeouts.TICK_S

    def _do_job(self, timeout_s: float) -> bool:
        """Do the next job; return whether there was one in time."""
        try:
            job = self._jobs.get(timeout=timeout_s) if timeout_s else self._jobs.get_nowait()
        except queue.Empty:
            return False
        with suppress(LinkGone):  # its reader reports the same
            job()
        return True

    def _compute(self) -> bool:
        """Do one task, if one is ready."""
        host = self._run.stages if self._run is not None else None
        connection = self._connection
        if host is None or connection is None or connection.phase not in _WORKING:
            return False
        with suppress(LinkGone):
            ran = host.run_next()
            self._give_gradients(host)
            info, report = host.info, host.report()  # also if nothing ran: it may wait for replicas
            if info is not None and report is not None:
                trips, nbytes = self.peers.round_trips(), self.peers.bytes_sent()
                report = replace(report, round_trips=trips, direct_bytes=nbytes)
                self._send(wire_forms.gradient_norms_message(info, report))
            return ran
        return True

    def _give_up(self) -> None:
        """Free the stages of a coordinator that stays away too long. Later, raise PeerLostError."""
        if self._leave_by < math.inf:
            self._done = True
            return
        if self._run is not None and not self._run.is_kept:
            gone = log.event("coordinator gone", "freed its stages")
            _log.warning("the coordinator did not come back; its stages are freed", extra=gone)
            self._forget_run()
        since = math.inf if self._gone_since is None or self._keep else self._gone_since
        if time.monotonic() > since + timeouts.COORDINATOR_S:
            raise PeerLostError(
                "no coordinator has come since the run was lost "
                f"({_duration(timeouts.COORDINATOR_S)})",
                hint="hetero worker --keep waits forever",
            )

    def failed(self, run: _Run, error: Exception) -> None:
        """End a run here for an error in another thread. Callable from any thread."""
        self._later(self._raise_of, run, error)

    def _raise_of(self, run: _Run, error: Exception) -> None:
        if run is self._run:
            raise error

    def _on_step_out_of_memory(self, run: _Run, error: StepOutOfMemory) -> None:
        """Give the attempt up; the coordinator aborts it everywhere."""
        if run is not self._run or run.stages is None or error.attempt is None:
            return
        if run.stages.is_running(*error.attempt):
            run.stages.abort()
        lack = log.event("memory ran out", "attempt given up", reason=error.message)
        _log.info("", extra=lack)
        self._send(Message(m.StepFailed(*error.attempt, error.message, error.hint)))

    def _on_told_to_end(self, reason: str) -> None:
        _log.info("%s; the coordinator may save its state first", reason)
        self._told = reason
        self._send(Message(m.Leaving(reason)))

    def _on_message(self, connection: Connection, message: Message, arrival: Any) -> None:
        body = message.body
        message.seen()
        if isinstance(body, m.PeerHello):
            try:
                self.peers.accept(connection, body)
                self._acceptor.gone(connection.stream)
            except HeteroError as error:
                self._refuse(connection, "peer", error.message, error.hint)
        elif connection is self._connection:
            self._obey(message, arrival)
        elif self.peers.knows(connection):
            if isinstance(body, m.Control):
                self.peers.answer(connection, message)
            elif isinstance(body, m.Bye):
                self.peers.lost(connection)
                connection.close(drain_s=0)
            elif isinstance(body, m.BoundaryTensor) and self._run is not None:
                self._on_data(f"worker {connection.peer}", message, arrival)
        else:
            # From a link that was replaced, or a stranger that does not begin with HELLO.
            message.release()
            connection.close(drain_s=0)

    def _on_lost(self, connection: Connection, reason: str) -> None:
        if connection is self._connection:
            self._connection = None
            if (run := self._run) is not None:
                run.lost = self._gone_since = time.monotonic()
                then = "waiting for it" if run.grace_s else "nothing of it is kept"
                lost = log.event("coordinator lost", then)
                _log.warning("lost the coordinator (%s); %s", reason, then, extra=lost)
            return
        worker = self.peers.lost(connection)
        if worker is not None and self._run is not None:
            lost = log.event("direct link lost", worker=worker)
            _log.warning("lost the link to worker %s (%s)", worker, reason, extra=lost)
            # If this is lost, the next step finds out.
            self._send(Message(m.PeerLost(worker, reason)))

    def _obey(self, message: Message, arrival: Any) -> None:
        """Do what a message of the coordinator says."""
        body = message.body
        match body:
            case m.Inputs() | m.BoundaryTensor():
                self._on_data("the coordinator", message, arrival)
            case m.Setup():
                self._on_setup(body)
            case m.Connect():
                assert self._connection is not None
                self.peers.dial(body.peers, body.timeout_s, self._connection.link.max_frame_bytes)
            case m.Start():
                self._on_start(body)
            case m.Step():
                self._on_step(body)
            case m.Commit():
                self._on_commit(message, body)
            case m.Abort():
                self._host.abort()
                self._send(Message(m.Aborted(body.step, body.attempt)))
            case m.StateRequest():
                part = self._host.state(body.stage, body.kind, body.part, body.step, body.names)
                self._send(wire_forms.part_message(m.State, body.stage, body.kind, body.part, part))
            case m.LoadState():
                self._on_load_state(message, body)
            case m.Rewind():
                digests = self._host.rewind(body.step).digests
                kept = tuple(m.KeptStage(*entry) for entry in digests.items())
                self._send(Message(m.Rewound(kept)))
            case m.Control():
                self._on_control(message, body)
            case m.Bye():
                ended = log.event("run ended", reason=body.reason)
                _log.info("the coordinator left: %s", body.reason, extra=ended)
                self._leave(stay=self._run is not None and self._run.measured)
            case m.Error() | m.Reject():
                reason = m.shortened(body.message)
                failed = log.event("run failed", reason=reason)
                _log.warning("the coordinator stopped: %s", reason, extra=failed)
                # It may be started again soon.
                self._leave(stay=True)
                if not self._keep:
                    left = _duration(timeouts.COORDINATOR_S)
                    _log.info("waiting %s for the run to be started again", left)

    def _on_data(self, sender: str, message: Message, arrival: Any) -> None:
        try:
            self._host.data(message, arrival)
        except ProtocolError as error:
            raise ProtocolError(f"{sender}: {error.message}", hint=error.hint) from None

    # -- connections ----------------------------------------------------------------------------

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        """Begin an accepted connection; without keys the peer has yet to identify itself. A worker
        that dials the coordinator accepts other workers alone."""
        if self._entry.port is None:
            name, role = str(identity or f"a worker at {stream.peer}"), m.LISTENER
        elif identity is None:
            name, role = f"coordinator {stream.peer}", None
        elif identity.keeps:
            name, role = f"coordinator {stream.peer}", m.WORKER
        else:
            name, role = str(identity), m.LISTENER
        self._begin(stream, name, HANDSHAKE_MAX_FRAME_BYTES, role, identity)

    def _call(self, stream: Stream) -> Connection:
        """Begin a connection that was dialled to the coordinator."""
        return self._begin(stream, "the coordinator", HANDSHAKE_MAX_FRAME_BYTES, m.WORKER)

    def _begin(
        self,
        stream: Stream,
        name: str,
        max_frame_bytes: int,
        role: str | None,
        identity: Identity | None = None,
    ) -> Connection:
        """Start a connection; `role` is ours, None while the peer has yet to identify itself."""
        connection = Connection(
            stream,
            name,
            role,
            self._received,
            self._lost,
            awaited=self._check_awaited,
            max_frame_bytes=max_frame_bytes,
            deadlines=LinkDeadlines(
                liveness_s=self._config.training.liveness_timeout_s, handshake_s=timeouts.STRANGER_S
            ),
            pool=self._device.buffers(),
            bandwidth=self._bandwidth,
        )
        connection.identity = identity
        connection.waiting.most_tensor_bytes = most_bytes()
        connection.start()
        return connection

    def _check_awaited(self, connection: Connection, frame: m.FrameHeader) -> None:
        """Check a frame whose header has come. Runs in the reader thread."""
        self._check_of_worker(connection, frame.body, frame.payload_bytes)
        run = self._run
        if isinstance(frame.body, m.BoundaryTensor) and run is not None and run.stages is not None:
            run.stages.expectation.check(frame.body, frame.shapes, frame.payload_bytes)

    def _check_of_worker(self, connection: Connection, body: m.Body, payload_bytes: int) -> None:
        """Check a message of another worker, which may ask for less than the coordinator."""
        if connection.phase is not Phase.FLOWING:
            return
        if isinstance(body, m.Control):
            link_probe.check_peer(body, payload_bytes)
        if isinstance(body, m.BoundaryTensor) and (run := self._run) is not None and run.owners:
            check_sender(body, run.owners, connection.peer)

    def _received(self, connection: Connection, message: Message) -> None:
        """Take a message that the session has allowed. Runs in the reader thread."""
        body = message.body
        self._check_of_worker(connection, body, message.payload_bytes)
        if isinstance(body, m.Hello):
            self._on_hello(connection, body)
            return
        if isinstance(body, m.Reject) and self._outbound.refused(connection, body):
            return
        if isinstance(body, m.Quit):
            if connection is self._connection:
                end_process(body.reason)
            return
        if (run := self._run) is not None and run.stages is not None:
            run.stages.expectation.hear(message)
        try:
            arrival = unpack(message, self._device)
        except ProtocolError:
            raise
        except Exception as error:  # memory as a rule: the run fails, and not the link
            if (run := self._run) is not None:
                self.failed(run, error)
            return
        connection.waiting.came(message)
        self._later(self._on_message, connection, message, arrival)

    def _lost(self, connection: Connection, reason: HeteroError | None) -> None:
        self._acceptor.gone(connection.stream)
        self._outbound.gone(connection)
        if (fault := connection.fault) is not None and (run := self._run) is not None:
            # A new error: the connection keeps the first, and its traceback would hold stages.
            self.failed(run, ProtocolError(fault.message, hint=fault.hint))
        self._later(self._on_lost, connection, reason.message if reason else "closed")

    def _on_hello(self, connection: Connection, hello: m.Hello) -> None:
        """Refuse a wrong coordinator, welcome one that comes back, and have a new one wait until
        the main thread has made room. Runs in the reader thread, since the main thread may compute
        for minutes."""
        failpoints.hit("join")
        me, run = self._entry.id, self._run
        if str(hello.worker_id) != str(me):
            text = f"this is worker {me}, not {hello.worker_id}"
            hint = "two workers have exchanged their addresses in the configuration"
            self._refuse(connection, "identity", text, hint)
            return
        if self._only_run not in (None, hello.run_id):
            if run is not None and not run.keeps:  # soon over
                self._refuse(connection, "busy", str(run), _BUSY_HINT)
                return
            text = "it was started by another run of its machine, and ends with that"
            text += f": {run.what}" if run is not None else ""
            hint = (
                f'give this run another "port" for worker {me} in the configuration, or wait '
                "until the other one is over"
            )
            self._refuse(connection, "identity", text, hint)
            return
        if run is not None and run.run_id == hello.run_id:
            if hello.process == run.process and hello.epoch <= run.epoch:
                self._refuse(connection, "stale", "a later connection of this run is here", None)
                return
            run.process, run.epoch = hello.process, hello.epoch
            self._welcome(connection, run, hello)
            self._later(self._join, connection, hello, True)
        elif run is not None and run.is_kept:
            self._refuse(connection, "busy", str(run), _BUSY_HINT)
        else:
            self._later(self._join, connection, hello, False)

    def _join(self, connection: Connection, hello: m.Hello, welcomed: bool) -> None:
        """Serve the coordinator of this link from now on; `welcomed`: it was answered already."""
        same_run = self._run is not None and self._run.run_id == hello.run_id
        if welcomed and not same_run:
            connection.close(drain_s=0)  # the run was given up just now; its next HELLO is told so
            return
        if not same_run and self._run is not None and self._run.is_kept:
            self._refuse(connection, "busy", str(self._run), _BUSY_HINT)
            return
        if self._connection is not None:
            self._connection.close(drain_s=0)
            self._connection = None
        if not same_run:
            self._forget_run()
            self._run = _Run.of(hello, connection.stream.peer)
        run = self._current
        if run.stages is not None:
            # What is still queued goes into the old link, where it is lost.
            run.stages.flush()
        self._connection = connection
        connection.peer = m.COORDINATOR
        self._acceptor.gone(connection.stream)
        self._gone_since = run.lost = None
        if run.meter is not None:
            connection.link.on_moved = run.meter.watch("local")
        connected = log.event("coordinator connected")
        _log.info("serving the run of %s", connection.name, extra=connected)
        if not same_run:
            self._lines.clear()  # earlier lines are not for this coordinator
        if not welcomed:
            self._welcome(connection, run, hello)

    def _welcome(self, connection: Connection, run: _Run, hello: m.Hello) -> None:
        """Answer HELLO; from now on frames may be as large as the coordinator proposes."""
        connection.link.max_frame_bytes = accepted_frame_bytes(hello.max_frame_bytes)
        device, memory = self._device, self._device.memory()
        kept = run.run_id if run.started else None
        welcome = m.Welcome(
            *(torch.__version__, device.name, device.label, memory.total, memory.free, kept),
            *(device.no_four_bit, device.host_free, self._own_port),
        )
        with suppress(HeteroError):  # if the link is gone, its reader reports it
            connection.send(Message(welcome))

    def _refuse(
        self, connection: Connection, code: m.RejectCode, message: str, hint: str | None
    ) -> None:
        # The peer's host only, since its port changes with each connection.
        peer = connection.name.rpartition(":")[0]
        _log.warning("refused %s: %s", connection.name, message, extra=log.said_by(peer))
        connection.refuse(code, message, hint)

    # -- a run ----------------------------------------------------------------------------------

    def _on_setup(self, setup: m.Setup) -> None:
        try:
            config = Config.from_dict(setup.config, self._config.base_dir)
            config = check_permitted(config, self._config, self._entry)
        except ConfigError as refused:
            _log.error("refused: %s", refused.message)
            self._report(refused)
            self._leave(stay=True)
            return
        run = self._current.afresh(config.training.longest_outage_s)
        pool = self._take_apart()
        self._run = run
        specs = [spec for spec in config.plan.stages if spec.index in setup.stages]
        layers = ", ".join(spec.layers for spec in specs)
        _log.info("loading %s", layers)
        self._send_lines()
        began = time.monotonic()
        stages = self._build(config, specs, self._device, pool)
        seconds = time.monotonic() - began
        _log.info("loaded %s onto %s in %.0f s", layers, self._device.name, seconds)
        self._install(run, config, stages)
        self._send(Message(m.Ready(tuple(map(report_of, stages)))))

    def _install(self, run: _Run, config: Config, stages: Sequence[StageInterface]) -> None:
        run.meter = meter_of(config)
        run.owners = {spec.index: spec.owner for spec in config.plan.stages}
        run.stages = StageHost(
            stages,
            config,
            self._device,
            run.meter,
            _WorkerSink(self, run),
            id=self._entry.id,
            keeps_state=config.replicates,
        )
        self.peers.run_id, self.peers.watch = run.run_id, run.meter.watch
        if self._connection is not None:
            self._connection.link.on_moved = run.meter.watch("local")

    def _take_apart(self) -> ReusePool:
        """Forget the run, and return the modules of its stages that the next plan can reuse."""
        pool, host = ReusePool(), self._current.stages
        if host is not None:
            host.close()
            pool = take_apart(host.stages, host.config)
            del host
        self._forget_run()
        return pool

    def _forget_run(self) -> None:
        """Free the stages of the run: the next WELCOME says how much memory is free."""
        run, self._run = self._run, None
        self.peers.close()
        if run is not None:
            if run.stages is not None:
                run.stages.close()
            del run
            self._device.empty_cache()

    def _on_start(self, start: m.Start) -> None:
        for stage in self._host.stages:
            stage.input_requires_grad = stage.index in start.input_requires_grad
        self._host.expectation.max_boundary_bytes = start.max_boundary_bytes
        self._current.started = True
        _log.info("ready")

    def _on_step(self, step: m.Step) -> None:
        info, schedule = wire_forms.step_info(step), wire_forms.step_schedule(step)
        known = range(len(self._current.owners))
        if len(schedule.in_flight_limits) < len(known) or not schedule.direct <= {*known[:-1]}:
            raise ProtocolError("STEP is about other stages than those of the plan")
        log.set_step(info.step + 1)
        _log.debug("step %d, attempt %d", info.step + 1, info.attempt)
        self.peers.ping()
        self._bandwidth.plan(
            info.attempt, schedule.sends, schedule.receives, schedule.order_timeout_s
        )
        self._host.begin(info, schedule, self)
        # Links that are gone are reported again, in case PEER_LOST was lost.
        ours, owners = self._host.indexes, self._current.owners
        for boundary in sorted(schedule.direct):
            ends = (boundary, boundary + 1)
            others = [owners[stage] for stage in ends if stage not in ours]
            if len(others) == 1 and not self.peers.reaches(others[0]):
                self._send(Message(m.PeerLost(others[0], "it was lost before this step")))

    def _give_gradients(self, host: StageHost) -> None:
        """Send the coordinator the gradients of stages that are done, if it needs them."""
        for gradients in host.gradients():
            self._give(gradients)

    def _give(self, gradients: GradientPart) -> None:
        assert self._host.info is not None
        self._send(wire_forms.gradients_message(self._host.info, gradients))

    def has_room(self) -> bool:
        """Whether the link is idle: otherwise a BACKWARD that another stage waits for would queue
        behind gradients."""
        return self._connection is not None and self._connection.link.idle

    def take(self, gradients: GradientPart) -> None:
        """Send gradients of a stage that still computes."""
        with suppress(LinkGone):  # its reader reports the same
            self._give(gradients)

    def _on_commit(self, message: Message, order: m.Commit) -> None:
        self._host.commit(order, wire_forms.tied_weights(message))
        message.release()
        spans = tuple(self._host.take_spans())
        self._send(Message(m.Committed(order.step, order.attempt, spans)))

    def _on_load_state(self, message: Message, order: m.LoadState) -> None:
        in_step = self._connection is not None and self._connection.phase is Phase.STEP
        if in_step and order.kind not in ("gradients", "tied gradients"):
            raise ProtocolError(f"LOAD_STATE of a {order.kind} came in a step")
        part = wire_forms.state_part(message)
        self._host.load_state(order.stage, order.kind, order.part, part)
        part.release()
        self._send(Message(m.StateLoaded(order.stage, order.part)))

    def _on_control(self, message: Message, question: m.Control) -> None:
        if question.name == link_probe.PEER:
            reply: Message | None = link_probe.answer_for_peer(question, self.peers.ask)
        else:
            reply = control.answer(message, self._checked)
        if question.name in (MEASURE, LEFT_OUT) and self._run is not None:
            self._run.measured = question.name == MEASURE
        message.release()
        if reply is not None:
            self._send(reply)

    def _checked(self, question: m.Control) -> Any:
        """The data of a question. Raises ConfigError if it asks for the cost of a model that this
        worker's configuration does not permit."""
        if question.name != MEASURE or not isinstance(question.data, dict):
            return question.data
        asked = Config.from_dict(question.data.get("config") or {}, self._config.base_dir)
        return {**question.data, "config": check_permitted(asked, self._config, self._entry)}

    def _leave(self, *, stay: bool = False) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._gone_since = time.monotonic()
        self._forget_run()
        self._done = not (self._keep or stay) or self._leave_by < math.inf

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _current(self) -> _Run:
        if self._run is None:
            raise ProtocolError("there is no run yet; HELLO comes first")
        return self._run

    @property
    def _host(self) -> StageHost:
        host = self._current.stages
        if host is None:
            raise ProtocolError("no stages are loaded yet; SETUP comes first")
        return host

    def to_coordinator(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Send; a lost link is ignored, since its reader reports it. Callable from any thread."""
        with suppress(LinkGone):
            self._send(message, done)

    def _send(self, message: Message, done: Callable[[], None] | None = None) -> None:
        connection = self._connection  # the sender thread comes here too
        if connection is None:
            raise LinkGone
        try:
            connection.send(message, done)
        except PeerLostError as error:
            raise LinkGone from error
        except ProtocolError as error:
            if connection.phase is Phase.CLOSED:  # closed by a BYE while this was made
                raise LinkGone from error
            raise

    def show_to_coordinator(self, level: str, text: str) -> None:
        """Have the main thread send a line of the log once a coordinator is connected."""
        self._lines.append((level, text))

    def _send_lines(self) -> None:
        while self._lines and self._connection is not None:
            self.to_coordinator(Message(m.Log(*self._lines.popleft())))

    def _report(self, error: HeteroError) -> None:
        """Tell the coordinator why the run failed here."""
        text = "; ".join(line.strip() for line in error.message.splitlines())
        with suppress(HeteroError, LinkGone):
            self._send(Message(m.Error(type(error).__name__, text, error.hint)))


def _stopped(reason: str) -> StoppedEarly:
    return StoppedEarly(reason, hint="started again, it serves the run as before")


def end_process(reason: str) -> None:
    """End this process at once, since its main thread hangs."""
    _log.error("the coordinator has this process ended: %s", reason)
    os._exit(HeteroError.exit_code)


class LinkGone(Exception):
    """The link broke before a message was sent; the link's reader reports the same."""
