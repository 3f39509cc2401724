from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.readiness import (
    BACKWARD,
    BACKWARD_FIRST,
    FORWARD,
    DueDates,
    Task,
)
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import (
    by_depth,
    default_max_in_flight,
    due_dates,
    forwards_ahead,
    portfolio,
    tune,
)
from tests.unit.engine.schedule.profiles import SLOW, equal, interleaved, profiles
from tests.unit.engine.schedule.retiming import retimed

MICRO_BATCHES = 6


def test_default_max_in_flight_is_twice_the_stages():
    assert default_max_in_flight(4) == 8


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize(("f", "b"), [(20, 40), (10, 10)])
def test_tune_reaches_the_bound_with_equal_stages(p, m, f, b):
    choice = tune(equal(p, f, b), m)
    assert choice.forecast.seconds <= 1.005 * (m + p - 1) * (f + b)
    assert choice.max_in_flight <= min(m, 3 * p)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (2, 3, 16), (4, 2, 8), (4, 2, 16)])
def test_tune_reaches_the_bound_with_interleaved_stages(p, v, m):
    profile = interleaved(p, v, 24, 48)
    assert tune(profile, m).forecast.seconds <= 1.005 * step_bound(profile, m)
    first = simulate(profile, m, default_max_in_flight(p * v)).seconds
    assert first > 1.01 * step_bound(profile, m)  # backward first does not


def test_tune_feeds_later_stages_that_have_less_work():
    """Twelve stages, each with a tenth less than the one before, as the last ones begin late."""
    work = [0.9**k for k in range(12)]
    profile = Profile.of(work, [2 * seconds for seconds in work])
    choice = tune(profile, 32)
    assert choice.policy == forwards_ahead(12)
    limits = choice.in_flight_limits
    first = simulate(profile, 32, choice.max_in_flight, in_flight_limits=limits)
    assert choice.forecast.seconds < 0.98 * first.seconds


def test_tune_reaches_the_bound_of_a_slow_link():
    profile = equal(2, 20, 40, Edge(SLOW, SLOW))
    assert tune(profile, 16).forecast.seconds <= 1.005 * 1314.42


@pytest.mark.parametrize(
    ("megabytes", "f", "b", "most"),
    [(16.8, 0.1, 0.1, 1.06), (4.0, 0.02, 0.04, 1.06), (8.4, 0.03, 0.06, 1.02)],
)
def test_tune_keeps_full_links_busy(megabytes, f, b, most):
    """Four stages on 1 Gbit/s: activations and gradients together take longer than the devices."""
    wire_s = megabytes * 1e6 / 119.6e6
    profile = equal(4, f, b, Edge(wire_s, wire_s))
    assert tune(profile, 16).forecast.seconds <= most * step_bound(profile, 16)


def test_forecast_of_a_long_step_is_not_below_its_bound():
    """Not even by the rounding of thousands of sums."""
    for k in range(20):
        profile = Profile.of([0.1 + k / 7, 0.3], [0.2, 0.1 + k / 9], edges=[Edge(k / 90, 0.1)])
        forecast = tune(profile, 300).forecast
        assert forecast.seconds >= step_bound(profile, 300)


def test_tune_sends_more_on_the_way_over_a_long_line():
    near, far = equal(2), equal(2, edge=Edge(latency_s=300))
    assert tune(near, 64).max_in_flight <= 6
    choice = tune(far, 64)
    assert choice.max_in_flight >= 10
    assert choice.forecast.seconds <= 1.02 * step_bound(far, 64)


def test_forecast_order_and_spans_are_of_one_step():
    choice = tune(equal(4, 20, 40, Edge(33.5, 33.5, 0.3)), 16)
    assert choice.forecast.seconds == max(span.ended for span in choice.spans)
    assert choice.schedule.tasks == choice.unordered.in_order_of(choice.spans).tasks
    assert choice.forecast.seconds == pytest.approx(retimed(choice.profile, choice.spans))


def test_tune_with_max_in_flight_takes_it():
    assert tune(equal(4), 16, max_in_flight=3).max_in_flight == 3
    assert tune(equal(4), 16, max_in_flight=9).max_in_flight == 9


