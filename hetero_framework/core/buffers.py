"""A pool of receive buffers.

Fresh memory costs a page fault per 4 KiB on first touch, which for activations costs more than the
receiving itself; pinned memory costs far more. Frames of a run have few different sizes, so a small
pool serves nearly all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

DEFAULT_POOL_BYTES = 256 * 1024 * 1024
_SMALLEST = 4096
MAX_PINNED_BYTES = 64 * 1024 * 1024
"""Largest buffer that is pinned. torch never gives pinned memory back: one part of a large state
would lock gigabytes for good. Beside the transfer, a copy from plain memory then costs little."""


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to an eighth of its power of two: similar lengths share buffers."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(0, (nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def pinned_size_class(nbytes: int) -> int:
    """The size class of memory pinned up to MAX_PINNED_BYTES: powers of 2, as torch allocates."""
    if nbytes > MAX_PINNED_BYTES:
        return size_class(nbytes)
    return 1 << (max(nbytes, _SMALLEST) - 1).bit_length()


class BufferPool:
    """Free buffers by size class, at most `max_bytes` of them together (None: all). Thread-safe.

    `allocate` makes a new buffer of `rounding(nbytes)` bytes. A buffer that is never given back is
    freed when its last user forgets it.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview] = lambda nbytes: memoryview(bytearray(nbytes)),
        max_bytes: int | None = DEFAULT_POOL_BYTES,
        rounding: Callable[[int], int] = size_class,
    ) -> None:
        self._allocate = allocate
        self._rounding = rounding
        self._max_bytes = max_bytes
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> tuple[memoryview, Callable[[], None]]:
        """A writable view of exactly `nbytes`, and the function to give it back, at most once."""
        size = self._rounding(nbytes)
        with self._lock:
            buffers = self._free.get(size)
            buffer = buffers.pop() if buffers else None
            if buffer is not None:
                self._free_bytes -= size
        whole = self._allocate(size) if buffer is None else buffer
        return whole[:nbytes], lambda: self._give_back(size, whole)

    def _give_back(self, size: int, buffer: memoryview) -> None:
        with self._lock:
            if self._max_bytes is not None and self._free_bytes + size > self._max_bytes:
                return
            self._free.setdefault(size, []).append(buffer)
            self._free_bytes += size

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self._free_bytes = 0
