"""Links between workers: who dials whom, the handshake, and which of them are alive.

The coordinator names the peers to dial. What goes over such a link are the boundary frames of the
star, the same bytes; when to use it, the coordinator says with every step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hetero_framework import control
from hetero_framework._version import __version__
from hetero_framework.core.dial import connect
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.frames import PROTOCOL_VERSION
from hetero_framework.core.link import Link
from hetero_framework.core.messages import (
    DIALLER,
    LISTENER,
    Boundary,
    Bye,
    Control,
    Error,
    Message,
    PeerAddress,
    PeerHello,
    PeerResult,
    PeerWelcome,
    Reject,
)
from hetero_framework.core.session import Phase, Session
from hetero_framework.core.stream import Stream
from hetero_framework.errors import HeteroError, NetworkError

Watch = Callable[[str, Message, float, float], None]

_SLICE_S = 0.1
_VERSIONS = (PROTOCOL_VERSION, __version__)
_ANSWERS = (PeerWelcome, Reject, Control, Error, Bye)


@dataclass(frozen=True)
class Introduced:
    """The dialling that CONNECT asked for is over; what came of it."""

    results: tuple[PeerResult, ...]


@dataclass
class _Peer:
    worker: WorkerId
    link: Link
    session: Session


class PeerLinks:
    """A worker's links to other workers.

    `start_link(stream, name, max_frame_bytes)` makes the link of a connection that was dialled
    here; `tell` puts an `Introduced` before the main thread. `run_id` and `watch` belong to the
    run that is served.
    """

    def __init__(
        self,
        me: WorkerId,
        start_link: Callable[[Stream, str, int], Link],
        tell: Callable[[Introduced], None],
    ) -> None:
        self.run_id: str | None = None
        self.watch: Callable[[WorkerId], Watch] | None = None
        self._me = me
        self._start_link = start_link
        self._tell = tell
        self._lock = threading.Lock()
        self._peers: dict[WorkerId, _Peer] = {}
        self._awaited: dict[Link, queue.SimpleQueue[Message | None]] = {}
        self._stop = threading.Event()

    # -- dialling -------------------------------------------------------------------------------

    def dial(self, peers: tuple[PeerAddress, ...], timeout_s: float, max_frame_bytes: int) -> None:
        """Open a link to each of these workers; `tell` hears when all is done, unless `close` comes
        first."""
        args = (peers, timeout_s, max_frame_bytes, self._stop)
        threading.Thread(target=self._dial_all, args=args, name="dial peers", daemon=True).start()

    def _dial_all(
        self,
        peers: tuple[PeerAddress, ...],
        timeout_s: float,
        max_frame_bytes: int,
        stop: threading.Event,
    ) -> None:
        results: dict[WorkerId, str | None] = {}

        def dial(peer: PeerAddress) -> None:
            try:
                problem = self._dial(peer, timeout_s, max_frame_bytes, stop)
            except Exception as error:  # whatever it is, the coordinator waits for the answer
                problem = f"{type(error).__name__}: {error}"
            results[peer.id] = problem

        threads = []
        for peer in peers:
            thread = threading.Thread(target=dial, args=(peer,), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                results[peer.id] = str(error)
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()
        if not stop.is_set():
            self._tell(Introduced(tuple(PeerResult(p.id, results[p.id]) for p in peers)))

    def _dial(
        self, peer: PeerAddress, timeout_s: float, max_frame_bytes: int, stop: threading.Event
    ) -> str | None:
        """Why there is no link to this worker; None when there is one."""
        deadline = time.monotonic() + timeout_s
        worker = peer.id
        try:
            stream = connect(peer.ip, peer.port, timeout_s, who=f"worker {worker}", stop=stop)
        except NetworkError as error:
            return error.message
        link = self._start_link(stream, f"worker {worker}", max_frame_bytes)
        answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        with self._lock:
            self._awaited[link] = answers
        session = Session(DIALLER)
        hello = Message(PeerHello(*_VERSIONS, self.run_id or "", worker, self._me, max_frame_bytes))
        session.send(hello)
        problem = "it did not answer"
        try:
            link.send(hello)
            if (answer := _first(answers, deadline, stop)) is not None:
                session.receive(answer)
                if isinstance(answer.body, PeerWelcome):
                    if self._add(_Peer(worker, link, session), stop):
                        return None
                    answer = None
            if answer is not None:
                refusal = answer.body
                problem = refusal.message if isinstance(refusal, (Reject, Error)) else answer.name
        except HeteroError as error:
            problem = error.message
        finally:
            with self._lock:
                self._awaited.pop(link, None)
        link.close(drain_s=0)
        return problem

    def answers(self, link: Link, message: Message | None) -> bool:
        """Whether this was the answer to a PEER_HELLO or CONTROL of ours, and nothing more; for the
        link's reader thread. None, the link is gone, is an answer too, but to lose a peer is
        more than that.
        """
        body = None if message is None else message.body
        if body is not None and not isinstance(body, _ANSWERS):
            return False
        if isinstance(body, Control) and body.request is not None:
            return False
        with self._lock:
            waiting = self._awaited.pop(link, None)
        if waiting is None:
            return False
        waiting.put(message)
        return message is not None or not self.knows(link)

    # -- being dialled --------------------------------------------------------------------------

    def accept(self, link: Link, hello: Message) -> None:
        """Welcome another worker of the same run. Raises HeteroError when it is not one."""
        session = Session(LISTENER)
        session.receive(hello)
        asked = hello.expect(PeerHello)
        if self.run_id is None or asked.run_id != self.run_id:
            raise NetworkError("this worker serves another run, or none")
        if str(asked.worker_id) != str(self._me):
            raise NetworkError(f"this is worker {self._me}, not {asked.worker_id}")
        link.max_frame_bytes = asked.max_frame_bytes
        link.name = f"worker {asked.from_id}"  # who had connected was not known before
        welcome = Message(PeerWelcome(*_VERSIONS))
        session.send(welcome)
        self._add(_Peer(asked.from_id, link, session))
        link.send(welcome)

    def _add(self, peer: _Peer, stop: threading.Event | None = None) -> bool:
        """Whether the peer is one now: not when `stop` says that the run has ended meanwhile."""
        watch = self.watch  # `close` takes it away
        if watch is not None:
            peer.link.on_moved = watch(peer.worker)
        with self._lock:
            if stop is not None and stop.is_set():
                return False
            before = self._peers.get(peer.worker)
            self._peers[peer.worker] = peer
        if before is not None:
            before.link.close(drain_s=0)
        return True

    # -- traffic --------------------------------------------------------------------------------

    def knows(self, link: Link) -> bool:
        return self._find(link) is not None

    def reaches(self, worker: WorkerId) -> bool:
        """Whether there is a link to this worker that works, as far as is known here."""
        return any(peer.worker == worker and not peer.link.closed for peer in self._all())

    def receive(self, link: Link, message: Message) -> bool:
        """Whether a message of a peer is a tensor for a stage; a goodbye is not, and ends the link.

        Raises ProtocolError for one that is out of order.
        """
        peer = self._find(link)
        if peer is None:
            return False
        peer.session.receive(message)
        if isinstance(message.body, Bye):
            self.lost(link)
            link.close(drain_s=0)
        return isinstance(message.body, Boundary)

    def send(
        self, worker: WorkerId, message: Message, done: Callable[[], None] | None = None
    ) -> None:
        """Send a tensor to a peer. One that is gone is ignored: its link's reader says so.

        Raises ProtocolError for a frame that is too large.
        """
        with self._lock:
            peer = self._peers.get(worker)
        if peer is None or peer.session.phase is not Phase.FLOWING:
            return
        peer.session.send(message)
        try:
            peer.link.send(message, done)
        except HeteroError:
            if not peer.link.closed:
                raise

    def ask(self, worker: WorkerId, question: Message, timeout_s: float) -> Message:
        """Send a CONTROL request to a peer and wait for its answer, which the caller releases.

        Raises NetworkError when there is no link to it or no answer.
        """
        with self._lock:
            peer = self._peers.get(worker)
            if peer is not None:
                answers = self._awaited[peer.link] = queue.SimpleQueue()
        if peer is None:
            raise NetworkError(f"there is no link to worker {worker}")
        try:
            peer.session.send(question)
            peer.link.send(question)
            answer = _first(answers, time.monotonic() + timeout_s, self._stop)
        finally:
            with self._lock:
                self._awaited.pop(peer.link, None)
        if answer is None and peer.link.closed:
            raise NetworkError(f"the link to worker {worker} broke")
        if answer is None:
            raise NetworkError(f"worker {worker} did not answer in {timeout_s:g} s")
        peer.session.receive(answer)
        if not isinstance(answer.body, Control):
            raise NetworkError(f"worker {worker} answered {answer.name}")
        return answer

    def answer(self, link: Link, question: Message) -> None:
        """Answer a peer's CONTROL. Raises ProtocolError for one that is out of order."""
        peer = self._find(link)
        try:
            if peer is None:
                return
            peer.session.receive(question)
            if question.expect(Control).answers is not None:
                return  # to a question that nobody waits for any more
            reply = control.answer(question)
        finally:
            question.release()
        if reply is not None:
            peer.session.send(reply)
            with suppress(HeteroError):
                link.send(reply)

    def ping(self) -> None:
        """Have every link measure its round trip."""
        for peer in self._all():
            with suppress(HeteroError):
                peer.link.ping()

    def round_trips(self) -> dict[WorkerId, float]:
        """Seconds there and back, of the peers that have answered a ping."""
        found = {peer.worker: peer.link.clock.round_trip_s for peer in self._all()}
        return {worker: seconds for worker, seconds in found.items() if seconds is not None}

    def bytes_sent(self) -> int:
        """What the present links have sent so far."""
        return sum(peer.link.stats.bytes_out for peer in self._all())

    def lost(self, link: Link) -> WorkerId | None:
        """Forget the peer of a link that is gone; who it was."""
        peer = self._find(link)
        if peer is None:
            return None
        with self._lock:
            del self._peers[peer.worker]
        return peer.worker

    def close(self) -> None:
        """Close all links; the run is over."""
        self._stop.set()
        self._stop = threading.Event()
        self.run_id = self.watch = None
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            with suppress(HeteroError):
                peer.link.send(Message(Bye("the run is over")))
            peer.link.close(drain_s=1.0)

    def _all(self) -> list[_Peer]:
        with self._lock:
            return list(self._peers.values())

    def _find(self, link: Link) -> _Peer | None:
        with self._lock:
            return next((peer for peer in self._peers.values() if peer.link is link), None)


def _first(
    answers: queue.SimpleQueue[Message | None], deadline: float, stop: threading.Event
) -> Message | None:
    while time.monotonic() < deadline and not stop.is_set():
        with suppress(queue.Empty):
            return answers.get(timeout=_SLICE_S)
    return None
