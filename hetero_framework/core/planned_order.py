"""A planned order of tasks or tensors, and how long one out of turn waits. No sockets.

A lane is the tasks of one kind of one stage, or the tensors that they need: one of each micro-batch
of a step, in ascending order. A PlannedOrder says whose turn it is among lanes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

_ASKS = 8  # in the time of one wait

FORWARD = "forward"
BACKWARD = "backward"
Lane = tuple[str, int]
"""FORWARD or BACKWARD, and a stage; of a tensor, the stage that takes it."""


def packed(lane: Lane) -> int:
    """A lane as it travels: twice the stage, and one more for backwards."""
    return 2 * lane[1] + (lane[0] == BACKWARD)


def unpacked(number: int) -> Lane:
    return BACKWARD if number % 2 else FORWARD, number // 2


class PlannedOrder:
    """Lanes in the order in which they are to have their turns, each once for every micro-batch."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._places: dict[Lane, list[int]] = {}
        for place, lane in enumerate(lanes):
            self._places.setdefault(lane, []).append(place)
        self._gone = dict.fromkeys(self._places, 0)

    def place(self, lane: Lane) -> float:
        """Where the next one of a lane stands in the order; behind all others where it does not."""
        if lane not in self._gone or self._gone[lane] >= len(self._places[lane]):
            return math.inf
        return self._places[lane][self._gone[lane]]

    @property
    def next_place(self) -> float:
        """The place of the next one; infinite where none is left."""
        return min(map(self.place, self._places), default=math.inf)

    def went(self, lane: Lane, micro_batch: int) -> None:
        """One of a lane goes, whether it was its turn or not."""
        if lane in self._gone:
            self._gone[lane] = max(self._gone[lane], micro_batch + 1)


class OrderTimeout:
    """Bounds the wait of one that is ready out of turn: at most `seconds` for each one that it lets
    go first. `clock` is in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._awaited = math.inf
        self._until = 0.0

    def left_s(self, order: PlannedOrder, lane: Lane, idle: bool = True) -> float:
        """Seconds that the next one of a lane has to wait from now on; 0 when it may go. Unless
        whatever is waited with is `idle` the time does not begin: then, when to ask again."""
        awaited = order.next_place
        if not self.seconds or order.place(lane) <= awaited:
            return 0.0
        if not idle:
            return self.seconds / _ASKS
        now = self._clock()
        if awaited != self._awaited:
            self._awaited, self._until = awaited, now + self.seconds
        return max(0.0, self._until - now)
