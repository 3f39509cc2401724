"""Comma- and tab-separated text (RFC 4180): a header, then rows whose cells are text."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from hetero_framework.data.sources import MAX_LINE_BYTES, Numeric, Record, lines, listed, shorten
from hetero_framework.errors import DataError

_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
# What pandas, and with it `datasets`, reads as a number.
_FORMS = {
    "whole": re.compile(r"\s*[+-]?\d{1,300}\s*", re.ASCII),
    "decimal": re.compile(
        r"\s*[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf(inity)?)\s*", re.ASCII | re.IGNORECASE
    ),
}
_TRUTHS = {"true": True, "false": False}


def _records(path: Path, numeric: Numeric, separator: str) -> Iterator[Record]:
    """The rows as objects of texts, an empty cell as an empty text; a column of `numeric` is typed.
    Raises DataError, with the line, for rows of another length than the header's."""
    header: list[str] = []
    typed: dict[str, Callable[[str], Any]] = {}
    for line, row in _rows(path, separator):
        where = f"{path}:{line}"
        if not header:
            header = _header(where, row, separator)
            for name in filter(header.__contains__, numeric.columns):
                typed[name] = _type(path, separator, name, header.index(name), numeric)
                if typed[name] is not _nothing:
                    break
            continue
        if len(row) != len(header):
            raise DataError(
                f"{where}: a row of {len(row)} cells under a header of {len(header)}"
                f" ({listed(header)})",
                hint=f'a cell with a {_SEPARATORS[separator]}, a line break or a " in it'
                ' stands between ", and a " in it is written twice',
            )
        fields: dict[str, Any] = dict(zip(header, row, strict=True))
        fields |= {name: value_of(fields[name]) for name, value_of in typed.items()}
        yield Record(where, fields)


commas = partial(_records, separator=",")
tabs = partial(_records, separator="\t")


def _rows(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line and the cells of each row that has cells. Raises DataError for a
    row that is not closed or longer than a line may be."""
    begun = taken = 0
    hint = 'a cell of it begins with a " that is not closed, or the file is no table'

    def fed() -> Iterator[str]:
        nonlocal begun, taken
        for number, line in lines(path, newline="", hint=hint):
            if not begun and separator not in line and not line.strip(" \t\r\n"):
                continue  # as in pandas
            begun, taken = begun or number, taken + len(line)
            if taken > MAX_LINE_BYTES:
                size = MAX_LINE_BYTES >> 20
                raise DataError(f"{path}:{begun}: the row is longer than {size} MiB", hint=hint)
            yield line

    csv.field_size_limit(MAX_LINE_BYTES)
    try:
        for row in csv.reader(fed(), delimiter=separator, strict=True):
            if row:
                yield begun, row
            begun = taken = 0
    except csv.Error as error:
        raise DataError(f"{path}:{begun}: {error}", hint=hint) from error


def _header(where: str, row: list[str], separator: str) -> list[str]:
    """The names of columns. A column without a name at the start is pandas' index, and gets the
    name under which pandas reads it. Raises DataError for a line that is no header."""
    used = _SEPARATORS[separator]
    for other, name in _SEPARATORS.items():
        if len(row) == 1 and other != separator and other in row[0]:
            raise DataError(
                f"{where}: the header is one cell, {shorten(row[0])!r}: the cells seem to be"
                f" separated by a {name}, not by a {used}",
                hint=f"save the table with a {used} between cells"
                + (", or call the file .tsv" if name == "tab" else ""),
            )
    names = [name.strip() for name in row]
    if any(names):
        for number in range(len(list(takewhile(lambda name: not name, names)))):
            free = (f"Unnamed: {number}" + f".{k}" * (k > 0) for k in count())
            names[number] = next(name for name in free if name not in names)
    if "" in names:
        raise DataError(
            f"{where}: the first line has to name the columns, and column"
            f" {names.index('') + 1} has no name",
            hint="add a header: text, or prompt and completion, between separators",
        )
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DataError(f"{where}: two columns are called {shorten(name)!r}", hint="rename one")
    return names


def _type(
    path: Path, separator: str, name: str, at: int, numeric: Numeric
) -> Callable[[str], bool | float | str | None]:
    """The function that makes a value of a column's cell. Raises DataError for the first cell that
    is of another kind than the others."""
    first: dict[str, tuple[str, str]] = {}
    are_names = bool(numeric.names)
    for line, row in islice(_rows(path, separator), 1, None):
        if at < len(row):
            first.setdefault(_kind(row[at]), (f"{path}:{line}", row[at]))
            are_names = are_names and row[at] in numeric.names
    kinds = first.keys()
    if are_names and kinds == {"truth"}:
        return str
    odd = [first[kind] for kind in ("name", "empty") if kind in kinds]
    if kinds == {"empty"}:
        return _nothing
    if numeric.or_names and "name" in kinds and not kinds & {"whole", "decimal"}:
        return str
    if odd or ("truth" in kinds and len(kinds) > 1):
        *_, (where, cell) = odd[:1] or first.values()
        others = [f"{found!r} ({there})" for there, found in first.values() if found != cell]
        text = f"{where}: {name} is {cell[:60]!r}, and not a number or true or false"
        if others:
            text = f"{where}: {name} is {cell[:60]!r}, unlike {others[0]}"
        raise DataError(
            text,
            hint="cells of a table are texts, and a column is read as numbers where all of its"
            " cells are, or as true and false; a .jsonl file tells texts from numbers",
        )
    if "truth" in kinds:
        return lambda cell: _TRUTHS[cell.lower()]
    return float if "decimal" in kinds else int


def _nothing(cell: str) -> None:
    """The value of each cell of an empty column."""


def _kind(cell: str) -> str:
    if not cell or cell.lower() in _TRUTHS:
        return "truth" if cell else "empty"
    return next((kind for kind, form in _FORMS.items() if form.fullmatch(cell)), "name")
