"""A frame that goes out on one link while it comes in on another, undecoded.

The reader of the incoming link fills the buffer, and the writer of the outgoing one sends from it.
The buffer is returned when both are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.messages import FrameHeader, Message
from hetero_framework.core.send_queue import Outgoing
from hetero_framework.errors import HeteroError


class Carrier(Protocol):
    """The link that a relayed frame goes out on; see `Link` for its methods."""

    def expect(self, outgoing: Outgoing, source: Any) -> None: ...
    def feed(self, outgoing: Outgoing, parts: Sequence[memoryview]) -> None: ...
    def pad(self, outgoing: Outgoing) -> None: ...


class Relay:
    """One frame on its way from the link `source` to `carrier`, in a buffer of `pool`."""

    def __init__(
        self,
        source: object,
        carrier: Carrier,
        frame: FrameHeader,
        message: Message,
        pool: BufferPool,
    ) -> None:
        self._source = source
        self._carrier = carrier
        self._pool = pool
        self._nbytes = frame.payload_bytes
        self._release: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._users = 2
        self._outgoing = Outgoing([frame.raw], self._done, message, frame.payload_bytes)

    def begin(self) -> memoryview:
        """Queue the frame, waiting for room, and return the buffer to receive into. Memory is taken
        once there is room: a carrier whose peer does not read holds up no more than its queue."""
        try:
            self._carrier.expect(self._outgoing, self._source)
        except HeteroError:
            self._done()  # one of the two is closed; its own reader reports that
        buffer, self._release = self._pool.take(self._nbytes)
        return buffer

    def feed(self, parts: Sequence[memoryview]) -> None:
        """Pass on the next tensor bytes; behind the last of them also the checksum."""
        self._carrier.feed(self._outgoing, parts)

    def end(self) -> None:
        """End the frame: nothing more comes. Missing bytes make it void."""
        self._carrier.pad(self._outgoing)
        self._done()

    def _done(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._release()
