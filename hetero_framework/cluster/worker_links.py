"""The coordinator's links to its workers: dialling, handshake, relaying, loss and return.

Frames for other workers are passed on undecoded by the reader threads, while they come in.
Everything else lands in one inbox, which the training thread reads.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hetero_framework import errors
from hetero_framework.cluster.inbound_workers import InboundWorkers
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.peer_links import most_bytes
from hetero_framework.config import Config, StageSpec, WorkerConfig, host_and_port
from hetero_framework.core import addresses, failpoints, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.clock import Clock
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import REFUSED, connect
from hetero_framework.core.frames import HANDSHAKE_MAX_FRAME_BYTES
from hetero_framework.core.identity import Identity
from hetero_framework.core.link import Link, LinkStats, OnMoved
from hetero_framework.core.messages import Message
from hetero_framework.core.session import Phase
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.engine.expectation import Expectation, check_sender
from hetero_framework.engine.hosts import (
    DirectLost,
    HostEvent,
    LinkLost,
    StopWanted,
    WorkerId,
    WorkerLeaving,
)
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerAwayError,
    PeerLostError,
    PeerSilentError,
    ProtocolError,
)
from hetero_framework.log import event, said_by
from hetero_framework.planner.schedule.step_schedule import StepSchedule
from hetero_framework.security.access import LOOPBACK_ONLY, Access
from hetero_framework.units import clock

_log = logging.getLogger(__name__)
_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR")}
_WORKING = (Phase.STEP, Phase.EVALUATION)
_MOST_LEFT_OUT = 1000
"""Messages that one `receive` takes in and that are for nobody but the user."""
_MOST_LINES, _TALK_S = 1000, 10.0
"""More lines in so many seconds no worker has to say."""
_NOT_CALLED = "it has not dialled"
OnRetry = Callable[[int, float, str], None]
ShowAway = Callable[[WorkerId, str | None], None]


class _Busy(Exception):
    """The worker serves another run at present."""


class _Refused(NetworkError):
    """The worker will not serve this run."""


class _Ended(NetworkError):
    """The worker's process on this machine has ended."""


class _Silent(NetworkError):
    """Something accepts the connection and gives no answer (`is_deaf`), hangs up (`hung_up`), or is
    no peer of ours."""

    is_deaf = hung_up = False


@dataclass(frozen=True)
class _Absence:
    """Since when a worker is away; `is_paused`: its owner has it back for a while."""

    since: float
    is_paused: bool

    def __str__(self) -> str:
        """For a table, "paused 0:02:10"."""
        return f"{'paused' if self.is_paused else 'away'} {clock(time.monotonic() - self.since)}"


class _Reached(NamedTuple):
    """A worker that has said WELCOME, on a connection that is not in use yet."""

    connection: Connection
    welcome: m.Welcome


@dataclass
class _Talk:
    """How many lines a worker has had logged lately; of a flood the rest is left out."""

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


@dataclass
class _Redial:
    """A lost link between workers: who dials whom next, and when. Each loss costs a step again."""

    order: tuple[WorkerId, WorkerId]
    at: float = 0.0
    pause_s: float = 0.0


