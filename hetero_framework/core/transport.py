"""Sockets: connecting, listening, and `Link`, which moves messages over one connection.

A link has one reader thread and one writer thread, so that both directions move while the
process computes. It knows frames but not what messages mean, except HEARTBEAT: it sends one when
it has been silent, answers those that ask for the clock, and swallows them all. A link that
failed in the middle of a frame is dead: it is closed and its owner hears the reason once.

A frame that another link is to carry on (`route`) is written there while it comes in: the reader
of the one link feeds the queue of the other. `outgoing.py` says what goes first.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.frames import (
    DEFAULT_MAX_FRAME_BYTES,
    PREFIX_BYTES,
    check_start,
    parse_prefix,
)
from hetero_framework.core.messages import FrameHeader, Heartbeat, Message, encode, read_header
from hetero_framework.core.send_queue import Buffer, Outgoing, SendQueue, drop_sent
from hetero_framework.errors import HeteroError, NetworkError, PeerLostError, ProtocolError

DEFAULT_QUEUE_BYTES = 256 * 1024 * 1024

_TICK_S = 0.5
"""How long a thread sleeps in a socket call before it looks at its deadlines again."""
_MAX_CALL_BYTES = 1 << 28
"""Most bytes given to one system call; macOS refuses 2 GiB and more."""
_AT_ONCE_BYTES = 256 * 1024
"""So much of a frame is written at once, in the sender's thread, when the link is idle."""
_SMALL_BYTES = 64 * 1024
"""Where there is no sendmsg, buffers up to this size are joined into one."""
_AHEAD_BYTES = 4096
"""A small frame is read in one call, and of a large one so many bytes with its header."""
_SEGMENT_BYTES = (1 << 14, 1 << 18)
"""Least and most of a relayed frame that is passed on at a time."""
_SEGMENT_S = 0.001
"""How long the bytes of one such piece should take to come in."""
_RESERVE_BYTES = 1024
"""Of a relayed frame so much is held back, to be sent byte by byte as signs of life."""
_CLOCK_SAMPLES = 16


