"""Layouts for a step of a given length: one dynamic programme over orders and cuts.

In a step of T seconds a stage has T - w left if a micro-batch reaches it after w seconds, counting
the gradients' way back. Its layers may therefore take, for m micro-batches,

    m (F + B) <= T - w.

From the embedding towards the head each device takes as many layers as this and its memory allow.
Of all orders of the same devices with the same last device, only the most promising is kept. It
covers the most layers, counting those that the unused devices could cover in the time left. The
number of kept orders is limited too. Devices that are alike are taken in their order.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetero_framework.extras.planner.layout import Layout, Part, Rules, longest

_ROUNDING = 1e-12
_BEAM = 2_000  # partial layouts that are kept, for all pairs of devices together
_LEAST_BEAM = 12  # least of them, for more than 12 devices
_RELAYED = 8  # workers without a link that are tried behind a worker that has links to others


class _Front(NamedTuple):
    """A partial layout: layers up to `end`, laid out as `parts`. Seconds are per micro-batch.
    `wait_s` is the way through all parts and back. `in_s` and `out_s` are what the last stage's
    NICs receive and send over the boundary before it, `relayed_s` is what the coordinator relays.
    `rate` is layers per second of the unused devices."""

    end: int
    wait_s: float
    used: frozenset[int]
    parts: Layout
    in_s: float
    out_s: float
    relayed_s: float
    rate: float


class LayerProgramme:
    """The dynamic programme. `depth` is the share of a full pipeline's micro-batches in flight for
    which stages need memory: 1 is all, 0 is one micro-batch, for fleets without memory for more."""

    def __init__(self, rules: Rules, *, depth: float = 1.0) -> None:
        self._rules = rules
        self._fleet = fleet = rules.fleet
        self._depth = depth
        self._beam = max(_LEAST_BEAM, _BEAM // len(rules.devices) ** 2)
        self._pin_starts = sorted(start for start, _ in rules.pins.values())
        self._short = [
            fleet.is_short_of_memory(Part(d, 0, fleet.layers)) for d in range(len(fleet.costs))
        ]
        self._sums = [
            [
                [f + b for f, b in zip(costs.forward_s, backward_s, strict=True)]
                for backward_s in (costs.backward_s, costs.recompute_s)
            ]
            for costs in fleet.costs
        ]
        self._rate = {d: 1 / max(fleet.layer_s(d), _ROUNDING) for d in rules.devices}
        self._empty = _Front(0, 0.0, frozenset(), (), 0.0, 0.0, 0.0, sum(self._rate.values()))
        ends = fleet.costs[0].device
        self._embedding_s = ends.embedding_forward_s + ends.embedding_backward_s
        self._quickest = sorted(rules.devices, key=fleet.layer_s)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether memory may decide anything."""
        return any(self._short[d] for d in self._rules.devices)

    def layouts(self, step_s: float) -> Iterator[Layout]:
        """Layouts for a step of `step_s` seconds with at most one stage per device. Layouts with
        fewer stages come first."""
        fronts, m = [self._empty], self._fleet.micro_batches
        for behind in reversed(range(len(self._rules.devices))):
            reached: dict[tuple[frozenset[int], int], tuple[float, _Front]] = {}
            for front in fronts:
                for d in self._following(front):
                    if whole := self._extended(front, d, step_s, behind, last=True):
                        yield whole.parts
                    if longer := self._extended(front, d, step_s, behind):
                        # The unused devices count with what they could hold in the remaining time.
                        value = longer.end + longer.rate * (step_s - longer.wait_s) / m
                        if value > reached.get((longer.used, d), (-math.inf,))[0]:
                            reached[longer.used, d] = value, longer
            best = heapq.nlargest(self._beam, reached.values(), key=lambda entry: entry[0])
            fronts = [front for _, front in best]

    def along(self, order: Sequence[int], step_s: float) -> Layout | None:
        """The layout of these devices in this order for a step of `step_s` seconds; None where
        there is none."""
        front = self._empty
        for behind, d in zip(reversed(range(len(order))), order, strict=True):
            leave = max(0, behind - 1)
            longer = self._extended(front, d, step_s, behind, last=not behind, leave=leave)
            if longer is None:
                return None
            front = longer
        return front.parts

    def _following(self, front: _Front) -> Iterator[int]:
        """The devices that may come next, one of each kind. If the last device has direct links,
        only the quickest few of the devices without one are among them."""
        if not front.parts:
            yield 0
            return
        tried, relayed = set(), 0
        linked = self._fleet.linked[front.parts[-1].device]
        for d in self._quickest:
            if linked and d not in linked:
                relayed += d not in front.used
                if relayed > _RELAYED and d not in self._rules.pins:
                    continue
            if d and d not in front.used and (kind := self._rules.kinds[d]) not in tried:
                tried.add(kind)
                yield d

    def _extended(
        self,
        front: _Front,
        d: int,
        step_s: float,
        behind: int,
        *,
        last: bool = False,
        leave: int = 0,
    ) -> _Front | None:
        """The front with another stage, on device d, and at most `behind` stages behind it. The
        `last` stage takes all layers left, others as many as they can, but not the last `leave`.
        None if it can take none, or if a NIC (of the stage before, of this stage, of the
        coordinator) would be busy for more than T / m seconds of each micro-batch."""
        m, wait_s = self._fleet.micro_batches, front.wait_s
        pace_s = step_s / m
        in_s = out_s = 0.0
        relayed_s, direct = front.relayed_s, False
        if front.parts:
            before = front.parts[-1].device
            edge, direct = self._rules.ways(before, d, front.end)[0]
            wait_s += edge.forward_s + edge.backward_s + 2 * edge.latency_s
            in_s, out_s = edge.forward_s, edge.backward_s
            if edge.relay is not None:
                relayed_s += in_s + out_s
            first_s = in_s if before == 0 else 0.0
            full = max(front.in_s + out_s, front.out_s + in_s, in_s, out_s, relayed_s + first_s)
            if full > pace_s + _ROUNDING:
                return None
        if (span := self._wanted(d, front.end, last, leave)) is None:
            return None
        held = 1 if last else max(1, math.ceil(self._depth * (behind + 1)))
        held, spare_s = min(held, m), (step_s - wait_s) / m
        modes = (False, True) if self._rules.checkpointing and self._short[d] else (False,)
        reached = (self._reach(d, front.end, span[1], held, on, spare_s, last) for on in modes)
        fitting = (part for part in reached if part is not None and part.end >= span[0])
        if (part := max(fitting, key=lambda part: part.end, default=None)) is None:
            return None
        wait_s += self._busy_s(part) + (self._embedding_s if d == 0 else 0.0)
        return _Front(
            part.end,
            wait_s,
            front.used | {d},
            (*front.parts, part._replace(direct=direct, offload=0)),
            in_s,
            out_s,
            relayed_s,
            front.rate - self._rate[d],
        )

    def _busy_s(self, part: Part) -> float:
        if part.offload:
            return sum(self._fleet.seconds(part))
        sums = self._sums[part.device][part.recompute]
        return sums[part.end] - sums[part.start]

    def _wanted(self, d: int, start: int, last: bool, leave: int) -> tuple[int, int] | None:
        """(least, most) layer at which the stage of device d may end; None if there may be none."""
        layers = self._fleet.layers
        limit = next((pin for pin in self._pin_starts if pin >= start), layers)
        pin = self._rules.pins.get(d)
        if pin is not None:
            fits = pin[0] == start and (pin[1] == layers or not last)
            return (pin[1], pin[1]) if fits else None
        if last:
            return (layers, layers) if limit == layers else None
        least = self._fleet.profile.first_layers if d == 0 else start + 1
        limit = min(limit, layers - leave)
        return (least, limit) if least <= limit else None

    def _reach(
        self, d: int, start: int, limit: int, held: int, recompute: bool, spare_s: float, last: bool
    ) -> Part | None:
        """The longest stage from layer `start` on that fits, to `limit` at most. It may have no
        layers; None if even that stage does not fit."""
        costs, sums = self._fleet.costs[d], self._sums[d][recompute]
        device = costs.device
        free = costs.memory_bytes
        if last:
            spare_s -= device.head_forward_s + device.head_backward_s
            free -= device.head_bytes
        if d == 0:
            spare_s -= self._embedding_s
            free -= device.embedding_bytes + held * device.embedding_stored_bytes
        slack = _ROUNDING * (1.0 + spare_s)
        if spare_s < -slack or free < 0:
            return None
        end = bisect_right(sums, sums[start] + spare_s + slack, start, limit + 1) - 1
        kept = costs.recomputed_bytes if recompute else costs.kept_bytes
        if recompute:  # the inputs at a stage's ends stay
            free -= costs.largest_bytes + held * costs.largest_input * ((start > 0) + last)

        def needs(end: int) -> float:
            stored = held if self._fleet.stores_layer(end - 1) else 0
            weights = costs.layer_bytes[end] - costs.layer_bytes[start]
            return weights + stored * (kept[end] - kept[start])

        in_time = end
        while end > start and self._short[d] and (needed := needs(end)) > free:
            # Layers differ little: take half as many away as the mean says, at least one.
            end -= max(1, int((end - start) * (1 - free / needed) / 2))
        resident = Part(d, start, end, recompute and end > start)
        if not costs.streams or end == in_time:
            return resident

        def streamed(layers: int) -> Part | None:
            part = resident._replace(end=start + layers, recompute=recompute and layers > 0)
            if (short := needs(part.end) - free) > 0:
                count = costs.fewest_streamed(start, part.end, short)
                part = part._replace(offload=count or 0)
            fits = short <= 0 or part.offload
            return part if fits and self._busy_s(part) <= spare_s + slack else None

        most = longest(lambda layers: streamed(layers) is not None, in_time - start, True)
        return (streamed(most) if most > end - start else None) or resident
