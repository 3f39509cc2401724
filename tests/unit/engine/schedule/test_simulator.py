from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import default_max_in_flight
from tests.unit.engine.schedule.profiles import (
    POLICIES,
    SIMULATIONS,
    SLOW,
    equal,
    profiles,
    work_of,
)

# ---- the profile


def test_profile_knows_the_nics_of_tensors():
    edges = [Edge(3, 5, 1), Edge(3, 5, 1), Edge(3, 5, 1, relay=0), Edge(3, 5, 1, relay=0)]
    profile = Profile.of([1] * 5, [1] * 5, devices=[0, 0, 1, 2, 0], edges=edges)
    assert profile.num_stages == 5
    assert profile.num_devices == 3
    assert [profile.edge_s(k, FORWARD) for k in range(4)] == [0, 4, 4, 4]
    assert [profile.edge_s(k, BACKWARD) for k in range(4)] == [0, 6, 6, 6]
    assert profile.nics(0, FORWARD) == ()
    assert profile.nics(1, FORWARD) == ((0, "out"), (1, "in"))
    assert profile.nics(1, BACKWARD) == ((1, "out"), (0, "in"))
    assert profile.nics(2, FORWARD) == ((1, "out"), (0, "in"), (0, "out"), (2, "in"))
    assert profile.nics(2, BACKWARD) == ((2, "out"), (0, "in"), (0, "out"), (1, "in"))
    assert profile.nics(3, FORWARD) == ((2, "out"), (0, "in"))  # its relay is its end


# ---- the simulator against closed forms


