"""Frames on their way out of a link, and which of them goes next. No sockets, no locks.

A frame that is relayed is here before its tensor bytes are: they are fed as they come in. Writing
it may begin early, but it never holds up what could go at once: frames whose bytes are all here
pass it until it has begun.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from hetero_framework.core.messages import Message

Buffer = bytes | memoryview
EARLY_BYTES = 1 << 14
"""So much of a relayed frame must be here before it is begun: its source does send."""
_ZEROS = memoryview(bytes(1 << 20))


class Outgoing:
    """One frame on its way out.

    `missing` bytes are still to come; `feed` brings them, in order. `left` are not written yet.
    `began` is the time.perf_counter() at which writing began; `busy` while a thread writes what it
    took. `done` is to be called when the frame is written or given up. `message` is for the trace
    only, and may be released already.
    """

    __slots__ = ("_pending", "began", "busy", "done", "left", "message", "missing", "nbytes")

    def __init__(
        self,
        buffers: Sequence[Buffer],
        done: Callable[[], None] | None = None,
        message: Message | None = None,
        missing: int = 0,
    ) -> None:
        self.missing = missing
        self.nbytes = sum(map(len, buffers)) + missing
        self.left = self.nbytes
        self.done = done
        self.message = message
        self.began: float | None = None
        self.busy = False
        self._pending = deque([memoryview(buffer) for buffer in buffers])

    @property
    def ready(self) -> bool:
        """Whether writing may begin: all is here, or enough of it."""
        return not self.missing or self.nbytes - self.missing >= EARLY_BYTES

    def feed(self, data: memoryview) -> None:
        """The next bytes of the tensors; ignored once the frame is padded or given up."""
        if self.missing:
            self._pending.append(data)
            self.missing -= len(data)

    def pad(self) -> None:
        """Zeros in place of the bytes that will not come, so that the next frame can follow."""
        while self.missing:
            self.feed(_ZEROS[: self.missing])

    def give_up(self) -> None:
        """Write and take no more of it."""
        self._pending.clear()
        self.missing = 0

    def take(self, reserve: int = 0) -> deque[memoryview]:
        """What may be written now; the last `reserve` bytes of it stay while more is to come."""
        taken = self._pending
        if not self.missing or not reserve:
            self._pending = deque()
            return taken
        self._pending = deque()
        while reserve and taken:
            last = taken.pop()
            kept = last[-reserve:]
            self._pending.appendleft(kept)
            reserve -= len(kept)
            if len(kept) < len(last):
                taken.append(last[: -len(kept)])
        return taken

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

    def wrote(self, nbytes: int, now: float) -> None:
        """The first `nbytes` were written before the frame was queued; writing began at `now`."""
        self.began = now
        self.left -= nbytes
        drop_sent(self._pending, nbytes)


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
        """`urgent`, and a frame that has begun: before all others but the one being written."""
        self.nbytes += frame.nbytes
        if urgent or frame.began is not None:
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

    def begin(self, frame: Outgoing) -> None:
        """Writing of `frame` begins, or goes on: it comes first from now on."""
        if frame.began is None:
            frame.began = time.perf_counter()
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
