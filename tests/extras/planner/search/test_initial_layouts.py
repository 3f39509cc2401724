from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.layout import Layout, Part, Rules, has_chunks
from hetero_framework.extras.planner.search import initial_layouts, moves
from hetero_framework.extras.planner.search.fast_evaluation import FastEvaluation, Scores
from hetero_framework.extras.planner.search.layer_dp import step_range
from hetero_framework.extras.planner.search.local_search import LocalSearch
from tests.extras.planner.fleets import GB, device, fleet_of, raw_fleet, rules_of

THREE = rules_of(fleet_of(device("local"), device(1, layer_forward_s=0.003), device(2)))
CHUNKS = rules_of(fleet_of(device("local"), device(1), device(2), device(3)), chunks=True)
EVEN = (Part(0, 0, 2), Part(1, 2, 4), Part(2, 4, 6), Part(3, 6, 8))


def scores_of(rules: Rules) -> tuple[Scores, LocalSearch]:
    scores = Scores(rules, 100_000)
    return scores, LocalSearch(rules, scores, FastEvaluation(rules, scores))


def is_whole(layout: Layout, layers: int = 8) -> bool:
    return (
        layout[0].start == 0
        and layout[-1].end == layers
        and all(a.end == b.start and a.device != b.device for a, b in pairwise(layout))
    )


# ---- one stage for each device


def test_simple_layouts_have_one_stage_per_device_and_come_best_first() -> None:
    scores, _ = scores_of(THREE)
    found = initial_layouts.simple(THREE, scores)
    assert 1 < len(found) <= 6
    assert all(is_whole(layout) and not has_chunks(layout) for layout in found)
    times = [scores.of(layout) for layout in found]
    assert times == sorted(times)
    least_s, _ = step_range(THREE.fleet, THREE.devices)
    assert least_s <= scores.bound(found[0]) < 1.5 * least_s


def test_with_little_memory_one_micro_batch_in_flight_is_enough() -> None:
    """A layer takes 1 GB, and 0.1 GB for each micro-batch."""
    tight = {"memory_bytes": 2.2 * GB}
    rules = rules_of(
        fleet_of(*(device(k or "local", **tight) for k in range(3)), layers=6), checkpointing=False
    )
    scores, _ = scores_of(rules)
    found = initial_layouts.simple(rules, scores)
    assert scores.of(found[0]) < math.inf
    assert [part.end for part in found[0]] == [2, 4, 6]


def test_initial_layouts_allow_for_slow_links() -> None:
    """0.1 s for a tensor: longer than the coordinator would take for all layers of the step."""
    rules = rules_of(fleet_of(device("local", memory_bytes=5 * GB), device(1), speed=1e6))
    scores, _ = scores_of(rules)
    found = initial_layouts.simple(rules, scores)
    assert scores.bound(found[0]) > 0.8 > 2 * step_range(rules.fleet, rules.devices)[1]


def test_with_little_memory_fewer_micro_batches_in_flight_are_tried() -> None:
    """0.5 GB of a micro-batch: for those of a full pipeline three quick workers have room for five
    layers, for half of them for six."""
    quick = {"memory_bytes": 4.2 * GB, "activation_bytes_per_layer": 0.5 * GB}
    slow = device("local", layer_forward_s=0.009, layer_backward_s=0.018)
    rules = rules_of(fleet_of(slow, *(device(k, **quick) for k in (1, 2, 3))), checkpointing=False)
    scores, _ = scores_of(rules)
    assert initial_layouts.simple(rules, scores)[0][0].end == 2


def test_longer_steps_have_some_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []
    for longer in (initial_layouts._LONGER, ()):
        monkeypatch.setattr(initial_layouts, "_LONGER", longer)
        scores, _ = scores_of(THREE)
        initial_layouts.simple(THREE, scores)
        known.append(set(scores.best(1000)))
    assert known[0] > known[1]


