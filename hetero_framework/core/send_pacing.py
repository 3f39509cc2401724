"""Writes large frames at about the rate the receiver reports. No sockets.

Bytes that are written faster than the network takes them wait in a switch in between. Behind them
waits every message of the link: signals, and TCP's confirmations of the other direction.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_FASTER = 1.05
"""Factor on the rate at which the last frames arrived: the network may have become faster."""
_SOONER_S = 0.005
"""How early the next frame may begin before the last one has arrived."""
_CATCHES_UP_S = 0.002
"""The most that a writer catches up after it woke up late."""
_MOST_PAUSE_S = 1.0
"""Longest pause for one piece."""
_LEAST_S = 0.010
"""A frame that takes less is not held back."""
_FASTEST = 2e8
"""Bytes per second. A faster network has empty buffers before a waiting writer wakes up."""
_FRAMES = 8


class SendPacing:
    """The large frames that one link sends. Not thread-safe. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: deque[float] = deque(maxlen=_FRAMES)  # bytes per second of the last frames,
        self._heard: deque[float] = deque(maxlen=_FRAMES)  # and of those that came alone
        self._rate = 0.0  # bytes per second, the most of these; 0 when nothing is known
        self._next_at = 0.0
        self._there_at = 0.0  # when all that was written has arrived, if the rate is right

    def heard(self, rate: float, *, alone: bool) -> None:
        """Take the `rate` in bytes per second at which the last frame arrived. A frame that shared
        a network interface sets no rate: each frame would be slower than the last."""
        if not (math.isfinite(rate) and rate > 0):
            return
        self._all.append(rate)
        if alone:
            self._heard.append(rate)
            self._rate = max(self._heard)

    def lasts_s(self, nbytes: int) -> float:
        """Least seconds in which `nbytes` arrive; 0 when nothing is known."""
        return nbytes / max(self._all) if self._all else 0.0

    def wrote(self, nbytes: int, frame_bytes: int, *, is_last: bool) -> None:
        """Record that `nbytes` of a frame of `frame_bytes` were written."""
        if frame_bytes <= _LEAST_S * self._rate or not 0 < self._rate < _FASTEST:
            return
        now = self._clock()
        lasts_s = min(nbytes / self._rate, _MOST_PAUSE_S)
        self._there_at = max(self._there_at, now) + lasts_s
        self._next_at = max(self._next_at, now - _CATCHES_UP_S) + lasts_s / _FASTER
        if is_last:
            self._next_at = max(self._next_at, self._there_at - _SOONER_S)

    def pause_s(self) -> float:
        """Seconds until the next piece may be written."""
        return max(0.0, self._next_at - self._clock())
