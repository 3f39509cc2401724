"""The best layout of a fleet.

1. Initial layouts with one stage for each device: a dynamic programme (`search/layer_dp.py`) covers
   the layers within a step of T seconds, for the shortest T at which it can and some longer ones.
2. These climb, one move at a time (`search/moves.py`), by scores that come from bounds. Then the
   best of them descend by simulation.
3. Where devices may have several stages, layouts of that kind descend too. So allowing several
   stages never makes a step longer.

All limits are counts of work, never of time: the same profile gives the same plan everywhere.
docs/maintainers/planner.md has more of each part, and the ideas behind them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, product

from hetero_framework.engine.schedule.bounds import machine_bounds
from hetero_framework.extras.planner.layout import (
    Evaluated,
    Layout,
    Part,
    Rules,
    evaluated,
    has_chunks,
)
from hetero_framework.extras.planner.search import moves
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme

# docs/maintainers/experiments/planner.md has the effects of half and twice some of these limits.
_STAGES = 30_000  # scored in each phase of the search
_TASKS = 150_000  # in all simulations; a task is a forward or a backward of a micro-batch
_MOST_DEVICES = 96  # of larger fleets the quickest take part
_SHARPNESS = 20  # exponent in a score, a norm of bounds: ten equal bounds score 12 % more than one

_DEPTHS = (1.0, 0.4, 0.0)  # shares of the micro-batches in flight that stages have memory for
_LONGER = (1.0, 1.02, 1.06, 1.15, 1.4)  # factors on the shortest step for which layouts are made
_DOUBLINGS = 12  # most doublings of a step that is too short
_PRECISION = 0.01  # of the shortest step
_NODES = 40_000  # beginnings of layouts that are tried where the dynamic programme finds none

_SEEDS = 6  # initial layouts that are climbed from
_CANDIDATES = 24  # climbed layouts that are simulated
_ORDERS = 400  # changes of devices, each cut anew, in a search
_NEIGHBOURS = 10  # neighbours with the best scores that are simulated
_CHUNKS = (2, 3, 4, 5, 6, 8)
_SPLIT = 24  # layouts with one more stage that are simulated
_STARTS = 4  # layouts of different numbers of stages that are descended from
_VARIANTS = 3  # layouts with one more stage that are descended from; thrice that with few devices
_FEW = 6  # most devices for which more moves are tried


class Search:
    """One search. `rules` say what a layout may be."""

    def __init__(self, rules: Rules) -> None:
        self._rules = _without_the_weakest(rules)
        self._fleet = rules.fleet
        self._programme = LayerProgramme(self._rules)
        self._scores: dict[Layout, tuple[float, float]] = {}  # (score, bound)
        self._steps: dict[Layout, Evaluated] = {}
        self._passed: set[Layout] = set()
        self._is_small = len(rules.devices) <= _FEW
        self._stages_left = self._orders = self._tasks = 0

    def run(self) -> Evaluated | None:
        """Return the best layout; None where nothing fits."""
        climbed = self._climbed()
        if not climbed:
            return None
        for layout in climbed:
            self._look(layout)
        self._stages_left = _STAGES
        for layout in self._fastest(1, lambda layout: not has_chunks(layout)):
            self._descend(layout, _TASKS // 2)
        if self._rules.interleaves:
            self._interleave(climbed)
        return min(self._steps.values(), key=lambda step: step.preference)

    def fits(self) -> bool:
        """Whether `run` would find a layout."""
        return bool(self._climbed())

    # -- judging --------------------------------------------------------------------------------

    def _score(self, layout: Layout) -> float:
        """An estimate of the step. The more devices and NICs are near its bound, the further it is
        above the bound, since they cannot all be busy at the right moment. Infinite if the layout
        does not fit or is not permitted, and for a new layout once the work is spent."""
        if layout not in self._scores:
            if self._stages_left <= 0:
                return math.inf
            ways = self._fleet.streamed(layout)
            self._stages_left -= len(layout) * len(ways)
            scores, bounds = zip(*map(self._judged, ways), strict=True)
            self._scores[layout] = min(scores), min(bounds)
        return self._scores[layout][0]

    def _judged(self, layout: Layout) -> tuple[float, float]:
        limits = self._fleet.memory_limits(layout)
        if limits is None or not self._rules.permits(layout):
            return math.inf, math.inf
        profile, m = self._fleet.pipeline(layout), self._fleet.micro_batches
        busy = machine_bounds(profile, m, limits)
        bound = max(busy)
        if bound == 0:
            return 0.0, 0.0
        near = sum((seconds / bound) ** _SHARPNESS for seconds in busy)
        return round(bound * near ** (1 / _SHARPNESS), 12), bound

    def _best(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """The `count` layouts with the best scores, of those that fit."""
        fit = (layout for layout in dict.fromkeys(layouts) if self._score(layout) < math.inf)
        return heapq.nsmallest(count, fit, key=self._score)

    def _look(self, layout: Layout, *, hopeless: bool = False) -> float:
        """Seconds of the simulated step. Infinite if the layout does not fit, if the work is spent,
        or, unless `hopeless`, if its bound is no better than the best step so far."""
        if layout not in self._steps:
            least = min((step.seconds for step in self._steps.values()), default=math.inf)
            score = self._score(layout)
            bound = self._scores[layout][1] if score < math.inf else math.inf
            if bound >= (math.inf if hopeless else least) or self._tasks > _TASKS:
                return math.inf
            ways = [evaluated(self._fleet, one) for one in self._fleet.streamed(layout)]
            fitting = [step for step in ways if step is not None]
            self._tasks += 2 * len(layout) * self._fleet.micro_batches * len(fitting)
            self._steps[layout] = min(fitting, key=lambda step: step.seconds)
        return self._steps[layout].seconds

    def _fastest(self, count: int, where: Callable[[Layout], bool]) -> list[Layout]:
        fitting = (layout for layout in self._steps if where(layout))
        return heapq.nsmallest(count, fitting, key=self._look)

    # -- one stage for each device --------------------------------------------------------------

    def _climbed(self) -> list[Layout]:
        """The best layouts by score with one stage for each device, climbing from initial ones."""
        self._stages_left = _STAGES
        for layout in self._initial():
            self._climb(layout)
        if not self._best([*self._scores], 1):
            self._stages_left = _STAGES
            for layout in self._enumerated():
                self._climb(layout)
        return self._best([*self._scores], _CANDIDATES)

    def _initial(self) -> list[Layout]:
        """Layouts of the shortest steps that the dynamic programme reaches, and of longer ones."""
        layer_s = max(map(self._fleet.layer_s, self._rules.devices))
        high = self._fleet.micro_batches * self._fleet.layers * layer_s
        for depth in _DEPTHS:
            programme = LayerProgramme(self._rules, depth=depth)
            if depth < 1 and not programme.is_short_of_memory:
                break
            if depth == 0 and self._best([*self._scores], 1):
                break
            high = self._shortest(programme, high)
            for factor in _LONGER:
                self._reached(programme, high * factor)
        return self._best([*self._scores], _SEEDS)

    def _shortest(self, programme: LayerProgramme, high: float) -> float:
        """The shortest step that the programme reaches."""
        low = 0.0
        for _ in range(_DOUBLINGS):
            if self._reached(programme, high):
                break
            low, high = high, 2 * high
        while high - low > _PRECISION * high:
            # Most fleets are used well: look nearer to the lower end.
            middle = 0.7 * low + 0.3 * high
            low, high = (low, middle) if self._reached(programme, middle) else (middle, high)
        return high

    def _reached(self, programme: LayerProgramme, step_s: float) -> bool:
        scores = map(self._score, programme.layouts(step_s))
        return min(scores, default=math.inf) < math.inf

    def _enumerated(self) -> list[Layout]:
        """The first layouts of all that fit, for tight memory: there the longest stages leave no
        room for the others, or only the coordinator has room for the head."""
        whole = (
            parts
            for parts in islice(beginnings(self._rules), _NODES)
            if parts[-1].end == self._fleet.layers and self._rules.permits(parts)
        )
        if self._rules.interleaves:
            whole = (one for parts in whole for one in (parts, *moves.closed(self._rules, parts)))
        return list(islice((one for one in whole if self._score(one) < math.inf), 4))

    def _climb(self, layout: Layout, *, reorders: bool = True) -> Layout:
        """Go to the neighbour with the best score until no neighbour is better."""
        while True:
            better = min(self._evening(layout), key=self._score, default=layout)
            if reorders and self._score(better) >= self._score(layout):
                better = min(self._reordered(layout), key=self._score, default=layout)
            if self._score(better) >= self._score(layout):
                return layout
            layout = better

    # -- by simulation --------------------------------------------------------------------------

    def _interleave(self, layouts: list[Layout]) -> None:
        """Descend from layouts with several stages on a device."""
        rules, few = self._rules, len(layouts[0]) <= moves.MANY
        simple = self._fastest(1, lambda layout: not has_chunks(layout))
        closed = [other for layout in layouts for other in moves.closed(rules, layout)]
        # The bound hardly sees the cost of few stored forwards: an even layout may be worse.
        found = self._best(closed, 2)
        found += [self._climb(layout, reorders=False) for layout in found]
        for chunks in _CHUNKS if few else _CHUNKS[:2]:
            turns = (moves.interleaved(rules, layout, chunks) for layout in layouts[: 1 + few])
            found += self._best((self._climb(one, reorders=False) for one in turns if one), 2)
        for layout in found:
            self._look(layout)
        self._stages_left = _STAGES
        splits = self._best((one for x in simple for one in moves.split(rules, x)), _SPLIT)
        looks = {layout: self._look(layout, hopeless=True) for layout in splits}
        self._stages_left = _STAGES
        by_stages: dict[int, Layout] = {}
        for layout in self._fastest(len(self._steps), has_chunks):
            by_stages.setdefault(len(layout), layout)
        starts = [*simple, *islice(by_stages.values(), _STARTS)]
        starts += heapq.nsmallest(
            _VARIANTS * (3 if self._is_small else 1), looks, key=looks.__getitem__
        )
        spare = _TASKS - self._tasks
        for k, start in enumerate(starts, start=1):
            self._descend(
                start, _TASKS - spare * (len(starts) - k) // (len(starts) + 1), several=True
            )
        for start in self._fastest(1, lambda layout: layout not in self._passed):
            self._descend(start, _TASKS, several=True)

    def _descend(self, layout: Layout, most: int, *, several: bool = False) -> None:
        """Go to a faster neighbour until there is none, or `most` tasks are simulated; with
        `several`, stages of few devices may be split."""
        while layout not in self._passed:
            self._passed.add(layout)
            near = chain(self._evening(layout), self._reordered(layout))
            layout = self._faster(near, layout, most)
            if several and layout in self._passed and self._is_small:
                layout = self._faster(moves.split(self._rules, layout), layout, most)

    def _faster(self, near: Iterable[Layout], layout: Layout, most: int) -> Layout:
        """The fastest of the layouts `near`, after simulating the most promising; `layout` itself
        if none is faster."""
        every, now = dict.fromkeys(near), self._look(layout)
        new = [one for one in every if one not in self._steps and self._score(one) < math.inf]
        for one in heapq.nsmallest(_NEIGHBOURS, new, key=self._score):
            if self._scores[one][1] < now and self._tasks <= most:
                self._look(one)
        better = min((one for one in every if one in self._steps), key=self._look, default=layout)
        return better if self._look(better) < now else layout

    # -- neighbours -----------------------------------------------------------------------------

    def _evening(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with the devices in the same order, for which nothing is cut anew."""
        yield from moves.shifted(self._fleet, layout)
        yield from moves.toggled(self._rules, layout)

    def _reordered(self, layout: Layout) -> Iterator[Layout]:
        """Neighbours with other devices, or in another order, while there is work left for them."""
        self._score(layout)
        step_s = self._scores.get(layout, (0.0, math.inf))[1]
        for order in moves.orders(self._rules, layout):
            self._orders += 1
            if self._orders > _ORDERS:
                return
            if (other := moves.balanced(self._programme, order, step_s)) is not None:
                yield other


