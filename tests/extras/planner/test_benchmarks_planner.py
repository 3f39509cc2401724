"""The planner's benchmarks: their yardsticks are right, and small cases of them hold. Predicted
beside measured steps: the cases, and the statistics of their errors."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import planner
from benchmarks.fleets import GIGABIT, estimated_fleet, random_fleet, seconds_before
from benchmarks.predictions import errors, shared
from benchmarks.predictions import random_fleet as unequal_fleet
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.extras.planner import evaluate
from hetero_framework.extras.planner.known_devices import KnownDevice, known_device
from hetero_framework.extras.planner.layout import Fleet, evaluated
from tests.extras.planner.fleets import device, fleet_of


def test_random_fleets_are_the_same_for_the_same_seed():
    one, other = (random_fleet(random.Random(3), 4, 12, 8, tight=True) for _ in range(2))
    assert one == other
    star = random_fleet(random.Random(3), 4, 12, 8, direct=0.0, speeds=[GIGABIT])
    assert all("local" in (link.sender, link.receiver) for link in star.links)
    assert len(star.links) == 6


def test_known_fleets_differ_in_their_times_alone():
    now, before = estimated_fleet(random.Random(0), [KnownDevice.seconds, seconds_before])
    assert (now, before) == tuple(
        estimated_fleet(random.Random(0), [KnownDevice.seconds, seconds_before])
    )
    for one, other in zip(now.devices, before.devices, strict=True):
        assert one.layer_forward_s != other.layer_forward_s
        assert (one.memory_bytes, one.layer_bytes) == (other.memory_bytes, other.layer_bytes)
    assert now.links == before.links


def test_unpacking_hid_in_the_estimate_before():
    card = known_device("RTX 4090")
    plain, packed = (seconds_before(card, 1e13, 1e6, n, half=True) for n in (0.0, 1e8))
    assert plain == packed == pytest.approx(3e-4 + 1e13 / (0.45 * 165.2e12))
    assert card.seconds(1e13, 1e6, 1e8, half=True) > card.seconds(1e13, 1e6, 0.0, half=True)


@pytest.mark.long
def test_plans_are_not_worse_than_those_of_the_estimate_before(capsys):
    found = planner.estimates(2)
    assert found["worse"] == 0
    assert capsys.readouterr().out.startswith("seed 0: ")


def test_all_layouts_are_enumerated():
    """Subsets of two workers in each order, all cuts, the head alone or not, both ways."""
    slow = fleet_of(device("local"), device(1), device(2), layers=3)
    fleet = Fleet(slow)
    found = list(planner.all_layouts(fleet, 1e9))
    assert len(found) == len(set(found))
    # Alone; with one of two workers 4 cuts; with both in two orders, a layer or more in the middle.
    per_order = sum(1 for a in range(4) for b in range(a + 1, 4))
    assert len(found) == 1 + 2 * 4 + 2 * per_order


def test_best_of_all_is_the_least_step_of_all_layouts():
    fleet = Fleet(fleet_of(device("local"), device(1, layer_forward_s=0.004), speed=3e7))
    found = [evaluated(fleet, layout) for layout in planner.all_layouts(fleet, 1e9)]
    steps = [one.seconds for one in found if one is not None]
    assert planner.best_of_all(fleet, 1e9)[0] == min(steps)
    assert planner.best_of_all(fleet, 0.5 * min(steps)) == (0.5 * min(steps), 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "most_devices"), [(2, 3), (6, 3), (7, 3), (13, 3), (365, 5)], ids=str
)
def test_plans_are_as_good_as_exhaustive_search(seed, most_devices):
    """The last one has 217 layouts that their bounds do not rule out."""
    found = planner.exhaustive([planner.instance(seed, most_devices)])
    assert found["all_fit"]
    assert found["ratio_one_stage"]["least"] >= 0.99
    assert found["ratio"]["least"] >= 0.99


@pytest.mark.long
def test_published_measurements_are_predicted():
    """Two-stage pipelines of A100s give the numbers, four-stage ones are predicted."""
    table = json.loads(planner.VTRAIN.read_text(encoding="utf-8"))
    assert len(table["rows"]) == 160
    found = planner.vtrain()
    assert found["predicted"] == 80
    assert found["mean_error"] <= 0.010
    assert found["worst_error"] <= 0.030


def test_fitting_recovers_the_numbers():
    def row(m: int, layers: int) -> dict[str, float]:
        took_ms = m * (layers / 2 * 3.0 + 7.0) + layers / 2 * 3.0 + 11.0
        return {"micro_batches": m, "layers": layers, "iteration_ms": took_ms}

    rows = [row(m, layers) for m in (2, 4, 8) for layers in (12, 16)]
    assert planner.fitted(rows) == pytest.approx([3.0, 7.0, 11.0])


def test_splits_hold_all_layers():
    profile = fleet_of(*(device(k or "local") for k in range(3)))
    entries = planner.split(profile, [1, 2, 1])
    assert [(e["start"], e["end"]) for e in entries] == [(0, 2), (2, 6), (6, 8)]
    assert evaluate(profile, entries).predicted_step_s > 0


@pytest.mark.long
def test_the_plan_beats_simple_rules():
    found = planner.splits(2)
    assert found["plan"]["mean"] > found["equal"]["mean"]


@pytest.mark.long
def test_large_reports_planning_times():
    found = planner.large(1, layers=8, devices=3, micro_batches=(8,))
    assert len(found["rows"]) == 6
    assert found["seconds_most"] > 0


def test_fleets_are_unequal_and_always_the_same():
    fleets = [unequal_fleet(number) for number in range(20)]
    assert [unequal_fleet(number) for number in range(20)] == fleets
    assert {len(fleet.profile.devices) for fleet in fleets} == {2, 3, 4, 5}
    assert {fleet.planned for fleet in fleets} == {"best", "equal"}
    workers = [any("local" not in (e.sender, e.receiver) for e in f.profile.links) for f in fleets]
    assert True in workers
    assert False in workers
    assert any(len(set(fleet.ports_bit_s)) > 1 for fleet in fleets)


def test_stages_sleep_as_the_plan_says():
    fleet = unequal_fleet(3)
    found = fleet.result()
    load = fleet.load(found)
    assert load.stages == len(found.shard_plan) == len(load.forward_s)
    assert load.plan()[-1]["end"] == fleet.profile.layers
    assert [entry["start"] for entry in load.plan()[1:]] == [e["end"] for e in load.plan()[:-1]]


def test_a_nic_is_shared_where_two_edges_meet():
    edge = Edge(0.1, 0.1)
    both = Profile.of([0.0] * 3, [0.0] * 3, edges=[edge, edge])
    # The middle one receives activations and gradients, and sends both: 0.2 s of each micro-batch.
    assert shared(both, 4, 2.0) == pytest.approx(0.4)
    assert shared(Profile.of([0.0] * 2, [0.0] * 2, edges=[edge]), 4, 2.0) == 0.0


def test_errors_are_counted_by_absolute_value():
    assert errors([-0.06, 0.02, -0.01]) == {
        "cases": 3, "within_5_percent": 2, "median": 0.02, "most": 0.06,
    }  # fmt: skip
    assert errors([]) == {"cases": 0}
