"""Predicted beside measured steps: the cases, and the statistics of their errors."""

from __future__ import annotations

import pytest

from benchmarks.predictions import errors, random_fleet, shared
from hetero_framework.engine.schedule.simulator import Edge, Profile


def test_fleets_are_unequal_and_always_the_same() -> None:
    fleets = [random_fleet(number) for number in range(20)]
    assert [random_fleet(number) for number in range(20)] == fleets
    assert {len(fleet.profile.devices) for fleet in fleets} == {2, 3, 4, 5}
    assert {fleet.planned for fleet in fleets} == {"best", "equal"}
    workers = [any("local" not in (e.sender, e.receiver) for e in f.profile.links) for f in fleets]
    assert True in workers
    assert False in workers
    assert any(len(set(fleet.ports_bit_s)) > 1 for fleet in fleets)


def test_stages_sleep_as_the_plan_says() -> None:
    fleet = random_fleet(3)
    found = fleet.result()
    load = fleet.load(found)
    assert load.stages == len(found.shard_plan) == len(load.forward_s)
    assert load.plan()[-1]["end"] == fleet.profile.layers
    assert [entry["start"] for entry in load.plan()[1:]] == [e["end"] for e in load.plan()[:-1]]


def test_a_nic_is_shared_where_two_edges_meet() -> None:
    edge = Edge(0.1, 0.1)
    both = Profile.of([0.0] * 3, [0.0] * 3, edges=[edge, edge])
    # The middle one receives activations and gradients, and sends both: 0.2 s of each micro-batch.
    assert shared(both, 4, 2.0) == pytest.approx(0.4)
    assert shared(Profile.of([0.0] * 2, [0.0] * 2, edges=[edge]), 4, 2.0) == 0.0


def test_errors_are_counted_by_absolute_value() -> None:
    assert errors([-0.06, 0.02, -0.01]) == {
        "cases": 3, "within_5_percent": 2, "median": 0.02, "most": 0.06,
    }  # fmt: skip
    assert errors([]) == {"cases": 0}