@settings(max_examples=40, deadline=None)
@given(profiles(), st.integers(0, 10), st.data())
def test_tune_never_exceeds_the_limits(profile, m, data):
    p = profile.num_stages
    in_flight_limits = data.draw(st.lists(st.integers(1, 5), min_size=p, max_size=p))
    choice = tune(profile, m, in_flight_limits=in_flight_limits)
    own, peaks = choice.in_flight_limits, choice.forecast.peak_in_flight
    assert all(1 <= a <= b for a, b in zip(own, in_flight_limits, strict=True))
    assert all(a <= b for a, b in zip(peaks, own, strict=True))
    assert 1 <= choice.max_in_flight <= max(1, m)


@pytest.mark.parametrize("latency", [0, 30])
@pytest.mark.parametrize("p", [3, 8])
def test_tune_keeps_few_in_flight(p, latency):
    """No more than with room for everything are needed, and two thirds of 64 for 8 far stages."""
    profile = equal(p, edge=Edge(latency_s=latency))
    choice = tune(profile, 64)
    assert choice.max_in_flight <= 44
    everything = simulate(profile, 64, 64, policy=choice.policy)
    assert choice.forecast.seconds <= 1.005 * everything.seconds


def test_limits_are_the_forwards_on_their_way_and_two_for_each_later_stage():
    profile = Profile.of([1, 3, 1], [2, 6, 2], edges=[Edge(1, 1, 0.5), Edge()])
    assert tune(profile, 64).in_flight_limits == (6, 4, 1)  # 18 and 12 seconds, 9 a micro-batch
    assert tune(profile, 64, in_flight_limits=[64, 2, 64]).in_flight_limits == (6, 2, 1)
    assert tune(profile, 5).in_flight_limits == (5, 4, 1)
    narrow = tune(profile, 64, max_in_flight=3)
    assert (narrow.max_in_flight, narrow.in_flight_limits) == (3, (3, 3, 1))


@settings(max_examples=60, deadline=None)
@given(profiles(least=1, free=True), st.sampled_from([1, 4, 8, 12]))
def test_tune_is_hardly_worse_than_the_default_limit(profile, m):
    policy = tune(profile, m).policy
    first = simulate(profile, m, default_max_in_flight(profile.num_stages), policy=policy)
    assert tune(profile, m).forecast.seconds <= 1.1 * first.seconds


def tasks(profile: Profile) -> list[Task]:
    """All tasks of a step, of which the last stage has forwards alone."""
    last = profile.num_stages - 1
    places = [(FORWARD, k) for k in range(last + 1)] + [(BACKWARD, k) for k in range(last)]
    return [Task(*place, n) for place in places for n in range(MICRO_BATCHES)]


def test_due_dates_of_a_chain_by_hand():
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
def test_a_task_is_due_before_its_dependents(profile, weight):
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
def test_longest_path_first_reaches_the_bound_of_equal_stages(p, v, m):
    profile = interleaved(p, v, 24, 48)
    policy = due_dates(profile, m, 0.0)
    assert simulate(profile, m, m, policy=policy).seconds == pytest.approx(step_bound(profile, m))


def test_due_dates_reach_the_bound_where_the_front_has_second_stages_behind_all():
    """Seven devices, four of which have a part of their work in front: no other policy does."""
    forward_s = [1, 3, 3, 3, 6, 6, 6, 2, 3, 3, 3]
    profile = Profile.of(forward_s, [2 * s for s in forward_s], devices=[*range(7), *range(4)])
    bound = step_bound(profile, 16)
    assert simulate(profile, 16, 16, policy=due_dates(profile, 16, 0.2)).seconds == bound
    for policy, least in ((BACKWARD_FIRST, 1.14), (by_depth(11), 1.02)):
        assert simulate(profile, 16, 16, policy=policy).seconds > least * bound


def test_the_portfolio_is_of_one_policy_where_each_device_has_one_stage():
    assert portfolio(equal(3), 8) == (forwards_ahead(3),)
    profile = interleaved(2, 2, 24, 48)
    assert portfolio(profile, 8) == (due_dates(profile, 8, 0.75), by_depth(4))
