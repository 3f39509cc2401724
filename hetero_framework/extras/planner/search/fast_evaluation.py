"""Layouts judged quickly: by scores, from bounds alone and cheap enough for tens of thousands of
them, and by simulation of a few schedules of which one is near the best."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from hetero_framework.engine.schedule.bounds import machine_bounds, step_bound
from hetero_framework.engine.schedule.policies import portfolio
from hetero_framework.engine.schedule.readiness import Policy
from hetero_framework.engine.schedule.simulator import Profile, simulate
from hetero_framework.engine.schedule.tuning import tapered_limits
from hetero_framework.extras.planner.layout import Layout, Rules

_SHARPNESS = 20
"""Exponent of the norm of bounds that stands for a step: ten equal ones count 12 % more than one;
at 10 they count 26 % more, at 40 6 %."""


class Scores:
    """Scores and bounds of layouts, each computed once. The work is limited: at most `stages`
    stages are scored, counted over all layouts."""

    def __init__(self, rules: Rules, stages: int) -> None:
        self._rules = rules
        self._scores: dict[Layout, float] = {}
        self._bounds: dict[Layout, float] = {}
        self._stages_left = stages

    def allow(self, stages: int) -> None:
        """From now on `stages` more stages may be scored."""
        self._stages_left = stages

    @property
    def is_over(self) -> bool:
        """Whether no more may be scored."""
        return self._stages_left <= 0

    def of(self, layout: Layout) -> float:
        """An estimate of the step: above its bound, the more devices and NICs are near
        it, since they cannot all be busy at the right moment. Infinite where it does not fit or is
        not permitted, and for a new layout when the work is spent."""
        if layout not in self._scores:
            if self.is_over:
                return math.inf
            ways = self._rules.fleet.streamed(layout)
            self._stages_left -= len(layout) * len(ways)
            scores, bounds = zip(*map(self._computed, ways), strict=True)
            self._scores[layout], self._bounds[layout] = min(scores), min(bounds)
        return self._scores[layout]

    def bound(self, layout: Layout) -> float:
        """A lower bound for every schedule of the layout."""
        self.of(layout)
        return self._bounds.get(layout, math.inf)

    def best(self, count: int) -> list[Layout]:
        """The best of all scored layouts; those that do not fit come last."""
        return heapq.nsmallest(count, self._scores, key=self.of)

    def _computed(self, layout: Layout) -> tuple[float, float]:
        fleet = self._rules.fleet
        limits = fleet.memory_limits(layout)
        if limits is None or not self._rules.permits(layout):
            return math.inf, math.inf
        busy = machine_bounds(fleet.pipeline(layout), fleet.micro_batches, limits)
        bound = max(busy)
        if bound == 0:
            return 0.0, 0.0
        near = sum((seconds / bound) ** _SHARPNESS for seconds in busy)
        return round(bound * near ** (1 / _SHARPNESS), 12), bound


MANY = 8
"""Stages up to which all moves are looked at: there are as many as pairs of stages."""
MOST_TASKS = 150_000  # of all simulations; a task is a forward or a backward of a micro-batch
_TASKS = 1_500  # of one
_NO_FASTER = 1.005  # times as long: too slow for any schedule to make it faster


class ScheduleChoice(NamedTuple):
    """A way to run a step."""

    max_in_flight: int
    policy: Policy
    in_flight_limits: tuple[int, ...]


class FastEvaluation:
    """The steps of layouts, each simulated once, as far as the work for it lasts. Long steps are
    judged by a part of their micro-batches."""

    def __init__(self, rules: Rules, scores: Scores) -> None:
        self._fleet = rules.fleet
        self._m = rules.fleet.micro_batches
        self._scores = scores
        self._seconds: dict[Layout, float] = {}
        self._by: dict[Layout, int] = {}  # the schedule that took that
        self.chosen: dict[Layout, Layout] = {}
        """Each layout with the streamed layers of its shortest step."""
        self.tasks = 0
        """Tasks that have been simulated."""

    def __contains__(self, layout: Layout) -> bool:
        return layout in self._seconds

    def __getitem__(self, layout: Layout) -> float:
        """Seconds of the step of a layout that was looked at."""
        return self._seconds[layout]

    @property
    def least_s(self) -> float:
        """The shortest step of all."""
        return min(self._seconds.values(), default=math.inf)

    def largest(self, where: Callable[[Layout], bool]) -> int:
        """The most tasks of a whole step of a layout that was looked at."""
        return max(2 * len(layout) * self._m for layout in filter(where, self._seconds))

    def fastest(
        self, count: int | None = None, where: Callable[[Layout], bool] = lambda layout: True
    ) -> list[Layout]:
        """The layouts of the shortest steps, or all of them."""
        count = len(self._seconds) if count is None else count
        return heapq.nsmallest(count, filter(where, self._seconds), key=self.__getitem__)

    def look(self, layout: Layout, like: Layout | None = None, *, alone: bool = False) -> float:
        """Seconds of a step by the better of the schedules; infinite where the layout does not fit,
        its bound is no better than the best of all, or there is no work left. With a layout
        `like` it, that one's best schedule comes first, and others are tried only if it is faster;
        with `alone`, only the first one is tried."""
        if layout in self._seconds:
            return self._seconds[layout]
        ways = [(one, self._fleet.memory_limits(one)) for one in self._fleet.streamed(layout)]
        fitting = [(one, limits) for one, limits in ways if limits is not None]
        least = math.inf if alone else self.least_s
        if not fitting or self._scores.bound(layout) >= least or self.tasks > MOST_TASKS:
            return math.inf
        times = [(*self._looked(one, n, like, alone), one) for one, n in fitting]
        best = min(times, key=lambda entry: entry[:2])
        self._seconds[layout], self._by[layout], self.chosen[layout] = best
        return self._seconds[layout]

    def _looked(
        self, layout: Layout, limits: tuple[int, ...], like: Layout | None, alone: bool
    ) -> tuple[float, int]:
        """(seconds of a step, the schedule that takes that)."""
        profile, m = self._fleet.pipeline(layout), self._judged(layout)
        rest_s = 0.0
        if m < self._m:
            rest_s = step_bound(profile, self._m, limits) - step_bound(profile, m, limits)
        schedules = list(enumerate(schedules_of(profile, m, limits)))
        if like is not None:
            schedules.sort(key=lambda entry: entry[0] != self._by[like])
        times = []
        for number, schedule in schedules:
            taken = self._run(profile, m, schedule)
            times.append((taken + rest_s, number))
            if alone or (like is not None and taken + rest_s > _NO_FASTER * self._seconds[like]):
                break
        return min(times)

    def _judged(self, layout: Layout) -> int:
        """The number of micro-batches by which a layout is judged."""
        p = len(layout)
        return min(self._m, max(2 * p, _TASKS // (2 * p)))

    def _run(self, profile: Profile, m: int, schedule: ScheduleChoice) -> float:
        """Seconds of m micro-batches."""
        max_in_flight, policy, limits = schedule
        self.tasks += 2 * profile.num_stages * m
        return simulate(profile, m, max_in_flight, policy=policy, in_flight_limits=limits).seconds


def schedules_of(
    profile: Profile, micro_batches: int, limits: tuple[int, ...]
) -> list[ScheduleChoice]:
    """A few values of `max_in_flight` and policies, of which one is near the best; no stage stores
    more forwards than `limits` say. The one that is best most often comes first."""
    p = profile.num_stages
    bound = step_bound(profile, micro_batches)
    path = math.ceil(profile.path_s * micro_batches / bound) if bound > 0 else p
    policies = portfolio(profile, micro_batches)
    if profile.num_devices < p:
        least = max(p, path)
        widest = min(micro_batches, 2 * least + p)
        narrower = min(micro_batches, least * 5 // 4 + 1)
        stored = {narrower: _tapered(narrower, limits), widest: limits}
        return [
            ScheduleChoice(size, policy, stored[size])
            for size in dict.fromkeys((widest, narrower))
            for policy in policies[1:]
        ]
    few, many = (min(micro_batches, times * max(p, path)) for times in (1, 3))
    ahead = _tapered(many, limits) if min(limits[:-1], default=many) < micro_batches else limits
    choices = [ScheduleChoice(many, policies[0], limits), ScheduleChoice(many, policies[1], ahead)]
    return [*choices, ScheduleChoice(few, policies[0], limits)] if p <= MANY else choices


def _tapered(size: int, limits: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(min, tapered_limits(size, len(limits)), limits))
