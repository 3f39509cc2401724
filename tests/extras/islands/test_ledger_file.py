"""docs/maintainers/faults.md: every fault has tests, and they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = re.findall(
    r"^\| F(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$",
    (ROOT / "docs" / "maintainers" / "faults.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


@cache
def names_in(place: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / place).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_of_the_model_is_listed_once():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 41


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"F{row[0]}")
def test_the_tests_of_a_fault_are_there(row):
    named = re.findall(r"`([\w/.]+)::(\w+)`", row[3])
    assert named
    assert row[3].count("`") == 2 * len(named)
    for place, name in named:
        assert name in names_in(place), f"{place} has no {name}"
