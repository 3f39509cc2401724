"""The table of figures has every row, with the failed ones marked."""

from __future__ import annotations

from types import SimpleNamespace

from tests.faults import report


def ran(*rows: tuple[str, str, str], passed: bool = True) -> SimpleNamespace:
    properties: list = [("other", 1)]
    for row in rows:
        report.add(properties, *row)
    return SimpleNamespace(user_properties=properties, passed=passed)


def test_rows_of_all_tests_are_in_the_table():
    reports = [
        ran(("frames", "2 million", "2 million"), ("memory", "+1 MB", "+10 MB")),
        ran(),
        ran(("speed", "1.3", "1.1"), passed=False),
    ]
    assert report.table(report.rows(reports)) == [
        "what    reached      goal",
        "------  -----------  ---------",
        "frames  2 million    2 million",
        "memory  +1 MB        +10 MB",
        "speed   FAILED: 1.3  1.1",
    ]
