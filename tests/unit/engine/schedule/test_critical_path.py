from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.critical_path import OnPath, critical_path
from hetero_framework.engine.schedule.readiness import BACKWARD_FIRST, Policy
from hetero_framework.engine.schedule.simulator import Edge, Profile, SimulatedSpan, simulate
from tests.extras.planner.profiles import POLICIES, SIMULATIONS, profiles


def path_and_seconds(
    profile: Profile, micro_batches: int, window: int, policy: Policy = BACKWARD_FIRST
) -> tuple[list[OnPath], float]:
    spans: list[SimulatedSpan] = []
    seconds = simulate(profile, micro_batches, window, policy=policy, spans=spans).seconds
    return critical_path(profile, spans), seconds


@SIMULATIONS
@given(profiles(free=True), st.integers(1, 9), st.integers(1, 9), POLICIES)
def test_with_free_transfers_the_critical_path_fills_the_step(
    profile: Profile, micro_batches: int, window: int, policy: Policy
) -> None:
    path, seconds = path_and_seconds(profile, micro_batches, window, policy)
    work = zip(path, profile.forward_s, profile.backward_s, strict=True)
    assert sum(one.forwards * f + one.backwards * b for one, f, b in work) == seconds


@SIMULATIONS
@given(profiles(least=1), st.integers(1, 9), st.integers(1, 9), POLICIES)
def test_the_path_begins_with_the_first_forward_and_ends_with_the_last_backward(
    profile: Profile, micro_batches: int, window: int, policy: Policy
) -> None:
    path, seconds = path_and_seconds(profile, micro_batches, window, policy)
    work = zip(path, profile.forward_s, profile.backward_s, strict=True)
    assert sum(one.forwards * f + one.backwards * b for one, f, b in work) <= seconds
    assert path[0].forwards >= 1 <= path[0].backwards
    assert all(one.forwards <= micro_batches >= one.backwards for one in path)


@pytest.mark.parametrize("slow", range(3))
def test_all_tasks_of_the_slowest_stage_are_on_the_path(slow: int) -> None:
    seconds = [10 if k == slow else 1 for k in range(3)]
    path, _ = path_and_seconds(Profile.of(seconds, seconds), 8, 8)
    assert path[slow] == OnPath(8, 8)
    assert all(one.forwards <= 2 for k, one in enumerate(path) if k != slow)


def test_tasks_wait_for_a_full_link() -> None:
    """Each forward waits for its transfer, and that for the one before."""
    profile = Profile.of([1, 1], [1, 1], edges=[Edge(20, 0)])
    path, seconds = path_and_seconds(profile, 4, 4)
    assert path == [OnPath(1, 1), OnPath(1, 1)]
    assert seconds == 1 + 4 * 20 + 2 + 1
