"""JSON: a list of objects in one of several forms, read part by part."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hetero_framework.data.files.json_lines import parse, record, skip
from hetero_framework.data.sources import MAX_LINE_BYTES, Record, reading, shorten
from hetero_framework.errors import DataError

_NOT_UTF_8 = re.compile("[\udc80-\udcff]")
_CHUNK = 2**16
_CUT = 16  # characters at the end of a text that may begin a value
_HINT = 'write [{"text": "..."}, ...], {"data": [...]}, or one object per line (.jsonl)'


def records(path: Path) -> Iterator[Record]:
    """Read a list of objects, {"data": [...]}, one object, or JSON Lines under the name .json."""
    with reading(path) as file:
        text = _JsonText(path, file)
        if text.next() not in ("[", "{", ""):
            found = shorten(text.rest)
            raise DataError(f"{path}: expected a list of objects, found: {found}", hint=_HINT)
        if text.next() == "[":
            yield from _items(text)
        while text.next() == "{" and not text.had_list:
            yield from _object(text)
        if text.next():
            what = "more follows the list" if text.had_list else "more follows the objects"
            raise DataError(f"{text.where}: not JSON, {what}: {shorten(text.rest)}")


class _JsonText:
    """The text of a file from a place on; the place moves through the file as values are taken."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        # Bytes that are not UTF-8 pass through here, so that the error can name their line.
        self._file = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        self._path, self._text, self._index, self._line = path, "", 0, 1
        self._before = 0  # characters of the first line before the text
        self.taken = 0
        self.had_list = False

    @property
    def where(self) -> str:
        return self._at(self._index)

    @property
    def rest(self) -> str:
        return self._text[self._index : self._index + 1000]

    def next(self) -> str:
        """The next character that is no space, without taking it; "" at the end."""
        while True:
            self._go(skip(self._text, self._index))
            if self._index < len(self._text) or not self._more():
                return self._text[self._index : self._index + 1]

    def take(self, wanted: str) -> None:
        """Take one of the wanted characters. Raises DataError for any other."""
        if self.next() not in tuple(wanted):
            expected = " or ".join(map(repr, wanted))
            text = f"{self.where}: not JSON, expected {expected} at: {shorten(self.rest)}"
            raise DataError(text)
        self._go(self._index + 1)

    def value(self) -> Any:
        """Take the value that begins here."""
        self.next()
        while True:
            try:
                value, end = parse(self._text, self._index, self._at, None, self._before)
            except DataError as error:
                why = error.__cause__
                is_cut = isinstance(why, json.JSONDecodeError) and (
                    why.msg.startswith("Unterminated") or why.pos > len(self._text) - _CUT
                )
                if not (is_cut and self._more()):
                    raise
            else:
                if end + 2 < len(self._text) or not self._more():  # "1." or "1e-" may go on
                    self._go(end)
                    return value

    def check(self, length: int, where: str) -> None:
        """Raise DataError for an example longer than a line of JSON Lines may be."""
        if length > MAX_LINE_BYTES:
            text = f"{where}: the object is longer than {MAX_LINE_BYTES >> 20} MiB"
            raise DataError(text, hint=_HINT)

    def _at(self, place: int) -> str:
        return f"{self._path}:{self._line + self._text.count(chr(10), self._index, place)}"

    def _go(self, to: int) -> None:
        self._line += self._text.count("\n", self._index, to)
        self.taken += to - self._index
        self._index = to

    def _more(self) -> bool:
        """Read more of the file; False at its end."""
        held = self._text[self._index :]
        self.check(len(held), self.where)
        if not (found := self._file.read(max(_CHUNK, len(held)))):
            return False
        if (wrong := _NOT_UTF_8.search(found)) is not None:
            line = self._line + held.count("\n") + found.count("\n", 0, wrong.start())
            text = f"{self._path}:{line}: there is a byte that is not valid UTF-8"
            raise DataError(text, hint="save the file as UTF-8")
        newline = self._text.rfind("\n", 0, self._index)
        self._before = self._index - newline - 1 + self._before * (newline < 0)
        self._text, self._index = held + found, 0
        return True


def _items(text: _JsonText) -> Iterator[Record]:
    text.take("[")
    text.had_list = True
    while text.next() != "]":
        where, shown = text.where, text.rest
        yield record(where, text.value(), shown)
        if text.next() == "]":
            break
        text.take(",]")
        if text.next() == "]":
            raise DataError(f"{text.where}: not JSON, a comma before the closing bracket")
        if not text.next():
            raise DataError(f"{text.where}: not JSON, the list does not end")
    text.take("]")


def _object(text: _JsonText) -> Iterator[Record]:
    """Take the object that begins here: itself, or the items of its list "data"."""
    where, begun = text.where, text.taken
    fields: dict[str, Any] = {}
    text.take("{")
    while text.next() != "}":
        if fields:
            text.take(",}")
        text.next()
        place = text.where
        if not isinstance(key := text.value(), str):
            raise DataError(f"{place}: not JSON, a key must be a text: {shorten(str(key))}")
        if key in fields:
            what = f'{key}: the key "{key}" is given twice in one object; keep one'
            raise DataError(f"{place}: {what}")
        text.take(":")
        fields[key] = None
        if key == "data" and text.next() == "[":
            yield from _items(text)
            begun = text.taken
            continue
        fields[key] = text.value()
        text.check(text.taken - begun, where)
    text.take("}")
    if not text.had_list:
        yield Record(where, fields)
