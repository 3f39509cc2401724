"""Serialises large frames per direction of the network interface. No sockets.

Two frames that share an interface are both late, and TCP divides the interface unevenly. So a large
frame asks its receiver for a turn, and goes when it fits beside the frames under way at both
interfaces. A receiver to which only one link brings large frames need not be asked. The rate of an
interface is learned from the frames. A frame that leaves room, because its other end is slow, lets
the next frame go beside it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from hetero_framework.core.planned_order import Lane, OrderTimeout, PlannedOrder

_FILLS = 0.6
"""A frame with this share of the interface's rate leaves no room."""
_FULL = 0.8
"""Below this share of its rate the interface was not full, so a slow frame was slow because of its
other end. On a full interface other frames may be the reason."""
_AHEAD_BYTES = 384 * 1024
_AHEAD_S = 0.010
"""The next frame is let go when the lesser of both is left of a frame: its signal waits behind a
piece and the system's buffers. More bytes would meet in a switch, which may drop some."""
_PROBE = 256
"""Every 256th frame that would have to wait goes beside the others: together they show whether the
interface has become faster than is known. Every 16th made steps 3 to 5 % longer."""
_ALONE = 0.8
"""A frame with this share of the bytes that passed meanwhile had the interface to itself."""
_LEARNT_S = 0.005
"""Shortest frame that tells the rate, in seconds: buffers take most of a shorter frame."""
_FRAMES = 8
_RATES = 64


class BandwidthScheduler:
    """Both directions of this machine's network interface, for all links of a process."""

    def __init__(self) -> None:
        self.out = Direction(reserves=False)
        self.into = Direction(reserves=True)

    def plan(
        self, attempt: int, sends: Iterable[Lane], receives: Iterable[Lane], order_timeout_s: float
    ) -> None:
        """Keep large frames of this attempt at a step in this order from now on."""
        self.out.plan(attempt, sends, order_timeout_s)
        self.into.plan(attempt, receives, order_timeout_s)


