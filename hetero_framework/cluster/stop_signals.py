"""Requests to a worker process to end: signals, and its supervisor's lines on its stdin."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_framework.core import timeouts
from hetero_framework.errors import StoppedEarly

SIGNALS = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP", "SIGBREAK": "Ctrl-Break"}
"""Signals that end a process in order, with the names that users know."""


@contextmanager
def signals_passed_to(note: Callable[[str], None], *, ends: bool = False) -> Iterator[None]:
    """Within the block, call `note` with the name of each signal of `SIGNALS` that comes, except
    ignored signals (`nohup` ignores SIGHUP on purpose). With `ends` the process ends after the
    block: its exit code is known then, and a later signal has no effect. Outside of the main
    thread, signals keep their meaning."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name, shown in SIGNALS.items():
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda *_, shown=shown: note(shown))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends else handler)


def stopped_by(shown: str) -> str:
    """The reason that a worker stopped by a signal gives the coordinator."""
    return f"it was stopped on its own machine ({shown})"


class StopSignals:
    """Passes requests to end on to the worker. A request that comes both as a signal and as a line
    counts once; a second signal asks to end at once. `ends`: see `signals_passed_to`."""

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends
        self._reason: str | None = None
        self._by_parent = False
        self._signals = 0

    def from_parent(self, reason: str) -> None:
        """Take a line of the supervisor. Runs in the thread that reads them."""
        if self._reason is None:
            self._reason, self._by_parent = reason, True
            # Has no effect before `obeyed_by`, which checks for an earlier line itself.
            _thread.interrupt_main(signal.SIGTERM)

    @contextmanager
    def obeyed_by(self, told: Callable[[str, bool], None]) -> Iterator[None]:
        """Within the block, call `told(reason, at_once)` for each request, in the main thread
        between any two of its instructions; it may raise. The process ends at most RELEASE_S after
        the first request, whatever it is doing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        watchdog = threading.Timer(timeouts.RELEASE_S, os._exit, (StoppedEarly.exit_code,))
        watchdog.daemon = True

        def obey(at_once: bool) -> None:
            assert self._reason is not None
            if watchdog.ident is None:
                watchdog.start()
            told(self._reason, at_once)

        def note(shown: str) -> None:
            if self._by_parent:
                self._by_parent = False
            else:
                self._signals += 1
                self._reason = self._reason or stopped_by(shown)
            obey(self._signals > 1)

        try:
            with signals_passed_to(note, ends=self._ends):
                if self._by_parent:  # the line came while libraries were imported
                    self._by_parent = False
                    obey(False)
                yield
        finally:
            watchdog.cancel()