def _max_buffers() -> int:
    """How many buffers one sendmsg takes (IOV_MAX)."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return max(16, min(1024, os.sysconf("SC_IOV_MAX")))
    return 16


REFUSED = "the machine answers, but nothing listens on that port"
"""The reason that `on_retry` is given when no process has the port."""

_IOV_MAX = _max_buffers()
_HAS_SENDMSG = hasattr(socket.socket, "sendmsg")
_CAN_TRY = hasattr(socket, "MSG_DONTWAIT")
_WAIT_ALL = 0 if sys.platform == "win32" else socket.MSG_WAITALL
_TICKED = (TimeoutError, BlockingIOError)
"""What a socket call raises when the tick is over and nothing was moved."""


# --------------------------------------------------------------------------- connect and listen


def connect(
    host: str,
    port: int,
    timeout_s: float,
    on_retry: Callable[[int, float, str], None] | None = None,
    *,
    who: str = "the peer",
    stop: threading.Event | None = None,
) -> socket.socket:
    """A connection to host:port, tried with growing pauses for `timeout_s` seconds.

    `on_retry(attempt, elapsed_s, reason)` is called after each failed attempt that will be
    repeated. `stop`, when set by another thread, ends the waiting. Raises NetworkError that says
    who could not be reached, where, for how long it was tried and what to check.
    """
    started = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        elapsed = time.monotonic() - started
        try:
            return _connect_once(host, port, min(10.0, max(0.1, timeout_s - elapsed)))
        except (OSError, UnicodeError) as error:
            reason, advice = _explain_connect(error, host, port)
        elapsed = time.monotonic() - started
        pause = min(5.0, 0.1 * 1.6 ** min(attempt, 20)) * random.uniform(0.5, 1.0)
        if elapsed + pause >= timeout_s or (stop is not None and stop.is_set()):
            raise NetworkError(
                f"cannot reach {who} at {host}:{port}: {reason} "
                f"(tried {attempt} times in {elapsed:.1f} s)",
                hint=advice,
            )
        if on_retry is not None:
            on_retry(attempt, elapsed, reason)
        if stop is None:
            time.sleep(pause)
        else:
            stop.wait(pause)


def _connect_once(host: str, port: int, timeout_s: float) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=timeout_s)
    if sock.getsockname() == sock.getpeername():
        # On the loopback a free port in the ephemeral range can connect to itself.
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    return sock


def _explain_connect(error: OSError | UnicodeError, host: str, port: int) -> tuple[str, str]:
    """(what happened, what to check) for a failed connection attempt."""
    if isinstance(error, (socket.gaierror, UnicodeError)):  # "box..lan" is no name at all
        return (
            f"the name {host!r} is not known here",
            "check the spelling, or give the machine's IP address in the configuration",
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            REFUSED,
            f"start the worker there and check that its port is {port}",
        )
    if isinstance(error, TimeoutError):
        return (
            "no answer",
            f"check that the machine is on, that {host} is its address, and that its firewall "
            f"lets TCP port {port} in",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN):
        return (
            "there is no route to that address",
            f"check the network connection of this machine and that {host} is in a network that "
            "it can reach",
        )
    return (error.strerror or str(error), f"check the address {host} and the port {port}")


class Listener:
    """A listening socket. `port` 0 takes a free one; `port` and `host` tell where it is.

    Raises NetworkError when the address cannot be had, saying what to change.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise _explain_listen(error, host, port) from error
        try:
            _claim_address(self._socket)
            self._socket.bind(address)
            self._socket.listen(16)
        except OSError as error:
            self._socket.close()
            raise _explain_listen(error, host, port) from error
        self._socket.settimeout(_TICK_S)
        self._closed = False
        self._in_use = threading.Lock()  # a socket closed inside accept could be another's by then
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout_s: float | None = None) -> socket.socket:
        """The next connection. Raises TimeoutError after `timeout_s` seconds, and NetworkError
        when the listener was closed (also from another thread)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            if deadline is not None:
                left = deadline - time.monotonic()
                self._socket.settimeout(min(_TICK_S, max(0.001, left)))
            try:
                with self._in_use:
                    if not self._closed:
                        return self._socket.accept()[0]
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"nobody connected to {self.host}:{self.port} in {timeout_s:g} s"
                    ) from None
            except ConnectionAbortedError:
                continue  # the peer gave up between connecting and being accepted
        raise NetworkError(f"the listener on {self.host}:{self.port} is closed")

    def close(self) -> None:
        self._closed = True
        with self._in_use:
            self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _claim_address(sock: socket.socket) -> None:
    """Allow a restart while old connections linger, but never two listeners on one port.

    On Windows SO_REUSEADDR means that a second program may take the port over;
    SO_EXCLUSIVEADDRUSE is what is wanted there, and lingering connections do not matter.
    """
    if sys.platform == "win32":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _explain_listen(error: OSError, host: str, port: int) -> NetworkError:
    where = f"cannot listen on {host}:{port}"
    # Windows says "not permitted" for a port that another program has exclusively.
    taken = sys.platform == "win32" and error.errno == errno.EACCES
    if error.errno == errno.EADDRINUSE or taken:
        return NetworkError(
            f"{where}: the port is in use",
            hint=f"stop the program that uses port {port} (another worker?), or change this "
            'entry\'s "port" in the configuration, on all machines',
        )
    if isinstance(error, socket.gaierror):
        return NetworkError(
            f"{where}: the name {host!r} is not known here",
            hint='give an IP address of this machine in its entry\'s "ip"',
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return NetworkError(
            f"{where}: this machine does not have the address {host}",
            hint="change this entry's \"ip\" in the configuration to one of this machine's "
            "addresses",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return NetworkError(
            f"{where}: not permitted",
            hint='ports below 1024 need special rights; choose a higher "port"',
        )
    return NetworkError(f"{where}: {error.strerror or error}")


# ------------------------------------------------------------------------------------------ link


@dataclass
class LinkStats:
    """What a link has moved. Bytes count whole frames, heartbeats included; seconds are spent
    writing (of the writer thread) and reading tensor bytes (of the reader thread)."""

    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    frames_out: int = 0
    write_s: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True)
class Clock:
    """What pings have shown, of the quickest of the last 16; None before the first answer.

    `round_trip_s`: seconds until the answer was back. `offset_s`: the peer's time.perf_counter()
    minus ours, wrong by at most half the round trip.
    """

    round_trip_s: float | None = None
    offset_s: float | None = None


OnMoved = Callable[[str, Message, float, float], None]


class _Shares:
    """Calls `release` when each of two users of a buffer has called it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._left = 2

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._release()


