from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.errors import ConfigError
from hetero_framework.extras.islands.shares import (
    GAIN,
    STEPS,
    Shares,
    apportion,
    given_shares,
    round_steps,
)

NAMES = st.text("abcdef", min_size=1, max_size=3)
SHARES = st.dictionaries(NAMES, st.floats(1e-3, 1e3), min_size=1, max_size=6)
EQUAL = Shares({"fast": 1.0, "slow": 1.0})
TWO_TO_ONE = {"fast": 1.0, "slow": 2.0}


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
def test_things_are_dealt_by_largest_remainder(count, shares, dealt):
    assert apportion(count, shares) == dealt


def test_shares_below_the_least_are_raised_to_it():
    shares = {"a": 97.0, "b": 1.0, "c": 2.0}
    assert apportion(20, shares) == {"a": 20, "b": 0, "c": 0}
    assert apportion(20, shares, least=1) == {"a": 18, "b": 1, "c": 1}
    assert apportion(20, shares, least=4) == {"a": 12, "b": 4, "c": 4}


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_shares_of_nothing_are_refused(shares):
    with pytest.raises(ValueError, match="cannot be dealt"):
        apportion(4, shares)


@given(SHARES, st.integers(0, 500), st.integers(0, 4))
def test_apportioned_numbers_add_up_and_are_off_by_less_than_one(shares, count, least):
    count += least * len(shares)
    dealt = apportion(count, shares, least)
    assert list(dealt) == sorted(shares)
    assert sum(dealt.values()) == count
    assert min(dealt.values()) >= least
    if least == 0:
        whole = sum(map(Fraction, shares.values()))
        for name, got in dealt.items():
            assert abs(got - count * Fraction(shares[name]) / whole) < 1
    assert apportion(count, dict(sorted(shares.items(), reverse=True)), least) == dealt


def test_a_fast_island_takes_more_steps_and_a_slow_one_enough_of_a_round():
    assert round_steps(20, {"a": 1.0, "b": 1.0}) == {"a": 20, "b": 20}
    assert round_steps(30, {"fast": 2.0, "slow": 1.0}) == {"fast": 40, "slow": 20}
    assert round_steps(20, {"fast": 99.0, "slow": 1.0}, fragments=2, delay_steps=2) == {
        "fast": 34,
        "slow": 6,
    }


def step_s(shares: Shares, seconds: dict[str, float], count: int) -> float:
    return max(n * seconds[name] for name, n in apportion(count, shares.of).items())


def test_given_shares_are_kept_and_auto_is_for_all_or_none():
    assert given_shares({"a": 6, "b": 2.5}) == {"a": 6.0, "b": 2.5}
    assert given_shares({"a": "auto", "b": "auto"}) is None
    with pytest.raises(ConfigError, match='is a number of b, c and "auto" of a'):
        given_shares({"c": 1, "a": "auto", "b": 2})


def test_shares_by_speeds_of_two_to_one_gain_a_half():
    tuned = EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS)
    assert apportion(96, tuned.of) == {"fast": 64, "slow": 32}
    assert tuned.taken_at == STEPS
    assert step_s(EQUAL, TWO_TO_ONE, 96) / step_s(tuned, TWO_TO_ONE, 96) == 1.5


def test_shares_stay_for_a_while_and_unless_others_gain_enough():
    assert EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS - 1) is EQUAL
    assert EQUAL.tuned({"fast": 1.0, "slow": 1.1}, count=96, done=STEPS) is EQUAL
    tuned = EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS)
    assert tuned.tuned({"fast": 2.0, "slow": 1.0}, count=96, done=2 * STEPS - 1) is tuned
    assert tuned.tuned({"fast": 2.0, "slow": 1.0}, count=96, done=2 * STEPS) is not tuned
    # An island whose speed swings about a mean does not make them swing.
    shares, changes = tuned, 0
    for step in range(2 * STEPS, 40 * STEPS):
        swing = 1.9 if step % 2 else 2.1
        new = shares.tuned({"fast": 1.0, "slow": swing}, count=96, done=step)
        changes, shares = changes + (new is not shares), new
    assert changes == 0


def test_a_gain_lost_by_rounding_to_samples_does_not_count():
    """Of three samples the fast one gets two anyway."""
    shares = Shares({"fast": 6.0, "slow": 4.0})
    assert shares.tuned({"fast": 1.0, "slow": 1.6}, count=3, done=STEPS) is shares
    assert shares.tuned({"fast": 1.0, "slow": 7.0}, count=3, done=STEPS) is not shares


def test_new_members_count_as_average_until_measured():
    shares = Shares({"a": 3.0, "b": 1.0}, taken_at=40)
    assert shares.for_members(["c", "a", "b"]) == Shares({"a": 3.0, "b": 1.0, "c": 2.0}, 40)
    assert shares.for_members(["b"]) == Shares({"b": 1.0}, 40)
    assert Shares().for_members(["y", "x"]) == Shares({"x": 1.0, "y": 1.0})
    joined = shares.for_members(["a", "b", "c"])
    tuned = joined.tuned({"a": 1.0, "b": 1.0, "gone": 9.0}, count=60, done=100)
    assert tuned.of == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert joined.tuned({"a": 1.0}, count=60, done=100) is joined


def test_state_is_json_and_says_all():
    shares = EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS)
    assert Shares.load_state_dict(json.loads(json.dumps(shares.state_dict()))) == shares


SECONDS = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-3, 1e3), min_size=1)


@given(SECONDS, st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1))
def test_other_shares_are_taken_only_where_they_gain(seconds, before):
    shares = Shares({name: before.get(name, 1.0) for name in seconds})
    tuned = shares.tuned(seconds, count=1000, done=STEPS)
    if tuned is not shares:
        now_s, then_s = (step_s(s, seconds, 1000) for s in (tuned, shares))
        assert now_s <= (1 - GAIN) * then_s
        assert tuned.tuned(seconds, count=1000, done=10 * STEPS) is tuned
