from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import all_layouts
from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.simulator import simulate
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.layout import Layout, Part
from hetero_framework.extras.planner.optimality.enumeration import Enumeration, TooMany
from hetero_framework.extras.planner.rules import Rules
from tests.extras.planner.fleets import GB, device, fleet_of, profiles_of_fleets, rules_of


@settings(max_examples=30, deadline=None)
@given(
    profiles_of_fleets(most_devices=3, most_layers=5, uneven=True), st.sampled_from([0.02, 0.1, 1])
)
def test_every_layout_that_could_be_better_is_enumerated(
    profile: FleetProfile, slower: float
) -> None:
    """Beside the benchmark's own list of all layouts, on links of every speed."""
    changed = [
        link.model_copy(update={"bytes_per_s": slower * link.bytes_per_s}) for link in profile.links
    ]
    rules = rules_of(profile.model_copy(update={"links": tuple(changed)}))

    def bound_s(layout: Layout) -> float:
        limits = rules.fleet.memory_limits(layout)
        return step_bound(rules.fleet.pipeline(layout), profile.micro_batches, limits)

    bounds = sorted(map(bound_s, all_layouts(rules.fleet, 1e9)))
    for most_s in (1.001 * bounds[0], 1.001 * bounds[len(bounds) // 2]):
        found = {bound_s(one) for one in Enumeration(rules, most_s, nodes=10**6).layouts()}
        assert {one for one in bounds if one < most_s} <= found


@settings(max_examples=40, deadline=None)
@given(
    profiles_of_fleets(most_devices=3, most_layers=4, tight=True, uneven=True),
    st.sampled_from([0.02, 0.1, 1]),
)
def test_with_several_stages_any_device_may_have_any_layer(
    profile: FleetProfile, slower: float
) -> None:
    changed = [
        link.model_copy(update={"bytes_per_s": slower * link.bytes_per_s}) for link in profile.links
    ]
    rules = rules_of(profile.model_copy(update={"links": tuple(changed)}), chunks=True)

    def step_s(layout: Layout) -> float:
        """By one schedule; a branch may end by more than the layout's own bound says."""
        limits, m = rules.fleet.memory_limits(layout), profile.micro_batches
        if limits is None:
            return math.inf
        return simulate(rules.fleet.pipeline(layout), m, m, in_flight_limits=limits).seconds

    steps = sorted(set(map(step_s, every_way(rules))) - {math.inf})
    for most_s in {1.001 * steps[k] for k in (0, len(steps) // 2)} if steps else ():
        enumeration = Enumeration(rules, most_s, nodes=10**6, several=True)
        found = set(map(step_s, enumeration.layouts()))
        assert {one for one in steps if one < most_s} <= found


def every_way(rules: Rules) -> Iterator[Layout]:
    """Each layer, and the head, on each device; each stage computing again or not where it could
    be short of memory; each boundary by each way."""
    fleet, layers = rules.fleet, rules.fleet.layers
    for *owners, head in product(rules.devices, repeat=layers + 1):
        parts = [Part(0, 0, 0)]
        for layer, d in enumerate(owners):
            if d == parts[-1].device:
                parts[-1] = parts[-1]._replace(end=layer + 1)
            else:
                parts.append(Part(d, layer, layer + 1))
        if head != parts[-1].device:
            parts.append(Part(head, layers, layers))
        again = [
            (False, True) if part.end > part.start and fleet.is_short_of_memory(part) else (False,)
            for part in parts
        ]
        pairs = pairwise(parts)
        ways = [[way for _, way in rules.ways(a.device, b.device, b.start)] for a, b in pairs]
        for recompute, direct in product(product(*again), product((False,), *ways)):
            chosen = zip(parts, recompute, direct, strict=True)
            yield tuple(part._replace(recompute=on, direct=way) for part, on, way in chosen)


def test_equal_devices_are_enumerated_once_beside_repeated_ones() -> None:
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(3)), layers=3), chunks=True)
    enumeration = Enumeration(rules, math.inf, nodes=10**6, several=True)
    orders = {tuple(part.device for part in layout) for layout in enumeration.layouts()}
    assert {(0, 1, 0, 1), (0, 1, 0, 2)} <= orders
    assert (0, 2) not in orders  # as good as (0, 1)


def test_devices_behind_slow_links_are_left_out_at_once() -> None:
    """Two boundaries on a NIC take more than the step; of many orders only pairs are looked at."""
    slow = fleet_of(
        *(device(k or "local", layer_forward_s=0.001 * (k + 1)) for k in range(7)), speed=5e6
    )
    found = list(Enumeration(rules_of(slow), 8 * 0.03, nodes=300).layouts())
    assert {len(layout) for layout in found} == {1, 2}


def test_enumeration_gives_up_where_there_is_too_much() -> None:
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(4))))
    with pytest.raises(TooMany):
        list(Enumeration(rules, 1e9, nodes=20).layouts())


def test_parts_that_a_device_cannot_hold_are_pruned_at_once() -> None:
    """Three layers each are all that fit, and one device has its own; of those alike one comes."""
    tight = {"memory_bytes": 3.4 * GB}
    profile = fleet_of(*(device(k or "local", **tight) for k in range(4)), layers=12)
    rules = replace(rules_of(profile), checkpointing=False, pins={2: (3, 6)})
    found = list(Enumeration(rules, math.inf, nodes=300).layouts())
    cuts = {tuple((part.device, part.end) for part in layout) for layout in found}
    assert cuts == {((0, 3), (2, 6), (1, 9), (3, 12))}
