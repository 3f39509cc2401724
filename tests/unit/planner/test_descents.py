from __future__ import annotations

import pytest

from hetero_framework.planner import descents
from hetero_framework.planner.climbing import Climber
from hetero_framework.planner.descents import Descents
from hetero_framework.planner.layout import Layout, Part, has_chunks
from hetero_framework.planner.quick_looks import QuickLooks
from hetero_framework.planner.rules import Rules
from hetero_framework.planner.scores import Scores
from hetero_framework.planner.search import Search
from tests.unit.planner.fleets import device, fleet_of, rules_of

UNLIKE = fleet_of(
    device("local", layer_forward_s=0.003),
    device(1),
    device(2, layer_forward_s=0.002),
    micro_batches=4,
    speed=1e9,
)
SIMPLE, CHUNKS = rules_of(UNLIKE), rules_of(UNLIKE, chunks=True)
BAD = (Part(0, 0, 6), Part(2, 6, 7, direct=True), Part(1, 7, 8, direct=True))
TURNS = (
    Part(0, 0, 2), Part(1, 2, 3), Part(2, 3, 4, direct=True), Part(0, 4, 5), Part(1, 5, 7),
    Part(2, 7, 8, direct=True),
)  # fmt: skip


def begun(rules: Rules, *layouts: Layout) -> tuple[Descents, QuickLooks, Climber]:
    """The descents of a search that has looked at some layouts."""
    scores = Scores(rules, 100_000)
    climber, looks = Climber(rules, scores), QuickLooks(rules, scores)
    for layout in layouts:
        looks.look(layout, alone=True)
        assert layout in looks
    return Descents(rules, scores, climber, looks), looks, climber


def test_a_descent_ends_where_no_neighbour_is_faster() -> None:
    started, looks, climber = begun(SIMPLE, BAD)
    given_s = looks[BAD]
    (end,) = started.run(few=True)
    assert looks[end] < 0.7 * given_s
    assert looks[end] == looks.least_s
    for near in climber.near(climber.partition(), end):
        looks.look(near)
        assert near not in looks or looks[near] >= looks[end]


def test_without_work_left_they_end_where_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descents, "MOST_TASKS", 0)
    started, looks, _ = begun(SIMPLE, BAD)
    tasks = looks.tasks
    assert started.run(few=True) == [BAD]
    assert looks.tasks == tasks


def test_those_of_several_stages_begin_at_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number of stages at the fastest; without `few` only at layouts of which the first
    devices come again, here none."""
    monkeypatch.setattr(descents, "MOST_TASKS", 0)
    slower = tuple(part._replace(device=(0, 2, 1)[part.device]) for part in TURNS)
    closed = (Part(0, 0, 2), Part(1, 2, 5), Part(2, 5, 7, direct=True), Part(0, 7, 8))
    started, looks, _ = begun(CHUNKS, BAD, TURNS, slower, closed)
    fastest = min(TURNS, slower, key=looks.__getitem__)
    ends = started.run(few=True)
    assert ends[0] == BAD
    assert set(ends[1:3]) == {fastest, closed}
    assert all(has_chunks(layout) for layout in ends[3:])
    assert len(set(ends)) == len(ends)  # where one has begun no other one does
    started, _, _ = begun(CHUNKS, BAD, TURNS, slower, closed)
    assert started.run(few=False) == [BAD]


def test_several_stages_are_split_and_joined_for_few_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    further = []
    for few in (3, 2):
        monkeypatch.setattr(descents, "FEW", few)
        started, looks, _ = begun(CHUNKS, BAD)
        started.run(few=True)
        further.append({len(layout) for layout in looks.fastest()})
    assert max(further[0]) > 3
    assert len(further[0]) > len(further[1])


def test_of_many_unlike_devices_the_first_ones_come_again_behind_all() -> None:
    """0.85 of the step with a stage each; 0.95 without starts of this form, 0.89 where the critical
    path does not say which layers to move."""
    times = enumerate((1, 2, 3, 4, 1.5, 2.5, 3.5, 3, 2, 4))
    devices = (
        device(k or "local", layer_forward_s=0.01 * s, layer_backward_s=0.02 * s) for k, s in times
    )
    profile = fleet_of(*devices, layers=40, micro_batches=12)
    simple, found = (Search(rules_of(profile, chunks=chunks)).run() for chunks in (False, True))
    assert simple is not None
    assert found is not None
    assert has_chunks(found.best.layout)
    assert found.best.seconds < 0.87 * simple.best.seconds
