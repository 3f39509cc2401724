"""Reasons for a plan: the limits of each device, unused devices, and changes that would help."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hetero_framework.config import layers_text, process_name
from hetero_framework.errors import PlanError
from hetero_framework.extras.planner import what_if
from hetero_framework.extras.planner.evaluated import Evaluated
from hetero_framework.extras.planner.layout import Fleet, Layout, Part
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.result import Alone, DeviceUse
from hetero_framework.extras.planner.rules import Rules
from hetero_framework.units import seconds as seconds_text
from hetero_framework.units import share, size

_WORTH = 0.02  # of a step: smaller savings are within the error of such comparisons
_MOST_ADVICE = 4
_NOT_BUSY = 0.9  # of the busiest device: a device below it is held up by memory or links
_NEARLY = 0.9  # of the saving of the largest card: a smaller one that saves this is named
_EXPLAINED = 4  # devices that are left out, by name


def device_uses(plan: Evaluated) -> tuple[DeviceUse, ...]:
    """Every device of a plan."""
    fleet, layout = plan.fleet, plan.layout
    step = plan.schedule.forecast
    devices = list(dict.fromkeys(part.device for part in layout))
    busy = dict(zip(devices, step.busy, strict=True))
    wire = _wire_shares(plan)
    most = max(busy.values())
    uses = []
    for d in devices:
        needed = fleet.memory_bytes(layout, d, step.peak_in_flight)
        free = fleet.costs[d].memory_bytes + fleet.costs[d].device.reserved_bytes - needed
        limit = "compute"
        if busy[d] < _NOT_BUSY * most:
            if _is_full(fleet, layout, d):
                limit = "memory"
            elif wire.get(d, 0.0) > busy[d]:
                limit = "link"
        layers = sum(part.end - part.start for part in layout if part.device == d)
        uses.append(DeviceUse(fleet.ids[d], busy[d], int(needed), limit, layers, int(free)))
    return tuple(uses)


def _wire_shares(plan: Evaluated) -> dict[int, float]:
    """The share of the step in which each device's busier NIC carries something."""
    profile = plan.schedule.profile
    work: dict[tuple[int, str], float] = {}
    for k, edge in enumerate(profile.edges):
        for kind, edge_s in (("forward", edge.forward_s), ("backward", edge.backward_s)):
            for nic in profile.nics(k, kind):
                work[nic] = work.get(nic, 0.0) + edge_s
    shares: dict[int, float] = {}
    for (d, _), work_s in work.items():
        if plan.seconds:
            part = plan.schedule.micro_batches * work_s / plan.seconds
            shares[d] = max(shares.get(d, 0.0), part)
    return shares


def _is_full(fleet: Fleet, layout: Layout, device: int) -> bool:
    """Whether one more layer would leave room for fewer micro-batches than the stages hold, or for
    none."""
    limits = fleet.memory_limits(layout)
    for k, part in enumerate(layout):
        if part.device != device or limits is None:
            continue
        longer = part._replace(end=part.end + 1) if part.end < fleet.layers else None
        if longer is None:
            longer = part._replace(start=part.start - 1) if part.start else None
        if longer is None:
            return False
        changed = (*layout[:k], longer, *layout[k + 1 :])
        fitting = fleet.memory_limits(changed)
        if fitting is None or (fitting[k] < min(limits[k], len(layout) - k)):
            return True
    return False


def alone(fleet: Fleet, devices: Collection[int]) -> Alone | None:
    """The fastest device that could hold and train everything by itself."""
    steps = []
    for d in devices:
        for recompute in (False, True):
            whole = (Part(d, 0, fleet.layers, recompute),)
            if fleet.memory_limits(whole) is not None:
                profile = fleet.pipeline(whole)
                step_s = fleet.micro_batches * (profile.forward_s[0] + profile.backward_s[0])
                steps.append((step_s, d))
    if not steps:
        return None
    step_s, d = min(steps)
    return Alone(fleet.ids[d], step_s)


def left_out(plan: Evaluated, rules: Rules) -> str:
    """Why devices that could take part do not."""
    fleet, layout = plan.fleet, plan.layout
    used = {part.device for part in layout}
    texts = []
    for d in rules.devices:
        if d not in used:
            texts.append(f"{process_name(fleet.ids[d])} {_why_not(plan, d)}")
    if len(texts) > _EXPLAINED:
        texts = [*texts[:_EXPLAINED], f"and {len(texts) - _EXPLAINED} more"]
    return "; ".join(texts)


def _why_not(plan: Evaluated, d: int) -> str:
    fleet = plan.fleet
    pace_s = plan.seconds / fleet.micro_batches
    one = fleet.costs[d]
    least = min(b - a for a, b in pairwise(one.layer_bytes))
    kept = min(b - a for a, b in pairwise(one.recomputed_bytes))
    if least + kept > one.memory_bytes:
        return "has no memory for a layer"
    edge = fleet.edge(0, d, fleet.layers, False)
    wire_s = max(edge.forward_s, edge.backward_s)
    if wire_s > pace_s:
        return (
            f"would receive a micro-batch in {seconds_text(wire_s)}, longer than all stages take"
            f" for one ({seconds_text(pace_s)})"
        )
    if fleet.layer_s(d) > pace_s:
        return (
            f"takes {seconds_text(fleet.layer_s(d))} for a layer, longer than others take for all"
            " of theirs"
        )
    return "is slower than the link to it pays for"


