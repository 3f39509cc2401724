"""The limits of a plan: what bounds each process, a figure for it, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from hetero_framework.config import process_name
from hetero_framework.errors import PlanError
from hetero_framework.extras.planner.layout import Evaluated, Part, Rules, longest, resident
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.result import DeviceUse, Limit
from hetero_framework.units import seconds, size

HELP = {
    "compute": "a quicker device, or one more",
    "streaming": "a card with more memory, or a quicker bus",
    "memory": "a card with more memory, offload, or smaller micro-batches",
    "link": 'wire "int8", a direct link, or a quicker network',
}
_NEARLY = 0.9  # share that counts as nearly as busy as the busiest device, or as nearly all work
_EXPLAINED = 4  # most unused devices that are listed
_SMALLER = (
    "make micro-batches or data.max_length smaller, train an adapter (in 4 bits) instead of all"
    " weights, set training.offload_optimizer, or add a device or host memory"
)


def device_uses(plan: Evaluated) -> tuple[DeviceUse, ...]:
    """The use of every device of a plan."""
    devices = dict.fromkeys(part.device for part in plan.layout)
    return tuple(map(partial(_use, plan), devices, plan.schedule.forecast.busy))


def _use(plan: Evaluated, d: int, busy: float) -> DeviceUse:
    fleet, layout, held = plan.fleet, plan.layout, plan.schedule.forecast.peak_in_flight
    costs, needed = fleet.costs[d], fleet.memory_bytes(layout, d, held)
    free = costs.memory_bytes + costs.device.reserved_bytes - needed
    parts = tuple(part for part in layout if part.device == d)
    streamed = [part for part in parts if part.offload]
    work_s, before_s = (sum(sum(fleet.seconds(p)) for p in x) for x in (parts, resident(parts)))
    fetches = sum(2 * fleet.fetch_s(part) for part in streamed) > _NEARLY * work_s
    limit = "streaming" if fetches else "compute"
    if busy < _NEARLY * max(plan.schedule.forecast.busy):
        if not costs.streams and free < _layer_bytes(plan, d):
            limit = "memory"
        elif _wire_s(plan, d) > busy * plan.seconds:
            limit = "link"
    stored = (fleet.stored_bytes(layout, k, held[k]) for k, p in enumerate(layout) if p.device == d)
    return DeviceUse(
        id=fleet.ids[d],
        busy=busy,
        memory_bytes=int(needed),
        limit=limit,
        layers=sum(part.end - part.start for part in parts),
        free_bytes=int(free),
        streamed=sum(part.offload for part in parts),
        host_bytes=int(sum(costs.streamed_bytes(p.start, p.end, p.offload)[0] for p in streamed)),
        streaming_s=fleet.micro_batches * (work_s - before_s),
        stored_bytes=int(sum(stored)),
    )


def limits_of(plan: Evaluated, rules: Rules, uses: Sequence[DeviceUse]) -> Iterator[Limit]:
    """The limits of the devices in use, and of the first devices that are not used."""
    fleet, m = plan.fleet, plan.fleet.micro_batches
    for use in uses:
        d, of_step = fleet.ids.index(use.id), f"of the {seconds(plan.seconds / m)} a micro-batch"
        figure = f"computes for {seconds(plan.seconds * use.busy / m)} {of_step}"
        if use.limit == "memory":
            figure = f"{size(max(0, use.free_bytes))} left, a layer takes"
            figure += f" {size(_layer_bytes(plan, d))}"
        elif use.limit == "link":
            figure = f"sends or receives for {seconds(_wire_s(plan, d) / m)} {of_step}"
        yield Limit(use.id, use.limit, figure, HELP[use.limit])
    used = {use.id for use in uses}
    for d in [d for d in rules.devices if fleet.ids[d] not in used][:_EXPLAINED]:
        limit, figure = _left_out(plan, d)
        yield Limit(fleet.ids[d], limit, f"not used: {figure}", HELP[limit])


def _left_out(plan: Evaluated, d: int) -> tuple[str, str]:
    """(limit, figure) of a device that could take part and does not."""
    fleet, memory = plan.fleet, plan.fleet.costs[d].memory_bytes
    pace_s, layer_s = plan.seconds / fleet.micro_batches, fleet.layer_s(d)
    edge = fleet.edge(0, d, fleet.layers, False)
    wire_s = max(edge.forward_s, edge.backward_s)
    if (layer := _layer_bytes(plan, d)) > memory:
        return "memory", f"{size(max(0.0, memory))} in all, a layer takes {size(layer)}"
    if layer_s > max(pace_s, wire_s):
        return "compute", f"{seconds(layer_s)} a layer, all stages take {seconds(pace_s)}"
    return "link", f"{seconds(wire_s)} a tensor, all stages take {seconds(pace_s)}"


def _layer_bytes(plan: Evaluated, d: int) -> float:
    """Bytes of a device's smallest layer, with the least that it stores of the micro-batches in
    flight."""
    costs, held = plan.fleet.costs[d], plan.schedule.forecast.peak_in_flight
    count = max([n for n, part in zip(held, plan.layout, strict=True) if part.device == d] or [1])
    return min(b - a for a, b in pairwise(costs.layer_bytes)) + count * min(
        b - a for a, b in pairwise(costs.recomputed_bytes)
    )


def _wire_s(plan: Evaluated, device: int) -> float:
    """Seconds of the step in which the device's busier NIC carries something."""
    profile, work_s = plan.schedule.profile, {"in": 0.0, "out": 0.0}
    for k, edge in enumerate(profile.edges):
        for kind, edge_s in (("forward", edge.forward_s), ("backward", edge.backward_s)):
            for d, direction in profile.nics(k, kind):
                work_s[direction] += edge_s if d == device else 0.0
    return plan.schedule.micro_batches * max(work_s.values())


