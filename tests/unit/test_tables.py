"""Tables fit the terminal, and lose nothing where they do not."""

from __future__ import annotations

import pytest

from hetero_framework import tables
from hetero_framework.tables import table

HEAD = ("process", "machine", "device", "layers", "memory needed")
ROWS = [
    ("coordinator", "localhost, 127.0.0.1 port 29500", "cpu", "embedding + 0-1", "201 MiB"),
    ("worker 1", "a-very-long-host.example.com port 9999", "cuda:0", "2-3, 8-9", "3.20 GiB"),
]


def at_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setattr(tables, "terminal_width", lambda: columns)
    return table(HEAD, ROWS, left=(0, 1, 2, 3))


def test_into_a_pipe_each_row_is_one_line():
    lines = table(HEAD, ROWS, left=(0, 1, 2, 3))
    assert len(lines) == 3
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[1].split("  ")[0] == "coordinator"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_on_a_terminal_a_table_is_folded_without_loss(monkeypatch, columns):
    lines = at_width(monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    shown = "".join("".join(lines).split())
    for row in ROWS:
        for cell in row:
            assert set(cell.replace(" ", "")) <= set(shown)
    # Numbers and names of processes stay whole.
    for whole in ("coordinator", "201 MiB", "3.20 GiB", "cuda:0"):
        assert any(whole in line for line in lines)


def test_a_table_that_cannot_shrink_is_wider_than_the_terminal(monkeypatch):
    assert any("3.20 GiB" in line for line in at_width(monkeypatch, 20))
