from __future__ import annotations

import math
from itertools import islice

import pytest

from hetero_framework.planner import climbing
from hetero_framework.planner.climbing import MANY, Climber
from hetero_framework.planner.layout import Layout, Part
from hetero_framework.planner.rules import Rules
from hetero_framework.planner.scores import Scores
from tests.unit.planner.fleets import GB, device, fleet_of, rules_of

UNLIKE = rules_of(
    fleet_of(
        device("local", layer_forward_s=0.003),
        device(1),
        device(2, layer_forward_s=0.002, memory_bytes=4 * GB),
        speed=1e9,
    )
)
BAD = (Part(0, 0, 6), Part(2, 6, 7, direct=True), Part(1, 7, 8, direct=True))


def climber_of(rules: Rules, stages: int = 100_000) -> tuple[Climber, Scores]:
    scores = Scores(rules, stages)
    return Climber(rules, scores), scores


def is_whole(layout: Layout, layers: int = 8) -> bool:
    ends = [0, *(part.end for part in layout)]
    return [part.start for part in layout] == ends[:-1] and ends[-1] == layers


def test_a_climb_ends_where_no_neighbour_is_better() -> None:
    climber, scores = climber_of(UNLIKE)
    climber.climb(BAD)
    (top,) = scores.best(1)
    assert scores.of(top) < 0.6 * scores.of(BAD)
    near = list(climber.near(climber.partition(), top))
    assert len(near) > 10
    assert all(is_whole(layout) for layout in near)
    assert min(map(scores.of, near)) >= scores.of(top)


def test_devices_change_where_layers_alone_are_not_enough() -> None:
    climber, scores = climber_of(UNLIKE)
    climber.climb(one := (Part(0, 0, 8),))
    (top,) = scores.best(1)
    assert len(top) > len(one)
    assert climber.evened(one) == one  # which moves layers between the stages there are


def test_layers_are_evened_between_the_same_stages() -> None:
    climber, scores = climber_of(UNLIKE)
    found = climber.evened(BAD)
    assert [part.device for part in found] == [0, 2, 1]
    assert is_whole(found)
    assert scores.of(found) < scores.of(BAD)
    assert climber.evened(found) is found


def test_a_stage_short_of_memory_computes_again() -> None:
    """With 1 GB a layer 4.4 GB leave room for 4 forwards of 4 layers or of all that come."""
    small = {"memory_bytes": 4.4 * GB}
    climber, scores = climber_of(rules_of(fleet_of(device("local", **small), device(1, **small))))
    found = climber.evened((Part(0, 0, 4), Part(1, 4, 8)))
    assert found[0].recompute
    assert scores.of(found) < math.inf


def test_without_work_left_nothing_is_moved() -> None:
    climber, scores = climber_of(UNLIKE, stages=len(BAD))
    scores.of(BAD)
    assert climber.evened(BAD) == BAD


def test_neighbours_by_a_layer_are_all_where_stages_are_few() -> None:
    climber, _ = climber_of(UNLIKE)
    counts = {tuple(p.end - p.start for p in layout) for layout in climber.shifted(BAD)}
    # A middle stage keeps a layer, the first and the last one may have none.
    assert counts == {(5, 2, 1), (5, 1, 2), (7, 1, 0), (6, 2, 0)}


def test_of_many_stages_the_busiest_two_devices_give_and_the_idlest_take() -> None:
    count = MANY + 3
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(count)), layers=4 * count))
    ends = [0]
    for k in range(count):
        # Devices 3 and 5 have most, 8, 9 and 10 more than the others.
        ends.append(ends[-1] + {3: 9, 5: 8, 8: 4, 9: 4, 10: 4}.get(k, 2))
    layout = tuple(Part(k, ends[k], ends[k + 1]) for k in range(count - 1))
    layout = (*layout, Part(count - 1, ends[-2], 4 * count))
    climber, _ = climber_of(rules)
    givers, takers = set(), set()
    for other in climber.shifted(layout):
        change = [(b.end - b.start) - (a.end - a.start) for a, b in zip(layout, other, strict=True)]
        givers.add(change.index(-1))
        takers.add(change.index(1))
    assert givers == {3, 5}
    assert len(takers) == MANY
    assert not takers & givers


def test_orders_are_cut_anew_as_long_as_there_is_work_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(climbing, "_ORDERS", 5)
    climber, scores = climber_of(UNLIKE)
    partition = climber.partition()
    scores.of(BAD)
    first = list(islice(climber.reordered(partition, BAD), 3))
    assert len(first) == 3
    order = [part.device for part in BAD]
    assert all([part.device for part in layout] != order for layout in first)
    assert len(list(climber.reordered(partition, BAD))) == 2  # in the whole search, not of each
    assert not list(climber.reordered(partition, BAD))
