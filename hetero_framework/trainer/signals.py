"""Ctrl-C and the signals that end a process: when they stop a run, and when they ask first.

While steps run, a signal is a request: finish the step, save, stop. Before the first step, and at
the second signal, KeyboardInterrupt stops the run at once. `hearing` catches signals from the first
moment of a command that takes part in a run. Only Ctrl-C (SIGINT) on a terminal asks whether to
save: SIGTERM, SIGHUP and Windows' SIGBREAK come from a shutdown, a batch system or a lost
connection, where nobody can answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

_ONCE_MORE = b"\nhetero: stopping as soon as the current work is done; once more stops at once\n"
_POLL_S = 0.2
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")


STOPPED = 75
"""Exit code of a command that a signal stopped, as errors.StoppedEarly has it."""


@contextlib.contextmanager
def hearing(words: Sequence[str], *, ends: bool = False) -> Iterator[StopRequest | None]:
    """Let a signal end the block in order, with one line on stderr, if `words` are a command that
    takes part in a run. The block begins before the command's modules are imported. A supervised
    worker and other commands get None, and signals keep the system's meaning. If the process `ends`
    with the block, later signals have no effect."""
    if words[:1] not in (["train"], ["worker"], ["serve"]) or "--supervised" in words:
        yield None
        return
    stop = StopRequest(ends=ends)
    try:
        with stop:
            yield stop
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, f"hetero: stopped: by {stop.requested or 'Ctrl-C'}\n".encode())
    finally:
        # After an interruption in text that a class is made of, as dataclasses have, Python ends by
        # SIGINT, whatever the exit code is. Other such text, as here, makes it forget that.
        namedtuple("Forgotten", ())


class StopRequest:
    """Context manager that turns the signals into KeyboardInterrupt or, while `waiting`, into the
    name of the signal in `requested`. `before_question` is called before the user is asked."""

    def __init__(
        self, *, ends: bool = False, before_question: Callable[[], None] = lambda: None
    ) -> None:
        self._ends = ends
        self._before_question = before_question
        self.requested: str | None = None
        self._since = 0.0
        self._waiting = False
        self._asking = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Only the main thread may set handlers; elsewhere (a notebook, a test) signals stay as is.
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, name, None)
                # Under `nohup` SIGHUP is ignored on purpose.
                if number is not None and not (
                    name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN
                ):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._ends else handler)
        self._previous.clear()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the first signal is only noted; the code there looks at `requested`."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def ask(self, by: str) -> None:
        """Request a stop as a first signal does, from any thread."""
        if self.requested is None:
            self._since, self.requested = time.monotonic(), by

    @property
    def waited_s(self) -> float:
        """Seconds since the first request; 0 without one."""
        return time.monotonic() - self._since if self.requested is not None else 0.0

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while self.requested is None and time.monotonic() < deadline:
            time.sleep(min(_POLL_S, seconds))

    def wants_checkpoint(self, question: str) -> bool:
        """Whether to save. The user is asked after Ctrl-C on a terminal; otherwise the answer is
        yes. At the question a second Ctrl-C means no, and any other signal means yes."""
        if self.requested != "SIGINT" or not _is_interactive():
            return True
        self._before_question()
        self._asking = True
        try:
            return input(f"{question} [Y/n] ").strip().lower() not in ("n", "no")
        except EOFError:
            return True
        except KeyboardInterrupt:
            return self.requested != "SIGINT"
        finally:
            self._asking = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, before = signal.Signals(number).name, self.requested
        self._since = self._since if before is not None else time.monotonic()
        self.requested = name
        # SIGTERM after Ctrl-C counts as a first signal, and then the user is not asked.
        is_first = before is None or (before == "SIGINT" and name != "SIGINT")
        if self._asking or not self._waiting or not is_first:
            raise KeyboardInterrupt
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):
            os.write(2, _ONCE_MORE)


def _is_interactive() -> bool:
    try:
        return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    except ValueError:  # closed
        return False
