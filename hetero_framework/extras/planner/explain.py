"""Reasons for a plan: the limits of each device, unused devices, and changes that would help.

A change is a changed profile of the same fleet; `hetero plan --allow` may search it too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from hetero_framework.config import layers_text, process_name
from hetero_framework.errors import PlanError
from hetero_framework.extras.planner.layout import (
    Evaluated,
    Fleet,
    Layout,
    Part,
    Rules,
    longest,
    resident,
)
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.profile import FleetProfile, LinkProfile
from hetero_framework.extras.planner.result import Alone, DeviceUse
from hetero_framework.units import bit_rate, share, size
from hetero_framework.units import seconds as seconds_text

MICRO_BATCH = "micro-batch"
CODEC = "codec"
_INT8 = 0.52  # of a 16-bit type's bytes: half, and a scale of 2 bytes for each block of 64 numbers
_WORK = (
    *("layer_forward_s", "layer_backward_s", "layer_recompute_s"),
    *("embedding_forward_s", "embedding_backward_s", "head_forward_s", "head_backward_s"),
)
_KEPT = ("activation_bytes_per_layer", "activation_bytes_recomputed")
_CARDS_GIB = (4, 8, 16)  # more, as the next larger cards have
_WORTH = 0.02  # of a step: smaller savings are within the error of such comparisons
_MOST_ADVICE = 4
_NOT_BUSY = 0.9  # of the busiest device: a device below it is held up by memory or links
_FETCHES = 0.9  # of a device's work: with less of it computing bounds some passes
_NEARLY = 0.9  # of the saving of the largest card: a smaller one that saves this is named
_MIB, _MOST_BYTES = float(1 << 20), 1e15
Remedy = tuple[str, str, Callable[[], FleetProfile | None]]
"""A kind of change, its text, and the profile with it: None where it is not possible."""
_EXPLAINED = 4  # devices that are left out, by name


def device_uses(plan: Evaluated) -> tuple[DeviceUse, ...]:
    """Every device of a plan."""
    fleet, layout, step = plan.fleet, plan.layout, plan.schedule.forecast
    devices = dict.fromkeys(part.device for part in layout)
    busy = dict(zip(devices, step.busy, strict=True))
    uses = []
    for d in devices:
        needed = fleet.memory_bytes(layout, d, step.peak_in_flight)
        free = fleet.costs[d].memory_bytes + fleet.costs[d].device.reserved_bytes - needed
        own = tuple(part for part in layout if part.device == d)
        work_s, before_s = (
            sum(sum(fleet.seconds(part)) for part in one) for one in (own, resident(own))
        )
        fetching_s = sum(2 * fleet.fetch_s(part) for part in own if part.offload)
        limit = "streaming" if fetching_s > _FETCHES * work_s else "compute"
        if busy[d] < _NOT_BUSY * max(busy.values()):
            if _is_full(fleet, layout, d):
                limit = "memory"
            elif _wire_s(plan, d) > busy[d] * plan.seconds:
                limit = "link"
        layers, streamed = sum(p.end - p.start for p in own), sum(p.offload for p in own)
        costs = fleet.costs[d]
        in_memory = () if costs.in_files else (part for part in own if part.offload)
        host = sum(costs.streamed_bytes(p.start, p.end, p.offload)[0] for p in in_memory)
        sizes = busy[d], int(needed), limit, layers, int(free), streamed, int(host)
        longer_s = fleet.micro_batches * (work_s - before_s)
        stored = sum(
            fleet.stored_bytes(layout, k, count)
            for k, count in enumerate(step.peak_in_flight)
            if layout[k].device == d
        )
        uses.append(DeviceUse(fleet.ids[d], *sizes, longer_s, int(stored)))
    return tuple(uses)


def _wire_s(plan: Evaluated, device: int) -> float:
    """Seconds of the step in which the device's busier NIC carries something."""
    profile, work_s = plan.schedule.profile, {"in": 0.0, "out": 0.0}
    for k, edge in enumerate(profile.edges):
        for kind, edge_s in (("forward", edge.forward_s), ("backward", edge.backward_s)):
            for d, direction in profile.nics(k, kind):
                work_s[direction] += edge_s if d == device else 0.0
    return plan.schedule.micro_batches * max(work_s.values())


