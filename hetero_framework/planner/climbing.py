"""Layouts improved one move at a time, by their scores."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hetero_framework.planner import moves
from hetero_framework.planner.layout import Layout
from hetero_framework.planner.partition import Partition
from hetero_framework.planner.rules import Rules
from hetero_framework.planner.scores import Scores

MANY = 8
"""Stages; of more, not all moves are looked at: there are as many as pairs of stages."""
_MOVES = 40  # from one seed
_EVENING_MOVES = 10  # of layers alone, where no order is changed
_ORDERS = 400  # of devices that are cut anew, in a search
_BEAM = 2_000  # partial layouts that are kept, for all pairs of devices together
_LEAST_BEAM = 12  # of more than 12 devices


class Climber:
    """Goes from layouts to better ones."""

    def __init__(self, rules: Rules, scores: Scores) -> None:
        self._rules = rules
        self._scores = scores
        self._orders = 0

    def climb(self, layout: Layout) -> None:
        """To the best neighbour as long as there is a better one; `scores` knows the way."""
        partition = self.partition()
        for _ in range(_MOVES):
            better = self._best(self._cheap(layout), layout)
            if better == layout:
                better = self._best(self.reordered(partition, layout), layout)
            if better == layout:
                break
            layout = better

    def evened(self, layout: Layout) -> Layout:
        """Layers moved, and stages made to compute again or not, as long as that is better."""
        for _ in range(_EVENING_MOVES):
            better = self._best(self._cheap(layout), layout)
            if better == layout:
                break
            layout = better
        return layout

    def partition(self, depth: float = 1.0) -> Partition:
        """The dynamic programme over these devices."""
        beam = max(_LEAST_BEAM, _BEAM // len(self._rules.devices) ** 2)
        return Partition(self._rules, depth=depth, beam=beam)

    def near(self, partition: Partition, layout: Layout) -> Iterator[Layout]:
        """All neighbours."""
        yield from self._cheap(layout)
        yield from self.reordered(partition, layout)

    def _cheap(self, layout: Layout) -> Iterator[Layout]:
        """Those for which nothing has to be cut anew."""
        yield from self.shifted(layout)
        yield from moves.toggled(self._rules, layout)

    def shifted(self, layout: Layout) -> Iterator[Layout]:
        """One layer moved, away from the devices with most work where there are many stages."""
        if len(layout) <= MANY:
            return moves.shifted(layout)
        profile = self._rules.fleet.pipeline(layout)
        work = [f + b for f, b in zip(profile.forward_s, profile.backward_s, strict=True)]
        loads = dict.fromkeys(profile.devices, 0.0)
        for d, seconds in zip(profile.devices, work, strict=True):
            loads[d] += seconds
        heavy = set(heapq.nlargest(2, loads, key=loads.__getitem__))
        light = set(heapq.nsmallest(MANY, loads, key=loads.__getitem__))
        sources, targets = (
            [k for k, d in enumerate(profile.devices) if d in chosen] for chosen in (heavy, light)
        )
        return moves.shifted(layout, sources, targets)

    def reordered(self, partition: Partition, layout: Layout) -> Iterator[Layout]:
        """Other devices, or in another order, as long as there is work left for it."""
        step_s = self._scores.bound(layout)
        for other in moves.reordered(self._rules, partition, layout, step_s):
            self._orders += 1
            if self._orders > _ORDERS:
                return
            yield other

    def _best(self, others: Iterator[Layout], layout: Layout) -> Layout:
        """The best of these; the layout itself if none is better."""
        better = min(others, key=self._scores.of, default=layout)
        return better if self._scores.of(better) < self._scores.of(layout) else layout
