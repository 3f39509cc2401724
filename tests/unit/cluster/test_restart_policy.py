from __future__ import annotations

from itertools import accumulate

import pytest

from hetero_framework.cluster.restart_policy import MAX_DEATHS, RestartPolicy
from hetero_framework.core.timeouts import DEATHS_S


def pauses(*deaths_s: float) -> list[float | None]:
    policy = RestartPolicy()
    return [policy.died(at) for at in deaths_s]


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer() -> None:
    assert pauses(100.0, 101.0, 103.0, 106.0) == [0.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("between_s", [0.0, 1.0, DEATHS_S / (MAX_DEATHS - 1)])
def test_five_deaths_within_ten_minutes_are_too_many(between_s: float) -> None:
    found = pauses(*(7.0 + between_s * k for k in range(5)))
    assert None not in found[:4]
    assert found[4] is None


def test_further_deaths_after_too_many_are_too_many() -> None:
    assert pauses(*([1.0] * 7))[4:] == [None] * 3


def test_rarer_deaths_are_never_too_many_and_cost_short_pauses_only() -> None:
    """As where a machine loses its worker every few minutes, for days."""
    found = pauses(*(160.0 * k for k in range(2000)))
    assert found[:4] == [0.0, 1.0, 2.0, 4.0]
    assert set(found[4:]) == {4.0}


def test_ten_minutes_without_a_death_begin_anew() -> None:
    times = accumulate([0.0, 1.0, 1.0, DEATHS_S + 1.0, 1.0])
    assert pauses(*times) == [0.0, 1.0, 2.0, 0.0, 1.0]
