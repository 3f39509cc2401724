from __future__ import annotations

import math
import random

import pytest

from benchmarks.fleets import GIGABIT, random_fleet
from hetero_framework.extras.planner import FleetProfile, evaluate, layout_search, plan
from hetero_framework.extras.planner import layout as evaluated_layouts
from hetero_framework.extras.planner.layout import Evaluated, Part, Rules, evaluated, has_chunks
from hetero_framework.extras.planner.layout_search import Search
from tests.cases import seldom
from tests.extras.planner.fleets import GB, device, fleet_of, rules_of

UNLIKE = fleet_of(
    device("local", layer_forward_s=0.003),
    device(1, memory_bytes=5 * GB),
    device(2, layer_forward_s=0.002),
    micro_batches=4,
)
FEW_LAYERS = fleet_of(
    device("local", head_forward_s=0.001, head_backward_s=0.002),
    device(1, head_forward_s=0.002, head_backward_s=0.004),
    layers=4,
    micro_batches=4,
)
HALVES = (Part(0, 0, 4), Part(1, 4, 8))


def searched(rules: Rules) -> Evaluated:
    found = Search(rules).run()
    assert found is not None
    return found


@pytest.mark.parametrize("chunks", [False, True])
def test_the_found_layout_is_permitted_fits_and_keeps_to_its_bound(chunks):
    rules = rules_of(UNLIKE, chunks=chunks)
    found = searched(rules)
    layout = found.layout
    assert rules.permits(layout)
    assert rules.fleet.memory_limits(layout) is not None
    again = evaluated(rules.fleet, layout)
    assert found.seconds == again.seconds
    assert found.seconds >= found.schedule.bound_s > 0


def test_interleaving_that_gains_too_little_is_not_taken(monkeypatch):
    rules = rules_of(FEW_LAYERS, chunks=True)
    least_s = searched(rules).seconds
    monkeypatch.setattr(evaluated_layouts, "_WORTH_CHUNKS", 10.0)
    found = searched(rules)
    assert not has_chunks(found.layout)
    assert found.seconds > least_s


@pytest.mark.long
def test_the_same_rules_give_the_same_plan():
    one, other = (searched(rules_of(UNLIKE, chunks=True)) for _ in range(2))
    assert one.layout == other.layout
    assert one.seconds == other.seconds
    assert one.schedule.max_in_flight == other.schedule.max_in_flight


def test_a_search_without_a_fitting_layout_returns_none():
    small = fleet_of(*(device(k or "local", memory_bytes=3 * GB) for k in range(2)))
    assert Search(rules_of(small, chunks=True)).run() is None


def test_of_too_many_devices_the_quickest_take_part(monkeypatch):
    monkeypatch.setattr(layout_search, "_MOST_DEVICES", 2)
    slow = [device(k, layer_forward_s=0.1) for k in (1, 3)]
    found = searched(rules_of(fleet_of(device("local", layer_forward_s=0.2), *slow, device(2))))
    assert {found.fleet.ids[part.device] for part in found.layout} <= {"local", 2}


def test_pins_are_kept():
    free = rules_of(UNLIKE, chunks=True)
    rules = Rules(free.fleet, free.devices, {2: (2, 4)}, checkpointing=True, chunks=True)
    assert [p[:3] for p in searched(rules).layout if p.device == 2] == [(2, 2, 4)]


def test_a_score_grows_with_the_machines_near_the_bound():
    """A machine alone at its bound is the score; two near it count more."""
    search = Search(rules_of(fleet_of(device("local"), device(1), speed=1e15)))
    search._stages_left = 100
    uneven, even = (search._score(one) for one in ((Part(0, 0, 8),), HALVES))
    assert uneven == pytest.approx(search._scores[(Part(0, 0, 8),)][1], rel=0.01)
    assert 1.002 < even / search._scores[HALVES][1] < 1.05
    search._stages_left = 0
    assert search._score((Part(0, 0, 3), Part(1, 3, 8))) == math.inf
    assert search._score(HALVES) == even  # known


