"""Neighbours of a layout: layouts that differ from it in one change."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import product

from hetero_framework.extras.planner.layout import Fleet, Layout, Part, Rules
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme

MANY = 8  # most stages for which all moves are tried: their number is that of pairs of stages
_HALVINGS = 6  # of a fifth of a step, down to 0.3 % of it; each costs another cut of the order
_MOST_EXCHANGES = 48  # exchanges for unused devices; beyond, only the quickest are tried


def recut(layout: Layout, counts: Sequence[int]) -> Layout:
    """The layout with these numbers of layers in its stages."""
    parts, start = [], 0
    for part, count in zip(layout, counts, strict=True):
        parts.append(part._replace(start=start, end=start + count))
        start += count
    return tuple(parts)


def shifted(fleet: Fleet, layout: Layout) -> Iterator[Layout]:
    """The layout with one layer moved between two stages: any two, or in a long pipeline from the
    two busiest devices to the least busy devices."""
    counts, last = [part.end - part.start for part in layout], len(layout) - 1
    sources = targets = [*range(len(layout))]
    if len(layout) > MANY:
        profile = fleet.pipeline(layout)
        loads = dict.fromkeys(profile.devices, 0.0)
        for d, *work in zip(profile.devices, profile.forward_s, profile.backward_s, strict=True):
            loads[d] += sum(work)
        heavy = set(heapq.nlargest(2, loads, key=loads.__getitem__))
        light = set(heapq.nsmallest(MANY, loads, key=loads.__getitem__))
        sources, targets = ([k for k in sources if layout[k].device in x] for x in (heavy, light))
    for source, target in product(sources, targets):
        if source != target and counts[source] > (source not in (0, last)):
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            yield recut(layout, moved)


def toggled(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """The layout with recomputing switched in one stage, or on in all before one (the stage that
    stores fewest forwards limits those behind it), or with another way over one boundary."""
    short = [
        rules.checkpointing and not part.recompute and rules.fleet.is_short_of_memory(part)
        for part in layout
    ]
    for k, part in enumerate(layout):
        if short[k] or part.recompute:
            yield _with(layout, k, part._replace(recompute=not part.recompute))
        if sum(short[:k]) > 1:
            front = (part._replace(recompute=part.end > part.start) for part in layout[:k])
            yield (*front, *layout[k:])
        if k:
            ways = rules.ways(layout[k - 1].device, part.device, part.start)
            for _, direct in ways:
                if direct != part.direct:
                    yield _with(layout, k, part._replace(direct=direct))


def orders(rules: Rules, layout: Layout) -> Iterator[list[int]]:
    """The order of devices with one left out, one replaced by an unused device, two exchanged, or
    an unused device added. No orders if a device has several stages."""
    order = [part.device for part in layout]
    if len(set(order)) < len(order):
        return
    unused = {rules.kinds[d]: d for d in reversed(rules.devices) if d not in order}
    if len(order) * len(unused) > _MOST_EXCHANGES:
        fastest = sorted(unused.values(), key=rules.fleet.layer_s)
        unused = {d: d for d in fastest[: max(1, _MOST_EXCHANGES // len(order))]}
    reach = len(order) if len(order) <= MANY else 3
    for k in range(1, len(order)):
        yield [*order[:k], *order[k + 1 :]]
        for d in unused.values():
            yield [*order[:k], d, *order[k + 1 :]]
        for other in range(k + 1, min(k + reach, len(order))):
            if rules.kinds[order[k]] != rules.kinds[order[other]]:
                swapped = list(order)
                swapped[k], swapped[other] = order[other], order[k]
                yield swapped
    for k, d in product(range(1, len(order) + 1), unused.values()):
        yield [*order[:k], d, *order[k:]]


def balanced(programme: LayerProgramme, order: Sequence[int], step_s: float) -> Layout | None:
    """The layout of these devices in this order with the shortest step, searched for around
    `step_s`; None if there is no layout."""
    high = step_s
    while (layout := programme.along(order, high)) is None:
        high *= 1.25
        if high >= 2 * step_s:  # true of an infinite step too
            return None
    low = 0.8 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = programme.along(order, middle)
        if better is None:
            low = middle
        else:
            layout, high = better, middle
    return layout


def interleaved(rules: Rules, layout: Layout, chunks: int) -> Layout | None:
    """The layout with each device's layers in `chunks` stages, in rounds over the devices. Devices
    with too few layers take part in fewer rounds. None if no device has enough layers."""
    counts = [part.end - part.start for part in layout]
    if max(counts) < chunks:
        return None
    stages: list[tuple[Part, int]] = []
    given = [0] * len(layout)
    for turn in range(1, chunks + 1):
        for k, part in enumerate(layout):
            # As even as whole layers allow, the remainders in different rounds.
            upto = (counts[k] * turn + k % chunks) // chunks if turn < chunks else counts[k]
            count, given[k] = upto - given[k], upto
            if count or (turn == 1 and k == 0):
                stages.append((part, count))
    return _built(rules, stages)


def split(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """The layout with a new stage elsewhere that takes some layers of a stage: all of them only of
    the first stage, which keeps the embedding, none only at the end, where it gets the head."""
    stages = [(part, part.end - part.start) for part in layout]
    for k, (part, count) in enumerate(stages):
        moved = {0, 1, count // 4, count // 2, count if k == 0 else 0}
        for taken, place in product(sorted(moved), range(1, len(layout) + 1)):
            beside = {one.device for one in layout[place - 1 : place + 1]}
            if not taken < count + (k == 0) or part.device in beside:
                continue
            if taken or (place == len(layout) and layout[-1].end > layout[-1].start):
                rest = [*stages[:k], (part, count - taken), *stages[k + 1 :]]
                for again in {False, part.recompute}:
                    new = (part._replace(recompute=again), taken)
                    yield _built(rules, [*rest[:place], new, *rest[place:]])


def _built(rules: Rules, stages: Sequence[tuple[Part, int]]) -> Layout:
    """The layout of stages with these numbers of layers, joined by the quickest ways. Between the
    first and the last stage, stages without layers are left out."""
    parts: list[Part] = []
    start = 0
    for k, (part, count) in enumerate(stages):
        if not count and 0 < k < len(stages) - 1:
            continue
        direct = bool(parts) and rules.ways(parts[-1].device, part.device, start)[0][1]
        again = part.recompute and count > 0
        parts.append(part._replace(start=start, end=start + count, recompute=again, direct=direct))
        start += count
    return merged(parts)


def closed(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """The layout with a last stage on the coordinator: the head and none, half or all of the
    coordinator's layers. A last stage stores one forward, so it need not compute again."""
    if layout[-1].start == layout[-1].end:
        layout = layout[:-1]  # the last stage had the head alone
    counts = [part.end - part.start for part in layout]
    if len(layout) < 2 or layout[-1].device == 0:
        return
    for behind in sorted({0, counts[0] // 2, counts[0]}):
        way = rules.ways(layout[-1].device, 0, rules.fleet.layers - behind)[0]
        last = Part(0, 0, 0, False, way[1])
        parts = recut((*layout, last), [counts[0] - behind, *counts[1:], behind])
        again = parts[0].recompute and parts[0].end > 0
        yield (parts[0]._replace(recompute=again), *parts[1:])


def merged(parts: Sequence[Part]) -> Layout:
    """The layout of `parts`, with neighbours on one device joined to one stage."""
    stages: list[Part] = []
    for part in parts:
        if stages and stages[-1].device == part.device:
            stages[-1] = stages[-1]._replace(end=part.end)
        else:
            stages.append(part)
    return tuple(stages)


def _with(layout: Layout, k: int, part: Part) -> Layout:
    return (*layout[:k], part, *layout[k + 1 :])
