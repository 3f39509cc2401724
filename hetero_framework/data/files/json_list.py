"""JSON: a list of objects in one of several forms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hetero_framework.data.files.json_lines import LineCounter, parse, record, skip
from hetero_framework.data.sources import BOM, Record, decode, reading, shorten
from hetero_framework.errors import DataError

_DATA_LIST = re.compile(r'\{\s*"data"\s*:\s*\[')


def records(path: Path) -> Iterator[Record]:
    """A list of objects, {"data": [...]}, one object, or JSON Lines under the name .json."""
    with reading(path) as file:
        text = decode(file.read().removeprefix(BOM), str(path))
    start = skip(text, 0)
    wrapped = _DATA_LIST.match(text, start)
    if wrapped is not None:
        start = wrapped.end() - 1
    if start < len(text) and text[start] not in "[{":
        raise DataError(
            f"{path}: expected a list of objects, found: {shorten(text[start:])}",
            hint='write [{"text": "..."}, ...], {"data": [...]}, or one object per line (.jsonl)',
        )
    return _json_items(path, text, start, wrapped is not None)


def _json_items(path: Path, text: str, start: int, wrapped: bool) -> Iterator[Record]:
    """The objects of the list at `start`, which may be `wrapped` in an object, or those that follow
    one another, one at a time."""
    line = LineCounter(path, text)
    in_list = text.startswith("[", start)
    index = skip(text, start + in_list)
    while index < len(text) and not (in_list and text.startswith("]", index)):
        value, end = parse(text, index, line.at)
        if not in_list and isinstance(value, dict) and isinstance(value.get("data"), list):
            for number, item in enumerate(value["data"], 1):
                yield record(f"{path}: item {number}", item, str(item))
        else:
            yield record(line.at(index), value, text[index:end])
        index = skip(text, end)
        if not in_list or text.startswith("]", index):
            continue
        if not text.startswith(",", index):
            raise DataError(
                f"{line.at(index)}: not JSON, expected ',' or ']' at: {shorten(text[index:])}"
            )
        index = skip(text, index + 1)
        if text.startswith("]", index):
            raise DataError(f"{line.at(index)}: not JSON, a comma before the closing bracket")
    if in_list and index >= len(text):
        raise DataError(f"{line.at(len(text))}: not JSON, the list does not end")
    if in_list:
        _check_end(text, skip(text, index + 1), wrapped, line)


def _check_end(text: str, index: int, wrapped: bool, line: LineCounter) -> None:
    """DataError where more examples may follow a list: text behind it is not read."""
    rest, where = text[index:], line.at(index)
    if wrapped and rest.startswith((",", "}")):  # the other keys of {"data": [...], ...}
        others, end = parse("{" + rest.removeprefix(","), 0, lambda _: where)
        if "data" in others:
            raise DataError(f'{where}: the key "data" is given twice; keep one')
        rest = ("{" + rest.removeprefix(","))[end:]
    if rest.strip():
        raise DataError(f"{where}: not JSON, more follows the list: {shorten(rest)}")
