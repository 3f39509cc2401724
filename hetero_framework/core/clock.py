"""The peer's clock, measured with pings over a link."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from hetero_framework.core.messages import Heartbeat

_SAMPLES = 16


@dataclass(frozen=True)
class Clock:
    """The peer's clock, from the ping with the shortest round trip of the last 16; None before an
    answer. `offset_s` is the peer's time.perf_counter() minus ours, wrong by at most half the round
    trip."""

    round_trip_s: float | None = None
    offset_s: float | None = None


class Pings:
    """The pings of one link. `answered` is for its reader thread, `new` for any thread."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._sent: deque[float] = deque(maxlen=_SAMPLES)
        self._round_trips: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def new(self) -> Heartbeat:
        now = time.perf_counter()
        self._sent.append(now)
        return Heartbeat(ping=now)

    def answered(self, ping: float | None, at: float | None) -> None:
        """Take the answer to `ping`, which the peer sent when its clock showed `at`."""
        now = time.perf_counter()
        if ping is None or ping not in self._sent or at is None or not math.isfinite(at):
            return
        self._round_trips.append((now - ping, at - (ping + now) / 2))
        self.clock = Clock(*min(self._round_trips))