def _without_the_weakest(rules: Rules) -> Rules:
    """Rules for the quickest devices by layer and link, no more than a search can handle."""
    fleet = rules.fleet

    def weakness(d: int) -> tuple[bool, float]:
        wire_s = fleet.edge(0, d, fleet.layers, False).forward_s if d else 0.0
        return (d != 0 and d not in rules.pins, max(fleet.layer_s(d), wire_s))

    strongest = sorted(rules.devices, key=weakness)[:_MOST_DEVICES]
    return replace(rules, devices=tuple(sorted(strongest)))


def beginnings(rules: Rules, parts: Layout = ()) -> Iterator[Layout]:
    """Every beginning of a layout, and so every whole layout, with one stage for each device and
    memory for each stage. Of devices that are alike the first are used first."""
    fleet, start, free = rules.fleet, parts[-1].end if parts else 0, dict[int, int]()
    used = {part.device for part in parts}
    for d in rules.devices if parts else (0,):
        if d not in used:
            free.setdefault(rules.kinds[d], d)
    for d, recompute in product(free.values(), (False, True)[: 1 + rules.checkpointing]):
        direct = bool(parts) and rules.ways(parts[-1].device, d, start)[0][1]
        for end in range(start, fleet.layers + 1):
            part = Part(d, start, end, recompute, direct)
            if not fleet.may_fit(part):
                if fleet.costs[d].streams:
                    continue
                break
            is_empty = end == start and (recompute or (bool(parts) and end < fleet.layers))
            is_vain = recompute and not fleet.is_short_of_memory(part)
            if not is_empty and not is_vain and rules.permits_part(part):
                yield (*parts, part)
                if start < fleet.layers:
                    yield from beginnings(rules, (*parts, part))
