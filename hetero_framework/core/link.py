"""`Link`: messages over one stream in order, with a thread for each direction, and signs of life.

A link itself handles only signals: HEARTBEAT, after silence and to measure the peer's clock
(`clock.py`), and the signals about turns (`link_bandwidth.py`). A frame for which `route` names
another link is written there while it comes in (`relay.py`). `send_queue.py` says which frame goes
first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence

from hetero_framework import errors
from hetero_framework.core import failpoints, frames, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.clock import Clock, Pings
from hetero_framework.core.frames import GOES_ON, INSIDE, PIECE_BYTES, PREFIX_BYTES
from hetero_framework.core.incoming import Incoming
from hetero_framework.core.link_bandwidth import LinkBandwidth
from hetero_framework.core.messages import Heartbeat, Message
from hetero_framework.core.relay import Relay
from hetero_framework.core.send_queue import (
    CHECKSUM_BYTES,
    VOID,
    Hasher,
    LinkStats,
    Outgoing,
    SendQueue,
    digest,
    drop_sent,
)
from hetero_framework.core.stream import MAX_CALL_BYTES, Stream
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.errors import HeteroError, NetworkError, PeerLostError, ProtocolError

log = logging.getLogger(__name__)

_AT_ONCE_BYTES = 64 * 1024
"""Bytes of a frame written at once, in the sender's thread, when the link is idle."""
_WRITTEN = (PIECE_BYTES, 8 * (PIECE_BYTES + 1), 0.002)
_PASSED_ON = (1 << 14, 1 << 18, 0.001)
"""Least and most bytes of a frame per call, and the seconds that a call should take. Larger calls
save thread switches, but signals wait for the end of a write, and relays for the end of a read."""
_HASHED_BYTES = 1 << 18
"""Bytes received in one call, and hashed while they are in the processor's cache."""
_RESERVE_BYTES = 1024
"""Bytes of a relayed frame held back, to be sent one by one as signs of life."""
_MOST_SIGNALS = 16
"""Most signals that wait to be written: a peer that does not read gets no more answers."""


OnMoved = Callable[[str, Message, float, float], None]


