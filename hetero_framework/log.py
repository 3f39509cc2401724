"""The package's logging: where lines go, and what a line may contain.

The `extra` of a line may be `event(...)`: the line then goes to events.jsonl too, or only there if
its message is empty. Or it is `said_by(...)`, which limits the lines that a peer causes.

Nothing here ends a process: a line that cannot be written is dropped. For a file, one line says so.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from hetero_framework.file_trust import not_through_links

EVENTS_FILE = "events.jsonl"
MAX_LINE_BYTES = 1024
MAX_PEER_LINES_PER_S = 10
_MAX_TRACEBACK_LINES = 40
_MAX_LISTED = 256
_CUT = " ..."
LOADING = "loading torch and transformers"

_package = logging.getLogger("hetero_framework")
_handlers: tuple[logging.Handler, ...] = ()  # the handlers of the innermost `log_to`
_step: int | None = None
_shown = ""  # the line of `at_work` that a terminal shows now


def printable(text: str, kept: str = "\n\t") -> str:
    """`text` with escapes for characters that could steer a terminal or hide text: control
    characters, marks of writing direction, lone surrogates. Characters in `kept` stay."""
    return "".join(
        char if char in kept or char.isprintable() else ascii(char)[1:-1] for char in text
    )


def one_line(text: str, most: int = MAX_LINE_BYTES, kept: str = "") -> str:
    """`text` as one printable line of at most `most` UTF-8 bytes; several if `kept` has "\\n"."""
    if text.isascii() and text.isprintable() and len(text) <= most:
        return text
    shown = printable(text[: most + 1], kept).encode()
    if len(shown) <= most:
        return shown.decode()
    return shown[: most - len(_CUT)].decode("utf-8", "ignore") + _CUT


def one_lines(value: Any) -> Any:
    """JSON data with each string and each key made one printable line."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, (list, tuple)):
        return [one_lines(item) for item in value]
    if isinstance(value, dict):
        return {one_line(str(key)): one_lines(item) for key, item in value.items()}
    return value


def event(what: str, action: str = "", **fields: Any) -> dict[str, Any]:
    """`extra` for a line that is an event: what happened, what is done about it, and plain fields.
    The event's step is the run's current step unless `fields` has another."""
    return {"event": {"step": _step, "what": what, "action": action, **fields}}


def said_by(peer: str) -> dict[str, Any]:
    """`extra` for a line that holds a peer's words."""
    return {"peer": peer}


def set_step(step: int | None) -> None:
    """Set the step that events belong to from now on."""
    global _step
    _step = step


def current_step() -> int | None:
    """The step that the last `set_step` set."""
    return _step


class Lines(logging.Handler):
    """Hands each record to `write(level, line)`, with its traceback if it has one."""

    def __init__(self, write: Callable[[str, str], object]) -> None:
        super().__init__()
        self._write = write
        self._counts: dict[str, tuple[float, int]] = {}  # by peer: when its second began, lines

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._report_suppressed(now - 1.0)
        peer = getattr(record, "peer", None)
        if peer is not None:
            began, count = self._counts.get(peer, (now, 0))
            self._counts[peer] = (began, count + 1)
            if count >= MAX_PEER_LINES_PER_S:
                return
        lines = [record.getMessage()]
        if record.exc_info:
            lines += "".join(traceback.format_exception(*record.exc_info)).splitlines()
        for text in filter(None, lines[:_MAX_TRACEBACK_LINES]):
            self._write_line(record.levelname, text)

    def close(self) -> None:
        self._report_suppressed(math.inf)
        super().close()

    def _report_suppressed(self, before: float) -> None:
        for peer, (began, count) in list(self._counts.items()):
            if began <= before:
                del self._counts[peer]
                if count > MAX_PEER_LINES_PER_S:
                    more = count - MAX_PEER_LINES_PER_S
                    self._write_line("INFO", f"{peer}: ... {more} more suppressed")

    def _write_line(self, level: str, text: str) -> None:
        with suppress(OSError, ValueError), _aside():  # ValueError: the stream is closed
            self._write(level, one_line(text))


def with_level(level: str, text: str) -> str:
    """A line for a screen: the level stands in front unless it is INFO."""
    return text if level == "INFO" else f"{level.lower()}: {text}"


