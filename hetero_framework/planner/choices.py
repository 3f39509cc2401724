"""What a stage may be at best, in any layout: its work, its time, its memory, its boundary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_framework.planner.layout import Fleet
from hetero_framework.planner.rules import Rules

_MOST_GROUPS = 48
_BUCKETS = 8  # of a layer's work: stages of one length that differ by less are one choice
_EXACTLY = 1e-9

Floats = NDArray[np.float64]


class Boundary(NamedTuple):
    """The best boundary into a device: seconds there and back, those on the wire of an activation
    and of a gradient, the longest that a first byte takes, and what of it the coordinator relays.
    """

    path_s: float
    forward_s: float
    backward_s: float
    latency_s: float
    relayed_s: float


class Group(NamedTuple):
    """Devices, so many, of which `members` are one of each kind: their boundaries from the
    coordinator and from others, and least seconds of an activation out of them and of the gradient
    that answers."""

    size: int
    members: tuple[int, ...]
    first: Boundary
    between: tuple[Boundary, ...]
    out_s: float
    answer_s: float


class Choice(NamedTuple):
    """Some layers on a device of a group, behind a boundary; `choices_of` has an array of each.

    Seconds are per micro-batch; `last_s` has the head in it. `held` is how many forwards there is
    memory for, 0 where for none. `wire_s` is what the device's NICs need of a step from when the
    stage can begin, and `last_wire_s` what those of the last stage need behind its first
    micro-batch."""

    group: Any
    work: Any
    forward_s: Any
    backward_s: Any
    seconds: Any
    last_s: Any
    held: Any
    fits_last: Any
    path_s: Any
    relayed_s: Any
    wire_s: Any
    last_wire_s: Any


class Share(NamedTuple):
    """All that a device of a group may hold in several stages; `shares_of` has an array of each.
    `most` is the work that there is memory for, and `wire_s` what the device's NICs need of a step
    from when its first stage can begin, with two stages, one of which `has_last`, the last of all;
    the rest as in `Choice`."""

    group: Any
    unit_s: Any
    layer_s: Any
    most: Any
    path_s: Any
    relayed_s: Any
    wire_s: Any
    has_last: Any


class Links:
    """Boundaries into and out of each device, as good as any can be. With several stages on a
    device a boundary may come from the coordinator or go there each time."""

    def __init__(self, rules: Rules, chunks: bool) -> None:
        fleet, profile = rules.fleet, rules.fleet.profile
        self._chunks = chunks
        self._bytes = profile.activation_bytes
        self._gradient_bytes = [profile.gradient_bytes * fleet.goes_back(k) for k in (0, 1)]
        index = {owner: d for d, owner in enumerate(fleet.ids)}
        links = {(index[link.sender], index[link.receiver]): link for link in profile.links}
        self._rate = {pair: link.bytes_per_s for pair, link in links.items()}
        self._latency_s = {pair: link.latency_s for pair, link in links.items()}
        others = [d for d in rules.devices if d]
        self._most_up = max(self._rate[d, 0] for d in others)
        self._most_down = max(self._rate[0, d] for d in others)
        self._peers: dict[int, list[int]] = {d: [] for d in others}
        for a, b in links:
            if a in self._peers and b in self._peers and (b, a) in links:
                self._peers[b].append(a)
        both = [self._both_s(0, d) for d in others]
        self._least_s, self._longest_s = min(both), max(both)

    def _both_s(self, a: int, b: int) -> float:
        return self._latency_s[a, b] + self._latency_s[b, a]

    def first(self, d: int) -> Boundary:
        """From the coordinator."""
        there_s = self._bytes / self._rate[0, d]
        back_s = self._gradient_bytes[0] / self._rate[d, 0]
        both_s = self._both_s(0, d)
        return Boundary(there_s + back_s + both_s, there_s, back_s, both_s / 2, 0.0)

    def between(self, d: int) -> tuple[Boundary, ...]:
        """From any other device, direct and relayed."""
        relayed = self._relayed(d)
        peers = self._peers[d]
        if not peers:
            return (relayed,)
        there_s = self._bytes / max(self._rate[a, d] for a in peers)
        back_s = self._gradient_bytes[1] / max(self._rate[d, a] for a in peers)
        both = [self._both_s(a, d) for a in peers]
        direct = Boundary(there_s + back_s + min(both), there_s, back_s, max(both) / 2, 0.0)
        pairs = zip(direct[:3], relayed[:3], strict=True)
        return (direct,) if all(a <= b for a, b in pairs) else (direct, relayed)

    def _relayed(self, d: int) -> Boundary:
        there_s = self._bytes / min(self._most_up, self._rate[0, d])
        back_s = self._gradient_bytes[1] / min(self._rate[d, 0], self._most_down)
        path_s = there_s + back_s + self._both_s(0, d) + self._least_s
        latency_s = (self._both_s(0, d) + self._longest_s) / 2
        if not self._chunks:
            return Boundary(path_s, there_s, back_s, latency_s, there_s + back_s)
        first = self.first(d)
        path_s, back_s = min(path_s, first.path_s), min(back_s, first.backward_s)
        return Boundary(path_s, min(there_s, first.forward_s), back_s, latency_s, first.forward_s)

    def out(self, d: int) -> tuple[float, float]:
        """Least seconds of an activation to any other device, and of the gradient that answers."""
        up, down = self._rate[d, 0], self._rate[0, d]
        rates = [(min(up, self._most_down), min(down, self._most_up))]
        rates += [(self._rate[d, a], self._rate[a, d]) for a in self._peers[d]]
        rates += [(up, down)] * self._chunks
        there, back = (max(one) for one in zip(*rates, strict=True))
        return self._bytes / there, self._gradient_bytes[1] / back


def groups_of(rules: Rules, chunks: bool) -> list[Group]:
    """The workers, those that compute alike together; where there are too many groups, those that
    are about as fast."""
    fleet, links = rules.fleet, Links(rules, chunks)
    alike: dict[Any, list[int]] = {}
    for d in sorted((d for d in rules.devices if d), key=fleet.layer_s):
        costs = fleet.costs[d]
        said = costs.device.model_dump_json(exclude={"id"})
        alike.setdefault((costs.memory_bytes, said), []).append(d)
    kinds = list(alike.values())
    size = -(-len(kinds) // _MOST_GROUPS)
    found = []
    for k in range(0, len(kinds), size):
        devices = [d for kind in kinds[k : k + size] for d in kind]
        out = [links.out(d) for d in devices]
        found.append(
            Group(
                len(devices),
                tuple(kind[0] for kind in kinds[k : k + size]),
                _best([links.first(d) for d in devices]),
                _best_ways([links.between(d) for d in devices]),
                min(there_s for there_s, _ in out),
                min(back_s for _, back_s in out),
            )
        )
    return found


def _best(boundaries: list[Boundary]) -> Boundary:
    return Boundary(
        min(one.path_s for one in boundaries),
        min(one.forward_s for one in boundaries),
        min(one.backward_s for one in boundaries),
        max(one.latency_s for one in boundaries),
        min(one.relayed_s for one in boundaries),
    )


def _best_ways(found: list[tuple[Boundary, ...]]) -> tuple[Boundary, ...]:
    """The best direct one of all and the best relayed one, as far as there are any."""
    every = [boundary for ways in found for boundary in ways]
    kinds = ([b for b in every if not b.relayed_s], [b for b in every if b.relayed_s])
    return tuple(_best(kind) for kind in kinds if kind)


def work_of_layers(fleet: Fleet) -> Floats:
    """The work in front of each layer: what the coordinator takes for it, in its mean layers."""
    local = fleet.costs[0]
    seconds = np.array(local.forward_s) + np.array(local.backward_s)
    if np.diff(seconds).min() <= 0:
        return np.arange(fleet.layers + 1.0)
    return seconds * (fleet.layers / seconds[-1])


def choices_of(rules: Rules, groups: Sequence[Group], most_s: float, *, first: bool) -> Choice:
    """All stages that take less than `most_s` for a step, right behind the coordinator (`first`) or
    others."""
    m, rows = rules.fleet.micro_batches, []
    for number, group in enumerate(groups):
        head_s = min(_head_s(rules.fleet, d) for d in group.members)
        ways = (group.first,) if first else group.between
        for work, forward_s, backward_s, seconds, held, fits_last in _stages(rules, group, most_s):
            for way in ways:
                wire_s = max(
                    (m - 1) * way.forward_s + m * group.answer_s - way.latency_s + backward_s,
                    (m - 1) * way.backward_s + m * group.out_s + forward_s,
                )
                last_wire_s = (m - 1) * max(way.forward_s, way.backward_s)
                times = (forward_s, backward_s, seconds, seconds + head_s)
                links = (way.path_s, way.relayed_s, wire_s, last_wire_s)
                rows.append((number, work, *times, held, fits_last, *links))
    return Choice(*map(np.array, zip(*rows, strict=True)))


def _head_s(fleet: Fleet, d: int) -> float:
    device = fleet.costs[d].device
    return device.head_forward_s + device.head_backward_s


def _stages(
    rules: Rules, group: Group, most_s: float
) -> Iterator[tuple[float, float, float, float, int, bool]]:
    """Work, seconds of forward, of backward and of both, how many forwards there is memory for, and
    whether the head fits beside it: of no layers, the head alone, and of one to all."""
    fleet, work = rules.fleet, work_of_layers(rules.fleet)
    yield 0.0, 0.0, 0.0, 0.0, 0, any(_has_the_head(fleet, d) for d in group.members)
    for recompute in (False, True) if rules.checkpointing else (False,):
        sums = [_Sums(fleet, d, recompute) for d in group.members]
        for length in range(1, fleet.layers + 1):
            stages = [one.stages(length) for one in sums]
            forward_s, backward_s, weights, kept = (
                np.min([stage[k] for stage in stages], axis=0) for k in range(4)
            )
            seconds = np.min([stage[0] + stage[1] for stage in stages], axis=0)
            if fleet.micro_batches * seconds.min() > most_s:
                break
            of_work = work[length:] - work[:-length]
            for here in _alike(of_work):
                times = [float(values[here].min()) for values in (forward_s, backward_s, seconds)]
                each = float(kept[here].min())
                spare = [one.free - float(weights[here].min()) for one in sums]
                count = held(max(spare), each, fleet.micro_batches)
                fits_last = any(
                    left - fleet.costs[d].device.head_bytes >= each
                    for left, d in zip(spare, group.members, strict=True)
                )
                if count or fits_last:
                    yield float(of_work[here].max()), *times, count, fits_last  # type: ignore[misc]


def _alike(work: Floats) -> Iterator[NDArray[np.bool_]]:
    """Which stages of one length are one choice."""
    if np.ptp(work) < _EXACTLY:
        yield np.ones(len(work), bool)
        return
    buckets = np.floor(work * _BUCKETS)
    for bucket in np.unique(buckets):
        yield buckets == bucket


def held(room: float, each: float, most: int) -> int:
    """How many forwards fit."""
    if room < each or room < 0:
        return 0
    return int(min(most, room / each)) if each else most


def shares_of(rules: Rules, groups: Sequence[Group], *, first: bool) -> Share:
    """What workers may hold in two stages or more, as if each layer were their cheapest."""
    m, rows = rules.fleet.micro_batches, []
    for number, group in enumerate(groups):
        own = [share_of(rules, d) for d in group.members]
        unit_s, layer_s = (min(one[k] for one in own) for k in (0, 1))
        every = (group.first, *group.between)
        again_s, back_again_s = (min(way[k] for way in every) for k in (1, 2))
        for way in every[:1] if first else every[1:]:
            there_s = (m - 1) * way.forward_s - way.latency_s + m * again_s
            back_s = (m - 1) * way.backward_s + m * back_again_s
            for ends in (2, 1):  # of its stages have one behind
                wire_s = max(there_s + m * ends * group.answer_s, back_s + m * ends * group.out_s)
                links = (way.path_s, way.relayed_s, wire_s, ends == 1)
                rows.append((number, unit_s, layer_s, max(one[2] for one in own), *links))
    return Share(*map(np.array, zip(*rows, strict=True)))


def share_of(rules: Rules, d: int) -> tuple[float, float, float]:
    """Least seconds of a unit of work and of a layer on a device, and the work that it has memory
    for with one micro-batch in flight."""
    fleet, costs = rules.fleet, rules.fleet.costs[d]
    work = np.diff(work_of_layers(fleet))
    seconds = np.diff(costs.forward_s) + np.diff(costs.backward_s)
    kept = np.diff(costs.kept_bytes)
    if rules.checkpointing:
        kept = np.minimum(kept, np.diff(costs.recomputed_bytes))
    kept = kept * [fleet.stores_layer(k) for k in range(fleet.layers)]
    each = float(np.diff(costs.layer_bytes).min() + kept.min())
    free = costs.memory_bytes * (1 + _EXACTLY)
    free -= costs.device.embedding_bytes if d == 0 else 0.0
    layers = min(float(fleet.layers), max(0.0, free) / each if each else math.inf)
    return float((seconds / work).min()), float(seconds.min()), layers * float(work.max())


def _has_the_head(fleet: Fleet, d: int) -> bool:
    costs = fleet.costs[d]
    return costs.memory_bytes * (1 + _EXACTLY) >= costs.device.head_bytes


class _Sums:
    """What all stages of one length on a device cost."""

    def __init__(self, fleet: Fleet, d: int, recompute: bool) -> None:
        costs = fleet.costs[d]
        self.free = costs.memory_bytes * (1 + _EXACTLY)
        self.free -= costs.largest_bytes if recompute else 0.0
        kept = costs.recomputed_bytes if recompute else costs.kept_bytes
        backward_s = costs.recompute_s if recompute else costs.backward_s
        self._sums = [
            np.array(values) for values in (costs.forward_s, backward_s, costs.layer_bytes, kept)
        ]
        self._stores = np.array([fleet.stores_layer(k) for k in range(fleet.layers)], float)

    def stages(self, length: int) -> list[Floats]:
        """Seconds of forward and backward, bytes of weights and of what is kept, of the stages that
        begin with each layer."""
        found = [values[length:] - values[:-length] for values in self._sums]
        found[3] *= self._stores[length - 1 :]
        return found
