from __future__ import annotations

import math

from hetero_framework.extras.planner.evaluated import evaluated
from hetero_framework.extras.planner.layout import Part
from hetero_framework.extras.planner.search.fast_evaluation import FastEvaluation
from hetero_framework.extras.planner.search.scores import Scores
from tests.extras.planner.fleets import device, fleet_of, rules_of

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
