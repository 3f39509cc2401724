"""The best layout of a fleet.

1. Seeds (`seeds`): a dynamic programme covers the layers within a step of T seconds, for the
   shortest T at which it can and some longer ones.
2. They are improved one move at a time by their scores (`climbing`), which bounds make (`scores`),
   and interleaved.
3. The simulator (`quick_looks`) decides between the best few dozen. From the best of these it goes
   on to faster neighbours (`descents`).
4. Where few enough layouts could be faster still, all of them are simulated (`proof`), those with
   one stage for each device first: then the plan is proved.

All limits are counts of work, never of time: the same profile gives the same plan everywhere.
docs/planner.md has more of each part, and the ideas behind them.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import islice

from hetero_framework.planner import moves, seeds
from hetero_framework.planner.climbing import MANY, Climber
from hetero_framework.planner.descents import Descents
from hetero_framework.planner.enumeration import Enumeration, TooMany
from hetero_framework.planner.evaluated import Evaluated, evaluated
from hetero_framework.planner.layout import Layout, has_chunks
from hetero_framework.planner.proof import Proof
from hetero_framework.planner.quick_looks import QuickLooks
from hetero_framework.planner.rules import Rules
from hetero_framework.planner.scores import Scores

# docs/decisions.md has what half and twice as much of the search's limits do.
_STAGES = 30_000  # that are scored in each phase of the search
_CANDIDATES = 24  # with one stage for each device, that are simulated
_NODES = 40_000  # of the enumeration, where the dynamic programme finds nothing that fits
_FITTING = 4  # that are climbed from then
_FINALISTS = 2  # that are tuned, and three times as many where steps are short:
_FINAL_TASKS = 3_000
_NEAR = 1.03  # times the shortest step: tuning changes the order of layouts by about that


@dataclass(frozen=True)
class Found:
    """The best layout, and whether all others were looked at and none is to be preferred."""

    best: Evaluated
    proved: bool


class Search:
    """One search. `rules` say what a layout may be."""

    def __init__(self, rules: Rules) -> None:
        self._rules = seeds.without_the_weakest(rules)
        self._has_all = self._rules.devices == rules.devices
        rules = self._rules
        self._scores = Scores(rules, _STAGES)
        self._climber = Climber(rules, self._scores)
        self._looks = QuickLooks(rules, self._scores)

    def run(self) -> Found | None:
        """None where nothing fits."""
        simple = self._climbed()
        if not simple:
            return None
        self._simulate(simple)
        self._scores.allow(_STAGES)
        descents = Descents(self._rules, self._scores, self._climber, self._looks)
        ends = descents.run(few=len(simple[0]) <= MANY)
        best = min(map(self._evaluated, self._finalists(ends)), key=lambda one: one.preference)
        proof = Proof(self._rules, self._scores)
        best, proved = proof.run(best)
        proved &= self._has_all
        if proved and self._rules.chunks:
            best, proved = (best, False) if self._rules.pins else proof.run(best, several=True)
        return Found(best, proved)

    def evened_s(self, layout: Layout) -> float:
        """About what a step takes once layers have been moved between these stages, infinite where
        that does not fit; for comparing profiles, not for plans."""
        return self._looks.look(self._climber.evened(layout))

    def _climbed(self) -> list[Layout]:
        """With one stage for each device: the best on the way from the seeds upwards."""
        for seed in seeds.shortest(self._rules, self._scores, self._climber):
            self._climber.climb(seed)
        if not (found := self._fitting()):
            self._scores.allow(_STAGES)
            for seed in self._first_that_fit():
                self._climber.climb(seed)
            found = self._fitting()
        return found

    def _fitting(self) -> list[Layout]:
        found = self._scores.best(_CANDIDATES)
        return [layout for layout in found if self._scores.of(layout) < math.inf]

    def _first_that_fit(self) -> list[Layout]:
        """For memory so tight that stages as long as they can be leave no room for the others, or
        that only the coordinator has room for the head."""
        rules, found = self._rules, list[Layout]()
        every = Enumeration(rules, math.inf, nodes=_NODES).layouts()
        if rules.chunks and not rules.pins:
            every = (other for one in every for other in (one, *moves.closed(rules, one)))
        fit = (layout for layout in every if self._scores.of(layout) < math.inf)
        with contextlib.suppress(TooMany):
            found.extend(islice(fit, _FITTING))
        return found

    def _simulate(self, simple: list[Layout]) -> None:
        """These, and the best ways to interleave them."""
        self._scores.allow(_STAGES)
        several = seeds.interleaved(self._rules, self._scores, self._climber, simple)
        for layout in [*simple, *several]:
            quickest = [] if has_chunks(layout) else self._looks.fastest(1)
            self._looks.look(layout, *quickest)

    def _finalists(self, ends: list[Layout]) -> list[Layout]:
        """The fastest, and if they have several stages on a device the best without, as long as it
        is near; of short steps also the ends of all descents."""
        looks = self._looks
        count = max(_FINALISTS, min(3 * _FINALISTS, _FINAL_TASKS // looks.largest))
        fastest = looks.fastest(count)
        near_s = _NEAR * looks[fastest[0]]
        one_each = looks.fastest(1, lambda x: not has_chunks(x) and looks[x] < near_s)
        others = ends if count > _FINALISTS else []
        return list(dict.fromkeys([*fastest, *one_each, *others]))

    def _evaluated(self, layout: Layout) -> Evaluated:
        found = evaluated(self._rules.fleet, layout)
        assert found is not None  # only what fits is simulated
        return found
