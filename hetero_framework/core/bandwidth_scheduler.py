"""Whose large frame has a direction of this machine's network interface now. No sockets.

Two frames that share an interface are both late, and TCP divides it unevenly. So a large frame asks
its receiver, and goes when it fills neither the interface here nor the one there together with
another. A receiver at which only one link brings any need not be asked. Nobody says how fast an
interface is: that is learned from the frames. One that leaves room, because the other end is slow,
lets the next go beside it.
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
"""With less than this share of its rate the interface was not full: what was slow then is slow
because of its other end. In a full one, a frame may be slow because of the others."""
_AHEAD_BYTES = 384 * 1024
_AHEAD_S = 0.010
"""When so much of a frame is left, or what takes so long, the next one may go: word of it waits
behind a piece and what the system holds. More would meet in a switch, which may drop some of it."""
_PROBE = 256
"""Every so many-th frame that would have to wait goes beside the others: together they show whether
the interface has become faster than is known. Every 16th made steps 3 to 5 % longer."""
_ALONE = 0.8
"""A frame with this share of what passed meanwhile had the interface for itself."""
_LEARNT_S = 0.005
"""A frame that takes less says nothing: buffers have most of it."""
_FRAMES = 8
_RATES = 64


class Interface:
    """Both directions of this machine's network interface."""

    def __init__(self) -> None:
        self.out = Turns(reserves=False)
        self.into = Turns(reserves=True)

    def plan(
        self, attempt: int, sends: Iterable[Lane], receives: Iterable[Lane], patience_s: float
    ) -> None:
        """From now on large frames keep to this order, those of this attempt at a step."""
        self.out.plan(attempt, sends, patience_s)
        self.into.plan(attempt, receives, patience_s)