def test_without_enough_memory_no_layout_fits() -> None:
    rules = rules_of(fleet_of(device("local", memory_bytes=GB), device(1, memory_bytes=GB)))
    scores, _ = scores_of(rules)
    assert all(scores.of(x) == math.inf for x in initial_layouts.simple(rules, scores))


# ---- fleets too large for a search


def test_of_too_many_devices_the_quickest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (0.009, 0.005, 0.001, 0.008, 0.002, 0.0001)
    raw = raw_fleet([device(k or "local", layer_forward_s=s) for k, s in enumerate(times)])
    for link in raw["links"]:
        link["bytes_per_s"] = 1e6 if 5 in (link["from"], link["to"]) else 1e9
    rules = rules_of(FleetProfile.from_dict(raw))
    assert initial_layouts.without_the_weakest(rules) == rules
    monkeypatch.setattr(initial_layouts, "_MOST_DEVICES", 3)
    assert initial_layouts.without_the_weakest(rules).devices == (0, 2, 4)
    pinned = Rules(rules.fleet, rules.devices, {3: (2, 4)}, checkpointing=True, chunks=False)
    assert initial_layouts.without_the_weakest(pinned).devices == (0, 2, 3)


# ---- several stages on a device


def test_devices_get_several_stages_in_turn() -> None:
    scores, local = scores_of(CHUNKS)
    found = initial_layouts.interleaved(CHUNKS, scores, local.evened, [EVEN])
    assert found
    assert all(is_whole(layout) and has_chunks(layout) for layout in found)
    assert all(scores.of(layout) < math.inf for layout in found)
    orders = [[part.device for part in layout] for layout in found]
    assert [0, 1, 2, 3, 0, 1, 2, 3] in orders
    assert [0, 1, 2, 3, 0] in orders
    # Of those in which the coordinator has the head the best two, and as they are when evened.
    closed = sorted(moves.closed(CHUNKS, EVEN), key=scores.of)[:2]
    assert set(closed) <= set(found)
    assert {local.evened(layout) for layout in closed} <= set(found)
    assert not {local.evened(layout) for layout in closed} <= set(closed)


def test_interleaved_layouts_that_do_not_fit_are_left_out() -> None:
    """The coordinator has no room for the head."""
    heads = (device(k or "local", head_bytes=3 * GB) for k in range(4))
    small, *others = heads
    rules = rules_of(fleet_of({**small, "memory_bytes": 2.5 * GB}, *others), chunks=True)
    scores, local = scores_of(rules)
    found = initial_layouts.interleaved(rules, scores, local.evened, [EVEN])
    assert found
    assert all(layout[-1].device != 0 for layout in found)


def test_the_first_devices_come_again_behind_all() -> None:
    found = list(initial_layouts.wrapped(CHUNKS, [EVEN]))
    assert {tuple(part.device for part in layout) for layout in found} == {
        (0, 1, 2, 3, 0), (0, 1, 2, 3, 0, 1), (0, 1, 2, 3, 0, 1, 2)
    }  # fmt: skip
    assert all(is_whole(layout) for layout in found)


def test_layouts_too_small_to_come_again_are_left_out() -> None:
    ones: Layout = (Part(0, 0, 0), Part(1, 0, 8))
    assert list(initial_layouts.wrapped(CHUNKS, [ones])) == []


@pytest.mark.parametrize("changes", [{"chunks": False}, {"pins": {1: (2, 4)}}])
def test_no_interleaved_layouts_where_they_are_not_allowed(changes: dict[str, Any]) -> None:
    settings = {"pins": {}, "chunks": True, **changes}
    rules = Rules(CHUNKS.fleet, CHUNKS.devices, checkpointing=True, **settings)
    scores, local = scores_of(rules)
    assert initial_layouts.interleaved(rules, scores, local.evened, [EVEN]) == []
    assert list(initial_layouts.wrapped(rules, [EVEN])) == []