def nothing_fits(rules: Rules, margins: Mapping[int | str, float]) -> PlanError:
    """The error that no plan fits, with each process's room, or that the pins prevent one."""
    fleet, lines, total = rules.fleet, list[str](), 0
    if rules.pins and Search(replace(rules, pins={})).fits():
        return PlanError("--pin: no plan keeps the pinned layers", hint="pin fewer layers")
    for d in rules.devices:
        device, kept = fleet.costs[d].device, margins.get(fleet.ids[d], 0.0)
        embedding = device.embedding_bytes if d == 0 else 0.0
        total += max(0, room := _room(rules, d, embedding))
        last = _room(rules, d, embedding + device.head_bytes)
        lines.append(
            f"{process_name(fleet.ids[d])} has {size(max(0.0, device.memory_bytes))}"
            + (f", {size(kept)} of it kept free" if kept else "")
            + f": room for {max(0, room)} of {fleet.layers} layers"
            + (f", beside the embedding of {size(embedding)}" if embedding else "")
            + (f", and needs {least}" if d == 0 and (least := fleet.profile.first_layers) else "")
            + f", {last if last >= 0 else 'none'} with the head"
        )
    wholes = [(Part(0, 0, fleet.layers, again),) for again in {False, rules.checkpointing}]
    need = min(fleet.kept_bytes(whole, 0) + fleet.activation_bytes(whole[0]) for whole in wholes)
    lines.append(f"the coordinator alone would need {size(need)}")
    what = f"all processes together have room for {total} of {fleet.layers} layers"
    hosts = {fleet.machines[d]: fleet.costs[d].host_bytes for d in rules.devices}
    if (short := fleet.costs[0].host_states_bytes - sum(hosts.values())) > 0:
        what = f"{size(short)} of host memory are missing for the optimizer's states"
    return PlanError("\n  ".join([f"no plan fits into memory: {what}", *lines]), hint=_SMALLER)


def _room(rules: Rules, d: int, beside: float) -> int:
    """The most layers that a device could hold with one micro-batch in flight and `beside` bytes of
    other things; -1 if it has no room for the other things."""
    fleet, costs = rules.fleet, rules.fleet.costs[d]

    def holds(layers: int) -> bool:
        parts = (Part(d, 0, layers, again) for again in {False, rules.checkpointing})
        return any(fleet.may_fit(part, costs.memory_bytes - beside) for part in parts)

    return longest(holds, fleet.layers, costs.streams)