class Link:
    """Messages over one connected socket, which the link owns from now on.

    `on_message(message)` is called in the reader thread for every message but HEARTBEAT; while it
    runs nothing more is read, so it should hand the message on. A HeteroError that it raises
    closes the link with that reason. `on_close(reason)` is called exactly once, in the reader
    thread, as the last thing: None after `close`, else the error. No on_message follows it.

    `route(message)` is called in the reader thread when the header of a frame with tensor bytes
    has come; the message has no tensors yet. If it returns a link, the frame goes out there as it
    comes in, and on_message is not called for it. When this link ends in the middle of such a
    frame, the rest of it is zeros, sent after on_close; when the other one ends, its rest is read
    and dropped. A HeteroError that `route` raises closes this link.

    `heartbeat_s`: a heartbeat goes out after so much silence of ours. `liveness_s`: the link
    fails after so much silence of the peer; any byte counts as life. `handshake_s`: the first
    message must be complete so soon. `allocate(nbytes)` makes receive buffers (pinned memory);
    `max_queue_bytes` bounds what waits to be written: `send` blocks above it.
    `max_frame_bytes` may be set when the peers have agreed on another value.

    `clock` is what the answers to `ping` have shown so far.
    `on_moved(direction, message, began, ended)`, when set, is called for every frame with tensor
    bytes: "send" in the thread that wrote the last of it, "receive" in the reader thread, with
    the time.perf_counter() of its beginning and its end. The message may be without its tensors.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_message: Callable[[Message], None],
        on_close: Callable[[HeteroError | None], None],
        *,
        route: Callable[[Message], Link | None] | None = None,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        heartbeat_s: float = 2.0,
        liveness_s: float = 30.0,
        handshake_s: float = 60.0,
        allocate: Callable[[int], memoryview] | None = None,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
    ) -> None:
        self.name = name
        self.max_frame_bytes = max_frame_bytes
        self.stats = LinkStats()
        self.clock = Clock()
        self.on_moved: OnMoved | None = None
        self._socket = sock
        self._on_message = on_message
        self._on_close = on_close
        self._route = route
        self._heartbeat_s = heartbeat_s
        self._liveness_s = liveness_s
        self._handshake_deadline: float | None = time.monotonic() + handshake_s
        self._handshake_s = handshake_s
        self._max_queue_bytes = max_queue_bytes
        self._pool = BufferPool(allocate)
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))  # received, and not looked at before
        self._ahead_from = self._ahead_to = 0
        self._segment_bytes = _SEGMENT_BYTES[0]
        self._pings: deque[float] = deque(maxlen=_CLOCK_SAMPLES)
        self._round_trips: deque[tuple[float, float]] = deque(maxlen=_CLOCK_SAMPLES)
        self._relaying: tuple[Link, Outgoing, _Shares] | None = None  # the reader's own

        # Guarded by _changed: the queue, and how far the link has come in its life.
        self._changed = threading.Condition()
        self._queue = SendQueue()
        self._pong: Outgoing | None = None  # the last answer to a ping
        self._closing = False  # no more sends; the writer drains the queue
        self._dead = False  # nothing more is read or written
        self._reason: HeteroError | None = None
        self._linger_until = 0.0

        tick = min(_TICK_S, liveness_s / 4, handshake_s / 4)
        _configure(sock, tick)
        self._reader = threading.Thread(target=self._read, name=f"{name} reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name} writer", daemon=True)
        self._writer.start()
        self._reader.start()

    # ---- for the owner

    @property
    def closed(self) -> bool:
        """Whether the link takes no more messages."""
        return self._closing or self._dead

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queue.nbytes

    def ping(self) -> None:
        """Ask for the peer's clock; `clock` tells when the answer is there. Does nothing on a
        link that is closed."""
        now = time.perf_counter()
        self._pings.append(now)
        self._beat(Heartbeat(ping=now))

    def send(self, message: Message, done: Callable[[], None] | None = None) -> None:
        """Queue a message; blocks while more than `max_queue_bytes` wait to be written.

        The tensors' memory is read later, by the writer: it must not change until `done` is
        called (in the writer thread, after the last byte was handed to the system; also when the
        link fails before that). Raises ProtocolError for a frame that is too large, and the
        link's reason (PeerLostError) when it is closed.
        """
        buffers = encode(message, self.max_frame_bytes)
        self._enqueue(buffers, done, message)

    def forward(self, message: Message) -> None:
        """Queue a received message as the very bytes it came as, without decoding or copying;
        it is released when they are written. Raises as `send` does."""
        buffers = message.forward_buffers()
        self._check_size(message, sum(map(len, buffers)))
        self._enqueue(buffers, message.release, message)

    def close(self, drain_s: float = 5.0) -> None:
        """Write what is queued for at most `drain_s` seconds, then close; waits until both
        threads are gone, unless it is called from one of them. Calling it again does nothing."""
        deadline = time.monotonic() + drain_s
        with self._changed:
            if not self._closing:
                self._closing = True
                self._linger_until = deadline
            self._changed.notify_all()
        if threading.current_thread() in (self._reader, self._writer):
            return
        self._writer.join(max(0.0, deadline - time.monotonic()))
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._reader.is_alive():
            self._fail(None)
            self._reader.join()
        self._writer.join()

    # ---- writing

    def _check_size(self, message: Message, nbytes: int) -> None:
        """Raise ProtocolError when the peer has not agreed to a frame of `nbytes`."""
        rest = nbytes - PREFIX_BYTES + 4
        if rest > self.max_frame_bytes:
            raise ProtocolError(
                f"{message.name}: a frame of {rest} bytes is larger than the "
                f"{self.max_frame_bytes} bytes agreed with {self.name}"
            )

    def _enqueue(
        self, buffers: Sequence[Buffer], done: Callable[[], None] | None, message: Message
    ) -> None:
        """Write a frame or hand it to the writer. When nothing is before it, its beginning is
        written at once: a small frame then needs no writer, and of a large one the peer reads the
        beginning while the writer wakes up. The rest is the writer's, for the sender has to
        compute."""
        nbytes = sum(map(len, buffers))
        traced = message if len(buffers) > 1 else None
        with self._changed:
            if self._queue or self.closed:
                self._wait_for_room(nbytes)
            began = time.perf_counter()
            sent = self._write_now(buffers)
            if sent == nbytes:
                self._count(nbytes)
            else:
                outgoing = Outgoing(buffers, done, traced)
                if sent:
                    outgoing.wrote(sent, began)
                self._queue.add(outgoing)
                self._changed.notify_all()
        if sent == nbytes:
            self._tell(done, traced, began)

    def _wait_for_room(self, nbytes: int, source: Link | None = None) -> None:
        """Wait until a frame fits the queue, no longer than `source`, where it comes from, lives.

        Raises the link's reason when it is closed. `_changed` is held.
        """
        # A frame larger than the bound may pass alone.
        while (
            self._queue and self._queue.nbytes + nbytes > self._max_queue_bytes and not self.closed
        ):
            if source is not None and source._dead:
                raise PeerLostError(f"{source.name}: the link is closed")
            self._changed.wait(None if source is None else _TICK_S)
        if self.closed:
            raise self._reason or PeerLostError(f"{self.name}: the link is closed")

    def _beat(self, body: Heartbeat) -> None:
        """Send a HEARTBEAT, next after the frame that is being written.

        It never waits for room: the reader answers pings. A peer that pings and does not read
        gets one answer at a time.
        """
        buffers = encode(Message(body))
        with self._changed:
            if self.closed or (body.pong is not None and self._pong in self._queue):
                return
            began = time.perf_counter()
            sent = self._write_now(buffers)
            if sent == len(buffers[0]):
                self._count(sent)
                return
            beat = Outgoing(buffers)
            if sent:
                beat.wrote(sent, began)
            if body.pong is not None:
                self._pong = beat
            self._queue.add(beat, urgent=True)
            self._changed.notify_all()

    def _write_now(self, buffers: Sequence[Buffer]) -> int:
        """Write a beginning without waiting, if nothing is before it; how many bytes."""
        if not self._queue.idle:
            return 0
        return self._try_write(deque([memoryview(buffer) for buffer in buffers]), _AT_ONCE_BYTES)

    def _try_write(self, views: deque[memoryview], room: int) -> int:
        """Write what the system takes without waiting; how many bytes.

        An error is the writer's to meet again and report.
        """
        if not _CAN_TRY or self._dead:
            return 0
        started = time.perf_counter()
        try:
            return _send_some(self._socket, views, socket.MSG_DONTWAIT, room)
        except OSError:
            return 0
        finally:
            self.stats.write_s += time.perf_counter() - started

    def _count(self, nbytes: int) -> None:
        self.stats.bytes_out += nbytes
        self.stats.frames_out += 1

    def _tell(
        self, done: Callable[[], None] | None, message: Message | None, began: float | None
    ) -> None:
        """After the last byte of a frame; `message` if it had tensors and went out whole."""
        ended = time.perf_counter()
        if done is not None:
            done()
        if self.on_moved is not None and message is not None and began is not None:
            self.on_moved("send", message, began, ended)

    def _write(self) -> None:
        reason: HeteroError | None = HeteroError(f"{self.name}: what follows a frame failed")
        try:
            while (following := self._next_piece()) is not None:
                outgoing, piece = following
                self._write_piece(outgoing, piece)
                with self._changed:
                    outgoing.busy = False
                    complete = self._remove_if_complete(outgoing)
                if complete:
                    self._tell(outgoing.done, outgoing.message, outgoing.began)
            reason = None
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            reason = PeerLostError(f"{self.name}: connection lost while writing: {_said(error)}")
        finally:
            if reason is not None:
                self._fail(reason)

    def _next_piece(self) -> tuple[Outgoing, deque[memoryview]] | None:
        """A frame, from now on being written, and what can be written of it, when there is
        something; None at our end. After heartbeat_s without anything it is a heartbeat.

        In the middle of a frame whose rest does not come in, a byte of the reserve is the sign of
        life. A link that is closing does not wait for the rest.
        """
        quiet_until = time.monotonic() + self._heartbeat_s
        with self._changed:
            while not self._dead:
                outgoing = self._queue.next()
                if self._closing:
                    if outgoing is not None and outgoing.began is not None:
                        outgoing.pad()
                    elif outgoing is None or outgoing.missing:
                        return None
                left = quiet_until - time.monotonic()
                if outgoing is not None:
                    piece = outgoing.take(_RESERVE_BYTES) or (left <= 0 and outgoing.take_one())
                    if piece:
                        self._queue.begin(outgoing)
                        outgoing.busy = True
                        return outgoing, piece
                if left <= 0:
                    quiet_until = time.monotonic() + self._heartbeat_s
                    if outgoing is None:
                        self._queue.add(Outgoing(encode(Message(Heartbeat()))), True)
                        continue
                self._changed.wait(max(left, 0))
        return None

    def _write_piece(self, outgoing: Outgoing, piece: deque[memoryview]) -> None:
        """Write all of it, unless the link dies meanwhile."""
        started = time.perf_counter()
        piece = _coalesced(piece)
        while piece and not self._dead:
            # On a timeout the peer does not read at present; the reader watches its life.
            with contextlib.suppress(*_TICKED):
                sent = _send_some(self._socket, piece)
                drop_sent(piece, sent)
                outgoing.left -= sent
        self.stats.write_s += time.perf_counter() - started

    def _remove_if_complete(self, outgoing: Outgoing) -> bool:
        if outgoing.left:
            return False
        self._queue.remove(outgoing)
        self._count(outgoing.nbytes)
        self._changed.notify_all()
        return True

    # ---- relaying: called by the reader of the link that a frame comes from

    def _expect(self, outgoing: Outgoing, source: Link) -> None:
        with self._changed:
            self._wait_for_room(outgoing.nbytes, source)
            self._queue.add(outgoing)

    def _feed(self, outgoing: Outgoing, data: memoryview) -> None:
        """Write what has come, if it is this frame's turn and the system takes it at once: no
        other thread has to wake up then. What it does not take is the writer's."""
        complete = False
        with self._changed:
            outgoing.feed(data)
            if not outgoing.busy and self._queue.next() is outgoing:
                self._queue.begin(outgoing)
                piece = outgoing.take(_RESERVE_BYTES)
                sent = self._try_write(piece, _MAX_CALL_BYTES) if piece else 0
                drop_sent(piece, sent)
                outgoing.left -= sent
                outgoing.put_back(piece)
                complete = self._remove_if_complete(outgoing)
                if piece:
                    self._changed.notify_all()
        if complete:
            self._tell(outgoing.done, outgoing.message, outgoing.began)

    def _pad(self, outgoing: Outgoing) -> None:
        with self._changed:
            outgoing.pad()
            self._changed.notify_all()

    # ---- reader thread

    def _read(self) -> None:
        reason: HeteroError | None = HeteroError(f"{self.name}: the handler of a message failed")
        try:
            self._read_frames()
            reason = None
        except OSError as error:
            reason = PeerLostError(f"{self.name}: connection lost: {_said(error)}")
        except ProtocolError as error:
            reason = ProtocolError(f"{self.name}: {error.message}", hint=error.hint)
        except HeteroError as error:
            reason = error
        finally:
            self._fail(reason)
            self._writer.join()
            self._socket.close()
            self._pool.clear()
            self._drop_queue()
            try:
                self._on_close(self._reason)
            finally:
                # Not before: an answer to made-up bytes must not come before the news.
                self._end_relay()

    def _read_frames(self) -> None:
        while (prefix := self._take(PREFIX_BYTES, at_start=True)) is not None:
            header_bytes, payload_bytes = parse_prefix(prefix, self.max_frame_bytes)
            header = self._take(header_bytes)
            if header is None:
                return
            frame = read_header(prefix, header, payload_bytes, self.max_frame_bytes)
            message = self._receive(frame) if payload_bytes else frame.attach()
            self.stats.bytes_in += PREFIX_BYTES + header_bytes + payload_bytes
            self.stats.frames_in += 1
            if message is None:
                continue
            if isinstance(message.body, Heartbeat):
                self._heard_beat(message.body)
                continue
            self._handshake_deadline = None
            if self._closing:
                message.release()
            else:
                self._on_message(message)

    def _receive(self, frame: FrameHeader) -> Message | None:
        """The message with its tensors; None when another link has taken it over."""
        started = time.perf_counter()
        link = None
        if self._route is not None and not self._closing:
            announced = frame.announced()
            link = self._route(announced)
        if link is not None:
            self._handshake_deadline = None
            link._check_size(announced, len(frame.raw) + frame.payload_bytes)
        buffer, release = self._pool.take(frame.payload_bytes)
        if link is None:
            message, whole = frame.attach(buffer, release), self._fill(buffer)
        else:
            message = announced
            whole = self._relay(frame, message, link, buffer, _Shares(release))
        if not whole:
            return None
        ended = time.perf_counter()
        self.stats.read_s += ended - started
        if self.on_moved is not None:
            self.on_moved("receive", message, started, ended)
        return message if link is None else None

    def _relay(
        self, frame: FrameHeader, message: Message, link: Link, buffer: memoryview, share: _Shares
    ) -> bool:
        """Read the tensor bytes into `buffer` and feed them to `link` as they come; whether all
        came."""
        outgoing = Outgoing([frame.raw], share, message, missing=len(buffer))
        self._relaying = (link, outgoing, share)
        try:
            link._expect(outgoing, self)
        except HeteroError:
            share()  # one of the two is closed; its own reader reports that
        got = 0
        while got < len(buffer):
            started = time.perf_counter()
            count = self._fill_some(buffer[got : got + self._segment_bytes])
            if not count:
                return False
            link._feed(outgoing, buffer[got : got + count])
            got += count
            self._size_segments(count / (time.perf_counter() - started))
        self._end_relay()
        return True

    def _end_relay(self) -> None:
        """Of the frame that is being relayed, if one is, nothing more comes."""
        if self._relaying is not None:
            link, outgoing, share = self._relaying
            self._relaying = None
            link._pad(outgoing)
            share()

    def _size_segments(self, bytes_per_s: float) -> None:
        """A piece is passed on when it is complete: quick ones may be larger, which saves turns of
        the threads."""
        smallest, largest = _SEGMENT_BYTES
        aim = min(int(bytes_per_s * _SEGMENT_S), self._segment_bytes * 2)
        self._segment_bytes = max(smallest, min(largest, aim))

    def _heard_beat(self, beat: Heartbeat) -> None:
        now = time.perf_counter()
        asked, at = beat.pong, beat.at
        if beat.ping is not None:
            self._beat(Heartbeat(pong=beat.ping, at=now))
        elif asked is not None and asked in self._pings and at is not None and math.isfinite(at):
            self._round_trips.append((now - asked, at - (asked + now) / 2))
            self.clock = Clock(*min(self._round_trips))

    def _take(self, nbytes: int, at_start: bool = False) -> bytes | None:
        """The next bytes of a frame's head; None when the link was closed on our side.

        More may be received than that, and waits in `_ahead`. `at_start`: between two frames.
        """
        start, end = self._ahead_from, self._ahead_from + nbytes
        if end > self._ahead_to:
            return self._take_new(nbytes, at_start)
        self._ahead_from = end
        return bytes(self._ahead[start:end])

    def _take_new(self, nbytes: int, at_start: bool) -> bytes | None:
        """`_take` when they are not all received yet."""
        if nbytes > _AHEAD_BYTES:
            long = memoryview(bytearray(nbytes))
            return bytes(long) if self._fill(long) else None
        while (have := self._ahead_to - self._ahead_from) < nbytes:
            if self._ahead_from:
                self._ahead[:have] = self._ahead[self._ahead_from : self._ahead_to]
                self._ahead_from, self._ahead_to = 0, have
            count = self._receive_some(self._ahead[have:], 0, at_start and not have)
            if not count:
                return None
            self._ahead_to += count
            if at_start and self._ahead_to < nbytes:
                check_start(self._ahead[: self._ahead_to])
        return self._take(nbytes)

    def _fill(self, view: memoryview) -> bool:
        """Receive exactly len(view) bytes. False when the link was closed on our side."""
        got = 0
        while got < len(view):
            count = self._fill_some(view[got:])
            if not count:
                return False
            got += count
        return True

    def _fill_some(self, view: memoryview) -> int:
        """Receive len(view) bytes, or fewer when they do not come within a tick; 0 as above."""
        ahead = min(len(view), self._ahead_to - self._ahead_from)
        if not ahead:
            return self._receive_some(view[:_MAX_CALL_BYTES], _WAIT_ALL, False)
        view[:ahead] = self._ahead[self._ahead_from : self._ahead_from + ahead]
        self._ahead_from += ahead
        return ahead

    def _receive_some(self, view: memoryview, flags: int, between: bool) -> int:
        """Receive at least a byte into `view`; 0 when the link was closed on our side.

        Raises PeerLostError when the peer is gone, silent for liveness_s, or (`between` two
        frames) has closed the connection.
        """
        since = time.monotonic()
        while True:
            try:
                count = self._socket.recv_into(view, 0, flags)
            except _TICKED:
                count = -1
            now = time.monotonic()
            if self._dead or (self._closing and (count == 0 or now > self._linger_until)):
                return 0
            if count == 0:
                where = "" if between else " in the middle of a message"
                raise PeerLostError(f"{self.name} closed the connection{where}")
            if self._handshake_deadline is not None and now > self._handshake_deadline:
                raise PeerLostError(
                    f"{self.name} did not complete the handshake in {self._handshake_s:g} s"
                )
            if count > 0:
                return count
            if now - since > self._liveness_s:
                raise PeerLostError(
                    f"{self.name} has been silent for {now - since:.0f} s",
                    hint="check that the machine is awake and its network is connected",
                )

    # ---- the end

    def _fail(self, reason: HeteroError | None) -> None:
        """Stop both threads; the first reason stays. Ends a link that closes in order, too."""
        with self._changed:
            if self._dead:
                return
            self._dead = True
            if not self._closing:
                self._reason = reason
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_queue(self) -> None:
        with self._changed:
            dropped = self._queue.clear()
        for outgoing in dropped:
            if outgoing.done is not None:
                outgoing.done()


