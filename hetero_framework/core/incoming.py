"""The bytes that come in over one stream, and the deadlines for them."""

from __future__ import annotations

import math
import time

from hetero_framework.core import frames, timeouts
from hetero_framework.core.stream import Stream
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.errors import PeerLostError, PeerSilentError

_AHEAD_BYTES = 16384
"""Bytes that are received at once with a frame's header. With 4096 the echo of a 4 KiB tensor took
0.36 ms, with 16384 0.26 ms."""


class Incoming:
    """The receiving side of `stream`, for one reader thread.

    All methods raise PeerLostError when the peer is gone, or is silent or sends no greeting for
    longer than `deadlines` permit. This side stops reading at the time.monotonic() `until`.
    """

    def __init__(self, stream: Stream, name: str, deadlines: LinkDeadlines) -> None:
        self.until = math.inf
        self._handshake_s = deadlines.handshake_s
        self.handshake_deadline: float | None = time.monotonic() + self._handshake_s
        self._stream = stream
        self.name = name
        tick_s = min(timeouts.TICK_S, deadlines.liveness_s / 4, self._handshake_s / 4)
        stream.set_tick(tick_s)
        # Less than the limit, so that the last tick before it finds the silence, even if early.
        self._silence_s = deadlines.liveness_s - 1.5 * tick_s
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))  # received but not read yet
        self._ahead_from = self._ahead_to = 0

    def take(self, nbytes: int, at_start: bool = False, most: int = _AHEAD_BYTES) -> bytes | None:
        """The next bytes that are no tensor's; None when this side has stopped reading. `at_start`:
        between two frames, where the peer may end its side. `most`: bytes to receive at once."""
        start, end = self._ahead_from, self._ahead_from + nbytes
        if end <= self._ahead_to:
            self._ahead_from = end
            return bytes(self._ahead[start:end])
        taken = bytearray(self._ahead[start : self._ahead_to])
        while len(taken) < nbytes:  # memory grows with the bytes received
            count = self._receive(self._ahead[:most], fill=False, at_start=at_start and not taken)
            if not count:
                return None
            taken += self._ahead[:count]
            self._ahead_from = self._ahead_to = count
            if at_start and len(taken) < nbytes:
                frames.check_start(taken)
        self._ahead_from -= len(taken) - nbytes
        return bytes(taken[:nbytes])

    def fill_some(self, view: memoryview) -> int:
        """Receive into `view` the bytes that are ahead, else those that come within a tick. Returns
        how many; 0 when this side has stopped reading."""
        ahead = min(len(view), self._ahead_to - self._ahead_from)
        if not ahead:
            return self._receive(view, fill=True)
        view[:ahead] = self._ahead[self._ahead_from : self._ahead_from + ahead]
        self._ahead_from += ahead
        return ahead

    def _receive(self, view: memoryview, *, fill: bool, at_start: bool = False) -> int:
        since = time.monotonic()
        while True:
            count = self._stream.read(view, fill)
            now = time.monotonic()
            if now > self.until or (count == 0 and self.until < math.inf):
                return 0
            if count == 0:
                where = "" if at_start else " in the middle of a message"
                raise PeerLostError(f"{self.name} closed the connection{where}")
            if self.handshake_deadline is not None and now > self.handshake_deadline:
                raise PeerLostError(
                    f"{self.name} did not complete the handshake in {self._handshake_s:g} s"
                )
            if count is not None:
                return count
            if now - since > self._silence_s:
                self._stream.abandon()
                raise PeerSilentError(
                    f"{self.name} has been silent for {now - since:.0f} s",
                    hint="check that the machine is awake and its network is connected",
                )
