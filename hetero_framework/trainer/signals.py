"""Ctrl-C and SIGTERM. Between steps they are a request: finish the step, offer a checkpoint, stop.
Before the first step, and the second time, they stop at once, as KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_ONCE_MORE = b"\nhetero: stopping after this step; once more stops at once\n"


class StopRequest:
    """Context manager that turns the signals into KeyboardInterrupt or, while `waiting`, into the
    name of the signal in `requested`.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._waiting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; elsewhere (a notebook, a test) signals stay as is.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the first signal is only noted; whoever works there looks at `requested`."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested is not None, signal.Signals(number).name
        if again or not self._waiting:
            raise KeyboardInterrupt
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, _ONCE_MORE)


def wants_checkpoint(question: str) -> bool:
    """Ask on a terminal whether to save; without one, or without an answer, yes."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    try:
        return input(f"{question} [Y/n] ").strip().lower() not in ("n", "no")
    except (EOFError, KeyboardInterrupt):
        return False
