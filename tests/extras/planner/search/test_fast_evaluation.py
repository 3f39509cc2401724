from __future__ import annotations

import math

import pytest

from hetero_framework.engine.schedule.bounds import machine_bounds, step_bound
from hetero_framework.extras.planner.layout import Part, evaluated
from hetero_framework.extras.planner.search.fast_evaluation import FastEvaluation, Scores
from tests.extras.planner.fleets import GB, card, device, fleet_of, rules_of

RULES = rules_of(fleet_of(device("local"), device(1), device(2, memory_bytes=3.5e9)))
EVEN = (Part(0, 0, 4), Part(1, 4, 8, direct=True))
UNEVEN = (Part(0, 0, 7), Part(1, 7, 8, direct=True))


def looks() -> FastEvaluation:
    return FastEvaluation(RULES, Scores(RULES, 10_000))


def test_a_fast_evaluation_is_near_the_tuned_step() -> None:
    for layout in (EVEN, UNEVEN):
        found = evaluated(RULES.fleet, layout)
        assert found is not None
        assert (1 - 1e-9) * found.schedule.bound_s <= looks().look(layout) <= 1.01 * found.seconds


def test_each_layout_is_simulated_once() -> None:
    quick = looks()
    seconds = quick.look(EVEN)
    tasks = quick.tasks
    assert tasks > 0
    assert quick.look(EVEN) == quick[EVEN] == seconds
    assert quick.tasks == tasks


def test_layouts_that_cannot_be_the_fastest_are_not_simulated() -> None:
    quick = looks()
    quick.look(EVEN)
    tasks = quick.tasks
    assert quick.look(UNEVEN) == math.inf  # its bound is above the other's step
    assert quick.look((Part(0, 0, 4), Part(2, 4, 8))) == math.inf  # does not fit
    assert quick.tasks == tasks
    assert UNEVEN not in quick
    assert quick.fastest() == [EVEN]


def test_alone_tries_one_schedule() -> None:
    quick = looks()
    quick.look(EVEN)
    tasks = quick.tasks
    assert quick.look(UNEVEN, alone=True) < math.inf
    assert quick.tasks - tasks == 2 * 2 * 8


def test_a_score_grows_with_the_machines_near_the_bound() -> None:
    scores = Scores(RULES, 100)
    pipeline, limits = RULES.fleet.pipeline(EVEN), RULES.fleet.memory_limits(EVEN)
    bounds = machine_bounds(pipeline, 8, limits)
    assert scores.bound(EVEN) == step_bound(pipeline, 8, limits)
    assert scores.of(EVEN) == pytest.approx(sum(x**20 for x in bounds) ** (1 / 20))
    # The first device has nothing to wait for, so it is not quite as near as the second.
    assert scores.of(EVEN) / scores.bound(EVEN) > 1.004
    assert 1 <= scores.of(UNEVEN) / scores.bound(UNEVEN) < 1.0001


def test_layouts_that_do_not_fit_come_last() -> None:
    scores = Scores(RULES, 100)
    too_large = (Part(0, 0, 4), Part(2, 4, 8))
    assert scores.of(too_large) == scores.bound(too_large) == math.inf
    scores.of(UNEVEN)
    scores.of(EVEN)
    assert scores.best(2) == [EVEN, UNEVEN]


def test_each_layout_is_scored_once_while_the_work_lasts() -> None:
    scores = Scores(RULES, 2)
    known = scores.of(EVEN)
    assert scores.is_over
    assert scores.of(UNEVEN) == math.inf
    assert scores.of(EVEN) == known
    scores.allow(2)
    assert scores.of(UNEVEN) < math.inf


def test_streamed_layers_are_those_of_the_shortest_step() -> None:
    cards = (card(name, memory_bytes=6.15 * GB) for name in ("local", 1))
    rules = rules_of(fleet_of(*cards, layers=14))
    layout = (Part(0, 0, 7), Part(1, 7, 14))
    scores = Scores(rules, 1000)
    steps = FastEvaluation(rules, scores)
    steps.look(layout)
    ways = rules.fleet.streamed(layout)
    times = [found.seconds for way in ways if (found := evaluated(rules.fleet, way)) is not None]
    assert len(times) == len(ways) == 2
    assert times[1] < times[0]
    assert steps.chosen[layout] == ways[1]
    assert steps[layout] == pytest.approx(times[1])
