"""Buffers that are overwritten the moment they are given back, as the emulated device's memory is.

One that is given back too early is seldom taken again before its last reader is done with it: the
mistake would hardly ever be seen. `python -m tests.greedy_buffers ...` is the command `hetero` with
such buffers, for the workers of tests.
"""

from __future__ import annotations

import sys

from hetero_framework.core.buffers import BufferPool

_NAN = b"\xff"
"""Of these bytes every floating point type has NaN."""


def install() -> None:
    """For all pools of this process."""
    give_back = BufferPool._give_back
    if give_back.__module__ == __name__:
        return

    def overwrite(self: BufferPool, size: int, buffer: memoryview) -> None:
        assert all(buffer is not free for free in self._free.get(size, ())), "given back twice"
        buffer[:] = _NAN * len(buffer)
        give_back(self, size, buffer)

    BufferPool._give_back = overwrite  # type: ignore[method-assign]


if __name__ == "__main__":
    from hetero_framework.__main__ import main

    install()
    sys.exit(main())
