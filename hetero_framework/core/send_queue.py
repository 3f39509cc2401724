"""Outgoing frame queue of one link. No sockets, no locks.

A relayed frame is queued before its tensor bytes, which are added as they come in. Frames whose
bytes are all here pass it until it has begun. An urgent frame passes all others, also between two
pieces of one that has begun.

A frame ends with the checksum of all of it: XXH3 with 64 bits, big-endian. TCP's own 16 bits miss
one damaged segment in 65,536, and a flipped bit in a tensor would go into the training unnoticed. A
relay passes the checksum on, so that the last receiver notices damage anywhere on the way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from hetero_framework.core.frames import GOES_ON, INSIDE, PIECE_BYTES, marks_in
from hetero_framework.core.messages import BoundaryTensor, Inputs, Message
from hetero_framework.core.planned_order import Lane

Hasher = xxhash.xxh3_64
CHECKSUM_BYTES = 8
VOID = b"\xff" * CHECKSUM_BYTES
"""In place of a checksum: the frame was given up on its way; the receiver drops it."""
Buffer = bytes | memoryview
EARLY_BYTES = 1 << 14
"""Bytes of a relayed frame that must be here before it begins: they show that its source sends."""
_MARK = memoryview(GOES_ON)
_ZEROS = memoryview(bytes(1 << 20))


def digest(hasher: Hasher) -> bytes:
    checksum: bytes = hasher.digest()
    return checksum if checksum != VOID else bytes(CHECKSUM_BYTES)


class Outgoing:
    """One frame on its way out. `done` is to be called when it is written or given up. `message` is
    for the order and the trace, and may be released already.

    A frame of this process gets its checksum here. In a relayed frame, `relayed_bytes` of tensors
    and the checksum are `missing` until `feed` brings them. `left` bytes are not written yet.
    `began` is the time.perf_counter() of the first byte. `busy`: a thread is writing. `boundary` is
    the body if the frame is a planned tensor between two stages. `lane` is set for a large one:
    these take turns."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        done: Callable[[], None] | None = None,
        message: Message | None = None,
        relayed_bytes: int | None = None,
    ) -> None:
        """`buffers`: the head, and for a frame of this process the tensors."""
        tensor_bytes = sum(map(len, buffers[1:])) if relayed_bytes is None else relayed_bytes
        self.relayed = relayed_bytes is not None
        self.missing = 0 if relayed_bytes is None else relayed_bytes + CHECKSUM_BYTES
        self._marks = marks_in(tensor_bytes) if tensor_bytes > PIECE_BYTES else 0
        self._first = len(buffers[0]) + PIECE_BYTES  # bytes in front of the first mark
        self._unlaid = len(buffers[0]) + tensor_bytes  # bytes that are not in `_pending` yet
        self._piece = self._first  # those of them in front of the next mark
        self.nbytes = self._unlaid + self._marks + CHECKSUM_BYTES
        self.left = self.nbytes
        self.done = done
        self.message = message
        body = message.body if message is not None else None
        self.boundary = body if isinstance(body, BoundaryTensor) else None
        self.lane: Lane | None = None
        if self._marks and self.boundary is not None:
            self.lane = self.boundary.lane
        self.began: float | None = None
        self.busy = False
        self._inside = False
        self._hasher = None if self.missing else Hasher()
        self._raw: deque[memoryview] = deque()  # not hashed yet
        self._pending: deque[memoryview] = deque()
        if self.missing:
            self._lay(memoryview(buffers[0]))
        else:
            self._raw.extend(map(memoryview, buffers))

    @property
    def ready(self) -> bool:
        """Whether writing may begin: all is here, or enough of it."""
        return not self.missing or self.nbytes - self.missing >= EARLY_BYTES

    @property
    def at_mark(self) -> bool:
        """Whether a mark is written next, so that another frame may stand here."""
        behind = self.nbytes - self.left - self._first
        if not self._marks or behind < 0 or self.busy:
            return False
        mark, inside = divmod(behind, PIECE_BYTES + 1)
        return not inside and mark < self._marks

    def go_inside(self) -> int:
        """Let this frame, which has not begun, go between two pieces of another one. Returns the
        bytes by which that makes it longer."""
        if self._inside:
            return 0
        self._inside = True
        self._pending.appendleft(memoryview(INSIDE))
        self.nbytes += 1
        self.left += 1
        return 1

    def feed(self, data: memoryview) -> None:
        """Add the next bytes of a relayed frame; ignored once the frame is padded or given up."""
        if self.missing:
            self.missing -= len(data)
            self._lay(data)

    def _lay(self, data: memoryview) -> None:
        """Make bytes ready to be written, with the marks between them."""
        while len(data) > self._piece and self._unlaid > self._piece:
            if self._piece:
                self._pending.append(data[: self._piece])
            self._pending.append(_MARK)
            self._unlaid -= self._piece
            data, self._piece = data[self._piece :], PIECE_BYTES
        self._pending.append(data)
        self._unlaid -= len(data)
        self._piece -= len(data)

    def pad(self) -> None:
        """Put zeros in place of bytes that will not come, and VOID behind them for the receiver."""
        while self.missing > CHECKSUM_BYTES:
            self.feed(_ZEROS[: self.missing - CHECKSUM_BYTES])
        if self.missing:
            self.feed(memoryview(VOID))

    def give_up(self) -> None:
        """Drop the bytes that are left; the frame takes no more."""
        self._pending.clear()
        self._raw.clear()
        self.missing = 0

    def take(self, reserve: int = 0, room: int = PIECE_BYTES) -> deque[memoryview]:
        """The bytes that may be written now: up to the last mark within `room` bytes, or else up to
        the next mark. The last `reserve` bytes stay while more is to come. A frame of this process
        gives hardly more than `room` bytes."""
        piece = self._piece or (0 if self._pending else PIECE_BYTES)
        more = 0 if self._pending else max(0, room - piece) // PIECE_BYTES * PIECE_BYTES
        self._hash_some(min(room, piece + more))
        taken, self._pending = self._pending, deque()
        while reserve and self.missing and taken:
            last = taken.pop()
            kept = last[-reserve:]
            self._pending.appendleft(kept)
            reserve -= len(kept)
            if len(kept) < len(last):
                taken.append(last[: -len(kept)])
        return self._up_to_mark(taken, room) if self.relayed and self._marks else taken

    def _up_to_mark(self, taken: deque[memoryview], most: int) -> deque[memoryview]:
        """Take the bytes in front of a mark; keep those behind it."""
        marked = PIECE_BYTES + 1
        behind = self.nbytes - self.left - self._first
        room = -behind if behind < 0 else marked - behind % marked
        room += max(0, most - room) // marked * marked
        front: deque[memoryview] = deque()
        while taken and room:
            view = taken.popleft()
            if len(view) > room:
                taken.appendleft(view[room:])
                view = view[:room]
            front.append(view)
            room -= len(view)
        self.put_back(taken)
        return front

    def _hash_some(self, room: int) -> None:
        """Hash at most `room` bytes and make them ready to be written, while they are in the
        processor's cache. The checksum follows the last bytes."""
        if self._hasher is None:
            return
        while self._raw and room:
            segment = self._raw.popleft()
            if len(segment) > room:
                self._raw.appendleft(segment[room:])
                segment = segment[:room]
            self._hasher.update(segment)
            self._lay(segment)
            room -= len(segment)
        if not self._raw:
            self._pending.append(memoryview(digest(self._hasher)))
            self._hasher = None

    def take_one(self) -> deque[memoryview]:
        """The next byte, of the reserve too, if there is one."""
        if not self._pending:
            return deque()
        first = self._pending.popleft()
        if len(first) > 1:
            self._pending.appendleft(first[1:])
        return deque([first[:1]])

    def put_back(self, rest: deque[memoryview]) -> None:
        """Put back bytes that were taken and could not be written yet."""
        self._pending.extendleft(reversed(rest))

    def wrote(self, segment: deque[memoryview], sent: int) -> bool:
        """Count the first `sent` bytes of `segment` as written and put the rest back. Returns
        whether there is no rest."""
        drop_sent(segment, sent)
        self.left -= sent
        self.put_back(segment)
        return not segment


