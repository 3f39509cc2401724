"""Layouts: the stages of a model on a fleet, with times and memory, and the rules for stages.
A layout is evaluated with the schedule that a run would use."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import TunedSchedule, tune
from hetero_framework.extras.planner.profile import DeviceProfile, FleetProfile
from hetero_framework.models.sizing.streaming import (
    VISITING_INPUTS,
    layers_in_turn,
    slot_sizes,
    slots_of,
    spread,
)

WorkerId = int | str
_EXACTLY = 1e-9  # share of bytes: tolerance for sums in another order
LEAST_STREAMED = 4  # layers: fewer take no more memory than their slots
_NAMES = {"id", "machine"}
_DEPTHS = (0.0, 1.0, 2.0)  # times a full pipeline's micro-batches, which are to have memory


class Part(NamedTuple):
    """A stage: layers [start, end) on a device (its index in `Fleet.ids`). `direct`: the boundary
    before it is crossed directly, not through the coordinator. `offload` of its layers are streamed
    from host memory; a search leaves this number to `Fleet.streamed`."""

    device: int
    start: int
    end: int
    recompute: bool = False
    direct: bool = False
    offload: int = 0

    def __hash__(self) -> int:
        # Without `offload`: the order of sets of layouts, and so the choice among equally good
        # ones, is the same as it would be if no layers were ever streamed.
        return hash(self[:5])


Layout = tuple[Part, ...]


def resident(layout: Layout) -> Layout:
    """The layout without streamed layers."""
    return tuple(part._replace(offload=0) for part in layout)


def longest(holds: Callable[[int], bool], most: int, streams: bool) -> int:
    """The most layers, up to `most`, that a device holds; -1 if it cannot even hold none. If it
    streams, even numbers are tried first: many layers in slots may take less than a few layers."""
    even = range(LEAST_STREAMED, most + 1 if streams else 0, 2)
    if found := bisect_left(even, True, key=lambda layers: not holds(layers)):
        layers = even[found - 1]
        return layers + 1 if layers < most and holds(layers + 1) else layers
    few = range(min(most, LEAST_STREAMED - 1 if streams else most) + 1)
    return bisect_left(few, True, key=lambda layers: not holds(layers)) - 1


def has_chunks(layout: Layout) -> bool:
    """Whether a device has several stages."""
    return len({part.device for part in layout}) < len(layout)


class _Costs:
    """Costs of layers on one device, as sums over the layers before each."""

    def __init__(self, device: DeviceProfile, layers: int, memory_bytes: float) -> None:
        def of_layers(values: Sequence[float]) -> list[float]:
            return list(values) * layers if len(values) == 1 else list(values)

        def sums(values: Sequence[float]) -> list[float]:
            return [0.0, *accumulate(of_layers(values))]

        self.device = device
        self.memory_bytes = memory_bytes
        self.forward_s = sums(device.layer_forward_s)
        self.backward_s = sums(device.layer_backward_s)
        recompute = sums(device.layer_recompute_s)
        self.recompute_s = [a + b for a, b in zip(self.backward_s, recompute, strict=True)]
        self.layer_bytes = sums(device.layer_bytes)
        kept = of_layers(device.activation_bytes_per_layer)
        self.kept_bytes = sums(kept)
        inputs, again = of_layers(device.layer_input_bytes), device.activation_bytes_recomputed
        self.input_bytes, self.largest_input = sums(inputs), max(inputs)
        pairs = zip(of_layers(again), inputs, strict=True)
        self.recomputed_bytes = sums([max(0.0, stored - leaving) for stored, leaving in pairs])
        self.largest_bytes = max(kept) + VISITING_INPUTS * self.largest_input
        self._frozen = of_layers(device.layer_frozen_bytes)
        self.step_bytes = sums(device.layer_step_bytes)
        self._is_even = min(self._frozen) == max(self._frozen)
        rate, self.host_bytes = device.host_to_device_bytes_per_s, device.host_bytes
        self.states_bytes = sums(device.layer_host_bytes)
        ends = device.embedding_host_bytes + device.head_host_bytes
        self.host_states_bytes = 0.0 if device.states_follow else self.states_bytes[-1] + ends
        self.streams = rate > 0 and self.host_bytes > 0 and max(self._frozen) > 0

    def streamed_bytes(self, start: int, end: int, count: int) -> tuple[float, float]:
        """(bytes that visit, bytes that are saved on the device) with `count` streamed layers of a
        stage; (infinite, 0) if one of these layers may not be streamed."""
        if self._is_even:
            return count * self._frozen[0], (count - slots_of(count)) * self._frozen[0]
        sizes = [int(self._frozen[k]) for k in spread(count, start, end)]
        return (sum(sizes), sum(sizes) - sum(slot_sizes(sizes))) if min(sizes) else (math.inf, 0.0)

    def fewest_streamed(self, start: int, end: int, needed: float) -> int | None:
        """The least number of streamed layers of a stage that saves `needed` bytes; None if none
        does or the host has no room. An odd number saves no more than the even one before it."""
        even = range(LEAST_STREAMED, end - start + 1 if self.streams else 0, 2)
        sizes = partial(self.streamed_bytes, start, end)
        least = bisect_left(even, needed * (1 - _EXACTLY), key=lambda count: sizes(count)[1])
        fits = least < len(even) and sizes(even[least])[0] <= self.host_bytes
        return even[least] if fits else None


class Fleet:
    """A profile made ready for search: the coordinator is device 0, and memory is what is left
    after margins and the processes' other needs."""

    def __init__(
        self, profile: FleetProfile, *, margins: Mapping[WorkerId, float] | None = None
    ) -> None:
        margins = margins or {}
        self.profile = profile
        self.layers = profile.layers
        self.micro_batches = profile.micro_batches
        devices = sorted(profile.devices, key=lambda device: device.id != "local")
        self.ids: list[WorkerId] = [device.id for device in devices]
        self.costs = [
            _Costs(d, self.layers, d.memory_bytes - d.reserved_bytes - margins.get(d.id, 0.0))
            for d in devices
        ]
        self._streams = any(costs.streams for costs in self.costs)
        self.machines = [device.machine or f"process {device.id}" for device in devices]
        self._links = {(link.sender, link.receiver): link for link in profile.links}
        self._edges: dict[tuple[int, int, bool, bool], Edge] = {}
        trained = [
            layer
            for layer in range(self.layers)
            if any(c.backward_s[layer + 1] > c.backward_s[layer] for c in self.costs)
        ]
        lowest = min(trained, default=self.layers)
        embedding = profile.embedding_is_trained
        if embedding is None:
            embedding = lowest == 0 or self.costs[0].device.embedding_backward_s > 0
        self._trained_from = -1 if embedding else lowest

    # -- time -----------------------------------------------------------------------------------

    def seconds(self, part: Part) -> tuple[float, float]:
        """Seconds of forward and backward of a stage's layers, without embedding and head. Each is
        the longer of computing (slower during copies) and copying. Where the direction turns,
        nothing is fetched before the first streamed layer is done, nor while the layers after the
        last streamed one are computed."""
        costs = self.costs[part.device]
        backward_s = costs.recompute_s if part.recompute else costs.backward_s
        forward_s = costs.forward_s[part.end] - costs.forward_s[part.start]
        back_s = backward_s[part.end] - backward_s[part.start]
        inputs = self.inputs_away(part)
        if not part.offload and not inputs:
            return forward_s, back_s
        more, fetch_s = costs.device.copy_slowdown - 1, self.fetch_s(part)
        turns = fetch_s and self.stores(part)
        ends = 1 / part.offload + 1 / (part.end - part.start) if turns else 0.0
        device, out_s, in_s = costs.device, 0.0, 0.0
        if inputs and device.device_to_host_bytes_per_s and device.host_to_device_bytes_per_s:
            out_s = inputs / device.device_to_host_bytes_per_s
            in_s = inputs / device.host_to_device_bytes_per_s

        def taken_s(computing_s: float, copying_s: float) -> float:
            slowed_s = computing_s + more * min(computing_s, copying_s)
            return max(slowed_s, copying_s + ends * computing_s)

        both = device.both_ways if fetch_s and out_s else 1.0
        forward_s = taken_s(forward_s, both * max(fetch_s, out_s))
        return forward_s, taken_s(back_s, fetch_s + in_s) if back_s else 0.0

    def fetch_s(self, part: Part) -> float:
        """Seconds in which a pass fetches streamed layers, without the layers that are still on the
        device when the direction turns. What moves for trained layers in a step counts as moving
        in equal parts in all its passes."""
        costs, count = self.costs[part.device], part.offload
        if step := (costs.step_bytes[part.end] - costs.step_bytes[part.start]) * count:
            passes = 2 * self.micro_batches * (part.end - part.start)
            return step / passes / costs.device.host_to_device_bytes_per_s
        total, _ = costs.streamed_bytes(part.start, part.end, count) if count else (0.0, 0.0)
        stays = slots_of(count) if self.stores(part) else count - layers_in_turn(count)
        moved = total * (count - stays) / max(1, count)
        return moved / costs.device.host_to_device_bytes_per_s if moved else 0.0

    def layer_s(self, device: int) -> float:
        """Mean seconds of forward and backward of a layer together."""
        costs = self.costs[device]
        return (costs.forward_s[-1] + costs.backward_s[-1]) / self.layers

    def can_go_direct(self, a: int, b: int) -> bool:
        """Whether two workers have a link of their own, both ways."""
        pair = (self.ids[a], self.ids[b])
        return 0 not in (a, b) and pair in self._links and pair[::-1] in self._links

    @cached_property
    def linked(self) -> list[set[int]]:
        """For each device the workers with which it has direct links, both ways."""
        all_ = range(len(self.ids))
        return [{b for b in all_ if self.can_go_direct(a, b)} for a in all_]

    def goes_back(self, position: int) -> bool:
        """Whether a gradient crosses a boundary in front of layer `position`."""
        return position > self._trained_from

    def edge(self, a: int, b: int, position: int, direct: bool) -> Edge:
        """The boundary from device a to device b in front of layer `position`. Below the lowest
        trained layer nothing goes back."""
        key = (a, b, direct, self.goes_back(position))
        if key not in self._edges:
            self._edges[key] = self._make_edge(*key)
        return self._edges[key]

    def _make_edge(self, a: int, b: int, direct: bool, goes_back: bool) -> Edge:
        if a == b:
            return Edge()
        middle = [] if direct or 0 in (a, b) else [0]
        path = [self.ids[d] for d in (a, *middle, b)]
        there = [self._links[pair] for pair in pairwise(path)]
        back = [self._links[pair] for pair in pairwise(path[::-1])]
        gradient_bytes = self.profile.gradient_bytes if goes_back else 0.0
        return Edge(
            self.profile.activation_bytes / min(link.bytes_per_s for link in there),
            gradient_bytes / min(link.bytes_per_s for link in back),
            sum(link.latency_s for link in (*there, *back)) / 2,
            relay=0 if middle else None,
        )

    def pipeline(self, layout: Layout) -> Profile:
        """The profile for the simulator."""
        times = [self.seconds(part) for part in layout]
        forward_s, backward_s = [f for f, _ in times], [b for _, b in times]
        first, last = (self.costs[layout[k].device].device for k in (0, -1))
        forward_s[0] += first.embedding_forward_s
        backward_s[0] += first.embedding_backward_s
        forward_s[-1] += last.head_forward_s
        backward_s[-1] += last.head_backward_s
        edges = [
            self.edge(before.device, part.device, part.start, part.direct)
            for before, part in pairwise(layout)
        ]
        devices = [part.device for part in layout]
        return Profile(tuple(forward_s), tuple(backward_s), tuple(devices), tuple(edges))

    # -- memory ---------------------------------------------------------------------------------

    def stores(self, part: Part) -> bool:
        """Whether a stage keeps its forwards: something in it or below it is trained."""
        return part.end > self._trained_from

    def stores_layer(self, layer: int) -> bool:
        """Whether the stage that holds a layer may have to keep its forwards."""
        return layer + 1 > self._trained_from

    def activation_bytes(self, part: Part) -> float:
        """Bytes that a stage stores of one micro-batch on its device."""
        costs = self.costs[part.device]
        if not self.stores(part):
            return 0.0
        sums = costs.recomputed_bytes if part.recompute else costs.kept_bytes
        total = sums[part.end] - sums[part.start]
        if part.start == part.device == 0:
            total += costs.device.embedding_stored_bytes
        if part.recompute and costs.largest_input:
            total += self._inputs_here(part) * costs.largest_input
        return total

    def _inputs_here(self, part: Part) -> int:
        """The number of stored layer inputs that stay on the device: the first input of a later
        stage, and the input of the model's last layer, whose backward follows at once."""
        return min(part.end - part.start, (part.start > 0) + (part.end == self.layers))

    def inputs_away(self, part: Part) -> float:
        """Bytes of one micro-batch that a stage stores in its machine's memory."""
        costs = self.costs[part.device]
        if not part.recompute or not costs.largest_input or not self.stores(part):
            return 0.0
        every = costs.input_bytes[part.end] - costs.input_bytes[part.start]
        return every - self._inputs_here(part) * costs.largest_input

    def kept_bytes(self, layout: Layout, device: int) -> float:
        """Bytes that a device holds all the time: weights, gradients, optimizer, and while a layer
        is computed again, what it keeps of one micro-batch."""
        costs, total = self.costs[device], 0.0
        parts = [part for part in layout if part.device == device]
        for part in parts:
            total += costs.layer_bytes[part.end] - costs.layer_bytes[part.start]
            if part.offload:
                total -= costs.streamed_bytes(part.start, part.end, part.offload)[1]
        if layout[0].device == device:
            total += costs.device.embedding_bytes
        if layout[-1].device == device:
            total += costs.device.head_bytes
        again = any(part.recompute and part.end > part.start for part in parts)
        return total + (costs.largest_bytes if again else 0.0)

    def may_fit(self, part: Part, free: float | None = None) -> bool:
        """Whether a device could hold a stage with one micro-batch in flight (in `free` bytes, if
        given). Embedding and head do not count."""
        costs = self.costs[part.device]
        needed = costs.layer_bytes[part.end] - costs.layer_bytes[part.start]
        needed += self.activation_bytes(part) + (costs.largest_bytes if part.recompute else 0.0)
        short = needed - (costs.memory_bytes if free is None else free) * (1 + _EXACTLY)
        return short <= 0 or costs.fewest_streamed(part.start, part.end, short) is not None

    def is_short_of_memory(self, part: Part) -> bool:
        """Whether a stage may be unable to hold all micro-batches of a step."""
        costs, device = self.costs[part.device], self.costs[part.device].device
        weights = costs.layer_bytes[part.end] - costs.layer_bytes[part.start]
        weights += device.embedding_bytes + device.head_bytes
        held = costs.kept_bytes[part.end] - costs.kept_bytes[part.start]
        return weights + self.micro_batches * held > costs.memory_bytes

    def memory_limits(self, layout: Layout) -> tuple[int, ...] | None:
        """The number of forwards that each stage has memory for; None if not even one fits. All
        stages of a device have the same number, but the last stage of all holds one."""
        if self.short_host(layout) is not None:
            return None
        most: dict[int, int] = {}
        for device in dict.fromkeys(part.device for part in layout):
            spare = self.costs[device].memory_bytes - self.kept_bytes(layout, device)
            each = sum(self.activation_bytes(p) for p in layout[:-1] if p.device == device)
            if layout[-1].device == device:
                spare -= self.activation_bytes(layout[-1])
            if spare < each or spare < 0:
                return None
            fits = int(spare / each) if each else self.micro_batches
            most[device] = max(1, min(fits, self.micro_batches))
        if any(map(self.inputs_away, layout)):
            counts = range(1, max(most.values()) + 1)
            fits = bisect_left(counts, True, key=lambda n: self.short_host(layout, n) is not None)
            most = {device: min(count, fits) for device, count in most.items()}
        limits = [most[part.device] if self.stores(part) else self.micro_batches for part in layout]
        return (*limits[:-1], 1)

    def short_host(self, layout: Layout, in_flight: int = 1) -> tuple[int, float] | None:
        """(device, bytes short) of the first device whose machine lacks room for the layers, states
        and inputs that it stores for the device, or None. The bytes are infinite if the device's
        layers may not be streamed."""
        used: dict[str, float] = {}
        for k, part in enumerate(layout):
            costs, name = self.costs[part.device], self.machines[part.device]
            needed = self.stored_bytes(layout, k, in_flight)
            if not part.offload and not needed:
                continue
            if part.offload:
                if not costs.streams:
                    return part.device, math.inf
                needed += costs.streamed_bytes(part.start, part.end, part.offload)[0]
            used[name] = used.get(name, 0.0) + needed
            if used[name] > costs.host_bytes:
                return part.device, used[name] - costs.host_bytes
        return None

    def stored_bytes(self, layout: Layout, k: int, in_flight: int) -> float:
        """Bytes of a stage's optimizer states, and of the inputs of its micro-batches, in its
        machine's memory."""
        part, last = layout[k], len(layout) - 1
        costs, count = self.costs[part.device], 1 if k == last else in_flight
        nbytes = count * self.inputs_away(part)
        follow = part.offload > 0 and costs.device.states_follow
        if costs.host_states_bytes or follow:
            # The states of layers that visit count as a part of them.
            share = 1 - part.offload / (part.end - part.start) if follow else 1.0
            nbytes += share * (costs.states_bytes[part.end] - costs.states_bytes[part.start])
            nbytes += 0.0 if k else costs.device.embedding_host_bytes
            nbytes += costs.device.head_host_bytes if k == last else 0.0
        return nbytes

    def streamed(self, layout: Layout) -> list[Layout]:
        """The layouts with the fewest streamed layers that make room for one micro-batch in flight,
        for a full pipeline's micro-batches, and for twice as many. Equal ones are given once."""
        found = [layout]
        for depth in _DEPTHS if self._streams else ():
            found.append(self._streamed(layout, depth, found[-1]))
        return [*dict.fromkeys(found[self._streams :])]

    def _streamed(self, layout: Layout, depth: float, less: Layout) -> Layout:
        """The layout with the fewest streamed layers that make room for `depth` times a full
        pipeline's micro-batches. Devices without room for these are as in the layout `less`."""
        parts, last = list(less), len(layout) - 1
        for device in dict.fromkeys(part.device for part in layout):
            costs, counts = self.costs[device], dict[int, int]()
            own = [k for k, part in enumerate(layout) if part.device == device]
            needed = self.kept_bytes(layout, device) - costs.memory_bytes
            for k in own:
                wanted = max(1, math.ceil(depth * (last - k + 1))) if k < last else 1
                needed += min(wanted, self.micro_batches) * self.activation_bytes(layout[k])
            left = sum(layout[k].end - layout[k].start for k in own)
            for k in sorted(own, key=lambda k: layout[k].end - layout[k].start):
                _, start, end, *_ = layout[k]
                share = needed * (end - start) / max(1, left)
                left -= end - start
                count = costs.fewest_streamed(start, end, share) if needed > 0 else 0
                if count:
                    counts[k] = count
                    needed -= costs.streamed_bytes(start, end, count)[1]
            if needed <= _EXACTLY * costs.memory_bytes:
                for k in own:
                    parts[k] = layout[k]._replace(offload=counts.get(k, layout[k].offload))
        return tuple(parts)

    def memory_bytes(self, layout: Layout, device: int, in_flight: Sequence[int]) -> float:
        """Memory that a process needs in all, with these numbers of micro-batches in flight."""
        held = sum(
            count * self.activation_bytes(part)
            for part, count in zip(layout, in_flight, strict=True)
            if part.device == device
        )
        reserved = self.costs[device].device.reserved_bytes
        return reserved + self.kept_bytes(layout, device) + held


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
        """Whether every pinned device holds just its layers, and the first stage enough."""
        return layout[0].end >= self.fleet.profile.first_layers and all(
            [(p.start, p.end) for p in layout if p.device == device] == [pin]
            for device, pin in self.pins.items()
        )

    @cached_property
    def kinds(self) -> dict[int, int]:
        """For each device, the first device that differs from it in nothing but its name."""
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
            (fleet.costs[d].memory_bytes, fleet.costs[d].device.model_dump(exclude=_NAMES))
            for d in (a, b)
        )
        shared = fleet.machines.count(fleet.machines[a]) + fleet.machines.count(fleet.machines[b])
        apart = fleet.machines[a] != fleet.machines[b] and shared > 2
        if one != other or (apart and fleet.costs[a].streams):
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
        direct. The quickest comes first; a way that is worse in everything is left out."""
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


_TIE = 1e-9  # for each stage: of equal layouts, the layout with fewer stages is preferred
_WORTH_CHUNKS, _WORTH_RELAYS = 1.01, 1.03
"""Factors on a step with several stages on a device when it is compared with one stage per device.
The second counts if a boundary is relayed."""


@dataclass(frozen=True)
class Evaluated:
    """A layout and its schedule."""

    fleet: Fleet
    layout: Layout
    schedule: TunedSchedule

    @cached_property
    def seconds(self) -> float:
        """Seconds of the predicted step."""
        return self.schedule.forecast.seconds

    @property
    def preference(self) -> float:
        """Seconds by which layouts are compared; of equal steps, fewer stages are better. Several
        stages on a device have to be worth it: at each boundary a run is slower than simulated,
        most of all at a relayed boundary, which keeps four NICs waiting."""
        seconds = self.seconds * (1 + _TIE * len(self.layout))
        if not has_chunks(self.layout):
            return seconds
        relays = any(edge.relay is not None for edge in self.schedule.profile.edges)
        return seconds * (_WORTH_RELAYS if relays else _WORTH_CHUNKS)


def evaluated(
    fleet: Fleet, layout: Layout, *, max_in_flight: int | None = None
) -> Evaluated | None:
    """The layout with the schedule that a run would use; None if it does not fit."""
    limits = fleet.memory_limits(layout)
    if limits is None:
        return None
    profile, m = fleet.pipeline(layout), fleet.micro_batches
    schedule = tune(profile, m, max_in_flight=max_in_flight, in_flight_limits=limits)
    return Evaluated(fleet, layout, schedule)
