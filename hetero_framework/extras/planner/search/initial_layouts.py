"""Initial layouts of a search, good by construction."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from hetero_framework.extras.planner.layout import Layout, Part, Rules, has_chunks
from hetero_framework.extras.planner.search import moves
from hetero_framework.extras.planner.search.fast_evaluation import MANY, Scores
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme, step_range

# One stage for each device.
_SEEDS = 6  # layouts that are climbed from; each is about as much work
_DEPTHS = (1.0, 0.4)  # shares of the micro-batches in flight that stages are to have memory for
_LONGER = (1.0, 1.02, 1.06, 1.15, 1.4)  # factors on the shortest step for which layouts are made
_DOUBLINGS = 12  # of a step that is too short
_PRECISION = 0.01  # of the shortest step
_MOST_DEVICES = 96  # of larger fleets the quickest take part

# Several.
_CHUNKS = (2, 3, 4, 5, 6, 8)
_CHUNKS_OF_MANY = (2, 3)
_FRONT = (0.3, 0.5, 0.7)  # shares of the devices that come again behind all
_SHARES = (0.25, 0.4)  # shares of their layers in front


def simple(rules: Rules, scores: Scores) -> list[Layout]:
    """Layouts with one stage for each device: those of the shortest steps that the dynamic
    programme reaches, and of some longer ones."""
    low, high = step_range(rules.fleet, rules.devices)
    for depth in _DEPTHS:
        programme = LayerProgramme(rules, depth=depth)
        if depth < 1 and not programme.is_short_of_memory:
            break
        # What fits with more micro-batches in flight fits with fewer.
        high = _seeded(programme, scores, low, high)
    layouts = scores.best(_SEEDS)
    if min(map(scores.of, layouts), default=math.inf) == math.inf:
        _seeded(LayerProgramme(rules, depth=0.0), scores, low, high)  # memory for one micro-batch
        layouts = scores.best(_SEEDS)
    return layouts


def _seeded(programme: LayerProgramme, scores: Scores, low: float, high: float) -> float:
    """The shortest step that the programme reaches, once `scores` knows layouts for it and for some
    longer ones."""
    least = _least(programme, scores, low, high)
    for factor in _LONGER:
        _reached(programme, scores, least * factor)
    return least


def _least(programme: LayerProgramme, scores: Scores, low: float, high: float) -> float:
    """The shortest step that the programme reaches."""
    for _ in range(_DOUBLINGS):
        if _reached(programme, scores, high):
            break
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        # Most fleets are used well: look nearer to the lower end.
        middle = 0.7 * low + 0.3 * high
        if _reached(programme, scores, middle):
            high = middle
        else:
            low = middle
    return high


def _reached(programme: LayerProgramme, scores: Scores, step_s: float) -> bool:
    """Whether a layout for a step of `step_s` seconds fits; its score is kept in `scores`."""
    return min(map(scores.of, programme.layouts(step_s)), default=math.inf) < math.inf


def without_the_weakest(rules: Rules) -> Rules:
    """Rules for the quickest devices by layer and link, no more than a search can handle."""
    fleet = rules.fleet

    def weakness(d: int) -> tuple[bool, float]:
        wire_s = fleet.edge(0, d, fleet.layers, False).forward_s if d else 0.0
        return (d != 0 and d not in rules.pins, max(fleet.layer_s(d), wire_s))

    strongest = sorted(rules.devices, key=weakness)[:_MOST_DEVICES]
    return replace(rules, devices=tuple(sorted(strongest)))


def beginnings(rules: Rules, parts: Layout = ()) -> Iterator[Layout]:
    """Every beginning, and so every whole layout, with one stage for each device, each of which has
    memory for its stage; of devices that are alike the first ones come."""
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


def interleaved(
    rules: Rules, scores: Scores, evened: Callable[[Layout], Layout], layouts: Sequence[Layout]
) -> list[Layout]:
    """The best of each way to give the devices of `layouts` (the best first) several stages."""
    if not rules.interleaves:
        return []
    chosen: dict[Layout, None] = {}

    def take(changed: Iterable[Layout]) -> None:
        fit = {layout for layout in changed if scores.of(layout) < math.inf}
        chosen.update(dict.fromkeys(heapq.nsmallest(2, fit, key=scores.of)))

    few = len(layouts[0]) <= MANY
    closed = [other for layout in layouts for other in moves.closed(rules, layout)]
    # The bound hardly sees the cost of few stored forwards: an even layout may be worse.
    take(closed)
    take(map(evened, heapq.nsmallest(2, closed, key=scores.of)))
    for chunks in _CHUNKS if few else _CHUNKS_OF_MANY:
        changed = (moves.interleaved(rules, layout, chunks) for layout in layouts[: 1 + few])
        take(evened(layout) for layout in changed if layout is not None)
    return list(chosen)


def wrapped(rules: Rules, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Layouts in which the first devices of a layout come again behind all."""
    if not rules.interleaves:
        return
    for layout, front, share in product(layouts, _FRONT, _SHARES):
        again = moves.wrapped(rules, layout, round(front * len(layout)), share)
        if has_chunks(again):
            yield again
