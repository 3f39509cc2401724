from __future__ import annotations

import itertools
import random

import numpy as np

from hetero_framework.planner.covering import Programme, Stages

NEVER = -np.inf


def table(works: list[tuple[float, float]], ticks: list[int], rows: int) -> Stages:
    """Stages that may come wherever their ticks are left; each is paid for on its own."""
    left = np.arange(rows)[:, None]
    may = left >= np.array(ticks)
    middle, last = (np.where(may, [pair[k] for pair in works], NEVER) for k in (0, 1))
    return Stages(middle, last, np.array(ticks), np.eye(len(works)))


def best_of_all(
    works: list[tuple[float, float]], ticks: list[int], left: int, prices: np.ndarray, most: int
) -> float:
    found = NEVER
    for count in range(1, most + 1):
        for order in itertools.product(range(len(works)), repeat=count):
            if sum(ticks[k] for k in order) <= left:
                work = sum(works[k][0] for k in order[:-1]) + works[order[-1]][1]
                found = max(found, work - sum(prices[k] for k in order))
    return found


def test_best_is_the_best_of_all_orders() -> None:
    draw = random.Random(0)
    for _ in range(30):
        ticks = [draw.choice([20, 30, 70]) for _ in range(3)]
        works = [(draw.randint(1, 5), draw.choice([NEVER, draw.randint(1, 5)])) for _ in ticks]
        prices = np.array([draw.choice([0.0, 1.5]) for _ in ticks])
        left = draw.randint(60, 100)
        stages = table(works, ticks, left + 1)
        first = Stages(stages.middle[-1:], stages.last[-1:], stages.ticks, stages.uses)
        found, used = Programme(stages, np.zeros(1), np.array([left]), first, 5).best(prices)
        assert found == best_of_all(works, ticks, left, prices, 5)
        assert sum(ticks * used) <= left


def test_best_has_room_for_stages_that_take_nothing() -> None:
    stages = table([(1.0, 1.0), (2.0, 2.0)], [0, 60], 101)
    first = Stages(stages.middle[-1:], stages.last[-1:], stages.ticks, stages.uses)
    found, _ = Programme(stages, np.zeros(1), np.array([100]), first, 4).best(np.zeros(2))
    assert found >= 5


def test_best_is_minus_infinity_where_nothing_ends() -> None:
    stages = table([(2.0, NEVER)], [10], 101)
    first = Stages(stages.middle[-1:], stages.last[-1:], stages.ticks, stages.uses)
    found, used = Programme(stages, np.zeros(1), np.array([100]), first, 5).best(np.zeros(1))
    assert found == NEVER
    assert not used.any()
