"""The coordinator's links to its workers: dialling, handshake, relaying, loss and return.

Frames for other workers are passed on undecoded by the reader threads, while they come in.
Everything else lands in one inbox, which the training thread reads.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from hetero_framework import control, errors
from hetero_framework.cluster.direct_links import DirectLinks
from hetero_framework.cluster.inbound_workers import InboundWorkers
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.membership import Membership
from hetero_framework.cluster.peer_links import most_bytes
from hetero_framework.config import Config, StageSpec, WorkerConfig, host_and_port
from hetero_framework.core import addresses, failpoints, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.clock import Clock
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import REFUSED, connect
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import HANDSHAKE_MAX_FRAME_BYTES
from hetero_framework.core.identity import Identity
from hetero_framework.core.link import Link, OnMoved
from hetero_framework.core.messages import Message
from hetero_framework.core.send_queue import LinkStats
from hetero_framework.core.session import Phase
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.engine.expectation import Expectation, check_sender
from hetero_framework.engine.hosts import DirectLost, HostEvent, LinkLost, StopWanted, WorkerLeaving
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerAwayError,
    PeerLostError,
    PeerSilentError,
    ProtocolError,
)
from hetero_framework.log import said_by
from hetero_framework.security.access import LOOPBACK_ONLY, Access

_log = logging.getLogger(__name__)
_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}
_WORKING = (Phase.STEP, Phase.EVALUATION)
_MOST_LEFT_OUT = 1000
"""Maximum messages that one `receive` takes in before one that is for its caller."""
_MOST_LINES, _TALK_S = 1000, 10.0
"""Maximum lines that a worker may have logged within this many seconds."""
_NOT_CALLED = "it has not dialled"
OnRetry = Callable[[int, float, str], None]
ShowAway = Callable[[WorkerId, str | None], None]


class _NotOpened(NetworkError):
    """A link that could not be opened. `kind`: the worker is "busy" with another run or has
    "refused" this one; its local process has "ended"; or what answers is "deaf", has "hung up", or
    is a "stranger"."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class _Reached(NamedTuple):
    """A worker that has sent WELCOME, on a connection that is not in use yet."""

    connection: Connection
    welcome: m.Welcome


@dataclass
class _Talk:
    """Number of lines that a worker has had logged lately; the rest of a flood is dropped."""

    since: float = -math.inf
    lines: int = 0

    def may_go_on(self, worker: WorkerId) -> bool:
        now = time.monotonic()
        if now - self.since > _TALK_S:
            self.since, self.lines = now, 0
        self.lines += 1
        if self.lines == _MOST_LINES + 1:
            text = "worker %s logs more than %d lines in %.0f s; those that follow are left out"
            _log.warning(text, worker, _MOST_LINES, _TALK_S)
        return self.lines <= _MOST_LINES


