from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.fleets import random_fleet
from hetero_framework.planner import FleetProfile, relaxation
from hetero_framework.planner.enumeration import Enumeration
from hetero_framework.planner.prefixes import idle_s
from hetero_framework.planner.relaxation import _InOrder, _OneEach, least_step
from hetero_framework.planner.simulator import Profile, occupations, step_bound
from tests.unit.planner.fleets import rules_of


def fleet(seed: int) -> FleetProfile:
    draw = random.Random(seed)
    n = draw.randint(2, 4)
    speeds = [2e7, 3e8] if seed % 3 == 0 else [1.2e9]
    return random_fleet(
        draw, n, draw.randint(3, 5), draw.choice([1, 4, 16]), tight=seed % 2 == 1,
        speeds=speeds, direct=0.5, layer_s=0.01, kinds=draw.choice([None, 2]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_no_bound_of_any_layout_is_below_the_least_step_and_one_is_near_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxation, "_TRIES", 20)
    rules = rules_of(fleet(seed))
    bounds = []
    for layout in Enumeration(rules, 1e9, nodes=10**6).layouts():
        limits = rules.fleet.memory_limits(layout)
        if limits is not None:
            pipeline = rules.fleet.pipeline(layout)
            bounds.append(step_bound(pipeline, rules.fleet.micro_batches, limits))
    least = min(bounds)
    assert 0.98 * least < least_step(rules, 1.2 * least) <= least * (1 + 1e-9)


def test_what_lies_in_order_is_bounded_better_than_by_prices() -> None:
    profile = random_fleet(random.Random(0), 5, 12, 8, speeds=[1.2e9], layer_s=0.01)
    prices = _OneEach(rules_of(profile), 0.4).least()
    assert _InOrder(rules_of(profile), 0.4).least() > 1.03 * prices


def test_a_stage_waits_as_the_bound_of_a_layout_says() -> None:
    """Two stages in front of a last one that takes nothing; the second one is what is judged."""
    draw = random.Random(0)
    for _ in range(200):
        forward_s, backward_s = ([draw.uniform(0.1, 2) for _ in range(2)] for _ in range(2))
        m, limits = draw.randint(1, 9), [draw.randint(1, 9) for _ in range(2)]
        limits = [min(m, limit) for limit in limits]
        tail_s = draw.uniform(0, 9)
        profile = Profile.of([*forward_s, tail_s], [*backward_s, 0.0])
        wait_s = forward_s[0] + backward_s[0]
        waits_s = idle_s(
            (forward_s[1], backward_s[1]), (forward_s[0], backward_s[0]),
            np.array(profile.path_s - wait_s), min(limits), m,
        )  # fmt: skip
        bound = wait_s + m * (forward_s[1] + backward_s[1]) + waits_s
        assert min(abs(bound - other) for other in occupations(profile, m, [*limits, 1])) < 1e-6
