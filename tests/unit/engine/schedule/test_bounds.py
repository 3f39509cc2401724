from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from tests.unit.engine.schedule.profiles import SLOW, equal, interleaved


@pytest.mark.parametrize(
    ("profile", "m", "seconds"),
    [
        (equal(4, 20, 40), 16, (16 + 4 - 1) * (20 + 40)),  # of the textbook
        (Profile.of([3], [5]), 7, 7 * 8),
        (equal(3), 0, 0),
        (Profile.of([1, 4, 2], [2, 6, 3]), 5, 3 + 5 * 10),
    ],
    ids=["equal stages", "one stage", "no micro-batch", "the slowest stage"],
)
def test_bound_of_a_chain_is_its_closed_form(profile, m, seconds):
    assert step_bound(profile, m) == seconds


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (4, 2, 16), (4, 3, 32)])
def test_bound_of_interleaved_stages_is_the_textbook_formula(p, v, m):
    """Narayanan et al. 2021, section 2.2."""
    f, b = 24, 48
    assert step_bound(interleaved(p, v, f, b), m) == m * (f + b) + (p - 1) * (f + b) / v


def test_bound_of_one_micro_batch_is_its_path_through_all_stages():
    edges = [Edge(7, 11, 1), Edge(13, 17, 2)]
    profile = Profile.of([1, 4, 2], [2, 6, 3], edges=edges)
    assert step_bound(profile, 1) == 18 + (7 + 11 + 2) + (13 + 17 + 4)
    on_one = replace(profile, devices=(0, 0, 0))
    assert step_bound(on_one, 1) == 18


def test_bound_of_a_slow_link_is_its_work_and_the_rest_it_cannot_hide():
    """F, 16 activations, the last one's F and B, its gradient's way and B."""
    bound = step_bound(equal(2, 20, 40, Edge(SLOW, SLOW)), 16)
    assert bound == pytest.approx(20 + 16 * SLOW + 60 + SLOW + 40)
    assert bound == pytest.approx(1314.42)
    latency = step_bound(equal(2, 20, 40, Edge(SLOW, SLOW, 25)), 16)
    assert latency == pytest.approx(bound + 2 * 25)


def test_bound_counts_activations_and_gradients_through_one_port():
    """All that the middle device receives comes through one port: activations from the first one
    on, gradients down to the last one, whose way on takes B, 7 and B again."""
    profile = equal(3, 1, 1, Edge(5, 7))
    assert step_bound(profile, 10) == 1 + 10 * (5 + 7) + (1 + 7 + 1)


def test_bound_of_relayed_boundaries_counts_them_at_the_relay():
    """Three boundaries between four workers: each link alone carries 5 + 5 per micro-batch, the
    relay all of it."""
    m, edge = 20, Edge(5, 5, 0, None)
    direct = Profile.of([1] * 4, [1] * 4, devices=[1, 2, 3, 4], edges=[edge] * 3)
    relayed = replace(direct, edges=(replace(edge, relay=0),) * 3)
    assert step_bound(direct, m) < 1.1 * m * 10 + 40
    assert m * 30 < step_bound(relayed, m) < m * 30 + 40
    assert simulate(relayed, m, 8).seconds >= step_bound(relayed, m)


def test_bound_of_a_stage_with_a_small_limit_includes_round_trips():
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
def test_bound_is_below_every_schedule(seed):
    """Unequal stages, three or four of them, latencies and limits; the least of all schedules."""
    draw = random.Random(seed)
    p, m = draw.choice([(3, 4), (4, 3), (3, 3)])
    times = [[draw.randint(1, 9) for _ in range(p)] for _ in range(2)]
    edges = [Edge(latency_s=draw.randint(0, 5)) for _ in range(p - 1)]
    profile = Profile.of(*times, edges=edges)
    limits = [draw.randint(1, m) for _ in range(p)]
    assert step_bound(profile, m, limits) <= least_of_all_schedules(profile, m, limits)


def test_bound_knows_that_a_slow_stage_in_front_starves_those_behind_it():
    """The second device gets a forward every 7 and has it done after 4, until the first gradient
    comes 11 after the first forward has left it. Before, the bound was 65."""
    edges = [Edge(latency_s=4), Edge(latency_s=3)]
    profile = Profile.of([7, 4, 4], [6, 7, 1], edges=edges)
    assert step_bound(profile, 4) == least_of_all_schedules(profile, 4, [4] * 3) == 71
