"""Text: a line is an example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetero_framework.data.sources import Record, lines


def records(path: Path) -> Iterator[Record]:
    for number, line in lines(path, newline=None):
        yield Record(f"{path}:{number}", {"text": line})
