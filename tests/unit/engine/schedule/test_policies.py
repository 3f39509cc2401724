from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.policies import by_depth, due_dates, forwards_ahead, portfolio
from hetero_framework.engine.schedule.readiness import (
    BACKWARD,
    BACKWARD_FIRST,
    FORWARD,
    DueDates,
    Task,
)
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from tests.unit.engine.schedule.profiles import equal, interleaved, profiles

MICRO_BATCHES = 6


def tasks(profile: Profile) -> list[Task]:
    """All tasks of a step, of which the last stage has forwards alone."""
    last = profile.num_stages - 1
    both = ((FORWARD, last + 1), (BACKWARD, last))
    return [
        Task(kind, k, n)
        for kind, stages in both
        for k in range(stages)
        for n in range(MICRO_BATCHES)
    ]


def test_due_dates_of_a_chain_by_hand() -> None:
    """Forwards of 1 and 4 seconds, backwards of 2 and 3; 0.5 there and 6 back, 0.25 each way."""
    profile = Profile.of([1, 4], [2, 3], edges=[Edge(0.5, 6.0, 0.25)])
    first, last = due_dates(profile, 11, head_weight=1.0).stages
    assert first == DueDates(0.0, 1.0, 15.0, 7.0)
    assert last[:2] == (1.75, 7.0)
    first, last = due_dates(profile, 11, head_weight=0.0).stages
    # From its beginning to the end of the step; ten others follow.
    assert first == DueDates(-(17.0 + 10 * 7), 7.0, -(2.0 + 10 * 2), 2.0)
    assert last[:2] == (-(15.25 + 10 * 7), 7.0)


@given(profiles(least=1), st.floats(0, 1))
def test_a_task_is_due_before_its_dependents(profile: Profile, weight: float) -> None:
    policy = due_dates(profile, MICRO_BATCHES, weight)
    key = {task: policy.key(task)[0] for task in tasks(profile)}
    last = profile.num_stages - 1
    for (kind, stage, k), due in key.items():
        after = [Task(kind, stage, k + 1)]
        if kind == FORWARD and stage < last:
            after.append(Task(FORWARD, stage + 1, k))
        elif stage:
            after.append(Task(BACKWARD, stage - 1, k))
        assert all(due < key[task] + 1e-9 for task in after if task in key)


@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 8), (4, 2, 16), (4, 4, 16), (3, 3, 12), (2, 6, 16)]
)
def test_longest_path_first_reaches_the_bound_of_equal_stages(p: int, v: int, m: int) -> None:
    profile = interleaved(p, v, 24, 48)
    policy = due_dates(profile, m, 0.0)
    assert simulate(profile, m, m, policy=policy).seconds == pytest.approx(step_bound(profile, m))


def test_due_dates_reach_the_bound_where_the_front_has_second_stages_behind_all() -> None:
    """Seven devices, four of which have a part of their work in front: no other policy does."""
    forward_s = [1, 3, 3, 3, 6, 6, 6, 2, 3, 3, 3]
    profile = Profile.of(forward_s, [2 * s for s in forward_s], devices=[*range(7), *range(4)])
    bound = step_bound(profile, 16)
    assert simulate(profile, 16, 16, policy=due_dates(profile, 16, 0.2)).seconds == bound
    for policy, least in ((BACKWARD_FIRST, 1.14), (by_depth(11), 1.02)):
        assert simulate(profile, 16, 16, policy=policy).seconds > least * bound


def test_the_portfolio_is_of_one_policy_where_each_device_has_one_stage() -> None:
    assert portfolio(equal(3), 8) == (forwards_ahead(3),)
    profile = interleaved(2, 2, 24, 48)
    assert portfolio(profile, 8) == (due_dates(profile, 8, 0.75), by_depth(4))