class WorkerLinks:
    """All links of one run; nothing else talks to workers.

    Args:
        local: The workers that this process has started.
        unpack: Makes a HostEvent's `arrival`, in a reader thread.
        watch: Gives a worker's link its `on_moved`.
        should_stop: Ends the wait for a lost worker.
        show_away: Called with a worker and a text while the worker is waited for, and with None
            when it is there; from any thread.
        small_packets: Whether all workers are dialled with `small_packets` of `connect`.
        session: What the workers are wanted for.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        max_frame_bytes: int,
        *,
        buffers: Callable[[], BufferPool] = BufferPool,
        local: LocalWorkers | None = None,
        unpack: Callable[[Message], Any] = lambda message: None,
        watch: Callable[[WorkerId], OnMoved] | None = None,
        access: Access = LOOPBACK_ONLY,
        should_stop: Callable[[], bool] = lambda: False,
        show_away: ShowAway = lambda worker, away: None,
        small_packets: bool = False,
        session: m.SessionKind = "training",
    ) -> None:
        self._workers = {w.id: w for w in config.workers if w.id in config.plan.owners}
        self._config = config
        name = config.output_dir.name if session == "training" else ""
        process = secrets.token_hex(8)  # a run that is started again keeps its id, and counts anew
        self._hello = m.Hello(run_id, "", process, 0, max_frame_bytes, session, name)
        self._epochs = itertools.count(1)
        self._buffers = buffers
        self._bandwidth = BandwidthScheduler()
        self._local = local or LocalWorkers(config, ())
        self._unpack = unpack
        self._watch = watch
        self._access = access
        self._should_stop = should_stop
        self._show_away = show_away
        self.members = Membership(self._workers)
        self.small_packets = set(self._workers if small_packets else ())
        """Workers that are dialled with `small_packets` of `connect`."""
        self.ready: dict[WorkerId, m.Ready] = {}
        """The answers of workers that have loaded their stages since they were last told to."""
        self.direct = DirectLinks(self._workers, self.send, self.receive)
        self._wires: dict[WorkerId, Connection] = {}
        self._expectation: Expectation | None = None  # while there are stages
        self._talk: defaultdict[WorkerId, _Talk] = defaultdict(_Talk)
        self.stats = {w: LinkStats() for w in self._workers}  # over all links of each worker
        self._inbox: queue.SimpleQueue[HostEvent | Exception] = queue.SimpleQueue()
        self.is_quiet = self._inbox.empty
        self._owners: dict[int, WorkerId] = {}  # of all stages, those of this process too
        self._current: tuple[int, int] = (-1, -1)
        self._stop = threading.Event()
        self._dialling: dict[WorkerId, Future[m.Welcome]] = {}
        self._awaited: dict[WorkerId, Future[_Reached]] = {}
        dialling = [worker.id for worker in config.workers if worker.dials]
        self._inbound = InboundWorkers(dialling, access, self._greet)

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._workers)

    def route(self, stages: Sequence[StageSpec], expectation: Expectation) -> None:
        """Set the worker of each stage. Frames for the coordinator's stages come to the inbox if
        they are in `expectation`."""
        self._expectation = expectation
        self._owners = {s.index: s.owner for s in stages}

    def expect(self, step: int, attempt: int) -> None:
        """Pass on boundary frames of this attempt at this step only."""
        self._current = (step, attempt)

    def plan(self, attempt: int, schedule: StepSchedule) -> None:
        """Order the large tensors of this attempt as in the schedule."""
        self._bandwidth.plan(attempt, schedule.sends, schedule.receives, schedule.order_timeout_s)

    def generation(self, worker_id: WorkerId) -> object:
        """A value that changes with each new link of a worker."""
        return self._wires.get(worker_id)

    # -- connecting -----------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept calls of workers without a port. Raises NetworkError, also for a host name that
        resolves to loopback on this machine (Debian's 127.0.1.1)."""
        if not any(worker.dials for worker in self._workers.values()):
            return
        entry = self._config.coordinator
        others = [w for w in self._workers.values() if not addresses.is_local_address(w.ip)]
        if any(worker.dials for worker in others) and addresses.is_loopback_by_name(entry.ip):
            raise NetworkError(
                f"the name {entry.ip!r} of the coordinator is a loopback address on this machine; "
                "workers cannot dial it there",
                hint=f'give its "ip" as {addresses.primary_address()}, or correct this machine\'s '
                "/etc/hosts",
            )
        self._inbound.listen(entry.ip, entry.port)

    def connect_all(self, workers: Iterable[WorkerId] | None = None) -> dict[WorkerId, m.Welcome]:
        """Dial these workers (default: all) in parallel; return their WELCOMEs. Raises the first
        error once all have answered or failed: NetworkError for a worker that cannot be reached in
        `connect_timeout_s`, ProtocolError for another protocol version."""
        self._dialling = {
            id: in_background(partial(self._open_when_free, self._workers[id]), f"dial-{id}")
            for id in (self._workers if workers is None else workers)
        }
        timeout_s = self._config.training.connect_timeout_s + 2 * timeouts.HANDSHAKE_S
        if not wait_for(self._dialling.values(), timeout_s):
            hanging = [str(id) for id, dialled in self._dialling.items() if not dialled.done()]
            raise NetworkError(
                f"the address of worker {', '.join(hanging)} could not be found out in time",
                hint='the name server does not answer; give an IP address as "ip"',
            )
        return {id: dialled.result() for id, dialled in self._dialling.items()}

    def let_go(self, worker_id: WorkerId, goodbye: Message) -> None:
        """Say goodbye to a worker and close its link."""
        connection = self._wires.pop(worker_id, None)
        if connection is not None:
            with suppress(HeteroError):
                connection.send(goodbye)
            connection.close(timeouts.STOP_S)

    def reconnect(self, worker_id: WorkerId, wait_s: float | None = None) -> bool:
        """Dial a lost worker for `wait_s` (default: `rejoin_wait_s`); return whether it still
        has its stages. A local worker whose process has ended or does not answer is started again.
        Raises PeerAwayError when it does not come back in time, PeerLostError when it died too
        often, and StopWanted."""
        if wait_s is None:
            wait_s = self._config.training.longest_outage_s
        return self._take_in(self._open_again(worker_id, wait_s)).run_id == self._hello.run_id

    def await_in_background(self, worker_id: WorkerId) -> None:
        """Dial an absent worker while the run goes on, without a limit."""
        if worker_id not in self._awaited:
            job = partial(self._open_again, worker_id, math.inf)
            self._awaited[worker_id] = in_background(job, f"await {worker_id}")

    def returned(self) -> dict[WorkerId, m.Welcome]:
        """The awaited workers that have come since the last call. Their links are in use from now
        on."""
        welcomes: dict[WorkerId, m.Welcome] = {}
        for worker in [w for w, reached in self._awaited.items() if reached.done()]:
            reached = self._awaited.pop(worker)
            if (error := reached.exception()) is not None:
                if not isinstance(error, (HeteroError, StopWanted)):
                    raise error
                _log.warning("worker %s is not waited for any more: %s", worker, error)
            elif reached.result().connection.closed:
                self.await_in_background(worker)
            else:
                welcomes[worker] = self._take_in(reached.result())
        return welcomes

    def _open_again(self, worker_id: WorkerId, wait_s: float) -> _Reached:
        """Dial as `reconnect` says; the connection is not in use yet."""
        self.members.absence(worker_id)  # begins now
        deadline, pause_s = time.monotonic() + wait_s, timeouts.ANSWER_TICK_S
        while True:
            if self._should_stop():
                raise StopWanted
            self._local.revive(worker_id, self._stop)
            try:
                left = max(0.1, deadline - time.monotonic())
                return self._open(self._workers[worker_id], left, again=True)
            except ProtocolError:
                raise
            except HeteroError as error:
                kind = error.kind if isinstance(error, _NotOpened) else None
                if kind == "refused":
                    raise
                # A process that is being killed may accept and reset; a moment later it has ended.
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, timeouts.BUSY_PAUSE_S)
                if kind == "deaf":
                    self._local.kill(worker_id)
                # An error without a kind comes when `left` is over.
                if kind is None or time.monotonic() > deadline or self._stop.is_set():
                    lost = f"worker {worker_id} does not come back: {error.message}"
                    raise PeerAwayError(lost) from error

    def _open_when_free(self, worker: WorkerConfig) -> m.Welcome:
        """Open the link at the start of a run; wait for a worker that ends another run, or that was
        killed or told to end just now."""
        deadline = time.monotonic() + self._config.training.connect_timeout_s
        told, hangs_up_since = False, math.inf
        while True:
            left = deadline - time.monotonic()
            try:
                return self._take_in(self._open(worker, max(0.1, left)))
            except _NotOpened as error:
                is_over = left < timeouts.BUSY_PAUSE_S or self._stop.is_set()
                if error.kind == "ended" and self._local.was_told_to_end(worker.id):
                    self._local.revive(worker.id, self._stop)
                    continue
                if error.kind == "busy" and is_over:
                    raise NetworkError(
                        f"worker {worker.id} at {worker.address} refused: {error.message}",
                        hint="end that, or give this run another worker",
                    ) from None
                if error.kind == "busy" and not told:
                    told = True
                    text = "worker %s: %s; waiting up to %.0f s for it"
                    _log.info(text, worker.id, error.message, left)
                if error.kind != "busy":
                    # It hangs up: a worker that died just then, or a forwarded port with nothing
                    # behind it yet.
                    now = time.monotonic()
                    hangs_up_since = min(hangs_up_since, now)
                    tried_s = now - hangs_up_since
                    if error.kind != "hung up" or tried_s > timeouts.HANDSHAKE_S or is_over:
                        raise
                    if not tried_s:
                        text = (
                            "worker %s: the program at %s hangs up; trying again for up to %.0f s"
                        )
                        most_s = min(left, timeouts.HANDSHAKE_S)
                        _log.info(text, worker.id, worker.address, most_s)
            self._stop.wait(timeouts.BUSY_PAUSE_S)

    def _open(self, worker: WorkerConfig, timeout_s: float, *, again: bool = False) -> _Reached:
        """Connect and shake hands once. `again`: the worker has been there before."""
        name, told = f"worker {worker.id}", False
        where = worker.ip if worker.dials else worker.address

        def on_retry(attempt: int, elapsed_s: float, reason: str) -> None:
            nonlocal told
            if again and self._should_stop():
                raise StopWanted
            if again:
                self._show_away(worker.id, str(self.members.absence(worker.id)))
            if not again and reason == REFUSED:  # another session's worker had the port
                self._local.start_missing(worker.id)
            ended = self._local.exit_text(worker.id)
            if ended is not None:
                raise _NotOpened("ended", ended if again else f"{name} did not start: {ended}")
            if not told and elapsed_s > timeouts.QUIET_S:
                told, left = True, timeout_s - elapsed_s
                starts = self._local.starts(worker.id)
                reason = "its process starts" if starts else reason
                longest = f"; up to {left:.0f} s more" if left < math.inf else ""
                _log.info("waiting for %s at %s (%s%s)", name, where, reason, longest)
                if reason in (REFUSED, _NOT_CALLED):
                    text = "if nothing there starts it%s: hetero worker on its machine"
                    _log.info(text, " again" * again)

        if worker.port is None:
            connection = self._await_call(worker.id, timeout_s, on_retry)
        else:
            connection = self._dial(worker, worker.port, timeout_s, on_retry)
        if self._stop.is_set():
            connection.close(drain_s=0)
            raise NetworkError(f"{name}: the run ended while it was connecting")
        connection.peer = worker.id
        if self._watch is not None:
            connection.link.on_moved = self._watch(worker.id)
        if worker.port is not None:
            connection.start()
        return self._greet_worker(worker, connection, again)

    def _greet_worker(self, worker: WorkerConfig, connection: Connection, again: bool) -> _Reached:
        """Send HELLO and wait for WELCOME. Closes the connection if anything else comes."""
        hello = replace(self._hello, worker_id=worker.id, epoch=next(self._epochs))
        hint, why, answer, fault = None, "it accepts, but says nothing", None, None
        patience_s = timeouts.REHANDSHAKE_S if again else timeouts.HANDSHAKE_S
        failpoints.hit("join")
        try:
            answer = connection.ask(Message(hello), patience_s, self._stop)
        except HeteroError as error:
            hint, why = (error.hint if isinstance(error, ProtocolError) else None), error.message
            fault = error
        if answer is None:
            connection.close(drain_s=0)
            kind = "hung up" if isinstance(fault, PeerLostError) else "stranger"
            if fault is None or isinstance(fault, PeerSilentError):
                kind = "deaf"
            hint = (
                hint or "check what has this port; if it is the worker, look at its screen or log"
            )
            text = f"the program at {worker.address} does not behave like a worker: {why}"
            raise _NotOpened(kind, text, hint)
        body = answer.body
        if not isinstance(body, m.Welcome):
            connection.close()
        if isinstance(body, m.Reject):
            if body.code == "busy":
                raise _NotOpened("busy", body.message)
            text = f"worker {worker.id} refused: {body.message}"
            if body.code == "protocol":
                raise ProtocolError(text, hint=body.hint)
            raise _NotOpened("refused", text, body.hint)
        return _Reached(connection, answer.expect(m.Welcome))

    def _take_in(self, reached: _Reached) -> m.Welcome:
        """Make this the link of its worker."""
        connection, welcome = reached
        assert connection.peer is not None
        self._wires[connection.peer] = connection
        self.ready.pop(connection.peer, None)
        self.direct.own_ports[connection.peer] = welcome.own_port
        self.members.answers(connection.peer, welcome.run_id == self._hello.run_id)
        self._show_away(connection.peer, None)
        self._local.answers(connection.peer)
        return welcome

    def _dial(
        self, worker: WorkerConfig, port: int, timeout_s: float, on_retry: OnRetry
    ) -> Connection:
        """Dial a worker that listens; return the connection, which is not started."""
        name, secure = f"worker {worker.id}", partial(self._access.dialled, process=worker.id)
        stream = connect(
            worker.ip,
            port,
            timeout_s,
            on_retry,
            who=name,
            stop=self._stop,
            secure=secure,
            small_packets=worker.id in self.small_packets,
        )
        return self._connection(stream, name, self.stats[worker.id])

    def _await_call(self, worker: WorkerId, timeout_s: float, on_retry: OnRetry) -> Connection:
        """Wait for the call of a worker that dials; return its connection."""
        began = time.monotonic()
        while (connection := self._inbound.take(worker)) is None:
            elapsed_s = time.monotonic() - began
            if elapsed_s > timeout_s or self._stop.is_set():
                to = self._config.coordinator
                where = host_and_port(to.ip, to.port)
                raise NetworkError(
                    f"worker {worker} has not dialled {where} in {elapsed_s:.1f} s",
                    hint="start it there (hetero worker) and look at what it says; the firewall of "
                    f"this machine has to let TCP port {to.port} in",
                )
            on_retry(0, elapsed_s, _NOT_CALLED)
            self._stop.wait(timeouts.ANSWER_TICK_S)
        connection.link.stats = self.stats[worker]
        connection.link.max_frame_bytes = self._hello.max_frame_bytes
        return connection

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        """Begin a connection that a worker dialled; its CALL will name the worker."""
        name = str(identity) if identity is not None else f"worker at {stream.peer}"
        connection = self._connection(stream, name, None, timeouts.STRANGER_S)
        connection.link.max_frame_bytes = HANDSHAKE_MAX_FRAME_BYTES
        connection.identity = identity
        connection.start()

    def _connection(
        self,
        stream: Stream,
        name: str,
        stats: LinkStats | None,
        handshake_s: float = timeouts.HANDSHAKE_S,
    ) -> Connection:
        connection = Connection(
            stream,
            name,
            m.COORDINATOR,
            self._received,
            self._closed,
            awaited=self._check_awaited,
            carrier=self._carrier,
            stats=stats,
            max_frame_bytes=self._hello.max_frame_bytes,
            deadlines=LinkDeadlines(
                liveness_s=self._config.training.liveness_timeout_s,
                handshake_s=handshake_s,
                send_s=self._config.training.step_timeout_s,
            ),
            pool=self._buffers(),
            bandwidth=self._bandwidth,
        )
        connection.waiting.most_tensor_bytes = most_bytes()
        return connection

    # -- traffic --------------------------------------------------------------------------------

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Queue a message. Raises LinkLost when the link is already gone."""
        connection = self._wires.get(worker_id)
        if connection is None:
            raise LinkLost(worker_id, "the link is closed")
        if isinstance(message.body, m.Setup):
            self.ready.pop(worker_id, None)
        try:
            connection.send(message)
        except PeerLostError as error:
            raise LinkLost(worker_id, error.message) from error

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Send a boundary message to the worker of its stage, unless its link is gone (its reader
        reports that) or new (the attempt is void)."""
        assert isinstance(message.body, m.BoundaryTensor)
        connection = self._wires.get(self._owners[message.body.stage])
        if connection is not None and connection.phase in _WORKING:
            with suppress(PeerLostError):
                connection.send(message, done)

    def ping(self, worker_id: WorkerId) -> None:
        """Have a link measure its round trip and the worker's clock."""
        if (connection := self._wires.get(worker_id)) is not None:
            connection.link.ping()

    def clock(self, worker_id: WorkerId) -> Clock:
        """The clock of a worker as measured by pings so far."""
        connection = self._wires.get(worker_id)
        return connection.link.clock if connection is not None else Clock()

    def fail(self, error: Exception) -> None:
        """Have `receive` raise an error of another thread."""
        self._inbox.put(error)

    def receive(self, timeout_s: float) -> HostEvent | None:
        """The next event, or None after `timeout_s`. Raises the error that a worker reports, and
        StepTrouble."""
        for _ in range(_MOST_LEFT_OUT):  # a flood does not keep the caller from its deadline
            try:
                event = self._inbox.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                return None
            if isinstance(event, Exception):
                raise event
            try:
                if event.wire is self._wires.get(event.worker):
                    if (known := self._known(event)) is not None:
                        return known
                elif event.message is not None:
                    event.message.release()  # of a link that has been replaced
            finally:
                if event.message is not None:
                    event.message.seen()
            timeout_s = 0
        return None

    def _known(self, event: HostEvent) -> HostEvent | None:
        """Return `event` if it is for the caller, else take it in here. Raises bad news."""
        if event.lost is not None:
            raise LinkLost(event.worker, event.lost)
        assert event.message is not None
        body = event.message.body
        if isinstance(body, m.Error):
            text = f"worker {event.worker}: {m.shortened(body.message)}"
            error = errors.error_from_peer(m.shortened(body.kind), text)
            error.hint = body.hint and m.shortened(body.hint)
            raise error
        if isinstance(body, m.PeerLost):
            lost = DirectLost(event.worker, body.worker_id, body.reason)
            if lost.pair in self.direct.open:
                raise lost
            return None  # the other end has reported it already
        if isinstance(body, m.StepFailed):
            if self._is_current(body):
                text = f"worker {event.worker}: {body.message}"
                raise StepOutOfMemory.of(self._current, text, body.hint, event.worker)
            return None
        if isinstance(body, m.Leaving):
            self.members.leaves(event.worker, body.reason)
            raise WorkerLeaving(event.worker, body.reason)
        if isinstance(body, m.Ready):
            self.ready[event.worker] = body  # read later, since others may leave or load meanwhile
        if isinstance(body, m.Connected):
            self.direct.note(event.worker, body)
            return None
        if isinstance(body, m.Control) and body.answers is None and body.request is None:
            event.message.release()
            if self._talk[event.worker].may_go_on(event.worker):
                control.note(Message(body))
            return None
        if isinstance(body, m.Log):
            if self._talk[event.worker].may_go_on(event.worker):
                peer, level = f"worker {event.worker}", _LEVELS.get(body.level, logging.INFO)
                _log.log(level, "%s: %s", peer, m.shortened(body.text), extra=said_by(peer))
            return None
        return event

    def close(self, goodbye: Message, drain_s: float = timeouts.DRAIN_S) -> None:
        """Say goodbye to all workers and close their links, in at most `drain_s` seconds."""
        self._stop.set()
        self._inbound.close()
        deadline = time.monotonic() + drain_s
        dialling: list[Future[Any]] = [*self._dialling.values(), *self._awaited.values()]
        wait(dialling, max(0.0, deadline - time.monotonic()))
        reached = [f for f in self._awaited.values() if f.done() and f.exception() is None]
        connections = [*self._wires.values(), *(f.result().connection for f in reached)]
        self._wires.clear()
        for connection in connections:
            with suppress(HeteroError):
                connection.send(goodbye)
        for connection in connections:
            connection.close(max(0.0, deadline - time.monotonic()))

    # -- reader threads -------------------------------------------------------------------------

    def _received(self, connection: Connection, message: Message) -> None:
        if isinstance(message.body, m.Call):
            self._inbound.admit(connection, message.body)
            return
        self._check_sender(connection, message.body)
        if isinstance(message.body, m.BoundaryTensor) and not self._is_for_us(message.body):
            message.release()
            return
        try:
            arrival = self._unpack(message)
        except ProtocolError:
            raise
        except HeteroError as error:  # no memory, as a rule: not the link's failure
            self._inbox.put(error)
            return
        assert connection.peer is not None
        connection.waiting.came(message)
        self._inbox.put(HostEvent(connection.peer, connection, message, arrival))

    def _check_awaited(self, connection: Connection, frame: m.FrameHeader) -> None:
        """Check a frame when its header has come."""
        body, expectation = frame.body, self._expectation
        self._check_sender(connection, body)
        if not isinstance(body, m.BoundaryTensor) or expectation is None:
            return
        check = expectation.check if self._is_for_us(body) else expectation.check_passing
        check(body, frame.shapes, frame.payload_bytes)

    def _check_sender(self, connection: Connection, body: m.Body) -> None:
        """Raise ProtocolError for a message about another worker's stage in the present attempt."""
        if isinstance(body, m.OfStep) and self._is_current(body) and self._owners:
            check_sender(body, self._owners, connection.peer)

    def _carrier(self, connection: Connection, message: Message) -> Link | None:
        """The link to which a boundary frame is relayed as it comes in; None if it is for us."""
        if not isinstance(message.body, m.BoundaryTensor) or not self._is_current(message.body):
            return None
        connection.accept(message)
        onward = self._wires.get(self._owners.get(message.body.stage, "local"))
        if onward is None or onward.phase not in _WORKING or onward.closed:
            return None  # a link that has just come back would not expect it
        return onward.link

    def _is_for_us(self, body: m.BoundaryTensor) -> bool:
        return self._is_current(body) and self._owners.get(body.stage, "local") == "local"

    def _is_current(self, body: m.OfStep) -> bool:
        return (body.step, body.attempt) == self._current

    def _closed(self, connection: Connection, reason: HeteroError | None) -> None:
        self._inbound.gone(connection)
        if connection.peer is None:
            return  # not identified yet
        if isinstance(reason, errors.ResourceError):
            self._inbox.put(reason)  # memory ran out here; to dial again would not help
        if connection.fault is not None:
            self._inbox.put(ProtocolError(f"{connection.name}: {connection.fault.message}"))
        why = reason.message if reason is not None else "the link was closed here"
        self._inbox.put(HostEvent(connection.peer, connection, lost=why))
