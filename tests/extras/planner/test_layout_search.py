from __future__ import annotations

import math

import pytest

from hetero_framework.extras.planner import layout as evaluated_layouts
from hetero_framework.extras.planner import plan
from hetero_framework.extras.planner.layout import Evaluated, Part, Rules, evaluated, has_chunks
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.search import initial_layouts, moves
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
def test_the_found_layout_is_permitted_fits_and_keeps_to_its_bound(chunks: bool) -> None:
    rules = rules_of(UNLIKE, chunks=chunks)
    found = searched(rules)
    layout = found.layout
    assert rules.permits(layout)
    assert rules.fleet.memory_limits(layout) is not None
    again = evaluated(rules.fleet, layout)
    assert again is not None
    assert found.seconds == again.seconds
    assert found.seconds >= found.schedule.bound_s > 0


def test_interleaving_that_gains_too_little_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(FEW_LAYERS, chunks=True)
    least_s = searched(rules).seconds
    monkeypatch.setattr(evaluated_layouts, "_WORTH_CHUNKS", 10.0)
    found = searched(rules)
    assert not has_chunks(found.layout)
    assert found.seconds > least_s


@pytest.mark.long
def test_the_same_rules_give_the_same_plan() -> None:
    one, other = (searched(rules_of(UNLIKE, chunks=True)) for _ in range(2))
    assert one.layout == other.layout
    assert one.seconds == other.seconds
    assert one.schedule.max_in_flight == other.schedule.max_in_flight


def test_a_search_without_a_fitting_layout_returns_none() -> None:
    small = fleet_of(*(device(k or "local", memory_bytes=3 * GB) for k in range(2)))
    assert Search(rules_of(small, chunks=True)).run() is None


def test_a_search_may_be_of_a_part_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_layouts, "_MOST_DEVICES", 2)
    found = searched(rules_of(UNLIKE))
    assert len({part.device for part in found.layout}) <= 2


def test_pins_are_kept() -> None:
    free = rules_of(UNLIKE, chunks=True)
    rules = Rules(free.fleet, free.devices, {2: (2, 4)}, checkpointing=True, chunks=True)
    assert [p[:3] for p in searched(rules).layout if p.device == 2] == [(2, 2, 4)]


def test_profiles_are_compared_by_layers_moved_between_the_same_stages() -> None:
    rules = rules_of(UNLIKE)
    best = searched(rules)
    assert len(best.layout) == 3
    uneven = moves.recut(best.layout, [6, 1, 1])
    by_hand = evaluated(rules.fleet, uneven)
    assert by_hand is not None
    assert by_hand.seconds > 1.1 * best.seconds
    assert Search(rules).evened_s(uneven) == pytest.approx(best.seconds, rel=0.02)


def test_a_layout_that_no_move_makes_fit_takes_infinitely_long() -> None:
    small = rules_of(fleet_of(*(device(k or "local", memory_bytes=3 * GB) for k in range(2))))
    assert Search(small).evened_s(HALVES) == math.inf


# ---- memory so tight that the programme finds nothing


def test_only_the_coordinator_has_room_for_the_head() -> None:
    head, worker = {"head_bytes": 2 * GB}, {"memory_bytes": 1.2 * GB}
    fleet = fleet_of(
        device("local", memory_bytes=2.05 * GB, **head),
        *(device(k, **worker, **head) for k in (1, 2)),
        layers=2,
    )
    found = plan(fleet, allow=["chunks"])
    ends = [(entry["id"], entry["end"]) for entry in found.shard_plan]
    assert ends in ([("local", 0), (a, 1), (b, 2), ("local", 2)] for a, b in ((1, 2), (2, 1)))


def test_a_quick_coordinator_without_memory_for_a_layer_has_the_head() -> None:
    heads = [{"head_forward_s": 0.001 * k, "head_backward_s": 0.002 * k} for k in (1, 20)]
    fleet = fleet_of(
        device("local", memory_bytes=0.5 * GB, **heads[0]), device(1, **heads[1]), layers=1
    )
    found = plan(fleet)
    assert [entry["id"] for entry in found.shard_plan] == ["local", 1, "local"]
    assert found.predicted_step_s < plan(fleet, allow=["checkpointing"]).predicted_step_s / 5
