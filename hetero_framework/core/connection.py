"""`Connection`: one peer over one stream, with its link, session, identity and handlers.

It is built first and `start`ed later. A message is handed on only when its sender is authenticated
and the message is legal now, so nothing of a stranger is unpacked.

The sequence when a link breaks:

1. The reader or writer thread of the link meets the error (`link.py`). The first reason is kept;
   both threads end, and queued frames are dropped.
2. `lost(connection, reason)` is called once, in the reader thread, after the last message. Callers
   that wait in `ask` get the reason. A frame that was being relayed from here becomes void.
3. Worker (`_on_lost`): stages and attempt stay as they are until the coordinator sends more, for
   at most `rejoin_wait_s`. A lost link between workers is reported with PEER_LOST.
4. Coordinator: `WorkerLinks.receive` raises LinkLost in the training thread, or DirectLost for a
   link between workers. Out of memory in a reader, or a fault of a worker, ends the run.
5. `Recovery.retrying` mends the link: `recover` dials again with the next epoch, and the worker
   refuses a HELLO of an older epoch. COMMIT is sent again where it was not confirmed.
6. The attempt is aborted everywhere (ABORT, ABORTED), and the step is done again with the next
   attempt's number. Frames of the old attempt are dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import Identity
from hetero_framework.core.link import Link
from hetero_framework.core.messages import FrameHeader, Message
from hetero_framework.core.session import ANSWERS, ORDER, ROLES, Phase, Session, legal
from hetero_framework.core.stream import Stream
from hetero_framework.errors import HeteroError, PeerLostError, ProtocolError

_ROLES = {m.Hello.spec.number: m.WORKER, m.PeerHello.spec.number: m.LISTENER}
"""The role of a worker at a connection, by the number of the first message."""
MOST_MESSAGES = 100_000
MOST_FIELD_BYTES = 64 << 20
"""Most memory for the fields of waiting messages, far above any run's. One alone may have more."""


def opening(role: str | None) -> frozenset[int]:
    """The numbers of the messages with which a peer may begin, by `role` of a `Connection`."""
    if role is None:
        return frozenset((*_ROLES, m.Heartbeat.spec.number))
    first = [p for p in ORDER if p is Phase.OPEN or p.name.endswith("GREETING")]
    return frozenset(kind.spec.number for phase in first for kind in legal(ROLES[role], phase))


