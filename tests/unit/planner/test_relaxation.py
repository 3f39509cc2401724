from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.planner import FleetProfile
from hetero_framework.planner.enumeration import Enumeration, TooMany
from hetero_framework.planner.relaxation import least_step, matched
from hetero_framework.planner.search import evaluated
from tests.unit.planner.fleets import device, fleet_of, profiles_of_fleets, rules_of


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 4), (3, 3), (4, 2), (4, 6)])
def test_matched_is_the_best_of_all(rows: int, columns: int) -> None:
    draw = random.Random(rows)
    for _ in range(30):
        table = [[draw.randint(0, 9) for _ in range(columns)] for _ in range(rows)]
        few = min(rows, columns)
        best = max(
            sum(table[r][c] for r, c in zip(chosen, order, strict=True))
            for chosen in itertools.combinations(range(rows), few)
            for order in itertools.permutations(range(columns), few)
        )
        assert matched(table) == best


def test_least_step_of_equal_devices_is_that_of_the_best_plan() -> None:
    profile = fleet_of(*(device(k or "local") for k in range(4)), speed=1e12)
    step_s = (3 + 8) * 0.006
    assert 0.98 * step_s < least_step(rules_of(profile), 2 * step_s) <= step_s + 1e-4


def test_least_step_knows_that_memory_keeps_devices_from_layers() -> None:
    ample = fleet_of(device("local"), device(1))
    tight = fleet_of(device("local"), device(1, memory_bytes=3.05e9))
    most_s = 8 * 8 * 0.003
    # Six of eight layers are the coordinator's.
    assert least_step(rules_of(tight), most_s) > 0.98 * 8 * 6 * 0.003
    assert least_step(rules_of(ample), most_s) < 8 * 6 * 0.003


def test_least_step_knows_what_a_star_relays() -> None:
    devices = [device(k or "local") for k in range(8)]
    direct, star = (
        fleet_of(*devices, speed=2e7, direct=direct, micro_batches=32) for direct in (True, False)
    )
    most_s = 32 * 8 * 0.003
    assert least_step(rules_of(star), most_s) > 1.2 * least_step(rules_of(direct), most_s)


@settings(max_examples=30, deadline=None)
@given(profiles_of_fleets(most_devices=3, most_layers=4, tight=True), st.booleans())
def test_no_layout_is_below_the_least_step(profile: FleetProfile, chunks: bool) -> None:
    """All layouts of one stage per device, simulated."""
    rules = rules_of(profile, chunks=chunks)
    steps = [
        found.seconds
        for layout in Enumeration(rules, 1e9, nodes=10**6).layouts()
        if (found := evaluated(rules.fleet, layout)) is not None
    ]
    if steps:
        assert least_step(rules, 2 * min(steps)) <= min(steps) * (1 + 1e-9)


def test_enumeration_gives_up_where_there_is_too_much() -> None:
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(4))))
    with pytest.raises(TooMany):
        list(Enumeration(rules, 1e9, nodes=20).layouts())


def test_a_quick_device_that_can_hold_nothing_does_not_stand_in_the_way() -> None:
    """Found by the property above: the coordinator alone is the only layout."""
    slow = {"layer_forward_s": 0.002, "layer_backward_s": 0.004}
    profile = fleet_of(
        device("local", **slow), device(1, memory_bytes=0.5e9), layers=1, micro_batches=1
    )
    assert least_step(rules_of(profile, chunks=False), 0.012) <= 0.006 * (1 + 1e-9)


def test_a_single_micro_batch_has_no_backwards_behind_the_first() -> None:
    """Found by the property above: the layer on one device, the head alone on the other."""
    head = {"head_forward_s": 0.001, "head_backward_s": 0.002, "memory_bytes": 1.2e9}
    profile = fleet_of(
        device("local", **head), device(1, memory_bytes=0.5e9), layers=1, micro_batches=1, speed=1e8
    )
    assert least_step(rules_of(profile, chunks=False), 0.012) <= 0.00502 * (1 + 1e-9)
