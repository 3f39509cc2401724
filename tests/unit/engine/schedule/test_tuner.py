from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_framework.config import StageSpec
from hetero_framework.engine.schedule import tuner
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.schedule.tuner import (
    StageSeconds,
    Tuner,
    assumed_profile,
    make_profile,
)
from hetero_framework.engine.schedule.tuning import tune

NOWHERE: frozenset[int] = frozenset()


def plan(*owners: int | str, layers: int = 4) -> list[StageSpec]:
    last = len(owners) - 1
    return [
        StageSpec(k, owner, k * layers, (k + 1) * layers, k == 0, k == last)
        for k, owner in enumerate(owners)
    ]


def seconds(count: int, **changes: float) -> dict[int, StageSeconds]:
    return {k: StageSeconds(0.02, 0.04, 0.0, 0.0)._replace(**changes) for k in range(count)}


# ---- profiles


def test_profile_names_devices_in_the_order_of_the_plan():
    profile = make_profile(plan("local", 2, "local", 1), seconds(4), {}, NOWHERE)
    assert profile.devices == (0, 1, 0, 2)


def test_a_profile_takes_boundary_times_from_the_receivers():
    """An activation arrives at the later stage, a gradient at the earlier one."""
    times = (StageSeconds(1, 2, 0.0, 7), StageSeconds(3, 4, 5, 8), StageSeconds(9, 10, 6, 0.0))
    profile = make_profile(plan("local", 1, 2), dict(enumerate(times)), {1: 0.5}, NOWHERE)
    assert profile.forward_s == (1, 3, 9)
    assert profile.backward_s == (2, 4, 10)
    edges = [(edge.forward_s, edge.backward_s, edge.latency_s) for edge in profile.edges]
    assert edges == [(5, 7, 0.0), (6, 8, 0.5)]


@pytest.mark.parametrize(
    ("owners", "direct", "relays"),
    [
        (("local", 1, 2), NOWHERE, [None, 0]),
        (("local", 1, 2), frozenset({1}), [None, None]),
        ((1, 2, "local", 3, 1), NOWHERE, [2, None, None, 2]),
        ((1, 2, "local", 3, 1), frozenset({3}), [2, None, None, None]),
        ((1, 2), NOWHERE, [None]),  # nothing of the coordinator's work is in the way
    ],
)
def test_profile_has_the_coordinator_relay_between_workers(owners, direct, relays):
    profile = make_profile(plan(*owners), seconds(len(owners)), {}, direct)
    assert [edge.relay for edge in profile.edges] == relays


def test_profile_that_is_assumed_counts_layers():
    stages = plan("local", 1, 2)
    stages[1] = replace(stages[1], end=stages[1].start)  # the embedding or the head alone
    profile = assumed_profile(stages, frozenset({1}))
    assert profile.forward_s == (4, 0.5, 4)
    assert profile.backward_s == (8, 1.0, 8)
    assert all(edge.forward_s > 0 for edge in profile.edges)
    assert profile.edges[1].relay is None


# ---- the choice


def test_the_first_step_is_tuned_to_the_assumed_profile():
    stages = plan("local", 1, 2)
    assumed = replace(tune(assumed_profile(stages), 8), assumed=True)
    assert Tuner(stages).choice(8, NOWHERE) == assumed


def test_a_choice_rests_on_assumed_times_until_a_step_is_measured():
    own = Tuner(plan("local", 1))
    assert own.choice(4, NOWHERE).assumed
    own.observe(seconds(2), {})
    assert not own.choice(4, NOWHERE).assumed
    assert own.choice(4, NOWHERE).profile.forward_s == (0.02, 0.02)


def test_choice_keeps_to_the_users_max_in_flight_and_the_memory_of_the_stages():
    stages = plan("local", 1, 2)
    assert Tuner(stages, max_in_flight=3).choice(8, NOWHERE).max_in_flight == 3
    in_flight = Tuner(stages, memory_limits=[2, 1, 1]).choice(8, NOWHERE).in_flight_limits
    assert all(a <= b for a, b in zip(in_flight, (2, 1, 1), strict=True))


def test_the_times_of_the_plan_count_until_a_step_is_measured():
    planned = Profile.of([1.0, 3.0], [2.0, 6.0])
    tuned = Tuner(plan("local", 1), planned=planned)
    assert tuned.choice(4, NOWHERE).profile == planned
    assert not tuned.choice(4, NOWHERE).assumed
    tuned.observe(seconds(2), {})
    assert tuned.profile(NOWHERE) != planned


@pytest.fixture
def asked(monkeypatch):
    """The micro-batches and profile of each call that tunes a schedule."""
    found: list[tuple[int, Profile]] = []

    def counted(profile: Profile, m: int, **options: object) -> object:
        found.append((m, profile))
        return tune(profile, m)

    monkeypatch.setattr(tuner, "tune", counted)
    return found


def test_choice_is_made_once_until_something_changes(asked):
    tuned = Tuner(plan("local", 1, 2))
    for _ in range(3):
        tuned.choice(8, NOWHERE)
    assert len(asked) == 1
    tuned.choice(4, NOWHERE)
    tuned.choice(4, frozenset({1}))
    assert [m for m, _ in asked] == [8, 4, 4]
    assert asked[1][1].edges[1].relay == 0
    assert asked[2][1].edges[1].relay is None


def test_choice_is_made_anew_after_steps_that_double(asked):
    tuned = Tuner(plan("local", 1))
    tuned.choice(4, NOWHERE)
    assert len(asked) == 1
    made = []
    for step in range(1, 18):
        before = len(asked)
        tuned.observe(seconds(2), {})
        tuned.choice(4, NOWHERE)
        made += [step] * (len(asked) > before)
    assert made == [1, 2, 4, 8, 16]


def test_a_long_measured_latency_puts_more_in_flight():
    tuned = Tuner(plan("local", 1))
    narrow = tuned.choice(32, NOWHERE).max_in_flight
    tuned.observe(seconds(2), {0: 0.3})
    choice = tuned.choice(32, NOWHERE)
    assert choice.max_in_flight >= narrow + 4


# ---- what is measured


def test_second_step_replaces_the_first_and_later_ones_are_averaged():
    tuned = Tuner(plan("local", 1))
    seen = []
    for forward_s in (9.0, 1.0, 2.0, 4.0):
        tuned.observe(seconds(2, forward_s=forward_s), {})
        seen.append(tuned.profile(NOWHERE).forward_s)
    assert seen == [(9.0, 9.0), (1.0, 1.0), (1.5, 1.5), (2.75, 2.75)]


def test_the_newest_latency_stays_until_the_next_one():
    tuned = Tuner(plan("local", 1, 2))
    tuned.observe(seconds(3), {0: 0.5, 1: 0.25})
    tuned.observe(seconds(3), {1: 0.75})
    assert [edge.latency_s for edge in tuned.profile(NOWHERE).edges] == [0.5, 0.75]