def advice(plan: Evaluated, rules: Rules, uses: Sequence[DeviceUse]) -> tuple[str, ...]:
    """The changes that shorten the step most, the best first, each with its approximate gain.
    Larger cards are those for the device that computes least for want of memory."""
    fleet, layout = plan.fleet, plan.layout
    now_s = Search(rules).evened_s(layout)

    def gain_of(variant: what_if.Variant) -> tuple[float, str]:
        other = fleet.with_profile(variant.profile)
        then_s = Search(rules.of(other)).evened_s(_with_direct(other, layout))
        return (1 - then_s / now_s if now_s > 0 else 0.0, variant.text)

    changed = [*what_if.settings(fleet.profile), *what_if.direct_links(fleet, layout)]
    gains = [gain_of(variant) for variant in changed]
    short = [use for use in uses if use.limit == "memory"]
    if short:
        least = min(short, key=lambda use: use.busy)
        cards = what_if.cards(fleet, fleet.ids.index(least.id))
        gains += cards_worth([gain_of(variant) for variant in cards])
    best = sorted((gain for gain in gains if gain[0] >= _WORTH), reverse=True)[:_MOST_ADVICE]
    return tuple(f"{text}: about {share(gain)} less per step" for gain, text in best)


def cards_worth(cards: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Of cards by size, with their gains, the smallest that gains nearly as much as the best."""
    most = max((gain for gain, _ in cards), default=0.0)
    return [entry for entry in cards if entry[0] >= _NEARLY * most][:1]


def _with_direct(fleet: Fleet, layout: Layout) -> Layout:
    """The layout with the quicker way at each boundary."""
    parts = [layout[0]]
    for before, part in pairwise(layout):
        a, b = before.device, part.device
        if fleet.can_go_direct(a, b) and not part.direct:
            ways = [fleet.edge(a, b, part.start, direct) for direct in (False, True)]
            relayed, direct = (max(edge.forward_s, edge.backward_s) for edge in ways)
            part = part._replace(direct=direct <= relayed)
        parts.append(part)
    return tuple(parts)


def _what_is_in_the_way(rules: Rules) -> str:
    """The obstacle in a fleet that has room for all layers."""
    fleet = rules.fleet
    first = fleet.costs[0]
    short = first.device.embedding_bytes - first.memory_bytes
    if short > 0:
        return f"the coordinator holds the embedding, for which it is short of {size(short)}"
    least = min(
        costs.device.head_bytes
        + (costs.device.embedding_bytes if d == 0 else 0.0)
        - costs.memory_bytes
        for d, costs in ((d, fleet.costs[d]) for d in rules.devices)
    )
    if least > 0:
        return f"the head fits on no process; the nearest one is short of {size(least)}"
    return "each process has room for some layers, but no cut into whole layers fits everywhere"


def _pins_leave_no_plan(rules: Rules) -> PlanError:
    fleet = rules.fleet
    pins = ", ".join(
        f"{process_name(fleet.ids[d])} {layers_text(*pin)}" for d, pin in sorted(rules.pins.items())
    )
    return PlanError(
        f"--pin: no plan keeps {pins}: the other layers cannot be held by the other processes",
        hint="without the pins a plan fits: pin fewer layers, or leave no process out",
    )


def nothing_fits(rules: Rules, margins: Mapping[int | str, float]) -> PlanError:
    """The missing things, with their places."""
    fleet, lines, room = rules.fleet, [], 0
    for d in rules.devices:
        costs = fleet.costs[d]
        sums = costs.recomputed_bytes if rules.checkpointing else costs.kept_bytes
        each = max(
            (b - a) + (k - j)
            for (a, b), (j, k) in zip(pairwise(costs.layer_bytes), pairwise(sums), strict=True)
        )
        free = costs.memory_bytes - (costs.device.embedding_bytes if d == 0 else 0.0)
        layers = int(max(0.0, free) / each) if each else fleet.layers
        room += layers
        kept = margins.get(fleet.ids[d], 0.0)
        margin = f", {size(kept)} of it kept free" if kept else ""
        lines.append(
            f"{process_name(fleet.ids[d])} has {size(max(0.0, costs.device.memory_bytes))}{margin}:"
            f" room for {min(layers, fleet.layers)} of {fleet.layers} layers, {size(each)} each"
        )
    costs = fleet.costs[0]
    layer = (costs.layer_bytes[-1] + costs.recomputed_bytes[-1]) / fleet.layers
    missing = max(0, fleet.layers - room) * layer
    what = f"{size(missing)} are missing" if missing else _what_is_in_the_way(rules)
    if rules.pins and not missing:
        without = replace(rules, pins={})
        if Search(without).run() is not None:
            return _pins_leave_no_plan(rules)
    hint = (
        "add a device, train an adapter (in 4 bits) instead of all weights, or make micro-batches "
        "or data.max_length smaller"
    )
    if not rules.checkpointing:
        hint = "allow checkpointing; or " + hint
    return PlanError("\n  ".join([f"no plan fits into memory: {what}", *lines]), hint=hint)
