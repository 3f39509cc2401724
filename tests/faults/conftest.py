"""The figures of `make faults`; see report.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults import report


@pytest.fixture
def figure(request):
    """Add a row (what, reached, goal) to the table."""

    def add(what: str, reached: str, goal: str) -> None:
        report.add(request.node.user_properties, what, reached, goal)

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    outcomes = ("passed", "failed")
    reports = [r for o in outcomes for r in terminalreporter.stats.get(o, []) if r.when == "call"]
    if rows := report.rows(reports):
        terminalreporter.section("figures")
        for line in report.table(rows):
            terminalreporter.write_line(line)
