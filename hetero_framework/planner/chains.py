"""Long chains of quick workers along their direct links, for fleets in which many pairs have none.

A chain takes next the worker with the fewest others left to go on to (Warnsdorff 1823), so that few
are stranded. There is one chain for each number of quickest workers that it may be made of: the
fewer, the quicker they are and the shorter it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetero_framework.planner.rules import Rules

_FEWEST = 8  # workers that a chain is made of
_MORE = 1.5  # times as many for the next chain
_STARTS = 4  # of chains: half with the quickest workers, half with those hard to reach

Neighbours = Mapping[int, Collection[int]]


def chains(rules: Rules) -> list[tuple[int, ...]]:
    """Orders of workers, each with a direct link to the one before, those of the quickest workers
    first; none where all workers are linked with each other, or none are."""
    workers = sorted((d for d in rules.devices if d), key=lambda d: (rules.fleet.layer_s(d), d))
    linked = rules.fleet.linked
    here = set(workers)
    pairs = sum(len(here & linked[d]) for d in workers)
    if not 0 < pairs < len(workers) * (len(workers) - 1):
        return []
    found: dict[tuple[int, ...], None] = {}
    count = _FEWEST
    while count < len(workers) * _MORE:
        found[_longest(workers[:count], linked)] = None
        count = int(count * _MORE)
    return [chain for chain in found if len(chain) > 1]


def _longest(workers: Sequence[int], linked: Sequence[Collection[int]]) -> tuple[int, ...]:
    """The longest of the chains from a few of the workers, the quickest and those hard to reach."""
    here = set(workers)
    near = {d: [other for other in linked[d] if other in here] for d in workers}
    lonely = sorted((d for d in workers if near[d]), key=lambda d: len(near[d]))
    starts = dict.fromkeys([*workers[: _STARTS // 2], *lonely[: _STARTS // 2]])
    return max((_chain(start, near) for start in starts), key=len)


def _chain(start: int, near: Neighbours) -> tuple[int, ...]:
    left = {d: len(others) for d, others in near.items()}  # neighbours that are not in it yet
    chain = [start]
    used = {start}
    while True:
        here = chain[-1]
        for other in near[here]:
            left[other] -= 1
        free = [other for other in near[here] if other not in used]
        if not free:
            return tuple(chain)
        following = min(free, key=lambda d: (left[d] == 0, left[d], d))
        chain.append(following)
        used.add(following)
