"""Layouts for a step of a given length: one dynamic programme over orders and cuts.

A stage that a micro-batch reaches w seconds after the start of the step, the gradients' way back
included, has T - w left. Its layers may therefore take, for m micro-batches,

    m (F + B) <= T - w.

From the embedding towards the head each device takes as many layers as this and its memory allow.
Of all orders of the same devices that end with the same one, only the most promising is kept: the
one with the most layers covered, those included that the other devices could cover in the time
left. The number of kept orders is limited, too. Devices that are alike are taken in their order.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetero_framework.extras.planner.layout import Fleet, Layout, Part, Rules, longest

_ROUNDING = 1e-12
_BEAM = 2_000  # partial layouts that are kept, for all pairs of devices together
_LEAST_BEAM = 12  # of more than 12 devices
_RELAYED = 8
"""Workers tried behind one to which they have no link, where it has links to others. Twice as many
make the programme up to twice as long in sparse fleets; with half as many a quick worker may
be missed."""


class _Front(NamedTuple):
    """A partial layout: layers up to `end`, laid out as `parts`. Seconds are per micro-batch:
    `wait_s` through all of it and back, `in_s` and `out_s` what the last stage's NICs receive and
    send over the boundary in front of it, `relayed_s` what the coordinator relays. `rate` is that
    of the devices left, layers a second."""

    end: int
    wait_s: float
    used: frozenset[int]
    parts: Layout
    in_s: float
    out_s: float
    relayed_s: float
    rate: float


class _StagePosition(NamedTuple):
    """A stage's position: the stages in front, the most in all, whether it has the head, and the
    layers that have to stay for others."""

    number: int
    most: int
    last: bool
    leave: int = 0


class LayerProgramme:
    """The dynamic programme. `depth` is the share of a full pipeline's micro-batches in a stage
    that is counted: 1 all of them, 0 one, for fleets without the memory for more."""

    def __init__(self, rules: Rules, *, depth: float = 1.0, beam: int | None = None) -> None:
        self._rules = rules
        self._fleet = fleet = rules.fleet
        self._depth = depth
        self._beam = beam or max(_LEAST_BEAM, _BEAM // len(rules.devices) ** 2)
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
        self._quickest = sorted(rules.devices, key=fleet.layer_s)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether memory may decide anything."""
        return any(self._short[d] for d in self._rules.devices)

    def layouts(self, step_s: float) -> Iterator[Layout]:
        """Layouts for a step of `step_s` seconds, those with fewer stages first; none of them uses
        a device twice."""
        most = len(self._rules.devices)
        fronts = [self._empty]
        for number in range(most):
            inner, last = _StagePosition(number, most, False), _StagePosition(number, most, True)
            reached: dict[tuple[frozenset[int], int], tuple[float, _Front]] = {}
            for front in fronts:
                for d in self._following(front):
                    whole = self._extended(front, d, step_s, last)
                    if whole is not None:
                        yield whole.parts
                    longer = self._extended(front, d, step_s, inner)
                    if longer is None:
                        continue
                    key, value = (longer.used, d), self._promise(longer, step_s)
                    if key not in reached or value > reached[key][0]:
                        reached[key] = (value, longer)
            best = heapq.nlargest(self._beam, reached.values(), key=lambda entry: entry[0])
            fronts = [front for _, front in best]

    def along(self, order: Sequence[int], step_s: float) -> Layout | None:
        """The layout of these devices in this order for a step of `step_s` seconds; None where
        there is none."""
        front = self._empty
        for number, d in enumerate(order):
            behind = len(order) - 1 - number
            place = _StagePosition(number, len(order), not behind, max(0, behind - 1))
            longer = self._extended(front, d, step_s, place)
            if longer is None:
                return None
            front = longer
        return front.parts

    def _following(self, front: _Front) -> Iterator[int]:
        """The devices that may come next, one of each kind; of those that would be reached through
        the coordinator, where others would not, the quickest few."""
        if not front.parts:
            yield 0
            return
        tried = set()
        relayed = 0
        linked = self._fleet.linked[front.parts[-1].device]
        for d in self._quickest:
            if linked and d not in linked:
                relayed += d not in front.used
                if relayed > _RELAYED and d not in self._rules.pins:
                    continue
            kind = self._rules.kinds[d]
            if d and d not in front.used and kind not in tried:
                tried.add(kind)
                yield d

    def _promise(self, front: _Front, step_s: float) -> float:
        """Layers placed, plus those that the unused devices could hold in the remaining time."""
        return front.end + front.rate * (step_s - front.wait_s) / self._fleet.micro_batches

    def _extended(
        self, front: _Front, d: int, step_s: float, place: _StagePosition
    ) -> _Front | None:
        """The front with a stage on device d: all layers left if it is the last one, else as many
        as it can take. None where it can take none, or where a NIC (of the stage in front, of this
        one, of the coordinator) would carry more than T / m seconds of each micro-batch."""
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
        spare_s = (step_s - wait_s) / m
        part = self._take(d, front.end, spare_s, place)
        if part is None:
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

    @property
    def _embedding_s(self) -> float:
        device = self._fleet.costs[0].device
        return device.embedding_forward_s + device.embedding_backward_s

    def _take(self, d: int, start: int, spare_s: float, place: _StagePosition) -> Part | None:
        """The layers from `start` on that device d can take in `spare_s` per micro-batch."""
        wanted = self._wanted(d, start, place)
        if wanted is None:
            return None
        behind = place.most - place.number
        held = 1 if place.last else max(1, math.ceil(self._depth * behind))
        held = min(held, self._fleet.micro_batches)
        least, best = wanted[0], None
        for recompute in (False, True) if self._rules.checkpointing else (False,):
            part = self._reach(d, start, wanted[1], held, recompute, spare_s, place.last)
            if part is not None and part.end >= least and (best is None or part.end > best.end):
                best = part
            if not self._short[d]:
                break
        return best

    def _wanted(self, d: int, start: int, place: _StagePosition) -> tuple[int, int] | None:
        """The least and the most that the stage of device d may end at."""
        layers = self._fleet.layers
        limit = next((pin for pin in self._pin_starts if pin >= start), layers)
        pin = self._rules.pins.get(d)
        if pin is not None:
            fits = pin[0] == start and (pin[1] == layers or not place.last)
            return (pin[1], pin[1]) if fits else None
        if place.last:
            return (layers, layers) if limit == layers else None
        least = start if d == 0 else start + 1
        limit = min(limit, layers - place.leave)
        return (least, limit) if least <= limit else None

    def _reach(
        self, d: int, start: int, limit: int, held: int, recompute: bool, spare_s: float, last: bool
    ) -> Part | None:
        """The stage of the layers from `start` on that fit, at most to `limit`; None where not even
        none do."""
        costs, sums = self._fleet.costs[d], self._sums[d][recompute]
        device = costs.device
        free = costs.memory_bytes
        if last:
            spare_s -= device.head_forward_s + device.head_backward_s
            free -= device.head_bytes
        if d == 0:
            spare_s -= self._embedding_s
            free -= device.embedding_bytes
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
            # Layers differ little: half as many fewer as the mean says, at least one.
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


def step_range(fleet: Fleet, devices: Sequence[int]) -> tuple[float, float]:
    """Lower and upper bound of a step in seconds: the devices sharing it perfectly, which takes
    1 / sum(1 / step alone), and the slowest device alone."""

    def alone(d: int, recompute: bool) -> float:
        costs = fleet.costs[d]
        device, backward_s = costs.device, costs.recompute_s if recompute else costs.backward_s
        ends = device.embedding_forward_s + device.embedding_backward_s
        ends += device.head_forward_s + device.head_backward_s
        return costs.forward_s[-1] + backward_s[-1] + ends * recompute

    fastest = [alone(d, False) for d in devices]
    least = 1 / sum(1 / seconds for seconds in fastest) if min(fastest) > 0 else 0.0
    m = fleet.micro_batches
    return m * least, m * max(alone(d, True) for d in devices)
