"""The best layout of a fleet.

1. Initial layouts with one stage for each device (`initial_layouts`): a dynamic programme covers
   the layers within a step of T seconds, for the shortest T at which it can and some longer ones.
2. `local_search` improves them one move at a time: by their scores, which bounds make,
   then by simulation (both in `fast_evaluation`). The best few are tuned.
3. Where devices may have several stages, 2 follows for such layouts, from the plan without them
   on: so allowing them never makes a plan longer.

All limits are counts of work, never of time: the same profile gives the same plan everywhere.
docs/maintainers/planner.md has more of each part, and the ideas behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from hetero_framework.extras.planner.layout import (
    Evaluated,
    Layout,
    Rules,
    evaluated,
    has_chunks,
    resident,
)
from hetero_framework.extras.planner.search import initial_layouts, moves
from hetero_framework.extras.planner.search.fast_evaluation import MANY, FastEvaluation, Scores
from hetero_framework.extras.planner.search.local_search import LocalSearch

# docs/maintainers/experiments/planner.md has the effects of half and twice these limits.
_STAGES = 30_000  # scored in each phase of the search
_CANDIDATES = 24  # layouts with one stage for each device that are simulated
_NODES = 40_000  # beginnings of layouts that are tried where the dynamic programme finds no layout
_FITTING = 4  # layouts that are climbed from then
_FINALISTS = 2  # layouts that are tuned; three times as many where steps are short:
_FINAL_TASKS = 3_000


class Search:
    """One search. `rules` say what a layout may be."""

    def __init__(self, rules: Rules) -> None:
        self._rules = initial_layouts.without_the_weakest(rules)
        self._scores = Scores(self._rules, _STAGES)
        self._steps = FastEvaluation(self._rules, self._scores)
        self._local = LocalSearch(self._rules, self._scores, self._steps)

    def run(self) -> Evaluated | None:
        """Return the best layout; None where nothing fits."""
        climbed = self._climbed()
        if not climbed:
            return None
        best = self._simple([layout for layout in climbed if not has_chunks(layout)])
        return self._interleaved(climbed, best) if self._rules.interleaves else best

    def fits(self) -> bool:
        """Whether `run` would find a layout."""
        return bool(self._climbed())

    def evened_s(self, layout: Layout) -> float:
        """The approximate step after moving layers between these stages, infinite where that does
        not fit; for comparing profiles, not for plans."""
        return self._steps.look(self._local.evened(resident(layout)))

    def _simple(self, layouts: list[Layout]) -> Evaluated | None:
        """The best layout with one stage for each device."""
        if not layouts:
            return None
        for layout in layouts:
            self._steps.look(layout, *self._steps.fastest(1))
        self._scores.allow(_STAGES)
        self._local.descend_simple()
        return self._tuned(self._fastest(lambda layout: not has_chunks(layout)))

    def _interleaved(self, layouts: list[Layout], simple: Evaluated | None) -> Evaluated:
        """The best of all layouts, of which `simple` is one."""
        self._scores.allow(_STAGES)
        several = initial_layouts.interleaved(
            self._rules, self._scores, self._local.evened, layouts
        )
        for layout in [*(one for one in layouts if has_chunks(one)), *several]:
            self._steps.look(layout)
        self._scores.allow(_STAGES)
        ends = self._local.descend_interleaved(few=len(layouts[0]) <= MANY)
        fastest = self._fastest()
        others = ends if len(fastest) > _FINALISTS else []
        chosen = (one for one in [*fastest, *others] if simple is None or has_chunks(one))
        return self._tuned(chosen, *([] if simple is None else [simple]))

    def _climbed(self) -> list[Layout]:
        """The best layouts with one stage for each device, climbing from the initial ones."""
        for layout in initial_layouts.simple(self._rules, self._scores):
            self._local.climb(layout)
        if not (layouts := self._fitting()):
            self._scores.allow(_STAGES)
            for layout in self._first_that_fit():
                self._local.climb(layout)
            layouts = self._fitting()
        return layouts

    def _fitting(self) -> list[Layout]:
        layouts = self._scores.best(_CANDIDATES)
        return [layout for layout in layouts if self._scores.of(layout) < math.inf]

    def _first_that_fit(self) -> list[Layout]:
        """Layouts for tight memory, where stages of the greatest length leave no room for the
        others, or only the coordinator has room for the head."""
        rules = self._rules
        tried = islice(initial_layouts.beginnings(rules), _NODES)
        every = (one for one in tried if one[-1].end == rules.fleet.layers and rules.permits(one))
        if rules.interleaves:
            every = (other for one in every for other in (one, *moves.closed(rules, one)))
        return list(islice((one for one in every if self._scores.of(one) < math.inf), _FITTING))

    def _fastest(self, where: Callable[[Layout], bool] = lambda layout: True) -> list[Layout]:
        """The layouts to be tuned, more of them where steps are short."""
        largest = self._steps.largest(where)
        count = max(_FINALISTS, min(3 * _FINALISTS, _FINAL_TASKS // largest))
        return self._steps.fastest(count, where)

    def _tuned(self, layouts: Iterable[Layout], *known: Evaluated) -> Evaluated:
        """The best of these as the product would run them."""
        candidates = list(known)
        for layout in dict.fromkeys(layouts):
            one = evaluated(self._rules.fleet, self._steps.chosen[layout])
            assert one is not None  # only what fits is simulated
            candidates.append(one)
        return min(candidates, key=lambda one: one.preference)