class Waiting:
    """Counts the messages that a link's reader has handed on, and bounds them, whatever the peer
    sends. Thread-safe. It does not wait: two processes that each wait for the other to read would
    wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages = 0
        self.field_bytes = 0
        self.tensor_bytes = 0
        self.most_tensor_bytes: int | None = None
        """Most bytes of waiting tensors. None: no bound; `Expectation` bounds boundary tensors."""

    def came(self, message: Message) -> None:
        """Count a message until its `seen` is called. Raises ProtocolError where too much waits."""
        with self._lock:
            self.messages += 1
            self.field_bytes += message.field_bytes
            self.tensor_bytes += message.tensor_bytes
            problem = self._problem()
        message.seen = partial(self._seen, message.field_bytes, message.tensor_bytes)
        if problem is not None:
            message.seen()
            message.release()
            raise ProtocolError(f"it sends faster than it is heard: {problem}")

    def _seen(self, field_bytes: int, tensor_bytes: int) -> None:
        with self._lock:
            self.messages -= 1
            self.field_bytes -= field_bytes
            self.tensor_bytes -= tensor_bytes

    def _problem(self) -> str | None:
        if self.messages > MOST_MESSAGES:
            return f"more than {MOST_MESSAGES} messages wait"
        if self.messages > 1 and self.field_bytes > MOST_FIELD_BYTES:
            return f"more than {MOST_FIELD_BYTES >> 20} MiB of fields wait"
        most = self.most_tensor_bytes
        if most is not None and self.messages > 1 and self.tensor_bytes > most:
            return f"more than {most >> 20} MiB of tensors wait"
        return None


class Connection:
    """A conversation with one peer, which owns `stream` from now on.

    `received(connection, message)` is called in the reader thread for every message that is legal
    and not awaited in `ask`; its exception ends the connection and is reported to the peer.
    `lost(connection, reason)` is called once, at the very end; the reason is None after `close`.
    `awaited(connection, frame)` is called before the tensor bytes of a legal message are received;
    its exception has the same effect. `carrier(connection, message)` may name the link that carries
    a frame on (`Link.route`). `role` is this side's role; None on the accepting side, where the
    peer's greeting decides the role. `options` are those of `Link`.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        role: str | None,
        received: Callable[[Connection, Message], None],
        lost: Callable[[Connection, HeteroError | None], None],
        *,
        awaited: Callable[[Connection, FrameHeader], None] = lambda connection, frame: None,
        carrier: Callable[[Connection, Message], Link | None] = lambda connection, message: None,
        **options: Any,
    ) -> None:
        self.stream = stream
        self.peer: WorkerId | None = None
        """The other end's id, once it has been accepted."""
        self.identity: Identity | None = None
        """The identity in the other end's certificate, if it has shown one; set before `start`."""
        self.fault: ProtocolError | None = None
        """The protocol error of a known peer; a new link would not mend it."""
        self.waiting = Waiting()
        """Messages that were handed to `received` and are not handled yet."""
        self._session = None if role is None else Session(role)
        self._received = received
        self._lost = lost
        self._awaited = awaited
        self._lock = threading.Lock()
        self._asking: queue.SimpleQueue[Message | HeteroError] | None = None
        self.link = Link(
            stream,
            name,
            self._on_message,
            self._on_close,
            opening=opening(role),
            admit=self._on_header,
            on_refused=self._blame,
            route=lambda message: carrier(self, message),
            **options,
        )

    def start(self) -> None:
        """Begin to read and write. Raises NetworkError when no thread can be started."""
        self.link.start()

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def phase(self) -> Enum:
        return Phase.OPEN if self._session is None else self._session.phase

    @property
    def closed(self) -> bool:
        return self.link.closed

    def send(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """`Link.send` of a message that is legal now. Raises PeerLostError when the link is gone,
        ProtocolError also for a message out of order (our own bug)."""
        assert self._session is not None
        self._session.send(message)
        try:
            self.link.send(message, done)
        except HeteroError as error:
            if not self.link.closed:
                raise  # a frame that is too large
            raise PeerLostError(error.message, hint=error.hint) from error

    def accept(self, message: Message) -> None:
        """Record that the peer may send this now; ProtocolError otherwise."""
        assert self._session is not None
        self._session.receive(message)

    def ask(
        self,
        message: Message,
        timeout_s: float,
        stop: threading.Event | None = None,
        *,
        then: Message | None = None,
    ) -> Message | None:
        """Send a greeting or a CONTROL request, and `then` right behind it. Returns the answer,
        which the caller releases, or None when no answer comes in time or `stop` is set. Raises the
        peer's fault, else the reason of the link's end."""
        answers: queue.SimpleQueue[Message | HeteroError] = queue.SimpleQueue()
        with self._lock:
            self._asking = answers
        try:
            self.send(message)
            if then is not None:
                self.send(then)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not (stop is not None and stop.is_set()):
                with suppress(queue.Empty):
                    answer = answers.get(timeout=timeouts.ANSWER_TICK_S)
                    if isinstance(answer, HeteroError):
                        raise answer
                    return answer
            return None
        except PeerLostError as error:  # a fault that came before the request goes first
            raise self.fault or error from error
        finally:
            with self._lock:
                self._asking = None

    def refuse(self, code: m.RejectCode, message: str, hint: str | None = None) -> None:
        """Tell this peer why it is not wanted, and close, without waiting for either."""
        with suppress(HeteroError):
            self.link.send(Message(m.Reject(code, message, hint)))
        self.link.end()

    def close(self, drain_s: float = timeouts.DRAIN_S) -> None:
        self.link.close(drain_s)

    # -- reader thread --------------------------------------------------------------------------

    def _on_header(self, frame: FrameHeader) -> None:
        assert self._session is not None  # a greeting has no tensors
        self._session.check(frame.body)
        self._awaited(self, frame)

    def _on_message(self, message: Message) -> None:
        body = message.body
        if self._session is None:
            self._session = Session(_ROLES[body.spec.number])  # the link lets nothing else through
        try:
            if not self._session.receive(message):
                message.release()
            elif not self._is_answer(message):
                self._received(self, message)
        except ProtocolError as error:
            if isinstance(body, m.OtherVersion):
                self.fault = error if self.peer is not None else None
                self._tell_asking(error)
                self.refuse("protocol", error.message, error.hint)
                return
            self._blame(error)
            raise

    def _blame(self, error: ProtocolError) -> None:
        """Note what a peer that we know did wrong, and tell it; a stranger learns nothing."""
        if self.peer is not None:
            self.fault = error
            written = threading.Event()
            with suppress(HeteroError):
                told = m.Error("ProtocolError", error.message, error.hint)
                self.link.send(Message(told), written.set)
                # The link fails next, and drops what a busy writer has not written.
                written.wait(timeouts.LAST_WORD_S)

    def _is_answer(self, message: Message) -> bool:
        """Give an answer to the call of `ask` that waits for it. Returns whether one waited."""
        body = message.body
        answers_control = isinstance(body, m.Control) and body.answers is not None
        return (answers_control or type(body) in ANSWERS) and self._tell_asking(message)

    def _tell_asking(self, answer: Message | HeteroError) -> bool:
        """Give an answer to the call of `ask` that waits. Returns whether one waited."""
        with self._lock:
            asking, self._asking = self._asking, None
        if asking is not None:
            asking.put(answer)
        return asking is not None

    def _on_close(self, reason: HeteroError | None) -> None:
        self._tell_asking(reason or PeerLostError(f"{self.name}: the link was closed here"))
        self._lost(self, reason)
