"""Decides when the large frames of one link go, and when its peer's may come. No sockets.

The sender of a large frame asks the receiver for a turn (ASK_TURN), and sends when it is granted
(TURN), at the rate at which the last large frame arrived there (ARRIVAL_RATE).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from hetero_framework.core import frames, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.clock import Pings
from hetero_framework.core.planned_order import packed, unpacked
from hetero_framework.core.send_queue import Outgoing

_REPORTED_BYTES = 512 * 1024
"""Smallest frame whose arrival rate is reported: switches hold little of a smaller one."""
_ASKS_S = 0.010
_ASKS_TRIPS = 4
"""A frame asks for a turn if it takes longer than _ASKS_S and than _ASKS_TRIPS round trips."""
_FASTER = 1.05
"""Factor on the rate at which the last frames arrived: the network may have become faster."""
_SOONER_S = 0.005
"""How long before the last frame has arrived the next frame may begin."""
_CATCHES_UP_S = 0.002
"""The most that a writer catches up after it woke up late."""
_MOST_PAUSE_S = 1.0
"""Longest pause for one piece."""
_LEAST_S = 0.010
"""A frame that takes less is not held back."""
_FASTEST = 2e8
"""Bytes per second. A faster network has empty buffers before a waiting writer wakes up."""
_FRAMES = 8  # how many of the last frames' rates count


class SendPacing:
    """Has a link write its large frames at about the rate that the receiver reports. Bytes that are
    written faster than the network takes them wait in a switch in between. Behind them waits every
    message of the link: signals, and TCP's acknowledgements for the other direction. Not
    thread-safe. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: deque[float] = deque(maxlen=_FRAMES)  # bytes per second of the last frames,
        self._heard: deque[float] = deque(maxlen=_FRAMES)  # and of those that came alone
        self._rate = 0.0  # bytes per second, the most of these; 0 when nothing is known
        self._next_at = 0.0
        self._there_at = 0.0  # when all that was written has arrived, if the rate is right

    def heard(self, rate: float, *, alone: bool) -> None:
        """Take the `rate` in bytes per second at which the last frame arrived. A frame that shared
        a network interface sets no rate, or each frame would be slower than the last."""
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