def drop_sent(pending: deque[memoryview], sent: int) -> None:
    """Forget the first `sent` bytes of `pending`."""
    while sent:
        first = pending[0]
        if sent < len(first):
            pending[0] = first[sent:]
            return
        sent -= len(first)
        pending.popleft()


@dataclass
class LinkStats:
    """Bytes that a link has moved in whole frames, signals too, and the seconds it wrote."""

    bytes_in: int = 0
    bytes_out: int = 0
    write_s: float = 0.0


class SendQueue:
    """The unfinished frames of one link, of `nbytes` in all; the one being written is first.
    `place` gives the place of a lane's next frame in the planned order. `begins` is called with the
    body of a tensor between two stages when its first byte is written."""

    def __init__(
        self,
        stats: LinkStats,
        place: Callable[[Lane], float] = lambda lane: math.inf,
        begins: Callable[[BoundaryTensor], None] = lambda body: None,
    ) -> None:
        self.nbytes = 0
        self._stats = stats
        self._place, self._begins = place, begins
        self._frames: deque[Outgoing] = deque()
        self._urgent: deque[Outgoing] = deque()
        self._begun: dict[Lane, int] = {}  # the `_turn` of a lane's last frame
        self._turn = 0

    def __len__(self) -> int:
        return len(self._frames) + len(self._urgent)

    @property
    def urgent(self) -> int:
        """The number of urgent frames that are not written yet."""
        return len(self._urgent)

    @property
    def idle(self) -> bool:
        """Whether nothing could be written now: all wait for bytes that have not come."""
        return not len(self) or self.next() is None

    def add(self, frame: Outgoing, urgent: bool = False) -> None:
        """Queue a frame; an `urgent` one before all others but the piece that is being written."""
        self.nbytes += frame.nbytes
        (self._urgent if urgent else self._frames).append(frame)

    def next(self) -> Outgoing | None:
        """The frame to write: the begun one, else an urgent one, else one that is complete, else
        the first that can begin. At a mark of the begun frame an urgent frame is the next, too.

        Complete frames keep their order, but INPUTS pass the large frames before them. Among large
        frames the next in the plan goes first, else the frame of the least recently served lane."""
        begun = bool(self._frames) and self._frames[0].began is not None
        if self._urgent:
            first = self._urgent[0]
            if begun and first.began is None and self._frames[0].at_mark:
                self.nbytes += first.go_inside()
            if not begun or first.began is not None or self._frames[0].at_mark:
                return first
        if begun:
            return self._frames[0]
        return self._next_in_turn() or next((f for f in self._frames if f.ready), None)

    def _next_in_turn(self) -> Outgoing | None:
        chosen: Outgoing | None = None
        first = (math.inf, 0)
        for frame in self._frames:
            if frame.missing:
                continue
            lane = frame.lane
            if lane is None:
                passes = frame.message is not None and isinstance(frame.message.body, Inputs)
                return frame if chosen is None or passes else chosen
            turn = (self._place(lane), self._begun.get(lane, -1))
            if chosen is None or turn < first:
                chosen, first = frame, turn
        return chosen

    def begin(self, frame: Outgoing, now: float) -> None:
        """Record that `frame` begins or goes on at `now`: it is the first frame from now on."""
        if frame.began is None:
            frame.began = now
            if frame.boundary is not None:
                self._begins(frame.boundary)
            if (lane := frame.lane) is not None:
                self._turn += 1
                self._begun[lane] = self._turn
        if frame not in self._urgent and self._frames[0] is not frame:
            self._frames.remove(frame)
            self._frames.appendleft(frame)

    def remove(self, frame: Outgoing) -> None:
        """Remove a frame of which all bytes are written."""
        self._stats.bytes_out += frame.nbytes
        (self._urgent if frame in self._urgent else self._frames).remove(frame)
        self.nbytes -= frame.nbytes

    def clear(self) -> list[Outgoing]:
        """Give up all that is left, and return it."""
        dropped = [*self._urgent, *self._frames]
        self._urgent.clear()
        self._frames.clear()
        self.nbytes = 0
        for frame in dropped:
            frame.give_up()
        return dropped
