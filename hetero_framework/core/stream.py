"""Bytes to and from one peer. `PlainStream` is one TCP socket and the only place that calls it.

A `Link` has one thread that reads and one that writes; `try_write` may come from any thread, one at
a time with `write`. No call waits longer than a tick, so that its thread can look at deadlines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Protocol

from hetero_framework.core import timeouts

MAX_CALL_BYTES = 1 << 28
"""Most bytes given to one system call; macOS refuses 2 GiB and more."""
_SMALL_BYTES = 64 * 1024
"""Where there is no sendmsg, buffers up to this size are joined into one."""
_UNSENT_BYTES = 64 * 1024
"""Most bytes that the system holds unsent: urgent bytes then pass a frame that is being written,
and a frame that pauses does pause."""
_LOCAL_UNSENT_BYTES = 1 << 20
"""The same where the peer is on this machine: fewer wake-ups, and nobody else to wait for."""
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_TICKED = (TimeoutError, BlockingIOError, InterruptedError)
"""Raised by a socket call when the tick is over and nothing was moved."""


class Stream(Protocol):
    """A connection as a link needs it. Errors are OSError."""

    @property
    def local(self) -> bool:
        """Whether the stream is known to pass no network interface."""

    @property
    def peer(self) -> str:
        """The address of the other end, for messages."""

    def set_tick(self, seconds: float) -> None:
        """Set the longest time that a `read` or `write` waits."""

    def read(self, view: memoryview, fill: bool = False) -> int | None:
        """Receive at least one byte into `view`, or with `fill` all that comes within a tick.
        Returns how many; 0 when the peer has ended its side, None when nothing came."""

    def write(self, buffers: deque[memoryview]) -> int:
        """Hand the first bytes of `buffers` to the system. Returns how many; 0 after a tick."""

    def try_write(self, buffers: deque[memoryview], room: int) -> int:
        """`write` at most `room` bytes without waiting. 0 for an error: `write` meets it again."""

    def end_writes(self) -> None:
        """End the writing side. The peer still reads all that was written."""

    def abandon(self) -> None:
        """Make `close` drop unsent bytes, so that a peer that can be reached hears of the end at
        once and not behind unconfirmed bytes."""

    def stop(self) -> None:
        """End both directions; a thread that waits in a call returns. Safe from any thread."""

    def close(self) -> None:
        """Give the connection back to the system; no thread may be in a call any more."""


_IOV_MAX = 16
"""Most buffers that one sendmsg takes."""
with contextlib.suppress(AttributeError, ValueError, OSError):
    _IOV_MAX = max(16, min(1024, os.sysconf("SC_IOV_MAX")))
_HAS_SENDMSG = hasattr(socket.socket, "sendmsg")
_CAN_TRY = hasattr(socket, "MSG_DONTWAIT")
_WAIT_ALL = 0 if sys.platform == "win32" else socket.MSG_WAITALL


class PlainStream:
    """A connected socket, which the stream owns from now on."""

    local = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.set_tick(timeouts.TICK_S)
        # The kernel sizes its buffers itself; a fixed SO_SNDBUF/SO_RCVBUF would switch that off.
        with contextlib.suppress(OSError):  # not every socket is TCP (tests use socket pairs)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._hold_unsent(_UNSENT_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def peer(self) -> str:
        try:
            return ":".join(map(str, self._socket.getpeername()[:2]))
        except OSError:
            return "a peer that is gone"

    def ends(self) -> list[tuple[str, int]]:
        """Host and port of both ends, sorted, so the other end has the same list; an empty list
        for a socket without them. Raises OSError."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return []
        return sorted(s[:2] for s in (self._socket.getsockname(), self._socket.getpeername()))

    def become_local(self) -> None:
        """Record that the stream passes no network interface."""
        self.local = True
        with contextlib.suppress(OSError):
            self._hold_unsent(_LOCAL_UNSENT_BYTES)

    def _hold_unsent(self, most_bytes: int) -> None:
        if _NOTSENT_LOWAT is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, most_bytes)

    def set_tick(self, seconds: float) -> None:
        if sys.platform == "win32":
            self._socket.settimeout(seconds)
            return
        # The kernel's own timeouts: no poll before each call, and one call receives a segment.
        self._socket.settimeout(None)
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def read(self, view: memoryview, fill: bool = False) -> int | None:
        try:
            return self._socket.recv_into(view[:MAX_CALL_BYTES], 0, _WAIT_ALL if fill else 0)
        except _TICKED:
            return None

    def write(self, buffers: deque[memoryview]) -> int:
        try:
            return self._send(buffers, 0)
        except _TICKED:
            return 0  # the peer does not read at present

    def try_write(self, buffers: deque[memoryview], room: int) -> int:
        if not _CAN_TRY:
            return 0
        batch: list[memoryview] = []
        for view in buffers:
            batch.append(view[:room])
            room -= len(batch[-1])
            if not room:
                break
        try:
            return self._send(batch, socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def _send(self, buffers: Iterable[memoryview], flags: int) -> int:
        if _HAS_SENDMSG:
            return self._socket.sendmsg(islice(buffers, _IOV_MAX), [], flags)
        # The small buffers in front become one, to save calls and packets.
        small = list(takewhile(lambda view: len(view) <= _SMALL_BYTES, buffers))
        first = b"".join(small) if small else next(iter(buffers))
        return self._socket.send(first[:MAX_CALL_BYTES], flags)

    def end_writes(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        linger = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)  # for no time
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
