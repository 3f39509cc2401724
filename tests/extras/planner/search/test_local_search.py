from __future__ import annotations

import math
import random
from itertools import islice

import pytest

from benchmarks.fleets import GIGABIT, random_fleet
from hetero_framework.extras.planner import FleetProfile, evaluate, plan
from hetero_framework.extras.planner.layout import Layout, Part, Rules, has_chunks
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.search import local_search
from hetero_framework.extras.planner.search.fast_evaluation import MANY, FastEvaluation, Scores
from hetero_framework.extras.planner.search.local_search import LocalSearch
from tests.extras.planner.fleets import GB, device, fleet_of, rules_of

UNLIKE = rules_of(
    fleet_of(
        device("local", layer_forward_s=0.003),
        device(1),
        device(2, layer_forward_s=0.002, memory_bytes=4 * GB),
        speed=1e9,
    )
)
BAD = (Part(0, 0, 6), Part(2, 6, 7, direct=True), Part(1, 7, 8, direct=True))


def search_of(rules: Rules, stages: int = 100_000) -> tuple[LocalSearch, Scores, FastEvaluation]:
    scores = Scores(rules, stages)
    steps = FastEvaluation(rules, scores)
    return LocalSearch(rules, scores, steps), scores, steps


def is_whole(layout: Layout, layers: int = 8) -> bool:
    ends = [0, *(part.end for part in layout)]
    return [part.start for part in layout] == ends[:-1] and ends[-1] == layers


def test_a_climb_ends_where_no_neighbour_is_better() -> None:
    local, scores, _ = search_of(UNLIKE)
    local.climb(BAD)
    (top,) = scores.best(1)
    assert scores.of(top) < 0.6 * scores.of(BAD)
    near = list(local._near(top))
    assert len(near) > 10
    assert all(is_whole(layout) for layout in near)
    assert min(map(scores.of, near)) >= scores.of(top)


def test_devices_change_where_layers_alone_are_not_enough() -> None:
    local, scores, _ = search_of(UNLIKE)
    local.climb(one := (Part(0, 0, 8),))
    (top,) = scores.best(1)
    assert len(top) > len(one)
    assert local.evened(one) == one  # which moves layers between the stages there are


def test_layers_are_evened_between_the_same_stages() -> None:
    local, scores, _ = search_of(UNLIKE)
    found = local.evened(BAD)
    assert [part.device for part in found] == [0, 2, 1]
    assert is_whole(found)
    assert scores.of(found) < scores.of(BAD)
    assert local.evened(found) is found


def test_a_stage_short_of_memory_computes_again() -> None:
    """With 1 GB a layer 4.4 GB leave room for 4 forwards of 4 layers or of all that come."""
    small = {"memory_bytes": 4.4 * GB}
    local, scores, _ = search_of(rules_of(fleet_of(device("local", **small), device(1, **small))))
    found = local.evened((Part(0, 0, 4), Part(1, 4, 8)))
    assert found[0].recompute
    assert scores.of(found) < math.inf


def test_evening_without_work_left_moves_nothing() -> None:
    local, scores, _ = search_of(UNLIKE, stages=len(BAD))
    scores.of(BAD)
    assert local.evened(BAD) == BAD


def test_neighbours_by_a_layer_are_all_where_stages_are_few() -> None:
    local, _, _ = search_of(UNLIKE)
    counts = {tuple(p.end - p.start for p in layout) for layout in local._shifted(BAD)}
    # A middle stage keeps a layer, the first and the last one may have none.
    assert counts == {(5, 2, 1), (5, 1, 2), (7, 1, 0), (6, 2, 0)}


def test_with_many_stages_the_busiest_devices_give_to_the_idlest() -> None:
    count = MANY + 3
    rules = rules_of(fleet_of(*(device(k or "local") for k in range(count)), layers=4 * count))
    ends = [0]
    for k in range(count):
        # Devices 3 and 5 have most, 8, 9 and 10 more than the others.
        ends.append(ends[-1] + {3: 9, 5: 8, 8: 4, 9: 4, 10: 4}.get(k, 2))
    layout = tuple(Part(k, ends[k], ends[k + 1]) for k in range(count - 1))
    layout = (*layout, Part(count - 1, ends[-2], 4 * count))
    local, _, _ = search_of(rules)
    givers, takers = set(), set()
    for other in local._shifted(layout):
        change = [(b.end - b.start) - (a.end - a.start) for a, b in zip(layout, other, strict=True)]
        givers.add(change.index(-1))
        takers.add(change.index(1))
    assert givers == {3, 5}
    assert len(takers) == MANY
    assert not takers & givers


def test_orders_are_recut_while_work_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_search, "_ORDERS", 5)
    local, scores, _ = search_of(UNLIKE)
    scores.of(BAD)
    first = list(islice(local._reordered(BAD), 3))
    assert len(first) == 3
    order = [part.device for part in BAD]
    assert all([part.device for part in layout] != order for layout in first)
    assert len(list(local._reordered(BAD))) == 2  # in the whole search, not of each
    assert not list(local._reordered(BAD))


# ---- by simulation