def _is_full(fleet: Fleet, layout: Layout, device: int) -> bool:
    """Whether one more layer would leave room for fewer micro-batches than the stages hold, or for
    none."""
    limits = fleet.memory_limits(layout)
    for k, part in enumerate(layout):
        if part.device != device or limits is None:
            continue
        if (part.start, part.end) == (0, fleet.layers):
            return False
        at_end = part.end < fleet.layers
        longer = part._replace(start=part.start - (not at_end), end=part.end + at_end)
        others = fleet.streamed(resident((*layout[:k], longer, *layout[k + 1 :])))
        fitting = (fleet.memory_limits(other) for other in others)
        if not any(one and one[k] >= min(limits[k], len(layout) - k) for one in fitting):
            return True
    return False


def alone(fleet: Fleet, devices: Collection[int]) -> Alone | None:
    """The fastest device that could hold and train everything by itself."""
    steps = []
    for whole in (Part(d, 0, fleet.layers, again) for d in devices for again in (False, True)):
        one = fleet.streamed((whole,))[0]
        if fleet.memory_limits(one) is not None:
            profile = fleet.pipeline(one)
            one_s = profile.forward_s[0] + profile.backward_s[0]
            steps.append((fleet.micro_batches * one_s, whole.device))
    step_s, d = min(steps, default=(0.0, None))
    return None if d is None else Alone(fleet.ids[d], step_s)


def left_out(plan: Evaluated, rules: Rules) -> str:
    """Why devices that could take part do not."""
    others = [d for d in rules.devices if d not in {part.device for part in plan.layout}]
    texts = [f"{process_name(plan.fleet.ids[d])} {_why_not(plan, d)}" for d in others[:_EXPLAINED]]
    more = len(others) - _EXPLAINED
    return "; ".join([*texts, f"and {more} more"] if more > 0 else texts)


def _why_not(plan: Evaluated, d: int) -> str:
    fleet, one = plan.fleet, plan.fleet.costs[d]
    pace_s, layer_s = plan.seconds / fleet.micro_batches, fleet.layer_s(d)
    layer, kept = (
        min(b - a for a, b in pairwise(s)) for s in (one.layer_bytes, one.recomputed_bytes)
    )
    edge = fleet.edge(0, d, fleet.layers, False)
    wire_s = max(edge.forward_s, edge.backward_s)
    if layer + kept > one.memory_bytes:
        return "has no memory for a layer"
    if wire_s > pace_s:
        longer = f"longer than all stages take for one ({seconds_text(pace_s)})"
        return f"would receive a micro-batch in {seconds_text(wire_s)}, {longer}"
    if layer_s > pace_s:
        return (
            f"takes {seconds_text(layer_s)} for a layer, longer than others take for all of theirs"
        )
    return "is slower than the link to it pays for"


def advice(plan: Evaluated, rules: Rules, uses: Sequence[DeviceUse]) -> tuple[str, ...]:
    """The changes that shorten the step most, the best first, each with its approximate gain.
    Larger cards are those for the device that computes least for want of memory."""
    fleet, layout = plan.fleet, plan.layout
    now_s = Search(rules).evened_s(layout)

    def gains(variants: Iterator[Variant]) -> Iterator[tuple[float, str]]:
        for variant in variants:
            other = Fleet(variant.profile, margins=fleet.margins)
            then_s = Search(replace(rules, fleet=other)).evened_s(_with_direct(other, layout))
            yield 1 - then_s / now_s if now_s > 0 else 0.0, variant.text

    found = [*gains(settings(fleet.profile)), *gains(direct_links(fleet, layout))]
    short = [use for use in uses if use.limit == "memory"]
    if short:
        least = min(short, key=lambda use: use.busy)
        found += cards_worth([*gains(cards(fleet, fleet.ids.index(least.id)))])
    best = sorted((gain for gain in found if gain[0] >= _WORTH), reverse=True)[:_MOST_ADVICE]
    return tuple(f"{text}: about {share(gain)} less per step" for gain, text in best)