class WorkerLinks:
    """All links of one run. `Pipeline` and the set-up talk to workers through it alone."""

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
    ) -> None:
        """`local` are the workers that this process has started. `unpack` makes a HostEvent's
        `arrival`, in a reader thread; `watch(worker)` gives its link's `on_moved`. `should_stop`
        ends the wait for a lost worker; `show_away(worker, text)` is called while one is waited
        for, from any thread, with None when it is there; `small_packets` as of `connect`, for
        all workers."""
        used = {entry.id for entry in config.shard_plan}
        self._workers = {w.id: w for w in config.workers if w.id in used}
        self._config = config
        self._run_id = run_id
        self._max_frame_bytes = max_frame_bytes
        self._buffers = buffers
        self._bandwidth = BandwidthScheduler()
        self._local = local or LocalWorkers(config, ())
        self._unpack = unpack
        self._watch = watch
        self._access = access
        self._should_stop = should_stop
        self._show_away = show_away
        self._away: dict[WorkerId, _Absence] = {}
        self.small_packets = set(self._workers if small_packets else ())
        """Workers that are dialled with `small_packets` of `connect`."""
        self.ready: dict[WorkerId, m.Ready] = {}
        """What workers have said of the stages that they were last told to load."""
        self._direct: set[frozenset[WorkerId]] = set()
        self._back: set[frozenset[WorkerId]] = set()
        self._redials: dict[frozenset[WorkerId], _Redial] = {}
        self._dialled: dict[tuple[WorkerId, WorkerId], str | None] = {}
        self._wires: dict[WorkerId, Connection] = {}
        self._expectation: Expectation | None = None  # while there are stages
        self._welcomes: dict[WorkerId, m.Welcome] = {}
        self._talk: defaultdict[WorkerId, _Talk] = defaultdict(_Talk)
        self._stats: dict[WorkerId, LinkStats] = {w: LinkStats() for w in self._workers}
        # A run that is started again keeps its id, but begins to count anew.
        self._process = secrets.token_hex(8)
        self._epochs: Counter[WorkerId] = Counter()
        self._inbox: queue.SimpleQueue[HostEvent | Exception] = queue.SimpleQueue()
        self._owners: dict[int, WorkerId] = {}
        self._holders: dict[int, WorkerId] = {}  # of all stages, those of this process too
        self._current: tuple[int, int] = (-1, -1)
        self._stop = threading.Event()
        self._dialling: dict[WorkerId, Future[m.Welcome]] = {}
        self._awaited: dict[WorkerId, Future[_Reached]] = {}
        is_called = any(worker.dials for worker in self._workers.values())
        dialling = [worker.id for worker in config.workers if worker.dials]
        self._inbound = InboundWorkers(dialling, access, self._greet) if is_called else None

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._workers)

    def route(self, stages: Sequence[StageSpec], expectation: Expectation) -> None:
        """Tell which worker owns which stage; frames for the others come to the inbox, as far as
        they are in `expectation`."""
        self._expectation = expectation
        self._holders = {s.index: s.owner for s in stages}
        self._owners = {s.index: s.owner for s in stages if s.owner in self._workers}

    def expect(self, step: int, attempt: int) -> None:
        """From now on only boundary frames of this attempt at this step are passed on."""
        self._current = (step, attempt)

    def plan(self, attempt: int, schedule: StepSchedule) -> None:
        """Large tensors of this attempt keep to the order of the schedule."""
        self._bandwidth.plan(attempt, schedule.sends, schedule.receives, schedule.order_timeout_s)

    def generation(self, worker_id: WorkerId) -> object:
        """Something that is equal as long as a worker's link is the same one."""
        return self._wires.get(worker_id)

    # -- connecting -----------------------------------------------------------------------------

    def listen(self) -> None:
        """Let the workers call that nobody can dial. Raises NetworkError, also for a name that
        means this machine to itself alone (Debian's 127.0.1.1)."""
        if self._inbound is None:
            return
        own = self._config.coordinator
        others = [w for w in self._workers.values() if not addresses.is_local_address(w.ip)]
        if any(worker.dials for worker in others) and addresses.is_loopback_by_name(own.ip):
            raise NetworkError(
                f"the name {own.ip!r} of the coordinator is a loopback address on this machine; "
                "workers cannot dial it there",
                hint=f'give its "ip" as {addresses.primary_address()}, or correct this machine\'s '
                "/etc/hosts",
            )
        self._inbound.listen(own.ip, own.port)

    def connect_all(self, workers: Iterable[WorkerId] | None = None) -> dict[WorkerId, m.Welcome]:
        """Dial these workers (default: all) at once; what each said. Raises the first error when
        all have answered or failed: NetworkError for one that cannot be reached in
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
        """Say goodbye to a worker that leaves, and close its link."""
        connection = self._wires.pop(worker_id, None)
        if connection is not None:
            with suppress(HeteroError):
                connection.send(goodbye)
            connection.close(timeouts.STOP_S)

    def reconnect(self, worker_id: WorkerId, wait_s: float | None = None) -> bool:
        """Dial a lost worker for `wait_s`, or else for `rejoin_wait_s`, one that its owner has
        paused without end; whether it has its stages still. One of this machine whose process
        ended, or does not answer, is started again. Raises PeerAwayError when it does not come back
        in time, PeerLostError when it died too often, and StopWanted."""
        if wait_s is None:
            is_paused = self._is_paused(worker_id)
            wait_s = math.inf if is_paused else self._config.training.rejoin_wait_s
        return self._take_in(self._open_again(worker_id, wait_s)).run_id == self._run_id

    def await_in_background(self, worker_id: WorkerId) -> None:
        """Have a worker that is away dialled while the run goes on, for as long as that lasts."""
        if worker_id not in self._awaited:
            job = partial(self._open_again, worker_id, math.inf)
            self._awaited[worker_id] = in_background(job, f"await {worker_id}")

    def returned(self) -> dict[WorkerId, bool]:
        """The awaited workers that have come since the last call, and whether they have their
        stages still. Until then nothing is heard of their links."""
        found: dict[WorkerId, bool] = {}
        for worker in [w for w, reached in self._awaited.items() if reached.done()]:
            reached = self._awaited.pop(worker)
            if (error := reached.exception()) is not None:
                if not isinstance(error, (HeteroError, StopWanted)):
                    raise error
                _log.warning("worker %s is not waited for any more: %s", worker, error)
            elif reached.result().connection.closed:
                self.await_in_background(worker)
            else:
                found[worker] = self._take_in(reached.result()).run_id == self._run_id
        return found

    def _open_again(self, worker_id: WorkerId, wait_s: float) -> _Reached:
        """As `reconnect` says, but the connection is not in use yet."""
        self._away.setdefault(worker_id, _Absence(time.monotonic(), is_paused=False))
        deadline, pause_s = time.monotonic() + wait_s, timeouts.ANSWER_TICK_S
        while True:
            if self._should_stop():
                raise StopWanted
            self._local.revive(worker_id, self._stop)
            try:
                left = max(0.1, deadline - time.monotonic())
                return self._open(self._workers[worker_id], left, again=True)
            except (ProtocolError, _Refused):
                raise
            except (HeteroError, _Busy) as error:
                # A process that is being killed may accept and reset; a moment later it has ended.
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, timeouts.BUSY_PAUSE_S)
                if isinstance(error, _Silent) and error.is_deaf:
                    self._local.kill(worker_id)
                if (
                    time.monotonic() > deadline
                    or self._stop.is_set()
                    or not isinstance(error, (_Busy, _Ended, _Silent))  # dialled to the end
                ):
                    text = error.message if isinstance(error, HeteroError) else str(error)
                    lost = f"worker {worker_id} does not come back: {text}"
                    raise PeerAwayError(lost) from error

    def _open_when_free(self, worker: WorkerConfig) -> m.Welcome:
        """Open the link at the start of a run; wait for a worker that ends another one, or that
        was killed or told to end just now."""
        deadline = time.monotonic() + self._config.training.connect_timeout_s
        told, hangs_up_since = False, math.inf
        while True:
            left = deadline - time.monotonic()
            try:
                return self._take_in(self._open(worker, max(0.1, left)))
            except _Ended:
                if not self._local.was_told_to_end(worker.id):
                    raise
                self._local.revive(worker.id, self._stop)
                continue
            except _Silent as silent:
                # A worker that died just then, or a forwarded port with nothing behind it yet.
                now = time.monotonic()
                hangs_up_since = min(hangs_up_since, now)
                tried_s = now - hangs_up_since
                if (
                    not silent.hung_up
                    or tried_s > timeouts.HANDSHAKE_S
                    or left < timeouts.BUSY_PAUSE_S
                    or self._stop.is_set()
                ):
                    raise
                if not tried_s:
                    text = "worker %s: what answers at %s hangs up; trying again for up to %.0f s"
                    _log.info(text, worker.id, worker.address, min(left, timeouts.HANDSHAKE_S))
            except _Busy as busy:
                if left < timeouts.BUSY_PAUSE_S or self._stop.is_set():
                    raise NetworkError(
                        f"worker {worker.id} at {worker.address} refused: {busy}",
                        hint="stop the other run, or give this one another worker",
                    ) from None
                if not told:
                    told = True
                    _log.info("worker %s: %s; waiting up to %.0f s for it", worker.id, busy, left)
            self._stop.wait(timeouts.BUSY_PAUSE_S)

    def _open(self, worker: WorkerConfig, timeout_s: float, *, again: bool = False) -> _Reached:
        """Connect and shake hands once. `again`: the worker has been there before."""
        name, where, told = f"worker {worker.id}", worker.address, False
        tell_at_s = timeouts.QUIET_S

        def on_retry(attempt: int, elapsed_s: float, reason: str) -> None:
            nonlocal told, tell_at_s
            if again and self._should_stop():
                raise StopWanted
            if again:
                self._show_away(worker.id, str(self._away[worker.id]))
            if again and self._is_paused(worker.id):
                if elapsed_s > tell_at_s:
                    tell_at_s = max(timeouts.PAUSED_S, 2 * elapsed_s)
                    since_s = clock(time.monotonic() - self._away[worker.id].since)
                    how = f"hetero resume {worker.id} (on its machine)"
                    text = "%s has been paused by its owner for %s; it goes on after: %s"
                    _log.info(text, name, since_s, how)
                return
            ended = self._local.exit_text(worker.id)
            if ended is not None:
                raise _Ended(ended if again else f"{name} did not start: {ended}")
            if not told and elapsed_s > timeouts.QUIET_S:
                told, left = True, timeout_s - elapsed_s
                starts = self._local.starts(worker.id)
                reason = "its process starts" if starts else reason
                longest = f"; up to {left:.0f} s more" if left < math.inf else ""
                _log.info("waiting for %s at %s (%s%s)", name, where, reason, longest)
                if again and reason in (REFUSED, _NOT_CALLED):
                    _log.info("if nothing there starts it again: hetero train on its machine")

        if worker.port is None:
            connection = self._await_call(worker.id, timeout_s, on_retry)
        else:
            connection = self._dial(worker, worker.port, timeout_s, on_retry)
        if self._stop.is_set():
            connection.close(drain_s=0)
            raise NetworkError(f"{name}: the run ended while it was connecting")
        self._epochs[worker.id] += 1
        connection.peer = worker.id
        if self._watch is not None:
            connection.link.on_moved = self._watch(worker.id)
        if worker.port is not None:
            connection.start()
        epoch = self._epochs[worker.id]
        hello = m.Hello(self._run_id, worker.id, self._process, epoch, self._max_frame_bytes)
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
            silent = _Silent(
                f"what answers at {where} is no worker that works: {why}",
                hint=hint
                or "is it another program that has this port? Else look at the worker's own "
                "screen or log",
            )
            silent.is_deaf = fault is None or isinstance(fault, PeerSilentError)
            silent.hung_up = isinstance(fault, PeerLostError) and not silent.is_deaf
            raise silent
        said = answer.body
        if not isinstance(said, m.Welcome):
            connection.close()
        if isinstance(said, m.Reject):
            if said.code == "busy":
                raise _Busy(said.message)
            kind = ProtocolError if said.code == "protocol" else _Refused
            raise kind(f"{name} refused: {said.message}", hint=said.hint)
        return _Reached(connection, answer.expect(m.Welcome))

    def _take_in(self, reached: _Reached) -> m.Welcome:
        """From now on this is the link of its worker."""
        connection, welcome = reached
        assert connection.peer is not None
        self._wires[connection.peer], self._welcomes[connection.peer] = connection, welcome
        self.ready.pop(connection.peer, None)
        away = self._away.pop(connection.peer, None)
        if away is not None and away.is_paused and welcome.run_id == self._run_id:
            self._away[connection.peer] = away  # the same process, which will end yet
        self._show_away(connection.peer, None)
        self._local.answers(connection.peer)
        return welcome

    def _is_paused(self, worker_id: WorkerId) -> bool:
        away = self._away.get(worker_id)
        return away is not None and away.is_paused

    def welcome(self, worker_id: WorkerId) -> m.Welcome | None:
        """What a worker said when it was last reached."""
        return self._welcomes.get(worker_id)

    def _dial(
        self, worker: WorkerConfig, port: int, timeout_s: float, on_retry: OnRetry
    ) -> Connection:
        """A connection with a worker that listens, not started."""
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
        return self._connection(stream, name, self._stats[worker.id])

    def _await_call(self, worker: WorkerId, timeout_s: float, on_retry: OnRetry) -> Connection:
        """The connection of a worker that calls; one that has called already is taken as it is."""
        assert self._inbound is not None
        began = time.monotonic()
        while (connection := self._inbound.take(worker)) is None:
            elapsed_s = time.monotonic() - began
            if elapsed_s > timeout_s or self._stop.is_set():
                to = self._config.coordinator
                where = host_and_port(to.ip, to.port)
                raise NetworkError(
                    f"worker {worker} has not dialled {where} in {elapsed_s:.1f} s",
                    hint="start it there (hetero train) and look at what it says; the firewall of "
                    f"this machine has to let TCP port {to.port} in",
                )
            on_retry(0, elapsed_s, _NOT_CALLED)
            self._stop.wait(timeouts.ANSWER_TICK_S)
        connection.link.stats = self._stats[worker]
        connection.link.max_frame_bytes = self._max_frame_bytes
        return connection

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        """Somebody dials; CALL says which worker it is."""
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
            max_frame_bytes=self._max_frame_bytes,
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

    # -- links between workers ------------------------------------------------------------------

    @property
    def direct(self) -> set[frozenset[WorkerId]]:
        """Pairs of workers that have a link of their own."""
        return set(self._direct)

    def forget_direct(self, worker_id: WorkerId) -> None:
        """Its process is another one: the links that it had to others are gone, also where their
        ends have not noticed yet."""
        self._direct = {pair for pair in self._direct if worker_id not in pair}
        self._back = {pair for pair in self._back if worker_id not in pair}
        self._redials = {pair: r for pair, r in self._redials.items() if worker_id not in pair}

    def drop_direct(self, pair: frozenset[WorkerId]) -> None:
        """Use the link of this pair no more; `dial_again` has it opened again."""
        self._direct.discard(pair)
        self._back.discard(pair)
        one, other = sorted(pair, key=str)
        redial = self._redials.setdefault(pair, _Redial((other, one)))
        redial.at = time.monotonic() + redial.pause_s
        redial.pause_s = min(timeouts.REDIAL_S, 2 * redial.pause_s + 1)

    def connect_workers(
        self, pairs: Iterable[tuple[WorkerId, WorkerId]], timeout_s: float
    ) -> dict[frozenset[WorkerId], str]:
        """Have each pair of workers open a link, the first dialling, then the second where that
        fails; why not, where both do. Raises LinkLost."""
        # One link for a pair that meets twice: each end would close its own of two that cross.
        wanted = list({frozenset(pair): pair for pair in pairs}.values())
        for pair in wanted:
            self._redials.pop(frozenset(pair), None)  # now, and not some time between steps
        problems: dict[frozenset[WorkerId], list[str]] = {}
        for ordered in (wanted, [(b, a) for a, b in wanted]):
            left = [(a, b) for a, b in ordered if frozenset((a, b)) not in self._direct]
            self._dialled.clear()
            self._order_dials(left, timeout_s)
            deadline = time.monotonic() + timeout_s + timeouts.HANDSHAKE_S
            while set(left) - self._dialled.keys() and time.monotonic() < deadline:
                try:
                    self.receive(timeouts.ANSWER_TICK_S)
                except DirectLost as lost:
                    self.drop_direct(lost.pair)  # one of those that were opened before
            for dialler, other in left:
                problem = self._dialled.get((dialler, other), "it does not say why")
                if problem is not None:
                    text = f"worker {dialler} cannot reach worker {other}: {problem}"
                    problems.setdefault(frozenset((dialler, other)), []).append(text)
        return {p: "; ".join(texts) for p, texts in problems.items() if p not in self._direct}

    def dial_again(self, timeout_s: float) -> None:
        """Between steps: have links between workers that were lost opened again, without waiting
        for it, and use those that are back. Raises LinkLost."""
        # Not before: news of the old link's loss may come after the news of the new link.
        self._direct |= self._back
        self._back.clear()
        now = time.monotonic()
        for redial in self._redials.values():
            if now >= redial.at:
                redial.at = now + timeout_s + redial.pause_s
                redial.order = redial.order[::-1]
                self._order_dials([redial.order], timeout_s)

    def _order_dials(self, pairs: Iterable[tuple[WorkerId, WorkerId]], timeout_s: float) -> None:
        by_dialler: dict[WorkerId, list[m.PeerAddress]] = {}
        for dialler, other in pairs:
            to = self._workers[other]
            if to.port is None:
                self._dialled[dialler, other] = "it has no port"
                continue
            by_dialler.setdefault(dialler, []).append(m.PeerAddress(other, to.ip, to.port))
        for dialler, peers in by_dialler.items():
            self.send(dialler, Message(m.Connect(tuple(peers), timeout_s)))

    def _note_dials(self, dialler: WorkerId, connected: m.Connected) -> None:
        """A worker has dialled others: which links there are now."""
        for entry in connected.peers:
            pair = frozenset((dialler, entry.id))
            self._dialled[dialler, entry.id] = entry.problem
            if entry.problem is not None:
                continue
            if (redial := self._redials.get(pair)) is None:
                self._direct.add(pair)
            else:
                redial.at = math.inf
                self._back.add(pair)
                back = event("direct link back", workers=f"{dialler}, {entry.id}")
                text = "the link between workers %s and %s is back"
                _log.info(text, dialler, entry.id, extra=back)

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
        """Send a boundary message to the worker of its stage. A link that is gone is ignored (its
        reader tells), as is one that has come back (the attempt is void)."""
        connection = self._wires.get(self._owners[message.expect(m.BoundaryTensor).stage])
        if connection is not None and connection.phase in _WORKING:
            with suppress(PeerLostError):
                connection.send(message, done)

    def ping(self, worker_id: WorkerId) -> None:
        """Have a link measure its round trip and the worker's clock."""
        if (connection := self._wires.get(worker_id)) is not None:
            connection.link.ping()

    def clock(self, worker_id: WorkerId) -> Clock:
        """What pings have shown so far."""
        connection = self._wires.get(worker_id)
        return connection.link.clock if connection is not None else Clock()

    def fail(self, error: Exception) -> None:
        """Have `receive` raise an error that came up in another thread."""
        self._inbox.put(error)

    def receive(self, timeout_s: float) -> HostEvent | None:
        """The next event, or None after `timeout_s`. Raises the worker's own error when it reports
        one, StepOutOfMemory when its attempt failed for that, LinkLost when its link broke, and
        DirectLost when a link between workers did."""
        for _ in range(_MOST_LEFT_OUT):  # a flood does not keep the caller from its deadline
            try:
                event = self._inbox.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                return None
            if isinstance(event, Exception):
                raise event
            if event.message is not None:
                event.message.seen()
            if event.wire is self._wires.get(event.worker):
                if (known := self._known(event)) is not None:
                    return known
            elif event.message is not None:
                event.message.release()  # of a link that has been replaced
            timeout_s = 0
        return None

    def _known(self, event: HostEvent) -> HostEvent | None:
        """`event`, unless it is for the user alone; raises what it means when it is bad news."""
        if event.lost is not None:
            raise LinkLost(event.worker, event.lost)
        assert event.message is not None
        body = event.message.body
        if isinstance(body, m.Error):
            said = f"worker {event.worker}: {m.shortened(body.message)}"
            error = errors.error_from_peer(m.shortened(body.kind), said)
            error.hint = body.hint and m.shortened(body.hint)
            raise error
        if isinstance(body, m.PeerLost):
            lost = DirectLost(event.worker, body.worker_id, body.reason)
            if lost.pair in self._direct:
                raise lost
            return None  # the other end has told it already
        if isinstance(body, m.StepFailed):
            if self._is_current(body):
                text = f"worker {event.worker}: {body.message}"
                raise StepOutOfMemory.of(self._current, text, body.hint, event.worker)
            return None
        if isinstance(body, m.Leaving):
            leaving = WorkerLeaving(event.worker, body.reason)
            if leaving.is_paused:
                self._away[event.worker] = _Absence(time.monotonic(), is_paused=True)
            raise leaving
        if isinstance(body, m.Ready):
            self.ready[event.worker] = body  # whoever reads it: others may leave or load meanwhile
        if isinstance(body, m.Connected):
            self._note_dials(event.worker, body)
            return None
        if isinstance(body, m.Log):
            if self._talk[event.worker].may_go_on(event.worker):
                peer, level = f"worker {event.worker}", _LEVELS.get(body.level, logging.INFO)
                _log.log(level, "%s: %s", peer, m.shortened(body.text), extra=said_by(peer))
            return None
        return event

    def traffic(self) -> dict[WorkerId, tuple[int, int, float]]:
        """Per worker, over all its links: bytes received, bytes sent, seconds spent writing."""
        return {w: (s.bytes_in, s.bytes_out, s.write_s) for w, s in self._stats.items()}

    def close(self, goodbye: Message, drain_s: float = timeouts.DRAIN_S) -> None:
        """Say goodbye to every worker and close the links; all in at most `drain_s` seconds."""
        self._stop.set()
        if self._inbound is not None:
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
            assert self._inbound is not None
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
        """Of a frame whose header has come."""
        body, expectation = frame.body, self._expectation
        self._check_sender(connection, body)
        if not isinstance(body, m.BoundaryTensor) or expectation is None:
            return
        check = expectation.check if self._is_for_us(body) else expectation.check_passing
        check(body, frame.shapes, frame.payload_bytes)

    def _check_sender(self, connection: Connection, body: m.Body) -> None:
        """Raise ProtocolError for what is another worker's to say in the present attempt."""
        if isinstance(body, m.OfStep) and self._is_current(body) and self._holders:
            check_sender(body, self._holders, connection.peer)

    def _carrier(self, connection: Connection, message: Message) -> Link | None:
        """The link that carries on a boundary frame whose header has come; None if it ends here."""
        if not isinstance(message.body, m.BoundaryTensor) or not self._is_current(message.body):
            return None
        connection.accept(message)
        owner = self._owners.get(message.body.stage)
        onward = self._wires.get(owner) if owner is not None else None
        if onward is None or onward.phase not in _WORKING or onward.closed:
            return None  # a link that has just come back would not expect it
        return onward.link

    def _is_for_us(self, body: m.BoundaryTensor) -> bool:
        return self._is_current(body) and body.stage not in self._owners

    def _is_current(self, body: m.OfStep) -> bool:
        return (body.step, body.attempt) == self._current

    def _closed(self, connection: Connection, reason: HeteroError | None) -> None:
        if self._inbound is not None:
            self._inbound.gone(connection)
        if connection.peer is None:
            return  # it has not said who it is
        if isinstance(reason, errors.ResourceError):
            self._inbox.put(reason)  # memory ran out here; to dial again would not help
        if connection.fault is not None:
            self._inbox.put(ProtocolError(f"{connection.name}: {connection.fault.message}"))
        why = reason.message if reason is not None else "the link was closed here"
        self._inbox.put(HostEvent(connection.peer, connection, lost=why))
