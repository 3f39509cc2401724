"""What a terminal shows while data are tokenised; elsewhere nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

_QUIET_S = 0.5  # what is done by then needs no display
_EVERY_S = 0.1


class Display:
    """One line that is drawn anew, and gone at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + _QUIET_S
        self._status: Status | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, done: str) -> None:
        """How far it is, as in "12,000 examples"."""
        if time.monotonic() < self._next or not sys.stderr.isatty():
            return
        self._next = time.monotonic() + _EVERY_S
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status("")
            self._status.start()
        self._status.update(f"{self._what}: {done}")
