"""A planned order of tasks or tensors, and the wait of items that are ready out of turn.

A lane is all tasks of one kind at one stage, or the tensors that these tasks need. It has one item
per micro-batch of a step, in ascending order. A PlannedOrder says which lane has the next turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

_ASKS = 8  # times that a waiting item asks again within one wait

FORWARD = "forward"
BACKWARD = "backward"
Lane = tuple[str, int]
"""FORWARD or BACKWARD, and a stage: for tensors the stage that receives them."""


def packed(lane: Lane) -> int:
    """The number of a lane on the wire: twice the stage, plus 1 for BACKWARD."""
    return 2 * lane[1] + (lane[0] == BACKWARD)


def unpacked(number: int) -> Lane:
    return BACKWARD if number % 2 else FORWARD, number // 2


class PlannedOrder:
    """The lanes in the order of their turns; a lane stands in it once per micro-batch."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._places: dict[Lane, list[int]] = {}
        for place, lane in enumerate(lanes):
            self._places.setdefault(lane, []).append(place)
        self._gone = dict.fromkeys(self._places, 0)

    def place(self, lane: Lane) -> float:
        """Index of the lane's next item in the order; infinite if the order has no more of them."""
        if lane not in self._gone or self._gone[lane] >= len(self._places[lane]):
            return math.inf
        return self._places[lane][self._gone[lane]]

    @property
    def next_place(self) -> float:
        """Index of the first item that has not gone; infinite if none is left."""
        return min(map(self.place, self._places), default=math.inf)

    def went(self, lane: Lane, micro_batch: int) -> None:
        """Record that the lane's item of `micro_batch` goes, whether it was its turn or not."""
        if lane in self._gone:
            self._gone[lane] = max(self._gone[lane], micro_batch + 1)


class OrderTimeout:
    """Bounds the wait of an item that is ready out of turn: at most `seconds` for each item that it
    lets go first. `clock` is in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._awaited = math.inf
        self._until = 0.0

    def left_s(self, order: PlannedOrder, lane: Lane, idle: bool = True) -> float:
        """Seconds that the lane's next item still has to wait; 0 when it may go. While the device
        or network is not `idle` the wait does not begin: ask again after the returned seconds."""
        awaited = order.next_place
        if not self.seconds or order.place(lane) <= awaited:
            return 0.0
        if not idle:
            return self.seconds / _ASKS
        now = self._clock()
        if awaited != self._awaited:
            self._awaited, self._until = awaited, now + self.seconds
        return max(0.0, self._until - now)
