"""Neighbours of a layout: layouts that differ from it in one change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hetero_framework.extras.planner.layout import Layout, Part, Rules
from hetero_framework.extras.planner.search.layer_dp import LayerProgramme

_HALVINGS = 6  # of a fifth of a step, to 0.3 % of it; each is one more cut of the same order
_ALL_SWAPS = 8  # stages; in longer pipelines devices change places with the next two only
_MOST_EXCHANGES = 48  # exchanges for unused devices, of which the quickest are tried


def recut(layout: Layout, counts: Sequence[int]) -> Layout:
    """The same stages with other numbers of layers."""
    parts, start = [], 0
    for part, count in zip(layout, counts, strict=True):
        parts.append(part._replace(start=start, end=start + count))
        start += count
    return tuple(parts)


def shifted(
    layout: Layout,
    sources: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
    count: int = 1,
) -> Iterator[Layout]:
    """Layers moved from a stage (one of `sources`, or any) to another (of `targets`)."""
    counts = [part.end - part.start for part in layout]
    last = len(layout) - 1
    every = range(len(layout))
    pairs = product(every if sources is None else sources, every if targets is None else targets)
    for source, target in pairs:
        if source != target and counts[source] >= count + (source not in (0, last)):
            moved = list(counts)
            moved[source] -= count
            moved[target] += count
            yield recut(layout, moved)


def toggled(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """One stage computes again or no longer does, or all in front of a stage do, since the one that
    stores fewest limits those behind it; or one boundary is crossed the other way."""
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


def reordered(
    rules: Rules, programme: LayerProgramme, layout: Layout, step_s: float
) -> Iterator[Layout]:
    """Two devices exchanged, one replaced by an unused one, left out, or taken in; cut anew.
    `step_s` is about the step of the layout."""
    order = [part.device for part in layout]
    if len(set(order)) < len(order):
        return
    unused = {rules.kinds[d]: d for d in reversed(rules.devices) if d not in order}
    if len(order) * len(unused) > _MOST_EXCHANGES:
        fastest = sorted(unused.values(), key=rules.fleet.layer_s)
        unused = {d: d for d in fastest[: max(1, _MOST_EXCHANGES // len(order))]}
    orders = []
    for k in range(1, len(order)):
        orders.append([*order[:k], *order[k + 1 :]])
        orders += [[*order[:k], d, *order[k + 1 :]] for d in unused.values()]
        for other in range(
            k + 1, len(order) if len(order) <= _ALL_SWAPS else min(k + 3, len(order))
        ):
            if rules.kinds[order[k]] != rules.kinds[order[other]]:
                swapped = list(order)
                swapped[k], swapped[other] = order[other], order[k]
                orders.append(swapped)
    for k in range(1, len(order) + 1):
        orders += [[*order[:k], d, *order[k:]] for d in unused.values()]
    for changed in orders:
        if (neighbour := balanced(programme, changed, step_s)) is not None:
            yield neighbour


def balanced(programme: LayerProgramme, order: Sequence[int], step_s: float) -> Layout | None:
    """The layout of these devices in this order for the shortest step, which is looked for around
    `step_s`; None where there is none."""
    high = step_s
    while (layout := programme.along(order, high)) is None:
        high *= 1.25
        if high >= 2 * step_s:  # also of one that is infinite
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
    """Each device's layers in `chunks` stages, in turn around the devices; those that have too few
    layers take part in fewer rounds. None where no device has enough."""
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


def wrapped(rules: Rules, layout: Layout, front: int, share: float) -> Layout:
    """The first `front` devices keep a share of their layers and have the others behind all, in the
    same order: those behind them begin sooner, and they have something to do until gradients come
    back."""
    kept, behind = [], []
    for k, part in enumerate(layout[:front]):
        count = part.end - part.start
        stays = min(count, max(1 if k else 0, round(share * count)))
        kept.append((part, stays))
        behind.append((part, count - stays))
    rest = [(part, part.end - part.start) for part in layout[front:]]
    return _built(rules, [*kept, *rest, *(stage for stage in behind if stage[1])])


def split(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """A new stage elsewhere with some layers of a stage: with all of them only from the first one,
    which keeps the embedding; with none only at the end, where the head is."""
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


def joined(rules: Rules, layout: Layout) -> Iterator[Layout]:
    """One stage less: its layers go to another one of its device, or to a neighbour."""
    stages = [(part, part.end - part.start) for part in layout]
    for k, (part, count) in enumerate(stages):
        for other, (taker, held) in enumerate(stages):
            if k and (other in (k - 1, k + 1) or (taker.device == part.device and other != k)):
                rest = [*stages[:other], (taker, held + count), *stages[other + 1 :]]
                yield _built(rules, [*rest[:k], *rest[k + 1 :]])


def _built(rules: Rules, stages: Sequence[tuple[Part, int]]) -> Layout:
    """Stages with the given numbers of layers, joined by the quickest ways; between the first and
    the last one, stages without layers are left out."""
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
    """The coordinator has the head too, with none, half or all of the layers that it holds now.
    They store one forward, so they need not compute again."""
    if layout[-1].start == layout[-1].end:
        layout = layout[:-1]  # it had the head alone
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
    """Neighbours on one device become one stage."""
    stages: list[Part] = []
    for part in parts:
        if stages and stages[-1].device == part.device:
            stages[-1] = stages[-1]._replace(end=part.end)
        else:
            stages.append(part)
    return tuple(stages)


def _with(layout: Layout, k: int, part: Part) -> Layout:
    return (*layout[:k], part, *layout[k + 1 :])