def test_a_climb_ends_where_no_neighbour_is_better():
    search = Search(rules_of(UNLIKE))
    search._stages_left = 100_000
    bad = (Part(0, 0, 6), Part(2, 6, 7, direct=True), Part(1, 7, 8, direct=True))
    found = search._climb(bad)
    assert search._score(found) < 0.8 * search._score(bad)
    assert all(search._score(one) >= search._score(found) for one in search._evening(found))


def test_layouts_that_cannot_be_the_fastest_are_not_simulated():
    search = Search(rules_of(UNLIKE))
    search._stages_left = 100_000
    best = searched(rules_of(UNLIKE)).layout
    assert search._look(best) < math.inf
    assert search._look((Part(0, 0, 8),)) == math.inf
    assert [*search._steps] == [best]


def random_fleet_of(number: int) -> FleetProfile:
    """A fleet of which more freedom once made the plan longer, or a better plan was known."""
    draw = random.Random(1000 + number)
    devices, layers = draw.randint(2, 8), draw.choice([20, 28, 32, 40, 48, 64, 80])
    speeds = [GIGABIT / 10, GIGABIT, GIGABIT]
    micro_batches = draw.choice([8, 16, 32])
    return random_fleet(draw, devices, layers, micro_batches, speeds=speeds, direct=0.8)


def test_a_split_that_needs_all_its_moves_is_found():
    """No single layer moved after the split is better by its bound, so it has to be simulated."""
    profile = random_fleet_of(12)
    known = [("local", 0, 6), (2, 6, 18), ("local", 18, 24), (1, 24, 28)]
    given = evaluate(profile, [{"id": d, "start": a, "end": b} for d, a, b in known])
    assert plan(profile).predicted_step_s <= given.predicted_step_s


@pytest.mark.parametrize("number", seldom((0, 2, 12, 4), 0, 2, 12))
def test_chunks_never_make_a_plan_longer(number):
    profile = random_fleet_of(number)
    without = plan(profile, allow=["checkpointing"])
    assert plan(profile).predicted_step_s <= without.predicted_step_s


@pytest.mark.long
def test_with_many_unlike_devices_the_first_ones_come_again():
    times = enumerate((1, 2, 3, 4, 1.5, 2.5, 3.5, 3, 2, 4))
    devices = (
        device(k or "local", layer_forward_s=0.01 * s, layer_backward_s=0.02 * s) for k, s in times
    )
    profile = fleet_of(*devices, layers=40, micro_batches=12)
    simple, found = (searched(rules_of(profile, chunks=chunks)) for chunks in (False, True))
    assert has_chunks(found.layout)
    assert found.seconds < 0.93 * simple.seconds


def test_only_the_coordinator_has_room_for_the_head():
    head, worker = {"head_bytes": 2 * GB}, {"memory_bytes": 1.2 * GB}
    fleet = fleet_of(
        device("local", memory_bytes=2.05 * GB, **head),
        *(device(k, **worker, **head) for k in (1, 2)),
        layers=2,
    )
    found = plan(fleet, allow=["chunks"])
    ends = [(entry["id"], entry["end"]) for entry in found.shard_plan]
    assert ends in ([("local", 0), (a, 1), (b, 2), ("local", 2)] for a, b in ((1, 2), (2, 1)))


def test_a_quick_coordinator_without_memory_for_a_layer_has_the_head():
    heads = [{"head_forward_s": 0.001 * k, "head_backward_s": 0.002 * k} for k in (1, 20)]
    fleet = fleet_of(
        device("local", memory_bytes=0.5 * GB, **heads[0]), device(1, **heads[1]), layers=1
    )
    found = plan(fleet)
    assert [entry["id"] for entry in found.shard_plan] == ["local", 1, "local"]
    assert found.predicted_step_s < plan(fleet, allow=["checkpointing"]).predicted_step_s / 5
