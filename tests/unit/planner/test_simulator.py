from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.planner.readiness import BACKWARD, FORWARD, Policy
from hetero_framework.planner.simulator import Edge, Profile, simulate, step_bound
from hetero_framework.planner.tuning import default_max_in_flight
from tests.unit.planner.profiles import (
    POLICIES,
    SIMULATIONS,
    SLOW,
    equal,
    interleaved,
    profiles,
    work_of,
)

# ---- the profile


def test_profile_knows_the_nics_of_tensors() -> None:
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


# ---- the bound


def test_bound_of_equal_stages_is_the_textbook_formula() -> None:
    m, p, f, b = 16, 4, 20, 40
    assert step_bound(equal(p, f, b), m) == (m + p - 1) * (f + b)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (4, 2, 16), (4, 3, 32)])
def test_bound_of_interleaved_stages_is_the_textbook_formula(p: int, v: int, m: int) -> None:
    """Narayanan et al. 2021, section 2.2."""
    f, b = 24, 48
    assert step_bound(interleaved(p, v, f, b), m) == m * (f + b) + (p - 1) * (f + b) / v


def test_bound_of_one_stage_is_its_work() -> None:
    assert step_bound(Profile.of([3], [5]), 7) == 7 * 8


def test_bound_of_no_micro_batch_is_nothing() -> None:
    assert step_bound(equal(3), 0) == 0


def test_bound_of_unequal_stages_waits_for_the_slowest() -> None:
    assert step_bound(Profile.of([1, 4, 2], [2, 6, 3]), 5) == 3 + 5 * 10


def test_bound_of_one_micro_batch_is_its_way_through_everything() -> None:
    edges = [Edge(7, 11, 1), Edge(13, 17, 2)]
    profile = Profile.of([1, 4, 2], [2, 6, 3], edges=edges)
    assert step_bound(profile, 1) == 18 + (7 + 11 + 2) + (13 + 17 + 4)
    on_one = replace(profile, devices=(0, 0, 0))
    assert step_bound(on_one, 1) == 18


def test_bound_of_a_slow_link_is_its_own_work_and_what_it_cannot_overlap() -> None:
    """F, 16 activations, the last one's F and B, its gradient's way and B."""
    bound = step_bound(equal(2, 20, 40, Edge(SLOW, SLOW)), 16)
    assert bound == pytest.approx(20 + 16 * SLOW + 60 + SLOW + 40)
    assert bound == pytest.approx(1314.42)
    latency = step_bound(equal(2, 20, 40, Edge(SLOW, SLOW, 25)), 16)
    assert latency == pytest.approx(bound + 2 * 25)


def test_bound_counts_activations_and_gradients_through_one_port() -> None:
    """All that the middle device receives comes through one port: activations from the first one
    on, gradients down to the last one, whose way on takes B, 7 and B again."""
    profile = equal(3, 1, 1, Edge(5, 7))
    assert step_bound(profile, 10) == 1 + 10 * (5 + 7) + (1 + 7 + 1)


def test_bound_of_relayed_boundaries_counts_them_at_the_relay() -> None:
    """Three boundaries between four workers: each link alone carries 5 + 5 per micro-batch, the
    relay all of it."""
    m, edge = 20, Edge(5, 5, 0, None)
    direct = Profile.of([1] * 4, [1] * 4, devices=[1, 2, 3, 4], edges=[edge] * 3)
    relayed = replace(direct, edges=(replace(edge, relay=0),) * 3)
    assert step_bound(direct, m) < 1.1 * m * 10 + 40
    assert m * 30 < step_bound(relayed, m) < m * 30 + 40
    assert simulate(relayed, m, 8).seconds >= step_bound(relayed, m)


def test_bound_of_a_stage_that_stores_few_waits_for_them_to_come_back() -> None:
    """Two at a time there and back: 5 in groups of 2, 2 and 1, and only the last group's way to the
    end counts twice."""
    profile = Profile.of([1, 4, 2], [2, 6, 3], edges=[Edge(7, 11, 1), Edge(13, 17, 2)])
    path = 18 + (7 + 11 + 2) + (13 + 17 + 4)
    assert step_bound(profile, 5, [2, 9, 9]) == path + 2 * path
    of_the_second = path - (1 + 8) - (2 + 12)
    assert step_bound(profile, 5, [9, 1, 9]) == path + 4 * of_the_second
    assert step_bound(profile, 5, [9, 9, 1]) == step_bound(profile, 5)


def all_orders(m: int, limit: int) -> list[list[tuple[str, int]]]:
    """The orders in which a stage may run its tasks if it stores so many forwards."""
    found = []
    for chosen in combinations(range(2 * m), m):
        order, done = [], {FORWARD: 0, BACKWARD: 0}
        for place in range(2 * m):
            kind = FORWARD if place in chosen else BACKWARD
            order.append((kind, done[kind]))
            done[kind] += 1
            if not 0 <= done[FORWARD] - done[BACKWARD] <= limit:
                break
        else:
            found.append(order)
    return found


