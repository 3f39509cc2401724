"""The table at the end of `make faults`: what was measured, what was reached, and the goal.

A test adds a row through the fixture `figure` of this directory's conftest:

    def test_something(figure) -> None:
        ...
        figure("slow readers", f"{grown_mb:.0f} MB more", "2 frames per worker")

Rows appear in the order of the tests, failed ones marked. They travel as properties of the test's
report, so that they are there under xdist, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HEAD = ("what", "reached", "goal")
_PROPERTY = "figure"
Row = tuple[str, str, str]


def add(properties: list[tuple[str, Any]], what: str, reached: str, goal: str) -> None:
    properties.append((_PROPERTY, (what, reached, goal)))


def rows(reports: Iterable[Any]) -> list[Row]:
    """Of the reports of tests that ran (pytest's, of the phase "call")."""
    found = []
    for report in reports:
        for name, row in report.user_properties:
            if name == _PROPERTY:
                what, reached, goal = row
                found.append((what, reached if report.passed else f"FAILED: {reached}", goal))
    return found


def table(rows: Iterable[Row]) -> list[str]:
    """The lines of the table, its columns as wide as they need."""
    lines = [HEAD, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return [text[0], "  ".join("-" * width for width in widths), *text[1:]]