class Turns:
    """One direction of the interface, for all links of a process. Thread-safe.

    When there is room again, whoever is next in the planned order is let go, or else who went
    longest ago, and has its turn from then on; without `reserves` all that wait are told, and have
    to begin again. `clock` is in seconds.
    """

    def __init__(self, reserves: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reserves = reserves
        self._clock = clock
        self._lock = threading.Lock()
        self._known: list[Passage] = []  # those that have had a frame
        self._going: list[Passage] = []
        self._waiting: list[Passage] = []
        self._moved = 0  # bytes of all
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._turn = self._waits = 0
        self._order, self._order_timeout = PlannedOrder(), OrderTimeout(0.0, clock)
        self._went: dict[Lane, tuple[int, int]] = {}  # a lane's last frame: attempt, micro-batch

    @property
    def patience_s(self) -> float:
        """How long a frame waits for the one whose turn it is, though there is room."""
        return self._order_timeout.seconds

    def plan(self, attempt: int, lanes: Iterable[Lane], patience_s: float) -> None:
        """The order of the frames of an attempt, of which some may have come already."""
        with self._lock:
            self._order = PlannedOrder(lanes)
            self._order_timeout = OrderTimeout(patience_s, self._clock)
            for lane, (of, micro_batch) in self._went.items():
                if of == attempt:
                    self._order.went(lane, micro_batch)
            following = self._follow()
        for passage in following:
            passage._go()

    def passage(
        self, go: Callable[[], None], on_alone: Callable[[], None] = lambda: None
    ) -> Passage:
        """The way of one link through the interface. Called without a lock: `go` when there is room
        for a frame of it that waits, `on_alone` when `is_alone` has changed by another link."""
        return Passage(self, go, on_alone)

    @property
    def _rate(self) -> float:
        """Bytes per second, the most of the last frames."""
        return max(self._rates, default=0.0)

    def _has_room(self) -> bool:
        return not any(passage._fills for passage in self._going)

    def _left_s(self, lane: Lane | None) -> float:
        """How long a frame has to wait for another one's turn."""
        return self._order_timeout.left_s(self._order, lane) if lane is not None else 0.0

    def _place(self, passage: Passage) -> tuple[float, int]:
        lane = passage._lane
        return self._order.place(lane) if lane is not None else math.inf, passage._turn

    def _follow(self) -> list[Passage]:
        """Who has waited and may go."""
        if not self._waiting or not self._has_room():
            return []
        following = sorted(self._waiting, key=self._place)
        if self._reserves:
            following = [p for p in following[:1] if p._insists or not self._left_s(p._lane)]
        for passage in following:
            self._waiting.remove(passage)
            if self._reserves:
                passage._start(fills=True)
        return following


class Passage:
    """The large frames of one link, one after the other."""

    def __init__(self, turns: Turns, go: Callable[[], None], on_alone: Callable[[], None]) -> None:
        self._turns = turns
        self._go = go
        self._on_alone = on_alone
        self._turn = 0  # when it began last
        self._fills = self._insists = False
        self._lane: Lane | None = None  # of the frame that waits
        self._paces: deque[float] = deque(maxlen=_FRAMES)
        self._filled: deque[bool] = deque(maxlen=_FRAMES)  # of the frames of which that is known
        self.pace = 0.0  # bytes/s of the last frame; 0 if it was too quick to say
        self.was_alone = False  # whether it had the interface for itself
        self._left = self._mine = 0
        self._since: tuple[float, int] | None = None  # when it began to be measured, bytes of all

    def lasts_s(self, nbytes: int) -> float:
        """Seconds that so many bytes have to be expected to take; 0 when nothing is known."""
        pace = max(self._paces, default=0.0)
        return nbytes / pace if pace else 0.0

    def begin(
        self, nbytes: int, lane: Lane | None = None, *, waits: bool = True, insists: bool = False
    ) -> bool:
        """Whether a frame of so many bytes may go now. If not, it waits for `go`, or `end`, or asks
        again after `left_s`; who `insists` waits for nobody's turn, only for room. Without `waits`
        it goes, whether there is room or not."""
        not_alone = self._meet()
        may_go = self._begin(nbytes, lane, waits, insists)
        for passage in not_alone:
            passage._on_alone()
        return may_go

    def is_alone(self) -> bool:
        """Whether no other link has had a frame."""
        with self._turns._lock:
            return self._turns._known == [self]

    def _meet(self) -> list[Passage]:
        """It has a frame from now on; who was alone until now."""
        turns = self._turns
        with turns._lock:
            if self in turns._known:
                return []
            turns._known.append(self)
            return turns._known[:1] if len(turns._known) == 2 else []

    def _begin(self, nbytes: int, lane: Lane | None, waits: bool, insists: bool) -> bool:
        turns = self._turns
        with turns._lock:
            self._left, self._lane, self._insists = nbytes, lane, insists
            if self in turns._going:
                return True
            fills = self._would_fill()
            if waits and fills and self._must_wait():
                if self in turns._waiting:
                    return False
                turns._waits += 1
                if turns._waits % _PROBE:
                    turns._waiting.append(self)
                    return False
            if self in turns._waiting:
                turns._waiting.remove(self)
            self._start(fills)
            return True

    def awaits_room(self, lane: Lane | None = None) -> bool:
        """Whether a frame would have to wait now; `go` tells when it has not to any more, or
        `left_s` is over."""
        turns = self._turns
        with turns._lock:
            self._lane, self._insists = lane, False
            if not self._would_fill() or not self._must_wait():
                return False
            if self not in turns._waiting:
                turns._waiting.append(self)
            return True

    def _must_wait(self) -> bool:
        turns = self._turns
        return not turns._has_room() or (not self._insists and turns._left_s(self._lane) > 0)

    def left_s(self) -> float:
        """How long the frame that waits has to do so for another one's turn, if there is room."""
        turns = self._turns
        with turns._lock:
            return turns._left_s(self._lane) if turns._has_room() else math.inf

    def place(self, lane: Lane) -> float:
        """Where a lane's next frame stands in the planned order."""
        with self._turns._lock:
            return self._turns._order.place(lane)

    def went(self, lane: Lane, attempt: int, micro_batch: int) -> None:
        """A frame, large or small, has begun."""
        turns = self._turns
        with turns._lock:
            turns._went[lane] = attempt, micro_batch
            turns._order.went(lane, micro_batch)

    def _would_fill(self) -> bool:
        return any(self._filled or self._paces)

    def _start(self, fills: bool) -> None:
        turns = self._turns
        turns._turn += 1
        self._turn = turns._turn
        self._since, self._mine, self._fills = None, 0, fills
        turns._going.append(self)

    def moved(self, nbytes: int) -> None:
        """So many bytes of the frame have passed."""
        turns = self._turns
        with turns._lock:
            turns._moved += nbytes
            self._left -= nbytes
            if self._since is None:  # what comes first fills buffers
                self._since = turns._clock(), turns._moved
                return
            self._mine += nbytes
            if not self._fills or self._left > self._ahead_bytes():
                return
            self._fills = False
            following = turns._follow()
        for passage in following:
            passage._go()

    def _ahead_bytes(self) -> float:
        pace = max(self._paces, default=math.inf)
        return min(_AHEAD_BYTES, pace * _AHEAD_S)

    def end(self) -> None:
        """The frame has passed, or does not come."""
        turns = self._turns
        with turns._lock:
            if self in turns._waiting:
                turns._waiting.remove(self)
            if self not in turns._going:
                return
            turns._going.remove(self)
            self._learn()
            self._fills = False
            following = turns._follow()
        for passage in following:
            passage._go()

    def leave(self) -> None:
        """The link has ended."""
        self.end()
        turns = self._turns
        with turns._lock:
            was_known = self in turns._known
            if was_known:
                turns._known.remove(self)
            alone = turns._known[:] if was_known and len(turns._known) == 1 else []
        for passage in alone:
            passage._on_alone()

    def _learn(self) -> None:
        self.pace, self.was_alone = 0.0, False
        if self._since is None:
            return
        turns, (began, moved) = self._turns, self._since
        elapsed = turns._clock() - began
        if elapsed < _LEARNT_S:
            return
        pace, of_all = self._mine / elapsed, (turns._moved - moved) / elapsed
        turns._rates.append(of_all)
        self._paces.append(pace)
        self.pace, self.was_alone = pace, pace >= _ALONE * of_all
        fills = pace >= _FILLS * turns._rate
        if fills or of_all < _FULL * turns._rate:
            self._filled.append(fills)
