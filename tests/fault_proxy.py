"""A TCP proxy that does what bad networks do, for tests.

    with FaultProxy(("127.0.0.1", port)) as proxy:
        connect("127.0.0.1", proxy.port, ...)
        proxy.up.cut_after = 100

`up` is from the connecting side to the target, `down` the way back. Faults may be set before or
during a connection; byte counts run over all connections since the proxy started.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack

from hetero_framework.core.frames import INSIDE, PIECE_BYTES, PREFIX_BYTES, marks_in
from hetero_framework.core.messages import Body
from hetero_framework.core.send_queue import CHECKSUM_BYTES

_SEGMENT_BYTES = 65_536
_TICK_S = 0.02


@dataclass
class Faults:
    """What happens to one direction. `seen` counts the bytes that were passed on."""

    delay_s: float = 0.0  # wait before each piece is passed on
    slice_bytes: int = 0  # pass on pieces of at most so many bytes
    rate: float = 0.0  # pass on so many bytes in a second
    cut_after: int | None = None  # close both sides in order after so many bytes
    reset_after: int | None = None  # close both sides with RST after so many bytes
    flip_at: int | None = None  # invert the lowest bit of the byte at this offset
    flip_in: int | None = None  # the same so many bytes after what has passed by now
    blackhole: bool = False  # pass nothing on, and let nobody know
    seen: int = 0
    kept: bytearray | None = None  # a copy of what is passed on


@dataclass
class FrameCut:
    """Break the connection at the next frame of this type: with none of it passed on, with its
    first half, or with all of it."""

    direction: str  # "up" or "down"
    kind: type[Body]
    where: str  # "before", "middle" or "after"
    reset: bool = False
    also: Callable[[], None] | None = None  # called at the same moment


@dataclass
class _Frames:
    """Where in a stream of frames its next byte is."""

    head: bytearray = field(default_factory=bytearray)
    rest: int = 0  # bytes to the next mark, or to the end of the frame
    behind: int = 0  # tensor bytes behind that mark
    inside: bool = False  # a frame inside of another one comes

    def scan(self, data: bytes, wanted: int, where: str) -> int | None:
        """How many bytes of `data` may pass before the cut; None when it is not in there."""
        at = 0
        while at < len(data):
            if self.rest:
                step = min(self.rest, len(data) - at)
                self.rest -= step
                at += step
                continue
            if self.behind and not self.inside:
                self.inside = data[at : at + 1] == INSIDE
                at += 1
                if not self.inside:
                    self._begin_piece(self.behind)
                continue
            self.head.append(data[at])
            at += 1
            if len(self.head) < PREFIX_BYTES:
                continue
            total, header = struct.unpack(">QI", self.head[:PREFIX_BYTES])
            if len(self.head) < PREFIX_BYTES + header:
                continue
            kind = msgpack.unpackb(self.head[PREFIX_BYTES:], raw=False)["t"]
            payload, got = total - 4 - header, len(self.head)
            size = got + payload + marks_in(payload) + CHECKSUM_BYTES
            self.head.clear()
            if self.inside:
                self.inside, self.rest = False, CHECKSUM_BYTES
                continue
            self._begin_piece(payload)
            if kind == wanted:
                offset = {"before": 0, "middle": size // 2, "after": size}[where]
                # The frame's first bytes may have passed with the piece before.
                return max(0, at - got + offset)
        return None

    def _begin_piece(self, left: int) -> None:
        piece = min(left, PIECE_BYTES)
        self.behind = left - piece
        self.rest = piece if self.behind else piece + CHECKSUM_BYTES


class FaultProxy:
    """Listens on 127.0.0.1:`port` and passes every connection on to `target`.

    `cuts` happen one after the other, each at the first fitting frame after the one before it.
    """

    def __init__(self, target: tuple[str, int], *, follows_frames: bool = True) -> None:
        """`follows_frames`: `cuts` can be used; not where the frames cannot be read."""
        self._follows_frames = follows_frames
        self.up = Faults()
        self.down = Faults()
        self.cuts: deque[FrameCut] = deque()
        self.connections = 0
        self._target = target
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TICK_S)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy acceptor")
        self._acceptor.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close everything and wait for the threads."""
        self._stop.set()
        self._acceptor.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def reset(self) -> None:
        """Close every present connection with RST."""
        for sock in list(self._sockets):
            _reset(sock)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near = self._listener.accept()[0]
            except TimeoutError:
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self.connections += 1
            self._sockets += [near, far]
            over = threading.Event()
            for sock in (near, far):  # both before the first pump, which may close them at once
                sock.settimeout(_TICK_S)
            for name, source, sink in (("up", near, far), ("down", far, near)):
                thread = threading.Thread(
                    target=self._pump, args=(name, source, sink, over), name="proxy pump"
                )
                self._threads.append(thread)
                thread.start()

    def _pump(
        self, name: str, source: socket.socket, sink: socket.socket, over: threading.Event
    ) -> None:
        faults = self.up if name == "up" else self.down
        frames = _Frames()
        owed = None  # bytes to pass on before a cut that has been decided
        try:
            while not (self._stop.is_set() or over.is_set()):
                if faults.blackhole:
                    self._stop.wait(_TICK_S)
                    continue
                try:
                    data = source.recv(_SEGMENT_BYTES)
                except TimeoutError:
                    continue
                self._wait_out(faults)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if over.is_set():
                    return
                if owed is None:
                    owed = self._next_cut(name, frames, data)
                if owed is not None:
                    self._send(sink, bytearray(data[:owed]))
                    owed -= min(owed, len(data))
                    if owed == 0:
                        over.set()
                        self._cut(source, sink)
                        return
                    continue
                if not self._pass_on(bytearray(data), source, sink, faults):
                    return
        except OSError:  # one side is gone: so is the other
            _reset(sink)

    def _next_cut(self, name: str, frames: _Frames, data: bytes) -> int | None:
        if not self._follows_frames:
            return None
        cut = self.cuts[0] if self.cuts and self.cuts[0].direction == name else None
        # A type that no frame has: follow the frames, cut nothing.
        number, where = (cut.kind.spec.number, cut.where) if cut else (0, "before")
        return frames.scan(data, number, where)

    def _cut(self, source: socket.socket, sink: socket.socket) -> None:
        cut = self.cuts.popleft()
        if cut.also is not None:
            cut.also()
        for sock in (sink, source):
            (_reset if cut.reset else _close)(sock)

    def _pass_on(
        self, data: bytearray, source: socket.socket, sink: socket.socket, faults: Faults
    ) -> bool:
        step = min(faults.slice_bytes or len(data), _at_once(faults.rate, len(data)))
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            if faults.delay_s:
                self._stop.wait(faults.delay_s)
            if faults.rate:
                self._stop.wait(len(piece) / faults.rate)
            self._wait_out(faults)
            if faults.flip_in is not None:
                faults.flip_at, faults.flip_in = faults.seen + faults.flip_in, None
            if faults.flip_at is not None and 0 <= faults.flip_at - faults.seen < len(piece):
                piece[faults.flip_at - faults.seen] ^= 1
            for limit, end in ((faults.cut_after, _close), (faults.reset_after, _reset)):
                if limit is not None and faults.seen + len(piece) >= limit:
                    self._send(sink, piece[: max(0, limit - faults.seen)])
                    faults.seen = limit
                    end(sink)
                    end(source)
                    return False
            if faults.kept is not None:
                faults.kept += piece
            if not self._send(sink, piece):
                return False
            faults.seen += len(piece)
        return True

    def _wait_out(self, faults: Faults) -> None:
        while faults.blackhole and not self._stop.is_set():
            self._stop.wait(_TICK_S)

    def _send(self, sink: socket.socket, piece: bytearray) -> bool:
        view = memoryview(piece)
        while view and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                view = view[sink.send(view) :]
        return not view


def _at_once(rate: float, nbytes: int) -> int:
    """Bytes that are passed on together at this rate: what comes in a tick."""
    return max(1, int(rate * _TICK_S)) if rate else nbytes


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Only closing sends the RST; a thread that waits in recv keeps a plain close from it.
        sock.shutdown(socket.SHUT_RD)
        sock.close()
