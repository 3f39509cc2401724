"""Frames on their way out of a link, and which of them goes next. No sockets, no locks.

A frame that is relayed is here before its tensor bytes are: they are fed as they come in. Writing
it may begin early, but it never holds up what could go at once: frames whose bytes are all here
pass it until it has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hetero_framework.core.checksum import CHECKSUM_BYTES, VOID, Hasher, digest
from hetero_framework.core.messages import Message

Buffer = bytes | memoryview
EARLY_BYTES = 1 << 14
"""So much of a relayed frame must be here before it is begun: its source does send."""
_ZEROS = memoryview(bytes(1 << 20))
_HASHED_BYTES = 1 << 18
"""So much is hashed just before it is written: it is in the processor's cache then."""


class Outgoing:
    """One frame on its way out.

    `missing` bytes are still to come; `feed` brings them, in order. `left` are not written yet.
    `began` is the time.perf_counter() at which writing began; `busy` while a thread writes what it
    took. `done` is to be called when the frame is written or given up. `message` is for the trace
    only, and may be released already. With `hashed` the frame gets its checksum here; a frame that
    is relayed with its checksum has that among its missing bytes (`sealed`).
    """

    __slots__ = (
        "_hasher",
        "_pending",
        "_raw",
        "_sealed",
        "began",
        "busy",
        "done",
        "left",
        "message",
        "missing",
        "nbytes",
    )

    def __init__(
        self,
        buffers: Sequence[Buffer],
        done: Callable[[], None] | None = None,
        message: Message | None = None,
        missing: int = 0,
        *,
        hashed: bool = False,
        sealed: bool = False,
    ) -> None:
        self.missing = missing + (CHECKSUM_BYTES if sealed else 0)
        self.nbytes = sum(map(len, buffers)) + self.missing + (CHECKSUM_BYTES if hashed else 0)
        self.left = self.nbytes
        self.done = done
        self.message = message
        self.began: float | None = None
        self.busy = False
        self._hasher = Hasher() if hashed else None
        self._sealed = sealed
        self._raw = deque([memoryview(buffer) for buffer in buffers])  # not hashed yet
        self._pending: deque[memoryview] = deque()
        if not hashed:
            self._raw, self._pending = self._pending, self._raw

    @property
    def ready(self) -> bool:
        """Whether writing may begin: all is here, or enough of it."""
        return not self.missing or self.nbytes - self.missing >= EARLY_BYTES

    def feed(self, data: memoryview) -> None:
        """The next bytes of the tensors; ignored once the frame is padded or given up."""
        if self.missing:
            (self._pending if self._hasher is None else self._raw).append(data)
            self.missing -= len(data)

    def pad(self) -> None:
        """Zeros in place of the bytes that will not come, so that the next frame can follow; the
        receiver drops a frame that is void."""
        tail = CHECKSUM_BYTES if self._sealed else 0
        while self.missing > tail:
            self.feed(_ZEROS[: self.missing - tail])
        if self.missing:
            self.feed(memoryview(VOID))

    def give_up(self) -> None:
        """Write and take no more of it."""
        self._pending.clear()
        self._raw.clear()
        self.missing = 0

    def take(self, reserve: int = 0) -> deque[memoryview]:
        """What may be written now; the last `reserve` bytes of it stay while more is to come."""
        if self._hasher is not None:
            self._hash_some()
        taken, self._pending = self._pending, deque()
        if not self.missing:
            return taken
        while reserve and taken:
            last = taken.pop()
            kept = last[-reserve:]
            self._pending.appendleft(kept)
            reserve -= len(kept)
            if len(kept) < len(last):
                taken.append(last[: -len(kept)])
        return taken

    def _hash_some(self) -> None:
        """Make the next bytes ready to be written; the checksum behind the last of them."""
        assert self._hasher is not None
        room = _HASHED_BYTES
        while self._raw and room:
            segment = self._raw.popleft()
            if len(segment) > room:
                self._raw.appendleft(segment[room:])
                segment = segment[:room]
            self._hasher.update(segment)
            self._pending.append(segment)
            room -= len(segment)
        if not self._raw and not self.missing:
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
        """What was taken and could not be written yet."""
        self._pending.extendleft(reversed(rest))


def drop_sent(pending: deque[memoryview], sent: int) -> None:
    """Forget the first `sent` bytes of `pending`."""
    while sent:
        first = pending[0]
        if sent < len(first):
            pending[0] = first[sent:]
            return
        sent -= len(first)
        pending.popleft()


class SendQueue:
    """The frames of one link that are not written completely, in the order of their sending.

    The one that is being written is first. Frames are counted with all their bytes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[Outgoing] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def __contains__(self, frame: object) -> bool:
        return frame in self._frames

    @property
    def idle(self) -> bool:
        """Whether nothing could be written now: all wait for bytes that have not come."""
        return not self._frames or self.next() is None

    def add(self, frame: Outgoing, urgent: bool = False) -> None:
        """`urgent`: before all others but the one being written."""
        self.nbytes += frame.nbytes
        if urgent:
            begun = bool(self._frames) and self._frames[0].began is not None
            self._frames.insert(int(begun), frame)
        else:
            self._frames.append(frame)

    def next(self) -> Outgoing | None:
        """The frame to write now: the begun one, else the first whose bytes are all here, else
        the first that can begin."""
        first = None
        for frame in self._frames:
            if frame.began is not None or not frame.missing:
                return frame
            if first is None and frame.ready:
                first = frame
        return first

    def begin(self, frame: Outgoing, now: float) -> None:
        """Writing of `frame` began at `now`, or goes on: it comes first from now on."""
        if frame.began is None:
            frame.began = now
        if self._frames[0] is not frame:
            self._frames.remove(frame)
            self._frames.appendleft(frame)

    def remove(self, frame: Outgoing) -> None:
        self._frames.remove(frame)
        self.nbytes -= frame.nbytes

    def clear(self) -> list[Outgoing]:
        """Give up all that is left, and return it."""
        dropped = list(self._frames)
        self._frames.clear()
        self.nbytes = 0
        for frame in dropped:
            frame.give_up()
        return dropped
