"""When the large frames of one link go, and when those of its peer may come. No sockets.

A large frame asks its receiver for a turn (ASK_TURN) and goes when it is granted (TURN), at the
rate at which the last one arrived there (ARRIVAL_RATE).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from hetero_framework.core import frames, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.clock import Pings
from hetero_framework.core.planned_order import packed, unpacked
from hetero_framework.core.send_pacing import SendPacing
from hetero_framework.core.send_queue import Outgoing

_REPORTED_BYTES = 512 * 1024
"""The arrival rate of a smaller frame is not reported: switches hold little of it."""
_ASKS_S = 0.010
_ASKS_TRIPS = 4
"""A frame asks for a turn if it takes at least this long, and this many round trips."""


class LinkBandwidth:
    """The turns and the rate of one link.

    `lock` is the link's, held where a method says so and whenever `say`, which sends a signal, and
    `wake`, for the writer, are called. What the peer sends is told in the reader thread.
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
        self._receives = False  # a large frame
        self._was_asked = False  # by the peer, and has not answered yet
        # Guarded by the lock:
        self._pacing = SendPacing()
        self._has_turn = False
        self._waits_until: float | None = None  # when a large frame goes without a turn
        self._asked: Outgoing | None = None  # the frame for which the peer has been asked
        self._asks_again_at = math.inf
        self._is_alone = False  # by the peer: no other link brings it large frames
        self._told_alone = False  # the last such report of ours to the peer

    # ---- sending

    def may_begin(self, frame: Outgoing) -> bool:
        """Whether writing of a large frame may begin or go on. The lock is held."""
        if self._has_turn or frame.began is not None:
            return True
        # The system may take a frame at once that then arrives slowly.
        lasts_s = max(self._way_out.lasts_s(frame.nbytes), self._pacing.lasts_s(frame.nbytes))
        if lasts_s > self._asks_from_s():
            if self._must_wait(frame):
                return False
        elif lasts_s > _ASKS_S:
            self._say(self._pings.new())  # the next one may know better
        self._waits_until = self._asked = None
        self._has_turn = self._way_out.begin(frame.nbytes, frame.lane, waits=False)
        return True

    def _asks_from_s(self) -> float:
        """How long a frame has to take if it is to wait for its turn."""
        if self._is_alone:
            return _ASKS_S
        trip_s = self._pings.clock.round_trip_s
        return math.inf if trip_s is None else max(_ASKS_S, _ASKS_TRIPS * trip_s)

    def _must_wait(self, frame: Outgoing) -> bool:
        """Whether a frame has to wait for room here or for the peer's answer. The peer is asked
        when there is room and it is the frame's turn. One deadline covers all of it."""
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
        """Seconds until a frame that waits may go or has to ask again, whatever is heard. The lock
        is held."""
        if self._waits_until is None:
            return math.inf
        now = time.monotonic()
        asked = self._asked is not None
        return min(
            self._waits_until - now,
            self._asks_again_at - now if asked else self._way_out.left_s(),
        )

    def pause_s(self) -> float:
        """Seconds until the next piece of a large frame may be written."""
        return self._pacing.pause_s()

    def begins(self, body: m.BoundaryTensor) -> None:
        """The first byte of a tensor between two stages is written."""
        self._way_out.went(body.lane, body.attempt, body.micro_batch)

    def wrote(self, frame: Outgoing, nbytes: int) -> None:
        """`nbytes` of a large frame are written, with which `frame.left` is up to date."""
        self._pacing.wrote(nbytes, frame.nbytes, is_last=not frame.left)
        self._has_turn = self._has_turn and frame.left > 0

    def moved(self, frame: Outgoing, nbytes: int) -> None:
        """The same without the lock, for the others that wait for room."""
        if frame.lane is not None:
            self._way_out.moved(nbytes)

    def sent(self) -> None:
        """All of a large frame is written. Without the lock."""
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
        """Tensor bytes of the frame that has begun."""
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
        """A signal about turns and rates has come."""
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
        """The peer's large frame may come; from any thread."""
        self._was_asked = False
        with self._lock:
            self._told_alone = self._way_in.is_alone()
            self._say(m.Turn(True, self._told_alone))

    def _tell_alone(self) -> None:
        """Whether the peer's large frames meet others here has changed; from any thread."""
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