def cards_worth(by_size: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Of cards by size, with their gains, the smallest that gains nearly as much as the best."""
    most = max((gain for gain, _ in by_size), default=0.0)
    return [entry for entry in by_size if entry[0] >= _NEARLY * most][:1]


def _with_direct(fleet: Fleet, layout: Layout) -> Layout:
    """The layout with the quicker way at each boundary."""
    parts = [layout[0]]
    for (a, *_), part in pairwise(layout):
        if fleet.can_go_direct(a, part.device) and not part.direct:
            ways = [fleet.edge(a, part.device, part.start, direct) for direct in (False, True)]
            relayed, direct = (max(edge.forward_s, edge.backward_s) for edge in ways)
            part = part._replace(direct=direct <= relayed)
        parts.append(part)
    return tuple(parts)


@dataclass(frozen=True)
class Variant:
    """A changed profile. `allowed_by` is the word of `--allow` that lets the planner take it, and
    `changes` the settings that it then needs."""

    text: str
    profile: FleetProfile
    allowed_by: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def settings(profile: FleetProfile) -> Iterator[Variant]:
    """Variants with other settings of the run, which change the numbers of the result a little."""
    tensors = {name: getattr(profile, name) for name in ("activation_bytes", "gradient_bytes")}
    if any(tensors.values()):
        wire = {"wire": {"activations": "int8", "gradients": "int8"}}
        coded = profile.model_copy(update={n: _INT8 * value for n, value in tensors.items()})
        yield Variant('wire.activations and wire.gradients "int8"', coded, CODEC, wire)
    if profile.rows % 2:
        return  # such a micro-batch cannot be halved
    m = 2 * profile.micro_batches
    halved: dict[str, Any] = {name: value / 2 for name, value in tensors.items()}
    halved["devices"] = tuple(
        device.model_copy(update={n: _halved(getattr(device, n)) for n in (*_WORK, *_KEPT)})
        for device in profile.devices
    )
    text = f"{m} micro-batches of half the size, if one of half the size takes half the time"
    halves = profile.model_copy(update={**halved, "micro_batches": m})
    yield Variant(text, halves, MICRO_BATCH, {"micro_batches": m})


def direct_links(fleet: Fleet, layout: Layout) -> Iterator[Variant]:
    """A direct link for each relayed boundary of the layout, as quick as the slower half of its
    way."""
    links = {(link.sender, link.receiver): link for link in fleet.profile.links}
    for before, part in pairwise(layout):
        a, b = fleet.ids[before.device], fleet.ids[part.device]
        if "local" in (a, b) or part.direct or a == b:
            continue
        new = {}
        for sender, receiver in ((a, b), (b, a)):
            legs = [links[sender, "local"], links["local", receiver]]
            ends: dict[str, Any] = {"sender": sender, "receiver": receiver}
            ends["bytes_per_s"] = min(leg.bytes_per_s for leg in legs)
            ends["latency_s"] = sum(leg.latency_s for leg in legs) / 2
            new[sender, receiver] = LinkProfile.model_validate(ends)
        speed = bit_rate(min(link.bytes_per_s for link in new.values()))
        yield Variant(
            f"a direct link of {speed} between {process_name(a)} and {process_name(b)}",
            fleet.profile.model_copy(update={"links": tuple((links | new).values())}),
        )


def cards(fleet: Fleet, device: int) -> Iterator[Variant]:
    """More memory for a device (by its place in `Fleet.ids`), the smallest card first."""
    name, devices = fleet.ids[device], {one.id: one for one in fleet.profile.devices}
    for gib in _CARDS_GIB:
        more = {"memory_bytes": devices[name].memory_bytes + gib * 2**30}
        larger = devices | {name: devices[name].model_copy(update=more)}
        yield Variant(
            f"a card with {gib} GiB more for {process_name(name)}",
            fleet.profile.model_copy(update={"devices": tuple(larger.values())}),
        )


def _halved(value: Any) -> Any:
    return tuple(v / 2 for v in value) if isinstance(value, tuple) else value / 2


def nothing_fits(
    rules: Rules, margins: Mapping[int | str, float], remedies: Iterable[Remedy] = ()
) -> PlanError:
    """The missing things, with their places, and those of `remedies`, from small to large within a
    kind, that would do: the smallest one of each kind."""
    fleet, lines = rules.fleet, []
    for d in rules.devices:
        costs = fleet.costs[d]
        sums = costs.recomputed_bytes if rules.checkpointing else costs.kept_bytes
        layers_and_kept = zip(pairwise(costs.layer_bytes), pairwise(sums), strict=True)
        each = max((b - a) + (k - j) for (a, b), (j, k) in layers_and_kept)
        ends = [("embedding", costs.device.embedding_bytes)] if d == 0 else []
        ends += [("head", costs.device.head_bytes)] if len(rules.devices) == 1 else []
        beside = " and ".join(f"{name} ({size(nbytes)})" for name, nbytes in ends if nbytes)
        layers = _rooms(rules, d)[len(rules.devices) == 1]
        kept = margins.get(fleet.ids[d], 0.0)
        margin = f", {size(kept)} of it kept free" if kept else ""
        source = "files" if costs.in_files else f"{size(costs.host_bytes)} of host memory"
        streams = f", from {source}" if costs.streams else ""
        lines.append(
            f"{process_name(fleet.ids[d])} has {size(max(0.0, costs.device.memory_bytes))}{margin}:"
            f" room for {max(0, layers)} of {fleet.layers} layers, {size(each)} each{streams}"
            + (f", beside {beside}" if beside else "")
        )
    if rules.pins and _short_of(rules) is None and Search(replace(rules, pins={})).fits():
        pins = ", ".join(
            f"{process_name(fleet.ids[d])} {layers_text(*pin)}"
            for d, pin in sorted(rules.pins.items())
        )
        return PlanError(
            f"--pin: no plan keeps {pins}: the other layers cannot be held by the other processes",
            hint="without the pins a plan fits: pin fewer layers, or leave no process out",
        )
    found = []

    def would_fit(remedy: Remedy) -> bool:
        if (profile := remedy[2]()) is None:
            return False
        other = replace(rules, fleet=Fleet(profile, margins=margins))
        return _short_of(other) is None and Search(other).fits()

    for _, of_kind in groupby(remedies, key=lambda remedy: remedy[0]):
        ways = list(of_kind)  # what one does, all behind it do
        least = bisect_left(ways, True, key=would_fit)
        found += [text for _, text, _ in ways[least : least + 1]]
    shorter = "data.max_length" if fleet.profile.rows == 1 else "micro-batches or data.max_length"
    hint = (
        "add a device or host memory, train an adapter (in 4 bits) instead of all weights, or make"
        f" {shorter} smaller"
    )
    if found:
        hint = f"it would fit with {', or '.join(found)}"
    elif not rules.checkpointing:
        hint = "allow checkpointing; or " + hint
    what = _what_is_in_the_way(rules)
    return PlanError("\n  ".join([f"no plan fits into memory: {what}", *lines]), hint=hint)


def _rooms(rules: Rules, d: int, more: float = 0.0) -> tuple[int, int]:
    """The most layers that a device could hold with one micro-batch in flight, without the head and
    with it; -1 where not even what it has beside them. `more` is memory that it is given
    besides."""
    fleet, costs, rooms = rules.fleet, rules.fleet.costs[d], []
    free = costs.memory_bytes + more - (costs.device.embedding_bytes if d == 0 else 0.0)
    modes = (False, True)[: 1 + rules.checkpointing]
    for spare in (free, free - costs.device.head_bytes):

        def holds(layers: int, spare: float = spare) -> bool:
            return any(fleet.may_fit(Part(d, 0, layers, again), spare) for again in modes)

        rooms.append(longest(holds, fleet.layers, costs.streams))
    return rooms[0], rooms[1]


def _have_room(rules: Rules, rooms: Mapping[int, tuple[int, int]]) -> bool:
    """Whether such devices together could hold all layers, embedding and head, as if layers were
    alike."""
    plain = sum(max(0, room) for room, _ in rooms.values())
    heads = [plain - max(0, room) + last for room, last in rooms.values() if last >= 0]
    return rooms[0][0] >= 0 and max(heads, default=-1) >= rules.fleet.layers


def _short_of(rules: Rules) -> tuple[float, int] | None:
    """The least memory that one device would need besides, and that device; None where all have
    room."""
    rooms, found = {d: _rooms(rules, d) for d in rules.devices}, []
    if _have_room(rules, rooms):
        return None
    for d in rules.devices:
        low, high = 0.0, _MOST_BYTES
        while high - low > _MIB:
            middle = (low + high) / 2
            enough = _have_room(rules, {**rooms, d: _rooms(rules, d, middle)})
            low, high = (low, middle) if enough else (middle, high)
        found.append((high, d))
    return min(found)


def _what_is_in_the_way(rules: Rules) -> str:
    spare = {d: rules.fleet.costs[d].memory_bytes for d in rules.devices}
    spare[0] -= rules.fleet.costs[0].device.embedding_bytes
    short = min(rules.fleet.costs[d].device.head_bytes - spare[d] for d in rules.devices)
    if spare[0] < 0:
        return f"the coordinator holds the embedding, for which it is short of {size(-spare[0])}"
    if short > 0:
        return f"the head fits on no process; the nearest one is short of {size(short)}"
    every = [(rules.fleet.costs[d], rules.fleet.machines[d]) for d in rules.devices]
    states = min(costs.host_states_bytes for costs, _ in every)
    if (short := states - sum({name: costs.host_bytes for costs, name in every}.values())) > 0:
        return f"{size(short)} of host memory are missing for the optimizer's states"
    if (missing := _short_of(rules)) is None:
        return "each process has room for some layers, but no cut into whole layers fits everywhere"
    where = f"on {process_name(rules.fleet.ids[missing[1]])}, embedding and head included"
    return f"{size(missing[0])} are missing {where}"