class Link:
    """Messages over one stream, which the link owns from now on. `start` begins.

    The callbacks are called in the reader thread, in which nothing more is read meanwhile.

    Args:
        on_message: gets every message but signals. Its exception closes the link and is the
            reason: out of memory as ResourceError, a bug as HeteroError.
        on_close: called exactly once, at the very end: with None after `close`, else the error.
        admit: called when the header of a frame with tensor bytes has come, before memory is taken
            for them. Its exception closes this link. A ProtocolError does so after
            `on_refused(error)`, and only once the frame is known to be undamaged.
        route: called after `admit`. If it returns a link, the frame goes out there as it comes in,
            without on_message. When this link ends within the frame, the frame is void; its
            receiver hears that after on_close, and drops it. When the other link ends, the rest of
            the frame is read and dropped. An exception of `route` closes this link.
        max_frame_bytes: set anew when the peers have agreed on it.
        opening: the numbers of the messages that may come first; others are not even decoded.
        pool: the receive buffers.
        bandwidth: links that share it take turns with large frames, where the stream passes a
            network interface.
        stats: the counts of the link before this one, which are continued.

    `on_moved(direction, message, began, ended)`, when set, is called for every frame with tensor
    bytes: with "send" in the thread that wrote its last byte, with "receive" in the reader thread.
    The times are those of time.perf_counter(). The message may be without its tensors.
    """

    max_queue_bytes = 256 * 1024 * 1024
    """`send` blocks while the queue with its frame would be larger than this."""

    def __init__(
        self,
        stream: Stream,
        name: str,
        on_message: Callable[[Message], None],
        on_close: Callable[[HeteroError | None], None],
        *,
        admit: Callable[[m.FrameHeader], None] = lambda frame: None,
        on_refused: Callable[[ProtocolError], None] = lambda error: None,
        route: Callable[[Message], Link | None] = lambda message: None,
        max_frame_bytes: int = frames.DEFAULT_MAX_FRAME_BYTES,
        opening: Container[int] | None = None,
        deadlines: LinkDeadlines | None = None,
        pool: BufferPool | None = None,
        bandwidth: BandwidthScheduler | None = None,
        stats: LinkStats | None = None,
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.max_header_bytes = frames.MAX_LONG_HEADER_BYTES
        self.stats = stats or LinkStats()
        self.on_moved: OnMoved | None = None
        self._stream = stream
        self._on_message = on_message
        self._on_close = on_close
        self._admit = admit
        self._on_refused = on_refused
        self._route = route
        self._opening = opening
        self._deadlines = deadlines = deadlines or LinkDeadlines()
        self._incoming = Incoming(stream, name, deadlines)
        self._piece_left = 0  # tensor bytes in front of the next mark
        self._pool = pool or BufferPool()
        self._relay: Relay | None = None
        self._pings = Pings()

        # Guarded by _lock: the queue, and whether the link is closing or dead. A frame that its
        # sender wrote at once does not wake the writer: each wake-up costs the computing thread.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for the writer
        self._room = threading.Condition(self._lock)  # for frames that do not fit the queue
        shared = None if stream.local else bandwidth
        self._bandwidth = LinkBandwidth(
            shared or BandwidthScheduler(), self._pings, self._lock, self._say, self._work.notify
        )
        self._queue = SendQueue(self.stats, self._bandwidth.place, self._bandwidth.begins)
        self._closing = False  # no more sends; the writer drains the queue
        self._dead = False  # nothing more is read or written
        self._reason: HeteroError | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name} reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name} writer", daemon=True)

    def start(self) -> None:
        """Begin to read and write. Raises NetworkError when the system has no thread for it."""
        try:
            self._writer.start()
            self._reader.start()
        except RuntimeError as error:
            self._fail(None)
            if self._writer.ident is not None:
                self._writer.join()
            self._stream.close()
            raise NetworkError(f"{self.name}: no thread for the link: {error}") from error

    # ---- for the owner

    @property
    def name(self) -> str:
        """The peer's name in errors."""
        return self._incoming.name

    @name.setter
    def name(self, name: str) -> None:
        self._incoming.name = name

    @property
    def clock(self) -> Clock:
        """The peer's clock as measured by pings."""
        return self._pings.clock

    @property
    def closed(self) -> bool:
        """Whether the link takes no more messages."""
        return self._closing or self._dead

    @property
    def idle(self) -> bool:
        """Whether all that was sent is written."""
        with self._lock:
            return not self._queue

    def ping(self) -> None:
        """Ask for the peer's clock; `clock` has the answer later. Does nothing on a closed link."""
        with self._lock:
            self._say(self._pings.new())

    def send(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Queue a message; blocks until it fits into `max_queue_bytes`.

        The tensors' memory must not change until `done` is called, in whichever thread hands the
        last byte to the system, or when the link fails. Raises ProtocolError for a frame that is
        too large, and the link's reason (PeerLostError) when it is closed.
        """
        buffers = m.encode(message, self.max_frame_bytes)
        outgoing = Outgoing(buffers, done, message if message.tensors else None)
        with self._lock:
            if self._queue.nbytes or self._closing or self._dead:
                self._wait_for_room(outgoing.nbytes)
            complete = self._queue_or_write(outgoing)
        if complete:
            self._tell(outgoing)

    def end(self, drain_s: float = timeouts.DRAIN_S) -> float:
        """Let the writer write the queue for at most `drain_s` seconds, then close. Returns the
        time.monotonic() at which that is over. Does not wait."""
        deadline = time.monotonic() + drain_s
        with self._lock:
            if not self._closing:
                self._closing = True
                self._incoming.until = deadline
            self._work.notify()
            self._room.notify_all()
        return deadline

    def close(self, drain_s: float = timeouts.DRAIN_S) -> None:
        """`end`, and wait until both threads are gone, unless called in one of them. Calling it
        again does nothing. Waits for a handler that hangs no longer than `EXIT_S`."""
        deadline = self.end(drain_s)
        if self._reader.ident is None:
            self._stream.close()
            self._drop_queue()
            return
        if threading.current_thread() in (self._reader, self._writer):
            return
        self._writer.join(max(0.0, deadline - time.monotonic()))
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            self._fail(None)
            self._reader.join(timeouts.EXIT_S)
            if self._reader.is_alive():
                log.error("%s: the link does not end: the handler of a message hangs", self.name)

    # ---- writing

    def _queue_or_write(self, outgoing: Outgoing, urgent: bool = False) -> bool:
        """Queue a frame, and return whether all of it is written. If nothing is before it, its
        beginning is written at once: a small frame needs no writer. `_lock` is held."""
        idle = self._queue.idle
        self._queue.add(outgoing, urgent)
        may_go = idle and self._may_go(outgoing) and not self._pause_s(outgoing)
        if may_go and not (outgoing.boundary is not None and self._fail_half_way(outgoing)):
            self._write_now(outgoing, _AT_ONCE_BYTES)
        if outgoing.left:
            self._work.notify()
        return not outgoing.left

    def _fail_half_way(self, outgoing: Outgoing) -> bool:
        """Write half of a frame and hit its failpoint, if that is due. Returns whether it was."""
        assert outgoing.boundary is not None
        name = f"{outgoing.boundary.spec.name.lower()}-half"
        if not failpoints.is_due(name):
            return False
        self._write_now(outgoing, outgoing.nbytes // 2)
        failpoints.hit(name)
        return True

    def _write_now(self, outgoing: Outgoing, room: int) -> bool:
        """Write the bytes of a frame that are ready, at most `room`, as far as the system takes
        them without waiting. Returns whether none is left. A complete frame leaves the queue."""
        if self._dead:
            return True
        began = time.perf_counter()
        goes_on = True
        while goes_on and (segment := outgoing.take(_RESERVE_BYTES, room)):
            sent = self._stream.try_write(segment, room)
            goes_on = outgoing.wrote(segment, sent)
            if outgoing.lane is not None:
                self._bandwidth.wrote(outgoing, sent)
            room -= sent
            if sent:
                self._queue.begin(outgoing, began)
            goes_on = goes_on and room > 0 and self._queue.next() is outgoing
        if not outgoing.left:
            self._queue.remove(outgoing)
            self._room.notify_all()
        self.stats.write_s += time.perf_counter() - began
        return goes_on

    def _wait_for_room(self, nbytes: int, source: Link | None = None) -> None:
        """Wait until a frame fits the queue. Raises the link's reason when it is closed, and
        PeerLostError when `source`, the link that the frame comes from, ends. `_lock` is held."""
        # In slices: Ctrl-C works on Windows, too. A frame larger than the bound may pass alone.
        while (
            self._queue and self._queue.nbytes + nbytes > self.max_queue_bytes and not self.closed
        ):
            if source is not None and source._dead:
                raise PeerLostError(f"{source.name}: the link is closed")
            self._room.wait(timeouts.TICK_S)
        if self.closed:
            raise self._reason or PeerLostError(f"{self.name}: the link is closed")

    def _say(self, signal: m.Signal) -> None:
        """Send a signal right behind the piece that is being written. It never waits for room,
        because the reader thread answers pings. `_lock` is held."""
        if not self.closed and self._queue.urgent < _MOST_SIGNALS:
            self._queue_or_write(Outgoing(m.encode(Message(signal))), urgent=True)

    def _may_go(self, outgoing: Outgoing) -> bool:
        """Whether a frame may begin or go on: a large one waits for its turn. `_lock` is held."""
        is_free = outgoing.lane is None or self._closing
        return is_free or self._bandwidth.may_begin(outgoing)

    def _pause_s(self, outgoing: Outgoing) -> float:
        """Seconds until the next piece of a frame may be written."""
        return self._bandwidth.pause_s() if outgoing.lane is not None else 0.0

    def _tell(self, outgoing: Outgoing) -> None:
        """Report that the last byte of a frame is written."""
        ended = time.perf_counter()
        if outgoing.lane is not None:
            self._bandwidth.sent()
        if outgoing.done is not None:
            outgoing.done()
        if self.on_moved is not None and outgoing.message is not None and outgoing.began:
            self.on_moved("send", outgoing.message, outgoing.began, ended)

    def _write(self) -> None:
        reason: HeteroError | None = None
        try:
            while (following := self._next_segment()) is not None:
                outgoing, segment = following
                self._write_segment(outgoing, segment)
                with self._lock:
                    outgoing.busy = False
                    if not outgoing.left:
                        self._queue.remove(outgoing)
                        self._room.notify_all()
                if not outgoing.left:
                    self._tell(outgoing)
                del following, outgoing, segment  # or a written frame's memory stays meanwhile
            self._stream.end_writes()
        except OSError as error:
            reason = PeerLostError(f"{self.name}: connection lost while writing: {_text(error)}")
        except HeteroError as error:
            reason = error
        except Exception as error:
            reason = self._unexpected("what follows a frame", error)
        if reason is not None:
            self._fail(reason)

    def _next_segment(self) -> tuple[Outgoing, deque[memoryview]] | None:
        """The frame to write next, marked busy, and the part to write; None when the link ends.
        After an idle heartbeat_s the frame is a heartbeat, or, within a frame whose rest does not
        come in, the part is a byte of the reserve. A closing link does not wait for the rest."""
        quiet_until = time.monotonic() + self._deadlines.heartbeat_s
        with self._lock:
            while not self._dead:
                outgoing = self._queue.next()
                if outgoing is not None and not self._may_go(outgoing):
                    asking = self._queue.next()
                    outgoing = None if asking is outgoing else asking
                if self._closing:
                    if outgoing is not None and outgoing.began is not None:
                        outgoing.pad()
                    elif outgoing is None or outgoing.missing:
                        return None
                left = quiet_until - time.monotonic()
                if outgoing is not None and (pause_s := self._pause_s(outgoing)):
                    self._work.wait(pause_s)
                    continue
                if outgoing is not None:
                    room = _segment_bytes(outgoing.nbytes - outgoing.left, outgoing.began, _WRITTEN)
                    segment = outgoing.take(_RESERVE_BYTES, room)
                    if segment or (left <= 0 and (segment := outgoing.take_one())):
                        self._queue.begin(outgoing, time.perf_counter())
                        outgoing.busy = True
                        return outgoing, segment
                if left <= 0:
                    quiet_until = time.monotonic() + self._deadlines.heartbeat_s
                    if outgoing is None:
                        self._queue.add(Outgoing(m.encode(Message(Heartbeat()))), urgent=True)
                        continue
                if outgoing is None:
                    left = min(left, self._bandwidth.left_s())
                self._work.wait(max(left, 0))
        return None

    def _write_segment(self, outgoing: Outgoing, segment: deque[memoryview]) -> None:
        """Write the segment, unless the link dies meanwhile. Raises PeerLostError when the peer
        takes nothing for `send_s`: its reader may hang while its writer says that it is alive."""
        started = time.perf_counter()
        since = time.monotonic()
        while segment and not self._dead:
            sent = self._stream.write(segment)
            drop_sent(segment, sent)
            outgoing.left -= sent
            if outgoing.lane is not None:
                with self._lock:  # the reader thread grants turns and sets the pace
                    self._bandwidth.wrote(outgoing, sent)
            now = time.monotonic()
            if sent:
                since = now
                self._bandwidth.moved(outgoing, sent)
            elif now - since > (limit_s := self._deadlines.send_s):
                raise PeerLostError(
                    f"{self.name} is alive, but has read nothing for {limit_s:.0f} s",
                    hint="it hangs: look at its screen or log; training.step_timeout_s sets this "
                    "limit",
                )
        self.stats.write_s += time.perf_counter() - started

    # ---- relaying: called by the reader of the link that a frame comes from

    def expect(self, outgoing: Outgoing, source: Link) -> None:
        with self._lock:
            self._wait_for_room(outgoing.nbytes, source)
            self._queue.add(outgoing)

    def feed(self, outgoing: Outgoing, parts: Sequence[memoryview]) -> None:
        """Add `parts`, and write them here if it is this frame's turn: this spares a wake-up."""
        with self._lock:
            for part in parts:
                outgoing.feed(part)
            if outgoing.busy or self._queue.next() is not outgoing or not self._may_go(outgoing):
                return
            if self._pause_s(outgoing):
                self._work.notify()
                return
            left = outgoing.left
            written = self._write_now(outgoing, MAX_CALL_BYTES)
            if not written or (not outgoing.left and self._queue):
                self._work.notify()
        self._bandwidth.moved(outgoing, left - outgoing.left)
        if not outgoing.left:
            self._tell(outgoing)

    def pad(self, outgoing: Outgoing) -> None:
        with self._lock:
            outgoing.pad()
            self._work.notify()

    # ---- reader thread

    def _read(self) -> None:
        reason: HeteroError | None = None
        try:
            self._read_frames()
        except OSError as error:
            reason = PeerLostError(f"{self.name}: connection lost: {_text(error)}")
        except ProtocolError as error:
            reason = ProtocolError(f"{self.name}: {error.message}", hint=error.hint)
        except HeteroError as error:
            reason = error
        except Exception as error:
            reason = self._unexpected("the handler of a message", error)
        self._fail(reason)
        self._bandwidth.leave_in()
        self._writer.join()  # it ends: no call of a stream is longer than a tick, nor is a `done`
        self._bandwidth.leave_out()
        self._stream.close()
        self._pool.clear()
        self._drop_queue()
        try:
            self._on_close(self._reason)
        except Exception:
            log.exception("%s: the handler of its end failed", self.name)
        # Not before: an answer to a void frame must not come before `on_close`.
        self._end_relay()

    def _unexpected(self, what: str, error: Exception) -> HeteroError:
        """The reason that the owner gets for an unexpected error: no thread ends in silence."""
        log.debug("%s: %s failed", self.name, what, exc_info=error)
        if (known := errors.as_hetero_error(error)) is not None:
            return known
        reason = HeteroError(f"{self.name}: {what} failed: {type(error).__name__}: {error}")
        reason.__cause__ = error
        return reason

    def _read_frames(self) -> None:
        while (prefix := self._incoming.take(PREFIX_BYTES, at_start=True)) is not None:
            frame = self._read_header(prefix)
            if frame is None:
                return
            self._piece_left = PIECE_BYTES
            self._bandwidth.receive_begins(frame)
            message = self._receive(frame)
            self._bandwidth.receive_ends(frame)
            self._count(frame)
            if message is None:
                continue
            if isinstance(message.body, m.Signal):
                self._heard(message.body)
                continue
            self._greeted()
            if self._closing:
                message.release()
            else:
                self._on_message(message)

    def _count(self, frame: m.FrameHeader) -> None:
        marks = frames.marks_in(frame.payload_bytes)
        self.stats.bytes_in += len(frame.raw) + frame.payload_bytes + marks + CHECKSUM_BYTES

    def _greeted(self) -> None:
        """A whole message has come: from now on others may."""
        self._incoming.handshake_deadline = self._opening = None

    def _read_header(self, prefix: bytes, inside: bool = False) -> m.FrameHeader | None:
        """The next header; None when closed on our side. `inside`: the header is within a frame."""
        header_bytes, payload_bytes = frames.parse_prefix(prefix, self.max_frame_bytes)
        if header_bytes > self.max_header_bytes:
            text = f"a header of {header_bytes} bytes; at most {self.max_header_bytes} come here"
            raise ProtocolError(text)
        header = self._incoming.take(header_bytes)
        if header is None:
            return None
        try:
            return m.read_header(prefix, header, payload_bytes, self.max_frame_bytes, self._opening)
        except ProtocolError as error:
            if (
                self._opening is None
                and not inside
                and self._was_meant(prefix + header, payload_bytes)
            ):
                self._on_refused(error)
            raise

    def _receive(self, frame: m.FrameHeader) -> Message | None:
        """The message with its tensors; None when another link took it over or it was given up."""
        hasher = Hasher(frame.raw)
        if not frame.payload_bytes:
            return frame.attach() if self._is_whole(frame, hasher) else None
        began = time.perf_counter()
        if not self._closing and not self._admitted(frame, hasher):
            return None
        message = frame.announced()
        carrier = None if self._closing else self._route(message)
        if carrier is not None:
            self._incoming.handshake_deadline = None
            rest = len(frame.raw) - PREFIX_BYTES + 4 + frame.payload_bytes
            if rest > carrier.max_frame_bytes:
                raise m.not_agreed(message.name, rest, carrier.max_frame_bytes, carrier.name)
            self._relay = Relay(self, carrier, frame, message, self._pool)
            if not self._pass_on(self._relay):
                return None
        else:
            buffer, release = self._pool.take(frame.payload_bytes)
            message = frame.attach(buffer, release)
            if not self._fill(buffer, hasher) or not self._is_whole(frame, hasher):
                message.release()
                return None
        if self.on_moved is not None:
            self.on_moved("receive", message, began, time.perf_counter())
        return message if carrier is None else None

    def _admitted(self, frame: m.FrameHeader, hasher: Hasher) -> bool:
        """Whether a frame's tensors may be received. The bytes of a refused frame are read and
        dropped: if they are damaged, the network is at fault and not the peer."""
        try:
            self._admit(frame)
        except ProtocolError as error:
            if not self._drop(frame.payload_bytes, hasher) or not self._is_whole(frame, hasher):
                return False
            self._on_refused(error)
            raise
        return True

    def _drop(self, left: int, hasher: Hasher) -> bool:
        """Read tensor bytes and forget them; False when the link was closed on our side."""
        scratch = memoryview(bytearray(_HASHED_BYTES))
        while left:
            part = scratch[: min(left, _HASHED_BYTES)]
            if not self._fill(part, hasher):
                return False
            left -= len(part)
        return True

    def _was_meant(self, raw: bytes, payload_bytes: int) -> bool:
        """Whether a frame with an impossible header arrived as it was sent. If not, the network is
        to blame."""
        self._piece_left = PIECE_BYTES
        hasher = Hasher(raw)
        if not self._drop(payload_bytes, hasher):
            return False
        return self._incoming.take(CHECKSUM_BYTES) == digest(hasher)

    def _is_whole(self, frame: m.FrameHeader, hasher: Hasher) -> bool:
        """Whether all of a frame is here; False if it was given up or the link was closed on our
        side. Raises PeerLostError for a frame that arrived damaged."""
        checksum = self._incoming.take(CHECKSUM_BYTES)
        if checksum is None or checksum == VOID:
            return False
        if checksum != digest(hasher):
            raise PeerLostError(
                f"{self.name}: a frame arrived damaged ({frame.body.spec.name}, "
                f"{len(frame.raw) + frame.payload_bytes} bytes)",
                hint="the step is done again; if it happens often, a network card, cable or "
                "memory on the way is broken",
            )
        return True

    def _pass_on(self, relay: Relay) -> bool:
        """Read the tensor bytes and pass them on as they come. Returns whether all came."""
        buffer, began, got = relay.begin(), time.perf_counter(), 0
        while got < len(buffer):
            size = _segment_bytes(got, began, _PASSED_ON)
            count = self._fill_piece(buffer[got : got + size])
            if not count:
                return False
            parts = [buffer[got : got + count]]
            got += count
            if got == len(buffer):
                checksum = self._incoming.take(CHECKSUM_BYTES)
                if checksum is None:
                    return False
                parts.append(memoryview(checksum))
            relay.feed(parts)
        self._end_relay()
        return True

    def _end_relay(self) -> None:
        """End the frame that is being relayed, if there is one: nothing more of it comes."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.end()

    def _heard(self, signal: m.Signal) -> None:
        if isinstance(signal, m.AskTurn) and signal.frame_bytes > 2 * self.max_frame_bytes:
            raise m.not_agreed("ASK_TURN", signal.frame_bytes, self.max_frame_bytes, "the peer")
        if not isinstance(signal, Heartbeat):
            self._bandwidth.heard(signal)
        elif signal.ping is not None:
            answer = Heartbeat(pong=signal.ping, at=time.perf_counter())
            with self._lock:
                self._say(answer)
        else:
            self._pings.answered(signal.pong, signal.at)

    def _fill(self, view: memoryview, hasher: Hasher) -> bool:
        """Receive exactly len(view) bytes. False when the link was closed on our side."""
        got = 0
        while got < len(view):
            count = self._fill_piece(view[got : got + _HASHED_BYTES])
            if not count:
                return False
            hasher.update(view[got : got + count])
            got += count
        return True

    def _fill_piece(self, view: memoryview) -> int:
        """Receive tensor bytes up to the next mark at most. Returns how many; 0 if closed by us."""
        if not self._piece_left and not self._read_mark():
            return 0
        count = self._incoming.fill_some(view[: self._piece_left])
        self._piece_left -= count
        self._bandwidth.received(count)
        return count

    def _read_mark(self) -> bool:
        """Read what stands between two pieces; False when the link was closed on our side."""
        while (mark := self._incoming.take(1, most=1)) == INSIDE:
            prefix = self._incoming.take(PREFIX_BYTES)
            frame = prefix and self._read_header(prefix, inside=True)
            if not frame or not self._is_whole(frame, Hasher(frame.raw)):
                return False
            if not isinstance(frame.body, m.Signal):
                raise ProtocolError(f"{frame.body.spec.name} inside of another frame")
            self.stats.bytes_in += len(INSIDE)
            self._count(frame)
            self._heard(frame.body)
        if mark is not None and mark != GOES_ON:
            raise ProtocolError(f"between two pieces of a frame stands {mark!r}")
        self._piece_left = PIECE_BYTES
        return mark is not None

    # ---- the end

    def _fail(self, reason: HeteroError | None) -> None:
        """Stop both threads; the first reason stays. Also ends a link that is closing in order."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            if not self._closing:
                self._reason = reason
            self._closing = True
            self._incoming.until = -math.inf
            self._work.notify()
            self._room.notify_all()
        self._stream.stop()

    def _drop_queue(self) -> None:
        with self._lock:
            dropped = self._queue.clear()
        for outgoing in dropped:
            if outgoing.done is not None:
                outgoing.done()


def _segment_bytes(moved: int, began: float | None, limits: tuple[int, int, float]) -> int:
    """Bytes of a frame to move next, when `moved` bytes of it have gone since `began`."""
    least, most, seconds = limits
    elapsed = time.perf_counter() - (began or 0.0)
    return max(least, min(most, moved, int(moved / max(elapsed, 1e-9) * seconds)))


def _text(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