@contextmanager
def at_work(what: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, show what is done in the block, and remove the line at its end. The given
    function adds how much is done: "12,000 examples"."""
    outer = _shown
    _show(f"{what} ...")
    try:
        yield lambda done: _show(f"{what}: {done}")
    finally:
        _show(outer)


@contextmanager
def _aside() -> Iterator[None]:
    """Take the line of `at_work` away for the block, which writes another line."""
    shown = _shown
    if shown:
        _show("")
    yield
    if shown:
        _show(shown)


def _show(text: str) -> None:
    """Replace the line that the terminal shows."""
    global _shown
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        if sys.stderr.isatty():
            print("\r" + " " * len(_shown), text, sep="\r", end="", file=sys.stderr, flush=True)
            _shown = text


class SlowImports:
    """Finds the libraries whose import takes seconds, and shows a line while they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in ("torch", "transformers", "transformers.modeling_utils", "peft"):
            return None
        if (spec := PathFinder.find_spec(name, path, target)) is not None:
            execute = spec.loader.exec_module  # type: ignore[union-attr]
            vars(spec.loader)["exec_module"] = partial(_shown_import, execute)
        return spec


def _shown_import(execute: Callable[[Any], None], module: Any) -> None:
    gc.disable()  # an import leaves no garbage, and looking for some takes a tenth of its time
    try:
        with at_work(LOADING):
            execute(module)
    finally:
        gc.freeze()  # no later collection looks at these million objects
        gc.enable()


def to_stderr(level: str, text: str) -> None:
    """The `write` of `Lines` for a process without a display."""
    print(with_level(level, text), file=sys.stderr, flush=True)


class LineFile:
    """A file to which lines are appended. `news` is a text about the file, to be logged once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.news = ""
        self._lost = 0
        self._torn = False  # the last line was cut off by a crash or a full disk

    def open(self) -> None:
        """Look at how the file ends."""
        self._torn = _ends_within_a_line(self.path)

    def append(self, line: str) -> None:
        """Append a line. A line that cannot be written is lost."""
        try:
            self._torn = not append_line(self.path, "\n" * self._torn + line)
            reason = os.strerror(errno.ENOSPC) if self._torn else ""
        except OSError as error:
            reason = error.strerror or str(error)
        if not reason and self._lost:
            self.news = f"{self.path} is written again; {self._lost} lines are lost"
        elif reason and not self._lost:
            self.news = (
                f"cannot write {self.path}: {reason}. Its lines are lost until there is room"
            )
        self._lost = self._lost + 1 if reason else 0


class _ToFile(logging.Handler):
    """A handler that writes a file. It logs the file's news after it has released its own lock,
    because logging takes the locks of the other handlers, one after another."""

    file: LineFile

    def handle(self, record: logging.LogRecord) -> bool:
        is_taken = bool(super().handle(record))
        if news := self.file.news:
            self.file.news = ""
            _package.warning("%s", news)
        return is_taken


class FileLines(Lines, _ToFile):
    """Appends lines with their time to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(self._append)
        self.file = LineFile(path)

    def _append(self, level: str, text: str) -> None:
        self.file.append(f"{datetime.now():%Y-%m-%d %H:%M:%S} {level} {text}")


class Events(_ToFile):
    """Appends each record that is an event to `path`, as one JSON object. Events are held until
    `open` or `close`, because a fresh run first moves an earlier run's file away."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__()
        self.file = LineFile(path)
        self._process = process
        self._waiting: list[str] | None = []

    def open(self) -> None:
        waiting, self._waiting = self._waiting or (), None
        self.file.open()
        for line in waiting:
            self.file.append(line)

    def close(self) -> None:
        self.open()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        if (fields := getattr(record, "event", None)) is None:
            return
        when = datetime.fromtimestamp(record.created, UTC)
        line = {"time": when.isoformat(timespec="milliseconds"), "process": self._process}
        line |= {name: _plain(value) for name, value in fields.items()}
        if text := record.getMessage():
            line["text"] = one_line(text, kept="\n")
        if self._waiting is None:
            self.file.append(json.dumps(line))
        else:
            self._waiting.append(json.dumps(line))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value[:_MAX_LISTED]]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return (
        value
        if value is None or isinstance(value, (bool, int))
        else one_line(str(value), kept="\n")
    )


def append_line(path: Path, line: str) -> bool:
    """Append a line in one write, so that several processes may share the file. False when the disk
    had room for only a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = line.encode() + b"\n"
    with open(path, "ab", buffering=0, opener=not_through_links) as file:
        return file.write(data) == len(data)


def _ends_within_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # the file is absent or empty
        return False


def set_level(level: str) -> None:
    """Show lines of this level and above. Events are recorded whatever the level."""
    _package.setLevel(min(logging.INFO, logging.getLevelName(level)))
    for handler in _handlers:
        handler.setLevel(logging.NOTSET if isinstance(handler, Events) else level)


@contextmanager
def log_to(level: str, *handlers: logging.Handler) -> Iterator[None]:
    """Within the block, the package's lines go to `handlers` and to an application's own handlers,
    not to those of a surrounding `log_to` or the root logger. At its end `handlers` are closed."""
    global _handlers
    outer, outer_level, outer_propagate = _handlers, _package.level, _package.propagate
    _replace(outer, handlers)
    _handlers, _package.propagate = handlers, False
    set_level(level)
    try:
        yield
    finally:
        _replace(handlers, outer)
        _handlers, _package.propagate = outer, outer_propagate
        _package.setLevel(outer_level)
        for handler in handlers:
            handler.close()


def _replace(old: Iterable[logging.Handler], new: Iterable[logging.Handler]) -> None:
    for handler in old:
        _package.removeHandler(handler)
    for handler in new:
        _package.addHandler(handler)