FOUR_MICRO_BATCHES = fleet_of(
    device("local", layer_forward_s=0.003),
    device(1),
    device(2, layer_forward_s=0.002),
    micro_batches=4,
    speed=1e9,
)
SIMPLE, CHUNKS = rules_of(FOUR_MICRO_BATCHES), rules_of(FOUR_MICRO_BATCHES, chunks=True)
TURNS = (
    Part(0, 0, 2), Part(1, 2, 3), Part(2, 3, 4, direct=True), Part(0, 4, 5), Part(1, 5, 7),
    Part(2, 7, 8, direct=True),
)  # fmt: skip


def begun(rules: Rules, *layouts: Layout) -> tuple[LocalSearch, FastEvaluation]:
    """A search that has simulated some layouts."""
    local, _, steps = search_of(rules)
    for layout in layouts:
        steps.look(layout, alone=True)
        assert layout in steps
    return local, steps


def test_a_descent_ends_where_no_neighbour_is_faster() -> None:
    local, steps = begun(SIMPLE, BAD)
    given_s = steps[BAD]
    local.descend_simple()
    (end,) = steps.fastest(1)
    assert steps[end] < 0.7 * given_s
    for near in local._near(end):
        steps.look(near)
        assert near not in steps or steps[near] >= steps[end]


def test_a_descent_without_work_left_ends_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_search, "MOST_TASKS", 0)
    local, steps = begun(SIMPLE, BAD)
    tasks = steps.tasks
    local.descend_simple()
    assert steps.fastest() == [BAD]
    assert steps.tasks == tasks


def test_interleaved_descents_begin_at_interleaved_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number of stages at the fastest; without `few` only at variants of the simple one,
    here none."""
    monkeypatch.setattr(local_search, "MOST_TASKS", 0)
    monkeypatch.setattr(local_search, "_SPLIT", 0)
    slower = tuple(part._replace(device=(0, 2, 1)[part.device]) for part in TURNS)
    closed = (Part(0, 0, 2), Part(1, 2, 5), Part(2, 5, 7, direct=True), Part(0, 7, 8))
    local, steps = begun(CHUNKS, BAD, TURNS, slower, closed)
    fastest = min(TURNS, slower, key=steps.__getitem__)
    ends = local.descend_interleaved(few=True)
    assert ends[0] == BAD
    assert set(ends[1:3]) == {fastest, closed}
    assert len(set(ends)) == len(ends)  # where one has begun no other one does
    local, _ = begun(CHUNKS, BAD, TURNS, slower, closed)
    assert local.descend_interleaved(few=False)[0] == BAD


def test_several_stages_are_split_and_joined_for_few_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    further = []
    for few in (3, 2):
        monkeypatch.setattr(local_search, "FEW", few)
        local, steps = begun(CHUNKS, BAD)
        local.descend_interleaved(few=True)
        further.append({len(layout) for layout in steps.fastest()})
    assert max(further[0]) > 3
    assert len(further[0]) > len(further[1])


@pytest.mark.long
def test_with_many_unlike_devices_the_first_ones_come_again() -> None:
    """0.89 of the step with a stage each; 0.95 without starts of this form."""
    times = enumerate((1, 2, 3, 4, 1.5, 2.5, 3.5, 3, 2, 4))
    devices = (
        device(k or "local", layer_forward_s=0.01 * s, layer_backward_s=0.02 * s) for k, s in times
    )
    profile = fleet_of(*devices, layers=40, micro_batches=12)
    simple, found = (Search(rules_of(profile, chunks=chunks)).run() for chunks in (False, True))
    assert simple is not None
    assert found is not None
    assert has_chunks(found.layout)
    assert found.seconds < 0.9 * simple.seconds


# ---- allowing more is never worse


def random_fleet_of(number: int) -> FleetProfile:
    """One of which more freedom once made the plan longer, or a better plan was known."""
    draw = random.Random(1000 + number)
    devices, layers = draw.randint(2, 8), draw.choice([20, 28, 32, 40, 48, 64, 80])
    speeds = [GIGABIT / 10, GIGABIT, GIGABIT]
    micro_batches = draw.choice([8, 16, 32])
    return random_fleet(draw, devices, layers, micro_batches, speeds=speeds, direct=0.8)


def test_a_split_that_needs_all_its_moves_is_found() -> None:
    """No single layer moved after the split is better by its bound, so it has to be simulated."""
    profile = random_fleet_of(12)
    known = [("local", 0, 6), (2, 6, 18), ("local", 18, 24), (1, 24, 28)]
    given = evaluate(profile, [{"id": d, "start": a, "end": b} for d, a, b in known])
    assert plan(profile).predicted_step_s <= given.predicted_step_s


@pytest.mark.parametrize(
    "number", [*(pytest.param(k, marks=pytest.mark.long) for k in (0, 2, 12)), 4]
)
def test_chunks_never_make_a_plan_longer(number: int) -> None:
    profile = random_fleet_of(number)
    without = plan(profile, allow=["checkpointing"])
    assert plan(profile).predicted_step_s <= without.predicted_step_s
