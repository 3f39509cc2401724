"""From layouts to faster neighbours, by simulation."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from hetero_framework.planner import moves, seeds
from hetero_framework.planner.climbing import MANY, Climber
from hetero_framework.planner.layout import Layout, has_chunks
from hetero_framework.planner.quick_looks import MOST_TASKS, QuickLooks
from hetero_framework.planner.rules import Rules
from hetero_framework.planner.scores import Scores

FEW = 6
"""Devices up to which more moves are looked at, and proofs may visit more."""
_STARTS = 4  # interleaved layouts of different numbers of stages
_WRAPPED = 3  # of those in which the first devices come again
_PROMISING = 1.2  # times the best step: those that take longer are no such start
_AGAIN = 2  # from the best of what the others have not come by
_NEIGHBOURS = 10  # that bounds promise most of
_TRIED = 8  # that take most from the critical path


class Descents:
    """They go on to a faster neighbour as long as there is one."""

    def __init__(self, rules: Rules, scores: Scores, climber: Climber, looks: QuickLooks) -> None:
        self._rules = rules
        self._scores = scores
        self._climber = climber
        self._looks = looks
        self._passed: set[Layout] = set()

    def run(self, *, few: bool) -> list[Layout]:
        """Where they end. They begin at the best layout with one stage for each device, at
        interleaved ones (with `few` stages, of all kinds), and then at the best of all that none
        has come by."""
        one_each = self._looks.fastest(1, lambda layout: not has_chunks(layout))
        ends = [self._descend(start, MOST_TASKS // 2, guided=False) for start in one_each]
        several = [*(self._interleaved() if few else ()), *self._wrapped(ends)]
        spare = MOST_TASKS - self._looks.tasks
        for k, start in enumerate(several, start=1):
            most = MOST_TASKS - spare * (len(several) + 1 - k) // (len(several) + 1)
            ends.append(self._descend(start, most))
        for _ in range(_AGAIN if several else 0):
            left = (layout for layout in self._looks.fastest() if layout not in self._passed)
            ends += [self._descend(start, MOST_TASKS) for start in islice(left, 1)]
        return ends

    def _interleaved(self) -> list[Layout]:
        """The fastest ones, each of another number of stages."""
        found: dict[int, Layout] = {}
        for layout in self._looks.fastest(where=has_chunks):
            found.setdefault(len(layout), layout)
        return list(found.values())[:_STARTS]

    def _wrapped(self, layouts: Iterable[Layout]) -> list[Layout]:
        """The fastest ones in which the first devices of a layout come again."""
        found = {}
        for layout in seeds.wrapped(self._rules, layouts):
            found[layout] = self._looks.look(layout, alone=True)
        most_s = _PROMISING * self._looks.least_s
        fit = [layout for layout, seconds in found.items() if seconds < most_s]
        return heapq.nsmallest(_WRAPPED, fit, key=found.__getitem__)

    def _descend(self, layout: Layout, most_tasks: int, *, guided: bool = True) -> Layout:
        """To a faster neighbour: with `guided` one of those that relieve the critical path, else
        the fastest of the near, else the fastest of further ones."""
        partition = self._climber.partition()
        better: Layout | None = layout
        while better is not None:
            layout = better
            self._passed.add(layout)
            better = (
                (guided and self._first_faster(self._relieved(layout), layout, most_tasks))
                or self._fastest(set(self._climber.near(partition, layout)), layout, most_tasks)
                or self._fastest(set(self._further(layout)), layout, most_tasks)
            )
        return layout

    def _further(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours for few devices: two or three layers moved at once, stages split or joined."""
        if self._rules.chunks and not self._rules.pins and len(self._rules.devices) <= FEW:
            yield from moves.shifted(layout, count=2)
            yield from moves.shifted(layout, count=3)
            yield from moves.split(self._rules, layout)
            yield from moves.joined(self._rules, layout)

    def _relieved(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with one layer moved, those first that take most from the critical path of the
        simulated step. With one stage for each device bounds say as much."""
        if not has_chunks(layout):
            return
        costs = []  # seconds of the path that a layer of each stage takes
        for part, on_path in zip(layout, self._looks.critical_path(layout), strict=True):
            forward_s, backward_s = self._rules.fleet.mean_layer_s(
                part.device, recompute=part.recompute
            )
            costs.append(on_path.forwards * forward_s + on_path.backwards * backward_s)
        every = range(len(layout))
        pairs = [(costs[b] - costs[a], a, b) for a in every for b in every if costs[b] < costs[a]]
        for _, a, b in sorted(pairs):
            if layout[a].end > layout[a].start:
                yield moves.relieved(self._rules, layout, a, b)

    def _first_faster(
        self, near: Iterable[Layout], layout: Layout, most_tasks: int
    ) -> Layout | None:
        """The first neighbour that is faster by the layout's own schedule, of those not simulated
        before; None after a few that are not."""
        looks, now = self._looks, self._looks[layout]
        new = (x for x in near if x not in looks and self._scores.bound(x) < now)
        for other in islice(new, _TRIED):
            if looks.tasks > most_tasks:
                break
            if looks.look(other, layout, alone=len(layout) > MANY) < now:
                return other
        return None

    def _fastest(self, near: set[Layout], layout: Layout, most_tasks: int) -> Layout | None:
        """The fastest of some neighbours, those simulated that promise most; None if none is faster
        than the layout."""
        looks, now = self._looks, self._looks[layout]
        promising = [x for x in near if x not in looks and self._scores.bound(x) < now]
        for other in heapq.nsmallest(_NEIGHBOURS, promising, key=self._scores.of):
            if looks.tasks > most_tasks:
                break
            looks.look(other, layout)
        known = [x for x in near if x in looks]
        better = min(known, key=looks.__getitem__, default=layout)
        return better if looks[better] < now else None
