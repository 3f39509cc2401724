"""Layouts improved one move at a time: by their scores, which are cheap, then by simulation."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice

from hetero_framework.extras.planner.layout import Layout, Rules, has_chunks
from hetero_framework.extras.planner.search import initial_layouts, moves
from hetero_framework.extras.planner.search.fast_evaluation import (
    MANY,
    MOST_TASKS,
    FastEvaluation,
    Scores,
)
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme

FEW = 6
"""Devices up to which more moves are looked at."""
# By scores.
_MOVES = 40  # from one layout
_EVENING_MOVES = 10  # moves of layers alone, in the same order
_ORDERS = 400  # changes of devices, each cut anew, in a search
# By simulation.
_STARTS = 4  # interleaved layouts of different numbers of stages
_VARIANTS = 3  # variants in which first devices come again, or layers of one stage are elsewhere
_SPLIT = 24  # of the latter that are simulated
_PROMISING = 1.2  # times the best step: variants that take longer are not started from
_AGAIN = 2  # from the best layouts that the others have not visited
_NEIGHBOURS = 10  # neighbours with the best bounds


class LocalSearch:
    """Goes from layouts to better ones. `scores` and `steps` know all layouts on its way."""

    def __init__(self, rules: Rules, scores: Scores, steps: FastEvaluation) -> None:
        self._rules = rules
        self._scores = scores
        self._steps = steps
        self._programme = LayerProgramme(rules)
        self._orders = 0
        self._passed: set[Layout] = set()

    # -- by scores ------------------------------------------------------------------------------

    def climb(self, layout: Layout) -> None:
        """Go to the best neighbour until none is better."""
        for _ in range(_MOVES):
            better = self._best(self._cheap(layout), layout)
            if better == layout:
                better = self._best(self._reordered(layout), layout)
            if better == layout:
                break
            layout = better

    def evened(self, layout: Layout) -> Layout:
        """Move layers, and have stages compute again or not, until that is no better."""
        for _ in range(_EVENING_MOVES):
            better = self._best(self._cheap(layout), layout)
            if better == layout:
                break
            layout = better
        return layout

    def _best(self, others: Iterator[Layout], layout: Layout) -> Layout:
        """The best of these; the layout itself if none is better."""
        better = min(others, key=self._scores.of, default=layout)
        return better if self._scores.of(better) < self._scores.of(layout) else layout

    # -- by simulation --------------------------------------------------------------------------

    def descend_simple(self) -> None:
        """Descend from the fastest layout with one stage for each device."""
        for start in self._steps.fastest(1, lambda layout: not has_chunks(layout)):
            self._descend(start, MOST_TASKS // 2)

    def descend_interleaved(self, *, few: bool) -> list[Layout]:
        """Descend from the fastest simple layout, from interleaved ones (with `few` stages, of all
        kinds), from variants of the simple one, and then from the best layouts not visited."""
        steps = self._steps
        simple = steps.fastest(1, lambda layout: not has_chunks(layout))
        starts = [*simple, *(self._interleaved() if few else ()), *self._variants(simple)]
        ends, spare = [], MOST_TASKS - steps.tasks
        for k, start in enumerate(starts, start=1):
            most = MOST_TASKS - spare * (len(starts) + 1 - k) // (len(starts) + 1)
            ends.append(self._descend(start, most, several=True))
        for _ in range(_AGAIN):
            left = (layout for layout in steps.fastest() if layout not in self._passed)
            ends += [self._descend(start, MOST_TASKS, several=True) for start in islice(left, 1)]
        return ends

    def _interleaved(self) -> list[Layout]:
        """The fastest layouts, one for each number of stages."""
        fastest: dict[int, Layout] = {}
        for layout in self._steps.fastest(where=has_chunks):
            fastest.setdefault(len(layout), layout)
        return list(fastest.values())[:_STARTS]

    def _variants(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The fastest layouts in which the first devices of a layout come again, or some layers of
        a stage are a stage of their own elsewhere."""
        splits = {other for layout in layouts for other in moves.split(self._rules, layout)}
        others = [
            *initial_layouts.wrapped(self._rules, layouts),
            *heapq.nsmallest(_SPLIT, splits, key=self._scores.of),
        ]
        looks = {layout: self._steps.look(layout, alone=True) for layout in others}
        most_s = _PROMISING * self._steps.least_s
        fit = [layout for layout, seconds in looks.items() if seconds < most_s]
        return heapq.nsmallest(_VARIANTS, fit, key=looks.__getitem__)

    def _descend(self, layout: Layout, most_tasks: int, *, several: bool = False) -> Layout:
        """Go to a faster neighbour until there is none: a near one, or with `several` a further
        one."""
        better: Layout | None = layout
        while better is not None:
            layout = better
            self._passed.add(layout)
            better = (
                self._fastest(self._near(layout), layout, most_tasks)
                or (several and self._fastest(self._further(layout), layout, most_tasks))
                or None
            )
        return layout

    def _fastest(self, near: Iterator[Layout], layout: Layout, most_tasks: int) -> Layout | None:
        """The fastest of some neighbours, of which the most promising are simulated; None if none
        is faster than the layout."""
        steps, now, every = self._steps, self._steps[layout], set(near)
        promising = [x for x in every if x not in steps and self._scores.bound(x) < now]
        for other in heapq.nsmallest(_NEIGHBOURS, promising, key=self._scores.of):
            if steps.tasks > most_tasks:
                break
            steps.look(other, layout)
        known = [x for x in every if x in steps]
        better = min(known, key=steps.__getitem__, default=layout)
        return better if steps[better] < now else None

    # -- neighbours -----------------------------------------------------------------------------

    def _near(self, layout: Layout) -> Iterator[Layout]:
        yield from self._cheap(layout)
        yield from self._reordered(layout)

    def _cheap(self, layout: Layout) -> Iterator[Layout]:
        """The neighbours in the same order, for which nothing is cut anew."""
        yield from self._shifted(layout)
        yield from moves.toggled(self._rules, layout)

    def _shifted(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with one layer moved, away from the busiest devices if stages are many."""
        if len(layout) <= MANY:
            return moves.shifted(layout)
        profile = self._rules.fleet.pipeline(layout)
        loads = dict.fromkeys(profile.devices, 0.0)
        for d, *work in zip(profile.devices, profile.forward_s, profile.backward_s, strict=True):
            loads[d] += sum(work)
        heavy = set(heapq.nlargest(2, loads, key=loads.__getitem__))
        light = set(heapq.nsmallest(MANY, loads, key=loads.__getitem__))
        sources, targets = (
            [k for k, d in enumerate(profile.devices) if d in chosen] for chosen in (heavy, light)
        )
        return moves.shifted(layout, sources, targets)

    def _reordered(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with other devices, or in another order, while there is work left for them."""
        step_s = self._scores.bound(layout)
        for other in moves.reordered(self._rules, self._programme, layout, step_s):
            self._orders += 1
            if self._orders > _ORDERS:
                return
            yield other

    def _further(self, layout: Layout) -> Iterator[Layout]:
        """For few devices: two or three layers moved at once, stages split or joined."""
        if len(self._rules.devices) <= FEW:
            yield from moves.shifted(layout, count=2)
            yield from moves.shifted(layout, count=3)
            yield from moves.split(self._rules, layout)
            yield from moves.joined(self._rules, layout)