class Direction:
    """One direction of the interface. Thread-safe; `clock` is in seconds.

    When there is room again, the waiting frame that is next in the planned order is let go; outside
    of the plan, the frame of the link that went longest ago. With `reserves` that frame has its
    turn from then on. Without it, all waiting links are told, and ask again.
    """

    def __init__(self, reserves: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reserves = reserves
        self._clock = clock
        self._lock = threading.Lock()
        self._known: list[LinkSlot] = []  # slots that have had a frame
        self._going: list[LinkSlot] = []
        self._waiting: list[LinkSlot] = []
        self._moved = 0  # bytes of all frames
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._turn = self._waits = 0
        self._order, self._order_timeout = PlannedOrder(), OrderTimeout(0.0, clock)
        self._went: dict[Lane, tuple[int, int]] = {}  # a lane's last frame: attempt, micro-batch

    @property
    def order_timeout_s(self) -> float:
        """Seconds that a frame waits, although there is room, for the frame whose turn it is."""
        return self._order_timeout.seconds

    def plan(self, attempt: int, lanes: Iterable[Lane], order_timeout_s: float) -> None:
        """Set the order of the frames of an attempt, of which some may have come already."""
        with self._lock:
            self._order = PlannedOrder(lanes)
            self._order_timeout = OrderTimeout(order_timeout_s, self._clock)
            for lane, (of, micro_batch) in self._went.items():
                if of == attempt:
                    self._order.went(lane, micro_batch)
            following = self._take_following()
        _let_go(following)

    def slot(self, go: Callable[[], None], on_alone: Callable[[], None] = lambda: None) -> LinkSlot:
        """A slot for one link. Calls `go` when there is room for the link's waiting frame, and
        `on_alone` when `is_alone` has changed because of another link; both without a lock."""
        return LinkSlot(self, go, on_alone)

    @property
    def _rate(self) -> float:
        """The interface's rate in bytes per second: the highest of the last frames."""
        return max(self._rates, default=0.0)

    def _has_room(self) -> bool:
        return not any(slot._fills for slot in self._going)

    def _left_s(self, lane: Lane | None) -> float:
        """Seconds that the lane's next frame has to wait for another frame's turn."""
        return self._order_timeout.left_s(self._order, lane) if lane is not None else 0.0

    def _place(self, slot: LinkSlot) -> tuple[float, int]:
        lane = slot._lane
        return self._order.place(lane) if lane is not None else math.inf, slot._turn

    def _take_following(self) -> list[LinkSlot]:
        """Remove and return the waiting slots that may go now."""
        if not self._waiting or not self._has_room():
            return []
        following = sorted(self._waiting, key=self._place)
        if self._reserves:
            following = [p for p in following[:1] if p._insists or not self._left_s(p._lane)]
        for slot in following:
            self._waiting.remove(slot)
            if self._reserves:
                slot._start(fills=True)
        return following


class LinkSlot:
    """The large frames of one link in one direction, one after the other."""

    def __init__(
        self, direction: Direction, go: Callable[[], None], on_alone: Callable[[], None]
    ) -> None:
        self._direction = direction
        self._go = go
        self._on_alone = on_alone
        self._turn = 0  # Direction._turn when the last frame began
        self._fills = self._insists = False
        self._lane: Lane | None = None  # of the frame that waits
        self._frame_rates: deque[float] = deque(maxlen=_FRAMES)
        self._filled: deque[bool] = deque(maxlen=_FRAMES)  # of each frame: left no room
        self.rate = 0.0  # bytes/s of the last frame; 0 if it was too quick to say
        self.was_alone = False  # whether that frame had the interface to itself
        self._left = self._mine = 0
        self._since: tuple[float, int] | None = None  # as measuring began: time, all bytes

    def lasts_s(self, nbytes: int) -> float:
        """Expected seconds for a frame of `nbytes`; 0 when nothing is known."""
        rate = max(self._frame_rates, default=0.0)
        return nbytes / rate if rate else 0.0

    def begin(
        self, nbytes: int, lane: Lane | None = None, *, waits: bool = True, insists: bool = False
    ) -> bool:
        """Begin a frame if it may go now, and return whether it may. If not, it waits for `go`.
        Call this again after `left_s`, or `end` to give up.

        Args:
            waits: if false, the frame goes even without room.
            insists: if true, the frame waits for room, but not for another frame's turn.
        """
        direction = self._direction
        with direction._lock:
            not_alone: list[LinkSlot] = []
            if self not in direction._known:
                direction._known.append(self)
                not_alone = direction._known[:1] if len(direction._known) == 2 else []
            may_go = self._begin(nbytes, lane, waits, insists)
        for slot in not_alone:
            slot._on_alone()
        return may_go

    def is_alone(self) -> bool:
        """Whether no other link has had a frame."""
        with self._direction._lock:
            return self._direction._known == [self]

    def _begin(self, nbytes: int, lane: Lane | None, waits: bool, insists: bool) -> bool:
        direction = self._direction
        self._left, self._lane, self._insists = nbytes, lane, insists
        if self in direction._going:
            return True
        fills = self._would_fill()
        if waits and fills and self._must_wait():
            if self in direction._waiting:
                return False
            direction._waits += 1
            if direction._waits % _PROBE:
                direction._waiting.append(self)
                return False
        if self in direction._waiting:
            direction._waiting.remove(self)
        self._start(fills)
        return True

    def awaits_room(self, lane: Lane | None = None) -> bool:
        """Whether a frame would have to wait now. If so, `go` is called when there is room; ask
        again after `left_s`."""
        direction = self._direction
        with direction._lock:
            self._lane, self._insists = lane, False
            if not self._would_fill() or not self._must_wait():
                return False
            if self not in direction._waiting:
                direction._waiting.append(self)
            return True

    def _must_wait(self) -> bool:
        if not self._direction._has_room():
            return True
        return not self._insists and self._direction._left_s(self._lane) > 0

    def left_s(self) -> float:
        """Seconds that the waiting frame waits for another frame's turn; infinite without room."""
        direction = self._direction
        with direction._lock:
            return direction._left_s(self._lane) if direction._has_room() else math.inf

    def place(self, lane: Lane) -> float:
        """Where a lane's next frame stands in the planned order."""
        with self._direction._lock:
            return self._direction._order.place(lane)

    def went(self, lane: Lane, attempt: int, micro_batch: int) -> None:
        """Record that a lane's frame, large or small, has begun."""
        direction = self._direction
        with direction._lock:
            direction._went[lane] = attempt, micro_batch
            direction._order.went(lane, micro_batch)

    def _would_fill(self) -> bool:
        return any(self._filled or self._frame_rates)

    def _start(self, fills: bool) -> None:
        direction = self._direction
        direction._turn += 1
        self._turn = direction._turn
        self._since, self._mine, self._fills = None, 0, fills
        direction._going.append(self)

    def moved(self, nbytes: int) -> None:
        """Record that `nbytes` of the frame have passed."""
        direction = self._direction
        with direction._lock:
            direction._moved += nbytes
            self._left -= nbytes
            if self._since is None:  # the first bytes only fill buffers
                self._since = direction._clock(), direction._moved
                return
            self._mine += nbytes
            ahead = min(_AHEAD_BYTES, max(self._frame_rates, default=math.inf) * _AHEAD_S)
            if not self._fills or self._left > ahead:
                return
            self._fills = False
            following = direction._take_following()
        _let_go(following)

    def end(self) -> None:
        """Record that the frame has passed, or will not come."""
        direction = self._direction
        with direction._lock:
            if self in direction._waiting:
                direction._waiting.remove(self)
            if self not in direction._going:
                return
            direction._going.remove(self)
            self._learn()
            self._fills = False
            following = direction._take_following()
        _let_go(following)

    def leave(self) -> None:
        """Record that the link has ended."""
        self.end()
        direction = self._direction
        with direction._lock:
            was_known = self in direction._known
            if was_known:
                direction._known.remove(self)
            alone = direction._known[:] if was_known and len(direction._known) == 1 else []
        for slot in alone:
            slot._on_alone()

    def _learn(self) -> None:
        self.rate, self.was_alone = 0.0, False
        if self._since is None:
            return
        direction, (began, moved) = self._direction, self._since
        elapsed = direction._clock() - began
        if elapsed < _LEARNT_S:
            return
        rate, of_all = self._mine / elapsed, (direction._moved - moved) / elapsed
        direction._rates.append(of_all)
        self._frame_rates.append(rate)
        self.rate, self.was_alone = rate, rate >= _ALONE * of_all
        fills = rate >= _FILLS * direction._rate
        if fills or of_all < _FULL * direction._rate:
            self._filled.append(fills)


def _let_go(slots: Iterable[LinkSlot]) -> None:
    for slot in slots:
        slot._go()
