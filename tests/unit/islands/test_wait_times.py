"""Whom islands wait for."""

from __future__ import annotations

from hetero_framework.islands.wait_times import for_others


def test_all_wait_for_the_last_one_and_that_one_for_nobody() -> None:
    assert for_others({"a": 10.0, "b": 12.5, "c": 12.0}) == {"a": 2.5, "b": 0.0, "c": 0.5}


def test_who_is_alone_waits_for_nobody() -> None:
    assert for_others({"a": 10.0}) == {"a": 0.0}
