from __future__ import annotations

import pytest

from hetero_framework.planner.groups import BestBoundaries, groups_of
from tests.unit.planner.fleets import device, fleet_of, rules_of


def test_workers_of_one_kind_are_a_group() -> None:
    slow = device(2, layer_forward_s=0.01)
    rules = rules_of(fleet_of(device("local"), device(1), slow, device(3)))
    assert [(group.size, group.members) for group in groups_of(rules, chunks=False)] == [
        (2, (1,)),
        (1, (2,)),
    ]


def test_of_many_kinds_those_about_as_fast_are_one_group() -> None:
    many = [device(k, layer_forward_s=0.001 * k) for k in range(1, 101)]
    groups = groups_of(rules_of(fleet_of(device("local"), *many)), chunks=False)
    assert [group.size for group in groups] == [3] * 33 + [1]
    assert groups[0].members == (1, 2, 3)


def test_a_boundary_is_as_good_as_the_best_one() -> None:
    """100 kB at 1 GB/s, 10 us of latency; through the coordinator twice the latency."""
    star = rules_of(fleet_of(device("local"), device(1), device(2), direct=False))
    first = BestBoundaries(star, False).from_coordinator(1)
    assert first.forward_s == first.backward_s == pytest.approx(1e-4)
    assert first.round_trip_s == pytest.approx(2e-4 + 2e-5)
    assert first.relayed_s == 0
    (relayed,) = BestBoundaries(star, False).from_workers(1)
    assert relayed.round_trip_s == pytest.approx(2e-4 + 4e-5)
    assert relayed.relayed_s == pytest.approx(2e-4)
    linked = rules_of(fleet_of(device("local"), device(1), device(2)))
    assert [b.relayed_s for b in BestBoundaries(linked, False).from_workers(1)] == [0]


def test_with_several_stages_a_boundary_may_come_from_the_coordinator() -> None:
    star = rules_of(fleet_of(device("local"), device(1), device(2), direct=False))
    boundaries = BestBoundaries(star, True)
    (relayed,) = boundaries.from_workers(1)
    assert relayed.round_trip_s == boundaries.from_coordinator(1).round_trip_s
    assert relayed.relayed_s == pytest.approx(1e-4)