def least_of_all_schedules(profile: Profile, m: int, limits: list[int]) -> float:
    """By trying every order of every stage, transfers only of latency."""
    last = profile.num_stages - 1
    orders = product(*(all_orders(m, limit) for limit in limits[:-1]))
    return min(ends_of(profile, m, last, order) for order in orders)


def ends_of(
    profile: Profile, m: int, last: int, orders: tuple[list[tuple[str, int]], ...]
) -> float:
    """When the last task has ended; infinite where these orders wait for each other."""
    ends: dict[tuple[str, int, int], float] = {}
    for k in range(m):
        ends[FORWARD, -1, k] = 0.0
    free, todo = [0.0] * (last + 1), [list(order) for order in orders]
    todo.append([(BACKWARD, k) for k in range(m)])  # both at once
    while any(todo):
        progress = False
        for stage, tasks in enumerate(todo):
            while tasks:
                kind, k = tasks[0]
                comes_forward = kind == FORWARD or stage == last
                source = stage - 1 if comes_forward else stage + 1
                before = ends.get((FORWARD if comes_forward else BACKWARD, source, k))
                if before is None:
                    break
                if source >= 0:
                    before += profile.edges[min(source, stage)].latency_s
                work = profile.forward_s[stage] * comes_forward
                work += profile.backward_s[stage] * (kind == BACKWARD)
                ends[kind, stage, k] = free[stage] = max(before, free[stage]) + work
                tasks.pop(0)
                progress = True
        if not progress:
            return math.inf
    return max(free)


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_below_every_schedule(seed: int) -> None:
    """Unequal stages, three or four of them, latencies and limits; the least of all schedules."""
    draw = random.Random(seed)
    p, m = draw.choice([(3, 4), (4, 3), (3, 3)])
    times = [[draw.randint(1, 9) for _ in range(p)] for _ in range(2)]
    edges = [Edge(latency_s=draw.randint(0, 5)) for _ in range(p - 1)]
    profile = Profile.of(*times, edges=edges)
    limits = [draw.randint(1, m) for _ in range(p)]
    assert step_bound(profile, m, limits) <= least_of_all_schedules(profile, m, limits)


def test_bound_knows_that_a_slow_stage_in_front_starves_those_behind_it() -> None:
    """The second device gets a forward every 7 and has it done after 4, until the first gradient
    comes 11 after the first forward has left it. Before, the bound was 65."""
    edges = [Edge(latency_s=4), Edge(latency_s=3)]
    profile = Profile.of([7, 4, 4], [6, 7, 1], edges=edges)
    assert step_bound(profile, 4) == least_of_all_schedules(profile, 4, [4] * 3) == 71


# ---- the simulator against closed forms


