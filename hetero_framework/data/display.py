"""Progress on the terminal while data are tokenised."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.5  # work that is done by then needs no display


@contextmanager
def display(what: str) -> Iterator[Callable[[str], None]]:
    """Show one line until the block ends. The given function updates it: "12,000 examples"."""
    from rich.console import Console

    began = time.monotonic()
    status = Console(stderr=True).status(what)

    def show(done: str) -> None:
        status.update(f"{what}: {done}")
        if sys.stderr.isatty() and time.monotonic() - began >= _QUIET_S:
            status.start()

    try:
        yield show
    finally:
        status.stop()
