"""Time that islands spend waiting for slower ones."""

from __future__ import annotations

from hetero_framework.extras.islands.wait_times import for_others


def test_all_islands_wait_for_the_last_one() -> None:
    assert for_others({"a": 10.0, "b": 12.5, "c": 12.0}) == {"a": 2.5, "b": 0.0, "c": 0.5}


def test_a_single_island_waits_for_no_other() -> None:
    assert for_others({"a": 10.0}) == {"a": 0.0}
