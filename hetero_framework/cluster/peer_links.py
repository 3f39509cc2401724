"""A worker's links to other workers: dialling, handshake, traffic.

The coordinator names the peers to dial; every STEP lists the links that carry tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial

import psutil

from hetero_framework import control
from hetero_framework.core import messages as m
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import connect
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import MAX_HEADER_BYTES
from hetero_framework.core.identity import key_owner
from hetero_framework.core.link import OnMoved
from hetero_framework.core.messages import Message
from hetero_framework.core.session import Phase
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import HeteroError, IdentityError, NetworkError, PeerLostError
from hetero_framework.security.access import LOOPBACK_ONLY, Access


def accepted_frame_bytes(proposed: int) -> int:
    """Limit of a peer's frames, from its proposal. More than half of this machine's memory would be
    a mistake or an attack."""
    return min(proposed, most_bytes())


def most_bytes() -> int:
    """Bytes of this machine's memory that one peer may use."""
    return psutil.virtual_memory().total // 2


class PeerLinks:
    """A worker's links to other workers.

    `begin(stream, name, max_frame_bytes)` starts a dialled connection; `tell` gets the results of a
    CONNECT. `run_id` and `watch` belong to the run that is served.
    """

    def __init__(
        self,
        me: WorkerId,
        begin: Callable[[Stream, str, int], Connection],
        tell: Callable[[tuple[m.PeerResult, ...]], None],
        access: Access = LOOPBACK_ONLY,
    ) -> None:
        self.run_id: str | None = None
        self.watch: Callable[[WorkerId], OnMoved] | None = None
        self._me = me
        self._begin = begin
        self._tell = tell
        self._access = access
        self._lock = threading.Lock()
        self._peers: dict[WorkerId, Connection] = {}
        self._bytes_before = 0  # over links that are gone
        self._stop = threading.Event()

    # -- dialling -------------------------------------------------------------------------------

    def dial(
        self, peers: tuple[m.PeerAddress, ...], timeout_s: float, max_frame_bytes: int
    ) -> None:
        """Open links to these workers in threads; `tell` gets the results unless `close` comes
        first."""
        stop = self._stop
        dialled = [
            in_background(partial(self._dial, peer, timeout_s, max_frame_bytes, stop), "dial peer")
            for peer in peers
        ]

        def tell() -> None:
            wait(dialled, 2 * timeout_s)  # a dial keeps to its time, a name server need not
            if not stop.is_set():
                problems = map(_problem, dialled)
                self._tell(tuple(map(m.PeerResult, (peer.id for peer in peers), problems)))

        threading.Thread(target=tell, name="dial peers", daemon=True).start()

    def _dial(
        self, peer: m.PeerAddress, timeout_s: float, max_frame_bytes: int, stop: threading.Event
    ) -> str | None:
        """Open a link to a worker; return the reason if that failed."""
        deadline = time.monotonic() + timeout_s
        worker = peer.id
        name, secure = f"worker {worker}", partial(self._access.dialled, process=worker)
        try:
            self._access.check_address(peer.ip, name)
            stream = connect(peer.ip, peer.port, timeout_s, who=name, stop=stop, secure=secure)
        except NetworkError as error:
            return error.message
        connection = self._begin(stream, name, max_frame_bytes)
        hello = Message(m.PeerHello(self.run_id or "", worker, self._me, max_frame_bytes))
        problem = "it did not answer"
        try:
            answer = connection.ask(hello, deadline - time.monotonic(), stop)
            if answer is not None:
                body = answer.body
                if isinstance(body, m.PeerWelcome) and self._add(worker, connection, stop):
                    return None
                if isinstance(body, (m.Reject, m.Error)):
                    problem = body.message
        except HeteroError as error:
            problem = error.message
        connection.close(drain_s=0)
        return problem

    # -- being dialled --------------------------------------------------------------------------

    def accept(self, connection: Connection, hello: m.PeerHello) -> None:
        """Welcome another worker of the same run. Raises HeteroError for any other peer."""
        if self.run_id is None or hello.run_id != self.run_id:
            raise NetworkError("this worker serves another run, or none")
        if str(hello.worker_id) != str(self._me):
            raise NetworkError(f"this is worker {self._me}, not {hello.worker_id}")
        identity = connection.identity
        if identity is not None and identity.worker != key_owner(hello.from_id):
            raise IdentityError(
                f"the certificate is that of {identity}, not worker {hello.from_id}"
            )
        connection.link.max_frame_bytes = accepted_frame_bytes(hello.max_frame_bytes)
        connection.link.name = f"worker {hello.from_id}"  # unknown when it connected
        self._add(hello.from_id, connection)
        connection.send(Message(m.PeerWelcome()))

    def _add(
        self, worker: WorkerId, connection: Connection, stop: threading.Event | None = None
    ) -> bool:
        """Make this the link to a worker; False when `stop` is set, since the run has ended."""
        watch = self.watch  # `close` takes it away
        if watch is not None:
            connection.link.on_moved = watch(worker)
        with self._lock:
            if stop is not None and stop.is_set():
                return False
            connection.peer = worker
            connection.link.max_header_bytes = MAX_HEADER_BYTES  # enough between workers
            before = self._peers.get(worker)
            self._peers[worker] = connection
        if before is not None:
            self._bytes_before += before.link.stats.bytes_out
            before.close(drain_s=0)
        return True

    # -- traffic --------------------------------------------------------------------------------

    def knows(self, connection: Connection) -> bool:
        return connection in self._all()

    def reaches(self, worker: WorkerId) -> bool:
        """Whether a link to this worker is open, as far as known."""
        peer = self._peers.get(worker)
        return peer is not None and not peer.closed

    def send(
        self, worker: WorkerId, message: Message, done: Callable[[], None] | None = None
    ) -> None:
        """Send a tensor to a peer, if its link is open. Raises ProtocolError for a frame too
        large."""
        peer = self._peers.get(worker)
        if peer is not None and peer.phase is Phase.FLOWING:
            with suppress(PeerLostError):
                peer.send(message, done)

    def ask(
        self, worker: WorkerId, question: Message, timeout_s: float, then: Message | None = None
    ) -> Message:
        """A peer's answer to a CONTROL request, which the caller releases. `then` is sent right
        behind the question. Raises NetworkError."""
        peer = self._peers.get(worker)
        if peer is None:
            raise NetworkError(f"there is no link to worker {worker}")
        try:
            answer = peer.ask(question, timeout_s, self._stop, then=then)
        except PeerLostError as error:
            raise NetworkError(f"the link to worker {worker} broke") from error
        if answer is None:
            raise NetworkError(f"worker {worker} did not answer in {timeout_s:g} s")
        if not isinstance(answer.body, m.Control):
            raise NetworkError(f"worker {worker} answered {answer.name}")
        return answer

    def answer(self, connection: Connection, question: Message) -> None:
        """Answer a peer's CONTROL."""
        try:
            # An answer that comes here is too late.
            is_question = question.expect(m.Control).answers is None
            if is_question and (reply := control.answer(question)) is not None:
                with suppress(PeerLostError):
                    connection.send(reply)
        finally:
            question.release()

    def ping(self) -> None:
        """Measure the round trip of every link."""
        for peer in self._all():
            with suppress(HeteroError):
                peer.link.ping()

    def round_trips(self) -> dict[WorkerId, float]:
        """Round trips in seconds, of the peers that have answered a ping."""
        with self._lock:
            peers = dict(self._peers)
        measured = {worker: peer.link.clock.round_trip_s for worker, peer in peers.items()}
        return {worker: seconds for worker, seconds in measured.items() if seconds is not None}

    def bytes_sent(self) -> int:
        """Bytes that the links of this run have sent so far."""
        return self._bytes_before + sum(peer.link.stats.bytes_out for peer in self._all())

    def lost(self, connection: Connection) -> WorkerId | None:
        """Forget the peer of a connection that is gone, and return its id."""
        with self._lock:
            for worker, peer in self._peers.items():
                if peer is connection:
                    self._bytes_before += peer.link.stats.bytes_out
                    del self._peers[worker]
                    return worker
        return None

    def close(self) -> None:
        """Close all links; the run is over."""
        self._stop.set()
        self._stop = threading.Event()
        self.run_id = self.watch = None
        self._bytes_before = 0
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            with suppress(HeteroError):
                peer.send(Message(m.Bye("the run is over")))
            peer.close(drain_s=1.0)

    def _all(self) -> list[Connection]:
        with self._lock:
            return list(self._peers.values())


def _problem(dialled: Future[str | None]) -> str | None:
    """Result of a dial. Any failure is answered, since the coordinator waits for the answer."""
    if not dialled.done():
        return "its address could not be found out in time"
    error = dialled.exception()
    return dialled.result() if error is None else f"{type(error).__name__}: {error}"
