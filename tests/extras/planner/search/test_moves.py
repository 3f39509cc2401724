from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_framework.extras.planner.layout import Part
from hetero_framework.extras.planner.layout_search import beginnings
from hetero_framework.extras.planner.search import moves
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme
from tests.extras.planner.fleets import GB, device, fleet_of, profiles_of_fleets, rules_of


@settings(max_examples=25, deadline=None)
@given(profiles_of_fleets(most_devices=3, most_layers=5), st.integers(2, 3))
def test_moves_keep_all_layers_and_only_ends_may_be_empty(profile, chunks):
    rules = rules_of(profile, chunks=True)
    for layout in beginnings(rules):
        if layout[-1].end < profile.layers:
            continue
        made = [moves.interleaved(rules, layout, chunks), *moves.closed(rules, layout)]
        made += [*moves.shifted(rules.fleet, layout), *moves.split(rules, layout)]
        for found in filter(None, made):
            assert [part.start for part in found] == [0, *(part.end for part in found[:-1])]
            assert found[-1].end == profile.layers
            assert all(part.start < part.end for part in found[1:-1]), (layout, found)
            assert found[0].device == 0
            assert all(one.device != other.device for one, other in pairwise(found))


def test_a_device_with_only_the_head_is_left_out_of_closed_layouts():
    rules = rules_of(fleet_of(device("local"), device(1), device(2), layers=6), chunks=True)
    layout = (Part(0, 0, 4, False, False), Part(2, 4, 6, False, True), Part(1, 6, 6, False, True))
    assert [
        [(part.device, part.end - part.start) for part in x] for x in moves.closed(rules, layout)
    ] == [[(0, 4), (2, 2), (0, 0)], [(0, 2), (2, 2), (0, 2)], [(0, 0), (2, 2), (0, 4)]]


def test_with_little_memory_all_stages_in_front_recompute_at_once():
    """One alone would win nothing: the one that stores fewest limits those behind it."""
    small, few = {"memory_bytes": 2.3 * GB}, {"layers": 6, "micro_batches": 8}
    layout = tuple(Part(k, 2 * k, 2 * k + 2) for k in range(3))
    for memory, longest in ((small, 2), ({}, 0)):
        rules = rules_of(fleet_of(*(device(k or "local", **memory) for k in range(3)), **few))
        again = [sum(part.recompute for part in found) for found in moves.toggled(rules, layout)]
        assert max(again, default=0) == longest


def test_a_stage_is_split_to_every_other_place():
    rules = rules_of(fleet_of(device("local"), device(1), device(2), layers=6), chunks=True)
    layout = (Part(0, 0, 2), Part(1, 2, 4, False), Part(2, 4, 6, False, True))
    made = {
        tuple((p.device, p.end - p.start) for p in found) for found in moves.split(rules, layout)
    }
    assert made == {
        ((0, 1), (1, 2), (0, 1), (2, 2)),
        ((0, 1), (1, 2), (2, 2), (0, 1)),
        ((0, 0), (1, 2), (0, 2), (2, 2)),
        ((0, 0), (1, 2), (2, 2), (0, 2)),
        ((0, 2), (1, 1), (2, 2), (1, 1)),
        ((0, 2), (2, 1), (1, 2), (2, 1)),
        ((0, 2), (1, 2), (2, 2), (0, 0)),
        ((0, 2), (1, 2), (2, 2), (1, 0)),
    }


def test_nothing_is_looked_for_without_a_step_to_begin_with():
    rules = rules_of(fleet_of(device("local", memory_bytes=2 * GB)))
    assert moves.balanced(LayerProgramme(rules), [0], math.inf) is None


def test_in_long_pipelines_the_busiest_devices_give_to_the_idlest():
    devices = (device(k or "local", layer_forward_s=0.001 * (1 + (k == 3))) for k in range(9))
    rules = rules_of(fleet_of(*devices, layers=27))
    layout = tuple(Part(k, 3 * k, 3 * k + 3) for k in range(9))
    every = [[part.end - part.start for part in one] for one in moves.shifted(rules.fleet, layout)]
    sources = {counts.index(2) for counts in every}
    assert 3 in sources
    assert len(sources) == 2
    assert len(every) < 2 * 9


def test_orders_change_one_device_or_two():
    rules = rules_of(fleet_of(*(device(k or "local", head_forward_s=k) for k in range(4))))
    found = [*moves.orders(rules, (Part(0, 0, 3), Part(1, 3, 6), Part(2, 6, 8)))]
    assert [0, 2] in found
    assert [0, 2, 1] in found
    assert [0, 3, 2] in found
    assert [0, 1, 3, 2] in found
    assert len(found) == 2 + 2 + 1 + 3
    assert not [*moves.orders(rules, (Part(0, 0, 3), Part(1, 3, 6), Part(0, 6, 8)))]
