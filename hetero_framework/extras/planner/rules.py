"""The rules of layouts: allowed devices, pinned layers, and the choices open to the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hetero_framework.engine.schedule.simulator import Edge
from hetero_framework.extras.planner.layout import Fleet, Layout, Part


@dataclass(frozen=True)
class Rules:
    """Rules of layouts: the devices that may take part (the coordinator, 0, always does), the
    layers that are pinned to some of them, and the choices of the search."""

    fleet: Fleet
    devices: tuple[int, ...]
    pins: Mapping[int, tuple[int, int]]
    checkpointing: bool
    chunks: bool

    @property
    def interleaves(self) -> bool:
        """Whether a device may have several stages: not where layers are pinned."""
        return self.chunks and not self.pins

    def permits_part(self, part: Part) -> bool:
        """Whether a stage leaves every pinned device just its layers."""
        if part.device in self.pins:
            return (part.start, part.end) == self.pins[part.device]
        return all(part.end <= start or end <= part.start for start, end in self.pins.values())

    def permits(self, layout: Layout) -> bool:
        """Whether every pinned device holds just its layers."""
        return all(
            [(p.start, p.end) for p in layout if p.device == device] == [pin]
            for device, pin in self.pins.items()
        )

    @cached_property
    def kinds(self) -> dict[int, int]:
        """For each device the first one that differs from it in nothing but its name."""
        kinds: dict[int, int] = {}
        for d in self.devices:
            alike = (first for first in dict.fromkeys(kinds.values()) if self._alike(first, d))
            kinds[d] = next(alike, d)
        return kinds

    def _alike(self, a: int, b: int) -> bool:
        if 0 in (a, b) or a in self.pins or b in self.pins:
            return False
        fleet = self.fleet
        one, other = (
            (fleet.costs[d].memory_bytes, fleet.costs[d].device.model_dump(exclude={"id"}))
            for d in (a, b)
        )
        if one != other:
            return False
        others = [d for d in self.devices if d not in (a, b)]
        pairs = [((a, d), (b, d)) for d in others] + [((d, a), (d, b)) for d in others]
        return all(self._ways(*x) == self._ways(*y) for x, y in [*pairs, ((a, b), (b, a))])

    def _ways(self, a: int, b: int) -> list[Edge]:
        return [edge for edge, _ in self.ways(a, b, self.fleet.layers)]

    @cached_property
    def _known_ways(self) -> dict[tuple[int, int, bool], list[tuple[Edge, bool]]]:
        return {}

    def ways(self, a: int, b: int, position: int) -> list[tuple[Edge, bool]]:
        """The ways over the boundary from a to b in front of layer `position`, and whether each is
        direct; the quickest first, and none that is worse in everything."""
        key = (a, b, self.fleet.goes_back(position))
        if key not in self._known_ways:
            self._known_ways[key] = self._found_ways(a, b, position)
        return self._known_ways[key]

    def _found_ways(self, a: int, b: int, position: int) -> list[tuple[Edge, bool]]:
        relayed = (self.fleet.edge(a, b, position, False), False)
        if not self.fleet.can_go_direct(a, b):
            return [relayed]
        edge = self.fleet.edge(a, b, position, True)
        pairs = zip(_times(edge), _times(relayed[0]), strict=True)
        if all(one <= other for one, other in pairs):
            return [(edge, True)]
        return sorted([(edge, True), relayed], key=lambda way: max(_times(way[0])[:2]))


def _times(edge: Edge) -> tuple[float, float, float]:
    return edge.forward_s, edge.backward_s, edge.latency_s
