"""Workers that compute alike, and the best boundary that any layout could give each of them.

`choices` makes of them what a stage may be at best, for a bound of all layouts (`relaxation`). So
whatever is not known of a layout, above all who is in front and behind, is taken at its best.
"""

from __future__ import annotations

from typing import NamedTuple

from hetero_framework.planner.rules import Rules

_MOST_GROUPS = 48
"""Twice as many columns take twice the time; with half as many unlike workers share a group sooner,
which then is as good as the best of them in everything."""


class Boundary(NamedTuple):
    """A boundary into a device, at least in each field by itself: seconds of a round trip, latency
    included, and of those on the wire of an activation and of a gradient; seconds on the wire of
    both as far as the coordinator relays them. `latency_s` is the longest that a first byte takes,
    since the wire may be busy that much sooner than the stage."""

    round_trip_s: float
    forward_s: float
    backward_s: float
    latency_s: float
    relayed_s: float


class Group(NamedTuple):
    """Workers that are bounded together: `size` of them, of which `members` are one of each kind;
    the boundaries by which they may be reached from the coordinator and from workers (direct,
    relayed), and seconds on the wire of an activation to who is behind them, and of its gradient.
    """

    size: int
    members: tuple[int, ...]
    from_coordinator: Boundary
    from_workers: tuple[Boundary, ...]
    out_forward_s: float
    out_backward_s: float


class BestBoundaries:
    """Boundaries into and out of each device, as good as any can be. With `chunks` a device may
    have several stages, the coordinator too: then any boundary may come from it or go to it."""

    def __init__(self, rules: Rules, chunks: bool) -> None:
        fleet, profile = rules.fleet, rules.fleet.profile
        self._chunks = chunks
        self._activation_bytes = profile.activation_bytes
        # Of the boundaries in front of layer 0 and of any other one.
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
        """Latency of a round trip."""
        return self._latency_s[a, b] + self._latency_s[b, a]

    def from_coordinator(self, d: int) -> Boundary:
        """Into device d, right behind the coordinator."""
        there_s = self._activation_bytes / self._rate[0, d]
        back_s = self._gradient_bytes[0] / self._rate[d, 0]
        both_s = self._both_s(0, d)
        return Boundary(there_s + back_s + both_s, there_s, back_s, both_s / 2, 0.0)

    def from_workers(self, d: int) -> tuple[Boundary, ...]:
        """Into device d from any other worker: direct, if there are links, and relayed, unless that
        is worse in everything."""
        relayed = self._relayed(d)
        peers = self._peers[d]
        if not peers:
            return (relayed,)
        there_s = self._activation_bytes / max(self._rate[a, d] for a in peers)
        back_s = self._gradient_bytes[1] / max(self._rate[d, a] for a in peers)
        both = [self._both_s(a, d) for a in peers]
        direct = Boundary(there_s + back_s + min(both), there_s, back_s, max(both) / 2, 0.0)
        pairs = zip(direct[:3], relayed[:3], strict=True)
        return (direct,) if all(a <= b for a, b in pairs) else (direct, relayed)

    def _relayed(self, d: int) -> Boundary:
        there_s = self._activation_bytes / min(self._most_up, self._rate[0, d])
        back_s = self._gradient_bytes[1] / min(self._rate[d, 0], self._most_down)
        round_trip_s = there_s + back_s + self._both_s(0, d) + self._least_s
        latency_s = (self._both_s(0, d) + self._longest_s) / 2
        if not self._chunks:
            return Boundary(round_trip_s, there_s, back_s, latency_s, there_s + back_s)
        # Or a later stage of the coordinator is in front, which only sends the activation.
        own = self.from_coordinator(d)
        return Boundary(
            min(round_trip_s, own.round_trip_s),
            min(there_s, own.forward_s),
            min(back_s, own.backward_s),
            latency_s,
            own.forward_s,
        )

    def out(self, d: int) -> tuple[float, float]:
        """Least seconds on the wire of an activation to any other device, and of its gradient."""
        up, down = self._rate[d, 0], self._rate[0, d]
        rates = [(min(up, self._most_down), min(down, self._most_up))]
        rates += [(self._rate[d, a], self._rate[a, d]) for a in self._peers[d]]
        rates += [(up, down)] * self._chunks
        there, back = (max(one) for one in zip(*rates, strict=True))
        return self._activation_bytes / there, self._gradient_bytes[1] / back


def groups_of(rules: Rules, *, chunks: bool) -> list[Group]:
    """The workers, those of one kind together; where there are more kinds than groups, also those
    that are about as fast."""
    fleet, boundaries = rules.fleet, BestBoundaries(rules, chunks)
    kinds: dict[tuple[float, str], list[int]] = {}
    for d in sorted((d for d in rules.devices if d), key=fleet.layer_s):
        costs = fleet.costs[d]
        said = costs.device.model_dump_json(exclude={"id"})
        kinds.setdefault((costs.memory_bytes, said), []).append(d)
    by_speed = list(kinds.values())
    size = -(-len(by_speed) // _MOST_GROUPS)
    found = []
    for k in range(0, len(by_speed), size):
        together = by_speed[k : k + size]
        devices = [d for kind in together for d in kind]
        out = [boundaries.out(d) for d in devices]
        found.append(
            Group(
                len(devices),
                tuple(kind[0] for kind in together),
                _best([boundaries.from_coordinator(d) for d in devices]),
                _best_ways([boundaries.from_workers(d) for d in devices]),
                min(there_s for there_s, _ in out),
                min(back_s for _, back_s in out),
            )
        )
    return found


def _best(boundaries: list[Boundary]) -> Boundary:
    return Boundary(
        min(one.round_trip_s for one in boundaries),
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
