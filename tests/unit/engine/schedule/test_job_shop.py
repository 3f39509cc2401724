from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.job_shop import JobShop, Operation, shortened
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Task
from hetero_framework.engine.schedule.simulator import (
    Edge,
    Profile,
    SimulatedSpan,
    outcome,
    simulate,
)
from tests.extras.planner.profiles import POLICIES, SIMULATIONS, equal, interleaved, profiles
from tests.extras.planner.retiming import retimed

LIMITS = st.lists(st.integers(1, 6), min_size=5, max_size=5)


def simulated(profile: Profile, m: int, most: int, limits: list[int], **settings: object):  # type: ignore[no-untyped-def]
    spans: list[SimulatedSpan] = []
    own = limits[: profile.num_stages]
    simulate(profile, m, most, in_flight_limits=own, spans=spans, **settings)  # type: ignore[arg-type]
    return spans, own


@SIMULATIONS
@given(profiles(), POLICIES, st.integers(1, 6), st.integers(1, 6), LIMITS)
def test_a_shortened_order_can_be_run(  # type: ignore[no-untyped-def]
    profile, policy, m, most, limits
) -> None:
    spans, limits = simulated(profile, m, most, limits, policy=policy)
    found = shortened(profile, spans, limits, most, 0.0)
    seconds = outcome(profile, found).seconds
    assert seconds <= max(span.ended for span in spans)
    assert seconds >= step_bound(profile, m, limits) - 1e-9
    assert Counter((s.task, s.is_transfer, s.leg) for s in found) == Counter(
        (s.task, s.is_transfer, s.leg) for s in spans
    )
    assert list(found) == sorted(found, key=lambda span: span.began)
    # The same order, timed by what knows nothing of the search: each task after its tensor, one at
    # a time on each device and NIC.
    assert retimed(profile, found) <= seconds + 1e-9
    peaks = outcome(profile, found).peak_in_flight
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert peaks[0] <= most
    for lane in {(span.task.lane, span.is_transfer, span.leg) for span in found}:
        own = [s.task.micro_batch for s in found if (s.task.lane, s.is_transfer, s.leg) == lane]
        assert own == sorted(own)


@SIMULATIONS
@given(profiles(), POLICIES, st.integers(0, 6), st.integers(1, 6), LIMITS)
def test_the_outcome_of_simulated_spans_equals_the_simulation(  # type: ignore[no-untyped-def]
    profile, policy, m, most, limits
) -> None:
    spans: list[SimulatedSpan] = []
    limits = limits[: profile.num_stages]
    done = simulate(profile, m, most, policy=policy, in_flight_limits=limits, spans=spans)
    found = outcome(profile, spans)
    assert found.seconds == done.seconds
    assert found.busy == pytest.approx(done.busy)
    if min(*profile.forward_s, *profile.backward_s) > 0:
        assert found.peak_in_flight == done.peak_in_flight


@pytest.mark.parametrize(
    ("profile", "least", "most"),
    [
        (equal(4, 20, 40, Edge(33.5, 33.5, 0.3)), 1.05, 1.035),
        (equal(4, 100, 100, Edge(141, 141, 0.3)), 1.05, 1.041),
        (interleaved(4, 2, 20, 40, Edge(8, 8, 0.3)), 1.12, 1.02),
    ],
)
def test_steps_that_fill_their_links_come_nearer_to_their_bounds(
    profile: Profile, least: float, most: float
) -> None:
    spans, limits = simulated(profile, 16, 16, [16] * profile.num_stages)
    bound_s = step_bound(profile, 16)
    assert outcome(profile, spans).seconds >= least * bound_s
    found = shortened(profile, spans, limits, 16, bound_s)
    assert outcome(profile, found).seconds <= most * bound_s


def test_step_that_is_at_its_bound_is_left_as_it_is() -> None:
    profile = equal(3)
    spans, limits = simulated(profile, 8, 8, [8] * 3)
    assert shortened(profile, spans, limits, 8, step_bound(profile, 8)) is spans


def test_orders_with_relayed_tensors_are_left_unchanged() -> None:
    profile = Profile.of([20] * 3, [40] * 3, edges=[Edge(50, 50), Edge(50, 50, relay=0)])
    spans, limits = simulated(profile, 8, 8, [8] * 3)
    assert shortened(profile, spans, limits, 8, 0.0) is spans


def test_two_searches_find_the_same_order() -> None:
    profile = equal(4, 20, 40, Edge(33.5, 33.5, 0.3))
    spans, limits = simulated(profile, 16, 16, [16] * 4)
    first, second = (shortened(profile, spans, limits, 16, 0.0) for _ in range(2))
    assert first is not spans
    assert first == second


def test_no_forward_goes_before_the_backward_that_makes_room() -> None:
    """One forward is stored: there is nothing to choose."""
    profile = Profile.of([1, 5], [2, 5], edges=[Edge(3, 3)])
    spans, limits = simulated(profile, 4, 1, [1, 1])
    found = shortened(profile, spans, limits, 1, 0.0)
    ended = {span.task: span.ended for span in found if not span.is_transfer}
    for span in found:
        kind, stage, k = span.task
        if (kind, stage) == (FORWARD, 0) and not span.is_transfer and k:
            assert span.began >= ended[Task(BACKWARD, 0, k - 1)]


def random_shop(seed: int) -> list[Operation]:
    """Two or three jobs of two or three operations each, some on two machines at once."""
    draw = random.Random(seed)
    found: list[Operation] = []
    for _ in range(draw.randint(2, 3)):
        for place in range(draw.randint(2, 3)):
            before = ((len(found) - 1, found[-1].seconds + draw.randint(0, 2)),) if place else ()
            machines = tuple(draw.sample(range(3), draw.choice([1, 1, 2])))
            found.append(Operation(float(draw.randint(1, 9)), machines, before))
    return found


def least_of_all(operations: list[Operation]) -> float:
    """The shortest of all orders of each machine's operations, each begun as soon as can be."""
    users = [[v for v, own in enumerate(operations) if m in own.machines] for m in range(3)]
    best = sum(own.seconds for own in operations) + 100.0
    for orders in product(*map(permutations, users)):
        before = [[(w, s) for w, s in own.after] for own in operations]
        for order in orders:
            for w, v in pairwise(order):
                before[v].append((w, operations[w].seconds))
        begins: dict[int, float] = {}
        while len(begins) < len(operations):
            free = [
                v
                for v in range(len(operations))
                if v not in begins and all(w in begins for w, _ in before[v])
            ]
            if not free:
                break  # these orders contradict each other
            for v in free:
                begins[v] = max((begins[w] + s for w, s in before[v]), default=0.0)
        else:
            best = min(best, max(begins[v] + own.seconds for v, own in enumerate(operations)))
    return best


def test_small_shops_beside_all_their_orders() -> None:
    reached = 0
    for seed in range(60):
        operations = random_shop(seed)
        shop = JobShop(operations)
        first = shop.length
        shop.shortest(200)
        least = least_of_all(operations)
        assert least <= shop.length <= first
        reached += shop.length == least
    assert reached >= 57


def test_the_estimate_of_an_exchange_is_a_lower_bound() -> None:
    """It is the longest path through the two; another may be longer."""
    exact = 0
    for seed in range(60):
        shop = JobShop(random_shop(seed))
        for _, path_s, u, v in list(shop._candidates(shop.length, {}, 0)):
            other = JobShop(random_shop(seed))
            assert other._swap(u, v)
            assert path_s <= other.length
            exact += path_s == other.length
    assert exact > 50