@pytest.mark.parametrize("p", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("m", [1, 3, 16, 64])
@pytest.mark.parametrize(("f", "b"), [(20, 40), (10, 10), (10, 30)])
def test_simulate_equal_stages_reach_the_bound_by_default(p, m, f, b):
    simulated = simulate(equal(p, f, b), m, default_max_in_flight(p))
    assert simulated.seconds == (m + p - 1) * (f + b)
    assert simulated.busy == pytest.approx([m * (f + b) / simulated.seconds] * p)


def test_simulate_p_in_flight_suffices_for_few_stages():
    assert simulate(equal(4), 16, 4).seconds == (16 + 3) * 60
    assert simulate(equal(8), 16, 8).seconds > (16 + 7) * 60


@pytest.mark.parametrize("relay", [None, 7])
def test_simulate_one_in_flight_is_serial(relay):
    m, edges = 5, [Edge(3, 4, 2, relay), Edge(1, 6, 0, relay)]
    profile = Profile.of([1, 4, 2], [2, 6, 3], edges=edges)
    simulated = simulate(profile, m, 1)
    assert simulated.seconds == m * (18 + (3 + 4 + 2 * 2) + (1 + 6))
    assert simulated.peak_in_flight == (1, 1, 1)


def test_simulate_small_limit_starves_the_stages():
    """Two micro-batches in four stages: no more than two stages are busy at a time."""
    simulated = simulate(equal(4), 16, 2)
    assert sum(simulated.busy) <= 2
    assert simulated.peak_in_flight == (2, 2, 2, 1)


def test_simulate_latency_hides_behind_many_in_flight_only():
    m, p, t = 64, 4, 5
    profile = equal(p, edge=Edge(latency_s=t))
    bound = (m + p - 1) * 60
    wide = simulate(profile, m, 2 * p).seconds
    assert bound < wide <= bound + 2 * (p - 1) * t + 60
    assert simulate(profile, m, p).seconds > 1.05 * bound


def test_simulate_slow_link_sets_the_pace():
    profile = equal(2, 20, 40, Edge(SLOW, SLOW))
    assert simulate(profile, 16, 4).seconds == pytest.approx(step_bound(profile, 16))
    assert simulate(profile, 16, 2).seconds > 1.2 * step_bound(profile, 16)


def test_simulate_relayed_boundaries_share_the_relays_nics():
    """Two edges between three workers that carry 10 each way: through the relay they are one
    NIC, apart they are two."""
    m, edge = 30, Edge(10, 10)
    apart = Profile.of([1] * 3, [1] * 3, devices=[1, 2, 3], edges=[edge, edge])
    relayed = replace(apart, edges=(replace(edge, relay=0),) * 2)
    work = m * 4 * 10
    assert work <= simulate(relayed, m, 12).seconds <= work + 100
    assert simulate(apart, m, 12).seconds <= work / 2 + 100


def test_simulate_slowest_stage_sets_the_pace():
    profile, m = Profile.of([1, 4, 2], [2, 6, 3]), 50
    simulated = simulate(profile, m, 6)
    assert simulated.seconds <= step_bound(profile, m) + 2 + 3
    assert simulated.busy[1] > 0.98


def test_simulate_all_stages_on_one_device_is_the_sum_of_the_work():
    profile = Profile.of([1, 2, 3], [4, 5, 6], devices=[0, 0, 0], edges=[Edge(9, 9, 9)] * 2)
    simulated = simulate(profile, 7, 4)
    assert simulated.seconds == 7 * 21
    assert simulated.busy == (1.0,)


@pytest.mark.parametrize(
    ("max_in_flight", "in_flight_limits"), [(0, None), (-1, None), (2, [1, 0])]
)
def test_simulate_refuses_limits_with_which_no_step_starts(max_in_flight, in_flight_limits):
    with pytest.raises(ValueError, match="never starts"):
        simulate(equal(2), 1, max_in_flight, in_flight_limits=in_flight_limits)


def test_simulate_a_nic_chooses_when_it_becomes_free():
    """And both directions take turns. Where NICs were booked in the order in which tensors became
    ready, no limits were better than 1.08 times the bound."""
    gigabit_s = 16.8e6 / 119.6e6
    profile = equal(4, 0.1, 0.1, Edge(gigabit_s, gigabit_s))
    simulated = simulate(profile, 16, 9, in_flight_limits=(9, 8, 7, 6))
    assert simulated.seconds <= 1.03 * step_bound(profile, 16)


# ---- properties of the simulator


@SIMULATIONS
@given(profiles(), st.integers(0, 12), st.integers(1, 14), POLICIES, st.data())
def test_simulate_ends_with_every_task_done_once_within_the_limits(
    profile, m, max_in_flight, policy, data
):
    p = profile.num_stages
    in_flight_limits = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=p, max_size=p))
    options = {"policy": policy, "in_flight_limits": in_flight_limits}
    simulated = simulate(profile, m, max_in_flight, **options)
    busy_s = [share * simulated.seconds for share in simulated.busy]
    assert busy_s == pytest.approx(work_of(profile, m))
    most = [min(max_in_flight, m, limit) for limit in in_flight_limits or [max_in_flight] * p]
    assert all(a <= b for a, b in zip(simulated.peak_in_flight, most, strict=True))


@SIMULATIONS
@given(profiles(), st.integers(0, 12), st.integers(1, 14), POLICIES)
def test_simulate_never_beats_the_bound(profile, m, max_in_flight, policy):
    simulated = simulate(profile, m, max_in_flight, policy=policy)
    assert simulated.seconds >= step_bound(profile, m) - 1e-9


@SIMULATIONS
@given(profiles(), st.integers(0, 30), st.data())
def test_simulate_never_beats_the_bound_of_its_limits(profile, m, data):
    p = profile.num_stages
    limits = data.draw(st.lists(st.integers(1, 6), min_size=p, max_size=p))
    simulated = simulate(profile, m, max(1, m), in_flight_limits=limits)
    assert simulated.seconds >= step_bound(profile, m, limits) - 1e-9


@SIMULATIONS
@given(profiles(free=True), st.integers(1, 12), st.integers(1, 14), POLICIES)
def test_simulate_never_loses_to_serial_where_transfers_are_free(profile, m, max_in_flight, policy):
    """Some device always works then."""
    serial = m * (sum(profile.forward_s) + sum(profile.backward_s))
    assert simulate(profile, m, max_in_flight, policy=policy).seconds <= serial
