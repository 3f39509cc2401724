"""All layouts that could beat a known one: branch and bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetero_framework.engine.schedule.simulator import Edge
from hetero_framework.extras.planner.layout import Layout, Part
from hetero_framework.extras.planner.rules import Rules


class TooMany(Exception):
    """More nodes than the search may visit."""


class Enumeration:
    """Layouts of one stage per device, with `several` of any number, from the embedding on; a
    branch ends where a device in it, one of its NICs, or what is left for the others, takes
    `most_s` or longer, and where a device has no memory for one micro-batch of its stage."""

    def __init__(self, rules: Rules, most_s: float, *, nodes: int, several: bool = False) -> None:
        self._rules = rules
        self._several = several
        self._fleet = rules.fleet
        self._most_s = most_s
        self._nodes = nodes
        fleet = rules.fleet
        self._c = {
            d: min(
                (costs.forward_s[k + 1] - costs.forward_s[k])
                + (costs.backward_s[k + 1] - costs.backward_s[k])
                for k in range(fleet.layers)
            )
            for d in rules.devices
            for costs in [fleet.costs[d]]
        }

    def layouts(self) -> Iterator[Layout]:
        """Yield them all. Raises TooMany."""
        device = self._fleet.costs[0].device
        begin = device.embedding_forward_s + device.embedding_backward_s
        yield from self._from((), 0, 0.0, begin)

    def _from(self, parts: Layout, d: int, wait_s: float, extra_s: float) -> Iterator[Layout]:
        """Continue with a stage on device d that begins after `wait_s` and has `extra_s` of work
        besides its layers."""
        fleet, rules, m = self._fleet, self._rules, self._fleet.micro_batches
        start, costs = parts[-1].end if parts else 0, self._fleet.costs[d]
        earlier_s = self._earlier_s(parts, d)
        head_s = costs.device.head_forward_s + costs.device.head_backward_s
        for recompute in (False, True) if rules.checkpointing else (False,):
            backward_s = costs.recompute_s if recompute else costs.backward_s
            for end in range(start, fleet.layers + 1):
                part = Part(d, start, end, recompute)
                if end == start and (recompute or (parts and end < fleet.layers)):
                    continue
                if not fleet.may_fit(part):
                    break
                if not rules.permits_part(part):
                    continue
                if recompute and not fleet.is_short_of_memory(part):
                    continue
                self._nodes -= 1
                if self._nodes < 0:
                    raise TooMany
                work_s = extra_s + costs.forward_s[end] - costs.forward_s[start]
                work_s += backward_s[end] - backward_s[start]
                if max(wait_s, m * earlier_s) + m * work_s >= self._most_s:
                    break
                last_s = max(wait_s, m * earlier_s) + m * (work_s + head_s)
                if end == fleet.layers and last_s < self._most_s:
                    yield from self._ways((*parts, part))
                if start < fleet.layers or not parts:
                    yield from self._behind((*parts, part), wait_s, work_s)

    def _behind(self, parts: Layout, before_s: float, work_s: float) -> Iterator[Layout]:
        """Continue behind a stage that begins after `before_s` and works for `work_s`."""
        wait_s = before_s + work_s
        used = {part.device for part in parts}
        free = [d for d in self._rules.devices if d not in used]
        left = self._fleet.layers - parts[-1].end
        m, most_s = self._fleet.micro_batches, self._most_s
        spare = dict.fromkeys(free, (most_s - wait_s) / m)
        if self._several:
            spare |= {d: most_s / m - self._earlier_s(parts, d) for d in used}
        covered = sum(
            seconds / self._c[d] if self._c[d] > 0 else math.inf for d, seconds in spare.items()
        )
        if covered < left:
            return
        tried = set()
        for d in spare:
            kind = self._rules.kinds[d]
            if d == parts[-1].device or (kind in tried and d not in used):
                continue
            if d not in used:
                tried.add(kind)
            edges = self._rules.ways(parts[-1].device, d, parts[-1].end)
            if before_s + self._wire_s(parts, edges) >= self._most_s:
                continue
            link_s = min(e.forward_s + e.backward_s + 2 * e.latency_s for e, _ in edges)
            yield from self._from(parts, d, wait_s + link_s, 0.0)

    def _earlier_s(self, parts: Layout, d: int) -> float:
        """Seconds of a micro-batch's layers in these stages of device d."""
        if not self._several:
            return 0.0
        return sum(sum(self._fleet.seconds(part)) for part in parts if part.device == d)

    def _wire_s(self, parts: Layout, behind: Sequence[tuple[Edge, bool]]) -> float:
        """The time that the NICs of the last of these stages need, from when it can begin."""
        m, there_s, back_s, latency_s = self._fleet.micro_batches, 0.0, 0.0, 0.0
        if len(parts) > 1:
            ways = self._rules.ways(parts[-2].device, parts[-1].device, parts[-1].start)
            there_s, back_s = _least(ways)
            latency_s = max(edge.latency_s for edge, _ in ways)
        sent_s, answer_s = _least(behind)
        received_s = (m - 1) * there_s + m * answer_s - latency_s
        return max(received_s, (m - 1) * back_s + m * sent_s)

    def _ways(self, layout: Layout) -> Iterator[Layout]:
        """The layout with each choice of ways across its boundaries."""
        if not self._rules.permits(layout):
            return
        layouts = [layout[:1]]
        for before, part in pairwise(layout):
            ways = self._rules.ways(before.device, part.device, part.start)
            layouts = [
                (*parts, part._replace(direct=direct)) for parts in layouts for _, direct in ways
            ]
        yield from layouts


def _least(ways: Sequence[tuple[Edge, bool]]) -> tuple[float, float]:
    """Seconds of an activation and of a gradient."""
    edges = [edge for edge, _ in ways]
    return min(edge.forward_s for edge in edges), min(edge.backward_s for edge in edges)
