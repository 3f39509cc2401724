"""Proves that no layout is faster than the best known one, or finds a faster one."""

from __future__ import annotations

from hetero_framework.engine.schedule.simulator import simulate
from hetero_framework.extras.planner.evaluated import Evaluated, evaluated
from hetero_framework.extras.planner.layout import Layout
from hetero_framework.extras.planner.optimality.enumeration import Enumeration, TooMany
from hetero_framework.extras.planner.rules import Rules
from hetero_framework.extras.planner.search.fast_evaluation import schedules_of
from hetero_framework.extras.planner.search.local_search import FEW
from hetero_framework.extras.planner.search.scores import Scores

_NODES = (20_000, 40_000)  # of the enumeration, for many devices and for few
_SEVERAL_NODES = 6_000  # where a device may have several stages: a model of few layers
_STAGES = (30_000, 120_000)  # that are scored
_TASKS = (200_000, 400_000)  # that are simulated
_TUNED = 60  # tasks simulated to tune a layout, per task of its step
_HOPELESS = 1.06  # of the best step: if a few schedules take longer, no other is fast enough
_EXACTLY = 1e-9  # sums in another order differ by less


class Proof:
    """Looks at all layouts that could be faster, where they are few enough."""

    def __init__(self, rules: Rules, scores: Scores) -> None:
        self._rules = rules
        self._scores = scores
        self._few = len(rules.devices) <= FEW

    def run(self, best: Evaluated, *, several: bool = False) -> tuple[Evaluated, bool]:
        """The best of all layouts with one stage for each device (with `several`, of any number)
        and True; or the best of those looked at and False."""
        layouts, is_all = self._open(best, several)
        m, tasks = self._rules.fleet.micro_batches, 0
        for layout in sorted(layouts, key=self._scores.bound):
            if self._scores.bound(layout) >= (1 - _EXACTLY) * best.seconds:
                break
            quick_s, looks = self._fast_evaluation(layout)
            tasks += 2 * looks * len(layout) * m
            if quick_s < _HOPELESS * best.seconds:
                tasks += _TUNED * len(layout) * m
                other = evaluated(self._rules.fleet, layout)
                assert other is not None  # only what fits is open
                best = min(best, other, key=lambda one: one.preference)
            if tasks > _TASKS[self._few]:
                return best, False
        return best, is_all

    def _open(self, best: Evaluated, several: bool) -> tuple[list[Layout], bool]:
        """Layouts that could be faster, and whether these are all; of many devices and of several
        stages all or none, since a few prove nothing."""
        most_s = (1 - _EXACTLY) * best.seconds
        layouts: list[Layout] = []
        self._scores.allow(_STAGES[self._few])
        nodes = _SEVERAL_NODES if several else _NODES[self._few]
        every = Enumeration(self._rules, most_s, nodes=nodes, several=several)
        try:
            for layout in every.layouts():
                if self._scores.is_over:
                    raise TooMany
                if self._scores.bound(layout) < most_s:
                    layouts.append(layout)
        except TooMany:
            return (layouts if self._few and not several else []), False
        return layouts, True

    def _fast_evaluation(self, layout: Layout) -> tuple[float, int]:
        """Seconds of a step by the best of a few schedules, and the number of these."""
        fleet, m = self._rules.fleet, self._rules.fleet.micro_batches
        limits, profile = fleet.memory_limits(layout), fleet.pipeline(layout)
        assert limits is not None  # only what fits is open
        times = [
            simulate(profile, m, size, policy=policy, in_flight_limits=held).seconds
            for size, policy, held in schedules_of(profile, m, limits)
        ]
        return min(times), len(times)
