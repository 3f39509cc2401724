from __future__ import annotations

from hetero_framework.extras.planner.layout import Part
from hetero_framework.extras.planner.rules import Rules
from tests.extras.planner.fleets import device, fleet_of, rules_of


def test_devices_that_differ_in_nothing_are_one_kind() -> None:
    profile = fleet_of(device("local"), device(1), device(2), device(3, memory_bytes=1))
    assert rules_of(profile).kinds == {0: 0, 1: 1, 2: 1, 3: 3}
    links = tuple(
        link.model_copy(update={"latency_s": 1.0}) if link.sender == 2 else link
        for link in profile.links
    )
    other = rules_of(profile.model_copy(update={"links": links}))
    assert other.kinds == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_boundary_is_direct_where_that_is_no_slower() -> None:
    profile = fleet_of(device("local"), device(1), device(2))
    rules = rules_of(profile)
    assert [direct for _, direct in rules.ways(1, 2, 4)] == [True]
    assert [direct for _, direct in rules.ways(0, 1, 4)] == [False]
    slow = tuple(
        link.model_copy(update={"bytes_per_s": 1e6})
        if (link.sender, link.receiver) == (1, 2)
        else link
        for link in profile.links
    )
    other = rules_of(profile.model_copy(update={"links": slow}))
    assert [direct for _, direct in other.ways(1, 2, 4)] == [False, True]


def test_pinned_layers_are_one_stage() -> None:
    base = rules_of(fleet_of(device("local"), device(1)))
    rules = Rules(base.fleet, base.devices, {1: (2, 8)}, True, False)
    assert rules.permits((Part(0, 0, 2), Part(1, 2, 8)))
    assert not rules.permits((Part(0, 0, 3), Part(1, 3, 8)))
    assert not rules.permits((Part(0, 0, 8),))