def _configure(sock: socket.socket, tick_s: float) -> None:
    # The kernel sizes the socket buffers itself; a fixed SO_SNDBUF/SO_RCVBUF would switch that off.
    if sys.platform == "win32":
        sock.settimeout(tick_s)
    else:
        # The kernel's own timeouts leave the socket blocking: no poll before each call, and one
        # call receives a whole tensor. Measured with 16 MB: 0.05 of the bare loop's speed.
        sock.settimeout(None)
        timeval = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    with contextlib.suppress(OSError):  # not every socket is TCP (tests use socket pairs)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _coalesced(buffers: deque[memoryview]) -> deque[memoryview]:
    """Without sendmsg, neighbouring small buffers become one, to save calls and packets."""
    if _HAS_SENDMSG or len(buffers) == 1:
        return buffers
    joined: deque[memoryview] = deque()
    small: list[memoryview] = []
    for buffer in [*buffers, memoryview(b"")]:
        if 0 < len(buffer) <= _SMALL_BYTES:
            small.append(buffer)
            continue
        if small:
            joined.append(memoryview(b"".join(small)))
            small = []
        if len(buffer):
            joined.append(buffer)
    return joined


def _send_some(
    sock: socket.socket, pending: deque[memoryview], flags: int = 0, room: int = _MAX_CALL_BYTES
) -> int:
    """Hand at most `room` bytes of the first buffers to the system; how many it took."""
    if not _HAS_SENDMSG:
        return sock.send(pending[0][:room], flags)
    batch: list[memoryview] = []
    for view in pending:
        batch.append(view[:room])
        room -= len(batch[-1])
        if room == 0 or len(batch) == _IOV_MAX:
            break
    return sock.sendmsg(batch, [], flags)


def _said(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
