from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.extras.islands.shares import apportion, round_steps

NAMES = st.text("abcdef", min_size=1, max_size=3)
SHARES = st.dictionaries(NAMES, st.floats(1e-3, 1e3), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("count", "shares", "dealt"),
    [
        (32, {"a": 6, "b": 2}, {"a": 24, "b": 8}),
        (10, {"a": 1, "b": 1, "c": 1}, {"a": 4, "b": 3, "c": 3}),
        (10, {"c": 1, "b": 1, "a": 1}, {"a": 4, "b": 3, "c": 3}),
        (7, {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 4, "b": 2, "c": 1}),
        (3, {"fast": 100, "slow": 1}, {"fast": 3, "slow": 0}),
        (0, {"a": 1, "b": 2}, {"a": 0, "b": 0}),
    ],
)
def test_things_are_dealt_by_largest_remainder(
    count: int, shares: dict[str, float], dealt: dict[str, int]
) -> None:
    assert apportion(count, shares) == dealt


def test_shares_below_the_least_are_raised_to_it() -> None:
    shares = {"a": 97.0, "b": 1.0, "c": 2.0}
    assert apportion(20, shares) == {"a": 20, "b": 0, "c": 0}
    assert apportion(20, shares, least=1) == {"a": 18, "b": 1, "c": 1}
    assert apportion(20, shares, least=4) == {"a": 12, "b": 4, "c": 4}


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_shares_of_nothing_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot be dealt"):
        apportion(4, shares)


@given(SHARES, st.integers(0, 500), st.integers(0, 4))
def test_apportioned_numbers_add_up_and_are_off_by_less_than_one(
    shares: dict[str, float], count: int, least: int
) -> None:
    count += least * len(shares)
    dealt = apportion(count, shares, least)
    assert list(dealt) == sorted(shares)
    assert sum(dealt.values()) == count
    assert min(dealt.values()) >= least
    if least == 0:
        whole = sum(map(Fraction, shares.values()))
        for name, got in dealt.items():
            assert abs(got - count * Fraction(shares[name]) / whole) < 1
    reversed_names = dict(sorted(shares.items(), reverse=True))
    assert apportion(count, reversed_names, least) == dealt


def test_a_fast_island_takes_more_steps_and_a_slow_one_enough_of_a_round() -> None:
    assert round_steps(20, {"a": 1.0, "b": 1.0}) == {"a": 20, "b": 20}
    assert round_steps(30, {"fast": 2.0, "slow": 1.0}) == {"fast": 40, "slow": 20}
    assert round_steps(20, {"fast": 99.0, "slow": 1.0}, fragments=2, delay_steps=2) == {
        "fast": 34,
        "slow": 6,
    }
