"""JSON Lines: a line is an object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetero_framework.config.strict_json import json_type, repeated_keys
from hetero_framework.data.sources import ONE_A_LINE, Record, lines, shorten
from hetero_framework.errors import DataError

_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def records(path: Path) -> Iterator[Record]:
    for number, line in lines(path, hint=ONE_A_LINE):
        if line.strip():
            where = f"{path}:{number}"
            start = skip(line, 0)
            if line.startswith("[", start):
                raise _not_an_object(where, "a list", line, ONE_A_LINE)
            value, end = parse(line, start, _at(where), ONE_A_LINE)
            if (rest := skip(line, end)) < len(line):
                raise DataError(
                    f"{where}: not JSON after column {end}: {shorten(line[rest:])}", hint=ONE_A_LINE
                )
            yield record(where, value, line)


def _at(where: str) -> Callable[[int], str]:
    return lambda position: where


class _RepeatedKeyError(ValueError):
    """An object has one key twice, so one of the two values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _RepeatedKeyError
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def parse(
    text: str, index: int, where: Callable[[int], str], hint: str | None = None, before: int = 0
) -> tuple[Any, int]:
    """The JSON value that begins at `index`, and where it ends. `before` is the number of
    characters that stand before `text` on its first line; errors count them in the column."""
    try:
        return _DECODER.raw_decode(text, index)
    except _RepeatedKeyError as error:
        path = repeated_keys(text, index)[0]
        key = re.split(r"[.\]]", path)[-1]
        raise DataError(
            f'{where(index)}: {path}: the key "{key}" is given twice in one object; keep one'
        ) from error
    except json.JSONDecodeError as error:
        what, column = error.msg.removesuffix(" at"), error.colno + before * (error.lineno == 1)
        raise DataError(
            f"{where(error.pos)}: not JSON ({what} at column {column}): {shorten(text[index:])}",
            hint=hint,
        ) from error
    except (RecursionError, ValueError) as error:
        # ValueError: a number of more digits than Python converts.
        raise DataError(
            f"{where(index)}: too deep or too long a value: {shorten(text[index:])}"
        ) from error


def json_value(text: str, where: str) -> Any:
    """The JSON value that `text` is. Raises DataError as for a line of a file."""
    value, end = parse(text, skip(text, 0), _at(where))
    if skip(text, end) < len(text):
        raise DataError(f"{where}: not JSON after column {end}: {shorten(text[end:])}")
    return value


def record(where: str, value: Any, shown: str) -> Record:
    if not isinstance(value, dict):
        hint = 'an example is an object with named fields, such as {"text": "..."}'
        raise _not_an_object(where, json_type(value), shown, hint)
    return Record(where, value)


def _not_an_object(where: str, kind: str, shown: str, hint: str) -> DataError:
    return DataError(f"{where}: expected a JSON object, found {kind}: {shorten(shown)}", hint=hint)


def skip(text: str, index: int) -> int:
    return _JSON_SPACE.match(text, index).end()  # type: ignore[union-attr]
