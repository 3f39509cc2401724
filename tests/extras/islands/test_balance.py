from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.errors import ConfigError
from hetero_framework.extras.islands.balance import GAIN, STEPS, Shares, given_shares
from hetero_framework.extras.islands.shares import apportion

EQUAL = Shares({"fast": 1.0, "slow": 1.0})
TWO_TO_ONE = {"fast": 1.0, "slow": 2.0}


def step_s(shares: Shares, seconds: dict[str, float], count: int) -> float:
    return max(n * seconds[name] for name, n in apportion(count, shares.of).items())


def test_given_shares_are_kept_and_auto_is_for_all_or_none() -> None:
    assert given_shares({"a": 6, "b": 2.5}) == {"a": 6.0, "b": 2.5}
    assert given_shares({"a": "auto", "b": "auto"}) is None
    with pytest.raises(ConfigError, match='is a number of b, c and "auto" of a'):
        given_shares({"c": 1, "a": "auto", "b": 2})


def test_shares_by_speeds_of_two_to_one_gain_a_half() -> None:
    tuned = EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS)
    assert apportion(96, tuned.of) == {"fast": 64, "slow": 32}
    assert tuned.taken_at == STEPS
    assert step_s(EQUAL, TWO_TO_ONE, 96) / step_s(tuned, TWO_TO_ONE, 96) == 1.5


def test_shares_stay_for_a_while_and_unless_others_gain_enough() -> None:
    assert EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS - 1) is EQUAL
    little = {"fast": 1.0, "slow": 1.1}
    assert EQUAL.tuned(little, count=96, done=STEPS) is EQUAL
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


def test_a_gain_lost_by_rounding_to_samples_does_not_count() -> None:
    """Of three samples the fast one gets two anyway."""
    shares = Shares({"fast": 6.0, "slow": 4.0})
    assert shares.tuned({"fast": 1.0, "slow": 1.6}, count=3, done=STEPS) is shares
    assert shares.tuned({"fast": 1.0, "slow": 7.0}, count=3, done=STEPS) is not shares


def test_new_members_count_as_average_until_measured() -> None:
    shares = Shares({"a": 3.0, "b": 1.0}, taken_at=40)
    assert shares.for_members(["c", "a", "b"]) == Shares({"a": 3.0, "b": 1.0, "c": 2.0}, 40)
    assert shares.for_members(["b"]) == Shares({"b": 1.0}, 40)
    assert Shares().for_members(["y", "x"]) == Shares({"x": 1.0, "y": 1.0})
    joined = shares.for_members(["a", "b", "c"])
    tuned = joined.tuned({"a": 1.0, "b": 1.0, "gone": 9.0}, count=60, done=100)
    assert tuned.of == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert joined.tuned({"a": 1.0}, count=60, done=100) is joined


def test_state_is_json_and_says_all() -> None:
    shares = EQUAL.tuned(TWO_TO_ONE, count=96, done=STEPS)
    again = Shares.load_state_dict(json.loads(json.dumps(shares.state_dict())))
    assert again == shares


SECONDS = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-3, 1e3), min_size=1)


@given(SECONDS, st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1))
def test_other_shares_are_taken_only_where_they_gain(
    seconds: dict[str, float], before: dict[str, float]
) -> None:
    shares = Shares({name: before.get(name, 1.0) for name in seconds})
    tuned = shares.tuned(seconds, count=1000, done=STEPS)
    if tuned is not shares:
        now_s, then_s = (step_s(s, seconds, 1000) for s in (tuned, shares))
        assert now_s <= (1 - GAIN) * then_s
        assert tuned.tuned(seconds, count=1000, done=10 * STEPS) is tuned
