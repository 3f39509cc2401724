from __future__ import annotations

import pytest

from hetero_framework.planner.choices import (
    capacity_of,
    device_choices,
    in_flight_limit,
    stage_choices,
    work_of_layers,
)
from hetero_framework.planner.groups import groups_of
from hetero_framework.planner.layout import Part
from tests.unit.planner.fleets import device, fleet_of, rules_of


def test_work_is_the_coordinators_time_in_its_mean_layers() -> None:
    layers = [0.001, 0.003, 0.001, 0.003]
    local = device("local", layer_forward_s=layers, layer_backward_s=layers)
    work = work_of_layers(rules_of(fleet_of(local, device(1), layers=4)).fleet)
    assert work == pytest.approx([0, 0.5, 2, 2.5, 4])
    idle = device("local", layer_forward_s=0.0, layer_backward_s=0.0)
    assert list(work_of_layers(rules_of(fleet_of(idle, device(1), layers=4)).fleet)) == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_as_many_forwards_as_there_is_memory_for() -> None:
    assert in_flight_limit(7.0, 2.0, 8) == 3
    assert in_flight_limit(7.0, 2.0, 2) == 2
    assert in_flight_limit(1.0, 2.0, 8) == 0
    assert in_flight_limit(0.0, 0.0, 8) == 8
    assert in_flight_limit(-1.0, 0.0, 8) == 0


def test_a_stage_is_no_worse_than_any_of_its_group() -> None:
    """Layers are cheap behind, and the stages of a length are those that begin anywhere."""
    times = [0.004, 0.004, 0.001, 0.001]
    rules = rules_of(
        fleet_of(device("local"), device(1, layer_forward_s=times), layers=4), checkpointing=False
    )
    found = stage_choices(rules, groups_of(rules, chunks=False), 1.0, after_coordinator=True)
    assert found.work == pytest.approx([0, 1, 2, 3, 4])
    assert found.forward_s == pytest.approx([0, 0.001, 0.002, 0.006, 0.010])
    assert found.seconds == pytest.approx(found.forward_s + 0.002 * found.work)


def test_a_stage_without_memory_is_no_choice() -> None:
    """1 GB for a layer, and 0.1 GB for each micro-batch in flight."""
    rules = rules_of(fleet_of(device("local"), device(1, memory_bytes=2.5e9)), checkpointing=False)
    found = stage_choices(rules, groups_of(rules, chunks=False), 1.0, after_coordinator=True)
    assert found.work == pytest.approx([0, 1, 2])
    assert list(found.limit) == [0, 8, 2]
    assert capacity_of(rules, 1).most_work == pytest.approx(2.5 / 1.1)


def test_two_stages_of_a_device_carry_what_is_counted() -> None:
    """Forwards into both of them, and gradients of those behind: two, or one behind the last."""
    m = 32
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(3)), micro_batches=m))
    parts = [(d, k, k + 1) for k, d in enumerate([0, 1, 2, 0, 1, 2])]
    pipeline = rules.fleet.pipeline(tuple(Part(*part) for part in parts))
    into: dict[int, float] = {}
    for before, behind, edge in zip(
        pipeline.devices, pipeline.devices[1:], pipeline.edges, strict=False
    ):
        into[behind] = into.get(behind, 0.0) + m * edge.forward_s
        into[before] = into.get(before, 0.0) + m * edge.backward_s
    choices = device_choices(rules, groups_of(rules, chunks=True), after_coordinator=False)
    for has_last, d in ((False, 1), (True, 2)):
        counted = choices.nic_s[choices.has_last == has_last].max()
        assert 0.97 * into[d] < counted <= into[d]
