"""Comma- and tab-separated text (RFC 4180): a header, then rows whose cells are text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hetero_framework.data.sources import MAX_LINE_BYTES, Record, listed, reading, shorten
from hetero_framework.errors import DataError

_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}


def _records(path: Path, separator: str) -> Iterator[Record]:
    """The rows as objects of texts; an empty cell is an empty text. Raises DataError, with the
    line, for rows of another length than the header's."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with reading(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows = csv.reader(text, delimiter=separator, strict=True)
        try:
            header = next(rows, [])
            _check_header(path, header, separator)
            for row in rows:
                if not row:
                    continue  # a blank line
                where = f"{path}:{rows.line_num}"
                if len(row) != len(header):
                    raise DataError(
                        f"{where}: a row of {len(row)} cells under a header of {len(header)}"
                        f" ({listed(header)})",
                        hint=f'a cell with a {_SEPARATORS[separator]}, a line break or a " in it'
                        ' stands between ", and a " in it is written twice',
                    )
                yield Record(where, dict(zip(header, row, strict=True)))
        except csv.Error as error:
            raise DataError(
                f"{path}:{rows.line_num}: {error}",
                hint='the cell begins with a " that is not closed, or is longer than'
                f" {MAX_LINE_BYTES >> 20} MiB",
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: behind line {rows.line_num} there are bytes that are not valid UTF-8",
                hint="save the file as UTF-8",
            ) from error


commas = partial(_records, separator=",")
tabs = partial(_records, separator="\t")


def _check_header(path: Path, header: list[str], separator: str) -> None:
    """Raise DataError for a first line that is no header."""
    used = _SEPARATORS[separator]
    for other, name in _SEPARATORS.items():
        if len(header) == 1 and other != separator and other in header[0]:
            raise DataError(
                f"{path}:1: the header is one cell, {shorten(header[0])!r}: the cells seem to be"
                f" separated by a {name}, not by a {used}",
                hint=f"save the table with a {used} between cells"
                + (", or call the file .tsv" if name == "tab" else ""),
            )
    if not header or not all(name.strip() for name in header):
        raise DataError(
            f"{path}:1: the first line has to name the columns, and one has no name",
            hint="add a header: text, or prompt and completion, between separators",
        )
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path}:1: two columns are called {shorten(twice)!r}", hint="rename one")