class LinkBandwidth:
    """Decides the turns and the rate of one link's large frames.

    `say` sends a signal and `wake` wakes the writer; both are called with the link's `lock` held.
    Methods that need the lock held say so. The reader thread reports the peer's frames and signals.
    """

    def __init__(
        self,
        scheduler: BandwidthScheduler,
        pings: Pings,
        lock: threading.Lock,
        say: Callable[[m.Signal], None],
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._pings = pings
        self._lock = lock
        self._say = say
        self._wake = wake
        self._way_in = scheduler.into.slot(self._grant, self._tell_alone)
        self._way_out = scheduler.out.slot(self._wake_writer)
        self.place = self._way_out.place
        self._receives = False  # whether a large frame is coming in
        self._was_asked = False  # whether the peer waits for a turn that it asked for
        # Guarded by the lock:
        self._pacing = SendPacing()
        self._has_turn = False
        self._waits_until: float | None = None  # when a large frame goes without a turn
        self._asked: Outgoing | None = None  # the frame for which the peer has been asked
        self._asks_again_at = math.inf
        self._is_alone = False  # the peer says: no other link brings it large frames
        self._told_alone = False  # our last such report to the peer

    # ---- sending

    def may_begin(self, frame: Outgoing) -> bool:
        """Whether writing of a large frame may begin or go on. The lock is held."""
        if self._has_turn or frame.began is not None:
            return True
        # The system may take a frame at once although it then arrives slowly.
        lasts_s = max(self._way_out.lasts_s(frame.nbytes), self._pacing.lasts_s(frame.nbytes))
        if lasts_s > self._asks_from_s():
            if self._must_wait(frame):
                return False
        elif lasts_s > _ASKS_S:
            self._say(self._pings.new())  # the next frame may know the round trip
        self._waits_until = self._asked = None
        self._has_turn = self._way_out.begin(frame.nbytes, frame.lane, waits=False)
        return True

    def _asks_from_s(self) -> float:
        """Seconds that a frame may take without waiting for its turn."""
        if self._is_alone:
            return _ASKS_S
        trip_s = self._pings.clock.round_trip_s
        return math.inf if trip_s is None else max(_ASKS_S, _ASKS_TRIPS * trip_s)

    def _must_wait(self, frame: Outgoing) -> bool:
        """Whether a frame has to wait for room here or for the peer's answer. The peer is asked
        when there is room and it is the frame's turn. One deadline covers both waits."""
        now = time.monotonic()
        if self._waits_until is None:
            self._waits_until = now + timeouts.TURN_S
        if now >= self._waits_until:
            return False
        if self._asked is not None:
            if now >= self._asks_again_at:
                self._ask(frame, math.inf)
        elif self._is_alone:
            return not self._way_out.begin(frame.nbytes, frame.lane)
        elif not self._way_out.awaits_room(frame.lane):
            self._ask(frame, now + (self._scheduler.out.order_timeout_s or math.inf))
        return True

    def _ask(self, frame: Outgoing, asks_again_at: float) -> None:
        assert frame.lane is not None
        self._asked, self._asks_again_at = frame, asks_again_at
        self._say(m.AskTurn(frame.nbytes, packed(frame.lane)))
        self._say(self._pings.new())

    def left_s(self) -> float:
        """Seconds until a waiting frame goes or asks again, even if the peer says nothing. The lock
        is held."""
        if self._waits_until is None:
            return math.inf
        now = time.monotonic()
        asked = self._asked is not None
        return min(
            self._waits_until - now, self._asks_again_at - now if asked else self._way_out.left_s()
        )

    def pause_s(self) -> float:
        """Seconds until the next piece of a large frame may be written."""
        return self._pacing.pause_s()

    def begins(self, body: m.BoundaryTensor) -> None:
        """Record that the first byte of a boundary tensor is written."""
        self._way_out.went(body.lane, body.attempt, body.micro_batch)

    def wrote(self, frame: Outgoing, nbytes: int) -> None:
        """Record that `nbytes` of a large frame are written; `frame.left` counts them already."""
        self._pacing.wrote(nbytes, frame.nbytes, is_last=not frame.left)
        self._has_turn = self._has_turn and frame.left > 0

    def moved(self, frame: Outgoing, nbytes: int) -> None:
        """Report `nbytes` of a large frame to other links that wait for room. Without the lock."""
        if frame.lane is not None:
            self._way_out.moved(nbytes)

    def sent(self) -> None:
        """Record that a whole large frame is written. Called without the lock."""
        self._way_out.end()

    def _wake_writer(self) -> None:
        with self._lock:
            self._wake()

    # ---- receiving, in the reader thread

    def receive_begins(self, frame: m.FrameHeader) -> None:
        body = frame.body
        if not isinstance(body, m.BoundaryTensor):
            return
        self._way_in.went(body.lane, body.attempt, body.micro_batch)
        self._receives = frames.marks_in(frame.payload_bytes) > 0
        if self._receives:
            self._was_asked = False
            self._way_in.begin(frame.payload_bytes, waits=False)

    def received(self, nbytes: int) -> None:
        """Record that `nbytes` of the begun frame's tensors came in."""
        if self._receives:
            self._way_in.moved(nbytes)

    def receive_ends(self, frame: m.FrameHeader) -> None:
        if not self._receives:
            return
        self._receives = False
        self._way_in.end()
        if frame.payload_bytes >= _REPORTED_BYTES and self._way_in.rate:
            with self._lock:
                self._say(m.ArrivalRate(self._way_in.rate, not self._way_in.was_alone))

    def heard(self, signal: m.Signal) -> None:
        """Handle a signal about turns and rates."""
        match signal:
            case m.AskTurn(frame_bytes=0):
                self._way_in.end()
            case m.AskTurn(frame_bytes, lane):
                insists, self._was_asked = self._was_asked, True
                if self._way_in.begin(frame_bytes, unpacked(lane), insists=insists):
                    self._grant()
            case m.Turn():
                self._heard_turn(signal)
            case m.ArrivalRate(bytes_per_s, shared):
                with self._lock:
                    alone = not shared and self._way_out.was_alone
                    self._pacing.heard(bytes_per_s, alone=alone)

    def _heard_turn(self, turn: m.Turn) -> None:
        with self._lock:
            self._is_alone = turn.alone
            if turn.granted:
                asked, self._asked = self._asked, None
                if asked is not None and self._way_out.begin(asked.nbytes, asked.lane):
                    self._waits_until, self._has_turn = None, True
                else:
                    self._say(m.AskTurn(0, 0))
            self._wake()

    def _grant(self) -> None:
        """Tell the peer that its large frame may come. Called in any thread."""
        self._was_asked = False
        with self._lock:
            self._told_alone = self._way_in.is_alone()
            self._say(m.Turn(True, self._told_alone))

    def _tell_alone(self) -> None:
        """Tell the peer if it changed whether its large frames meet others here. Any thread."""
        with self._lock:
            if (alone := self._way_in.is_alone()) != self._told_alone:
                self._told_alone = alone
                self._say(m.Turn(False, alone))

    def leave_in(self) -> None:
        """End the receiving side."""
        self._way_in.leave()

    def leave_out(self) -> None:
        """End the sending side."""
        self._way_out.leave()