@pytest.mark.parametrize("p", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("m", [1, 3, 16, 64])
@pytest.mark.parametrize(("f", "b"), [(20, 40), (10, 10), (10, 30)])
def test_simulate_equal_stages_reach_the_bound_with_the_default_limit(
    p: int, m: int, f: int, b: int
) -> None:
    simulated = simulate(equal(p, f, b), m, default_max_in_flight(p))
    assert simulated.seconds == (m + p - 1) * (f + b)
    assert simulated.busy == pytest.approx([m * (f + b) / simulated.seconds] * p)


def test_simulate_p_in_flight_suffices_for_few_stages() -> None:
    assert simulate(equal(4), 16, 4).seconds == (16 + 3) * 60
    assert simulate(equal(8), 16, 8).seconds > (16 + 7) * 60


@pytest.mark.parametrize("relay", [None, 7])
def test_simulate_one_in_flight_is_serial(relay: int | None) -> None:
    m, edges = 5, [Edge(3, 4, 2, relay), Edge(1, 6, 0, relay)]
    profile = Profile.of([1, 4, 2], [2, 6, 3], edges=edges)
    simulated = simulate(profile, m, 1)
    assert simulated.seconds == m * (18 + (3 + 4 + 2 * 2) + (1 + 6))
    assert simulated.peak_in_flight == (1, 1, 1)


def test_simulate_small_limit_starves_the_stages() -> None:
    """Two micro-batches in four stages: no more than two stages are busy at a time."""
    simulated = simulate(equal(4), 16, 2)
    assert sum(simulated.busy) <= 2
    assert simulated.peak_in_flight == (2, 2, 2, 1)


def test_simulate_latency_hides_behind_many_in_flight_only() -> None:
    m, p, t = 64, 4, 5
    profile = equal(p, edge=Edge(latency_s=t))
    bound = (m + p - 1) * 60
    wide = simulate(profile, m, 2 * p).seconds
    assert bound < wide <= bound + 2 * (p - 1) * t + 60
    assert simulate(profile, m, p).seconds > 1.05 * bound


def test_simulate_slow_link_sets_the_pace() -> None:
    profile = equal(2, 20, 40, Edge(SLOW, SLOW))
    assert simulate(profile, 16, 4).seconds == pytest.approx(step_bound(profile, 16))
    assert simulate(profile, 16, 2).seconds > 1.2 * step_bound(profile, 16)


def test_simulate_relayed_boundaries_share_the_relays_nics() -> None:
    """Two edges between three workers that carry 10 each way: through the relay they are one
    NIC, apart they are two."""
    m, edge = 30, Edge(10, 10)
    apart = Profile.of([1] * 3, [1] * 3, devices=[1, 2, 3], edges=[edge, edge])
    relayed = replace(apart, edges=(replace(edge, relay=0),) * 2)
    work = m * 4 * 10
    assert work <= simulate(relayed, m, 12).seconds <= work + 100
    assert simulate(apart, m, 12).seconds <= work / 2 + 100


def test_simulate_slowest_stage_sets_the_pace() -> None:
    profile, m = Profile.of([1, 4, 2], [2, 6, 3]), 50
    simulated = simulate(profile, m, 6)
    assert simulated.seconds <= step_bound(profile, m) + 2 + 3
    assert simulated.busy[1] > 0.98


def test_simulate_all_stages_on_one_device_is_the_sum_of_the_work() -> None:
    profile = Profile.of([1, 2, 3], [4, 5, 6], devices=[0, 0, 0], edges=[Edge(9, 9, 9)] * 2)
    simulated = simulate(profile, 7, 4)
    assert simulated.seconds == 7 * 21
    assert simulated.busy == (1.0,)


@pytest.mark.parametrize(
    ("max_in_flight", "in_flight_limits"), [(0, None), (-1, None), (2, [1, 0])]
)
def test_simulate_refuses_what_lets_nothing_in(
    max_in_flight: int, in_flight_limits: list[int] | None
) -> None:
    with pytest.raises(ValueError, match="never starts"):
        simulate(equal(2), 1, max_in_flight, in_flight_limits=in_flight_limits)


def test_simulate_a_nic_chooses_when_it_becomes_free() -> None:
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
    profile: Profile, m: int, max_in_flight: int, policy: Policy, data: st.DataObject
) -> None:
    """Whatever the times, edges, devices, policy and limits: it ends, each device has done exactly
    the work of its stages, and no stage has stored more than it may."""
    p = profile.num_stages
    in_flight_limits = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=p, max_size=p))
    simulated = simulate(
        profile, m, max_in_flight, policy=policy, in_flight_limits=in_flight_limits
    )
    assert [share * simulated.seconds for share in simulated.busy] == pytest.approx(
        work_of(profile, m)
    )
    most = [min(max_in_flight, m, limit) for limit in in_flight_limits or [max_in_flight] * p]
    assert all(
        in_flight <= limit for in_flight, limit in zip(simulated.peak_in_flight, most, strict=True)
    )


@SIMULATIONS
@given(profiles(), st.integers(0, 12), st.integers(1, 14), POLICIES)
def test_simulate_never_beats_the_bound(
    profile: Profile, m: int, max_in_flight: int, policy: Policy
) -> None:
    assert (
        simulate(profile, m, max_in_flight, policy=policy).seconds >= step_bound(profile, m) - 1e-9
    )


@SIMULATIONS
@given(profiles(), st.integers(0, 30), st.data())
def test_simulate_never_beats_the_bound_of_its_limits(
    profile: Profile, m: int, data: st.DataObject
) -> None:
    p = profile.num_stages
    limits = data.draw(st.lists(st.integers(1, 6), min_size=p, max_size=p))
    simulated = simulate(profile, m, max(1, m), in_flight_limits=limits)
    assert simulated.seconds >= step_bound(profile, m, limits) - 1e-9


@SIMULATIONS
@given(profiles(free=True), st.integers(1, 12), st.integers(1, 14), POLICIES)
def test_simulate_never_loses_to_serial_where_transfers_are_free(
    profile: Profile, m: int, max_in_flight: int, policy: Policy
) -> None:
    """Some device always works then."""
    serial = m * (sum(profile.forward_s) + sum(profile.backward_s))
    assert simulate(profile, m, max_in_flight, policy=policy).seconds <= serial


def test_simulate_spread_is_the_same_each_time_and_bounded() -> None:
    even = simulate(equal(1), 20, 20)
    uneven = simulate(equal(1), 20, 20, spread=0.3)
    assert uneven == simulate(equal(1), 20, 20, spread=0.3) != even
    assert 0.7 * even.seconds < uneven.seconds < 1.3 * even.seconds
