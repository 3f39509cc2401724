"""Makes a plan from a profile, and predicts the step of a given plan."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from hetero_framework.config import process_name
from hetero_framework.config.plan import Plan, PlanEntry, owner_problems, plan_problems
from hetero_framework.config.problems import Problem, problems_of, report, shown
from hetero_framework.errors import PlanError, UserError
from hetero_framework.extras.planner.layout import (
    Evaluated,
    Fleet,
    Layout,
    Part,
    Rules,
    WorkerId,
    evaluated,
)
from hetero_framework.extras.planner.layout_search import Search
from hetero_framework.extras.planner.limits import device_uses, limits_of, nothing_fits
from hetero_framework.extras.planner.profile import FleetProfile, ids_text
from hetero_framework.extras.planner.result import Alone, Result
from hetero_framework.units import size

CHECKPOINTING = "checkpointing"
CHUNKS = "chunks"
ALLOWED = frozenset({CHECKPOINTING, CHUNKS})
"""The default choices of a plan: they change no number of the result."""
CODEC = "codec"
MICRO_BATCH = "micro-batch"
CHOICES = ALLOWED | {CODEC, MICRO_BATCH}
_INT8 = 0.52  # of a 16-bit type's bytes: half, and a scale of 2 bytes for each block of 64 numbers
_HALVED = (
    *("layer_forward_s", "layer_backward_s", "layer_recompute_s"),
    *("embedding_forward_s", "embedding_backward_s", "head_forward_s", "head_backward_s"),
    *("activation_bytes_per_layer", "activation_bytes_recomputed", "embedding_stored_bytes"),
)


def plan(
    profile: FleetProfile,
    *,
    pins: Mapping[WorkerId, tuple[int, int]] | None = None,
    excluded: Collection[WorkerId] = (),
    margins: Mapping[WorkerId, float] | None = None,
    allow: Collection[str] = ALLOWED,
) -> Result:
    """The best plan for a fleet.

    `pins` are layers [start, end) that a process must hold, `excluded` workers that must hold none,
    `margins` bytes that stay free on a process. `allow` is what may be chosen besides order and
    cut: "checkpointing", "chunks" (several stages on a process), "codec" and "micro-batch". The
    last two change the numbers of the result a little. Raises UserError for options that contradict
    each other or the profile, PlanError where nothing fits.
    """
    began = time.perf_counter()
    pins, margins = pins or {}, margins or {}
    if problems := list(_option_problems(profile, pins, excluded, margins, allow)):
        raise UserError(_listed(problems))
    rules = _rules(Fleet(profile, margins=margins), pins, excluded, allow)
    result = Search(rules).run()
    changes: dict[str, Any] = {}
    for changed, needed in variants(profile, allow):
        other = _rules(Fleet(changed, margins=margins), pins, excluded, allow)
        candidate = Search(other).run()
        if candidate and (not result or candidate.seconds < result.seconds):
            rules, result, changes = other, candidate, needed
    if result is None:
        raise nothing_fits(rules, margins)
    return replace(_result(rules, result, changes), seconds=time.perf_counter() - began)


def variants(
    profile: FleetProfile, allow: Collection[str]
) -> Iterator[tuple[FleetProfile, dict[str, Any]]]:
    """Profiles of the fleet with other settings of the run, and these settings."""
    tensors = {name: getattr(profile, name) for name in ("activation_bytes", "gradient_bytes")}
    if CODEC in allow and any(tensors.values()):
        coded = profile.model_copy(update={n: _INT8 * value for n, value in tensors.items()})
        yield coded, {"wire": {"activations": "int8", "gradients": "int8"}}
    if MICRO_BATCH in allow and not profile.rows % 2:
        m = 2 * profile.micro_batches
        halved: dict[str, Any] = {name: value / 2 for name, value in tensors.items()}
        halved["devices"] = tuple(
            device.model_copy(update={n: _half(getattr(device, n)) for n in _HALVED})
            for device in profile.devices
        )
        changed = profile.model_copy(update={**halved, "micro_batches": m})
        yield changed, {"micro_batches": m}


def _half(value: Any) -> Any:
    return tuple(v / 2 for v in value) if isinstance(value, tuple) else value / 2


def compared(
    profile: FleetProfile,
    *,
    pins: Mapping[WorkerId, tuple[int, int]],
    excluded: Collection[WorkerId],
    margins: Mapping[WorkerId, float],
    allow: Collection[str],
) -> list[dict[str, Any]]:
    """Seconds of the step without each machine that may be left out, and on the coordinator's
    machine alone; None where nothing fits. Each takes one search."""
    rules = _rules(Fleet(profile, margins=margins), pins, excluded, allow)
    machines: dict[str, list[int]] = {}
    for d in rules.devices:
        machines.setdefault(rules.fleet.machines[d], []).append(d)
    (here, *others) = machines.values()
    fewer = [(own, [d for d in rules.devices if d not in own]) for own in others]
    fewer = [(own, left) for own, left in fewer if not any(d in rules.pins for d in own)]
    if others and not rules.pins:
        fewer.append((here, here))
    found = []
    for named, left in fewer:
        best = Search(replace(rules, devices=tuple(left))).run()
        ids, step_s = [rules.fleet.ids[d] for d in named], best and best.seconds
        found.append({"ids": ids, "alone": named is left, "step_s": step_s})
    return found


def evaluate(
    profile: FleetProfile,
    shard_plan: Sequence[Mapping[str, Any]],
    *,
    max_in_flight: int | None = None,
    margins: Mapping[WorkerId, float] | None = None,
) -> Result:
    """The predicted step of a given plan, by the same simulator. Entries are as in
    `Result.shard_plan`. Raises PlanError for a plan that is wrong or does not fit, UserError for
    wrong margins."""
    began = time.perf_counter()
    margins = margins or {}
    if problems := list(_option_problems(profile, {}, (), margins, ())):
        raise UserError(_listed(problems))
    fleet = Fleet(profile, margins=margins)
    layout = _layout(fleet, shard_plan)
    step = evaluated(fleet, layout, max_in_flight=max_in_flight)
    if step is None:
        raise _does_not_fit(fleet, layout)
    rules = _rules(fleet, {}, (), ALLOWED)
    result = _result(rules, step, {})
    return replace(result, seconds=time.perf_counter() - began)


def _listed(problems: Sequence[Problem]) -> str:
    return "\n".join(str(problem) for problem in problems)


def _rules(
    fleet: Fleet,
    pins: Mapping[WorkerId, tuple[int, int]],
    excluded: Collection[WorkerId],
    allow: Collection[str],
) -> Rules:
    index = {owner: d for d, owner in enumerate(fleet.ids)}
    return Rules(
        fleet,
        tuple(d for d, owner in enumerate(fleet.ids) if owner not in excluded),
        {index[owner]: layers for owner, layers in pins.items()},
        CHECKPOINTING in allow,
        CHUNKS in allow,
    )


def _result(rules: Rules, best: Evaluated, changes: Mapping[str, Any]) -> Result:
    fleet = rules.fleet
    uses = device_uses(best)
    used = {use.id for use in uses}
    return Result(
        shard_plan=_entries(fleet, best.layout),
        max_in_flight=best.schedule.max_in_flight,
        predicted_step_s=best.seconds,
        devices=uses,
        unused=tuple(fleet.ids[d] for d in rules.devices if fleet.ids[d] not in used),
        limits=tuple(limits_of(best, rules, uses)),
        alone=alone(fleet, rules.devices),
        changes=changes,
        seconds=0.0,
        schedule=best.schedule,
        in_flight=best.schedule.forecast.peak_in_flight,
        host_rates={
            str(device.id): device.host_to_device_bytes_per_s
            for device in fleet.profile.devices
            if device.host_bytes
        },
    )


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


def _entries(fleet: Fleet, layout: Layout) -> tuple[dict[str, Any], ...]:
    entries = []
    for k, part in enumerate(layout):
        entry: dict[str, Any] = {"id": fleet.ids[part.device], "start": part.start, "end": part.end}
        if k and 0 not in (part.device, layout[k - 1].device):
            entry["links"] = "direct" if part.direct else "relay"
        if part.offload:
            entry["offload"] = part.offload
        if part.recompute:
            entry["gradient_checkpointing"] = True
        entries.append(entry)
    return tuple(entries)


def _layout(fleet: Fleet, shard_plan: Sequence[Mapping[str, Any]]) -> Layout:
    """The layout of a given plan. A boundary without `links` is crossed directly if it can be."""
    entries = _plan_entries(fleet, shard_plan)
    index = {owner: d for d, owner in enumerate(fleet.ids)}
    parts: list[Part] = []
    for k, entry in enumerate(entries):
        d = index[entry.id]
        recompute = bool(entry.gradient_checkpointing)
        direct = bool(parts) and fleet.can_go_direct(parts[-1].device, d)
        if entry.links == "direct" and parts and 0 not in (parts[-1].device, d) and not direct:
            ends = f"{process_name(entries[k - 1].id)} and {process_name(entry.id)}"
            text = f"is direct, but the profile has no links between {ends}, both ways"
            raise PlanError(str(Problem(f"shard_plan[{k}].links", text)))
        streamed = entry.offload if isinstance(entry.offload, int) else 0
        if streamed > entry.end - entry.start:
            text = f"is {streamed}, but the stage has {entry.end - entry.start} layers"
            raise PlanError(str(Problem(f"shard_plan[{k}].offload", text)))
        direct = direct and entry.links != "relay"
        parts.append(Part(d, entry.start, entry.end, recompute, direct, streamed))
    fewest = fleet.streamed(tuple(parts))[0]
    return tuple(
        part._replace(offload=other.offload) if entry.offload == "auto" else part
        for part, other, entry in zip(parts, fewest, entries, strict=True)
    )


def _plan_entries(fleet: Fleet, shard_plan: Sequence[Mapping[str, Any]]) -> list[PlanEntry]:
    problems: list[Problem] = []
    entries = []
    for k, raw in enumerate(shard_plan):
        try:
            entries.append(PlanEntry.model_validate(dict(raw)))
        except ValidationError as error:
            for problem in problems_of(error.errors(include_url=False), PlanEntry, dict(raw)):
                problems.append(Problem(f"shard_plan[{k}].{problem.path}", problem.text))
    if not problems:
        problems = [*plan_problems(entries), *owner_problems(entries, fleet.ids[1:])]
        problems += [
            Problem(f"shard_plan[{k}]", f"is on {process_name(b.id)} as the one before; join them")
            for k, (a, b) in enumerate(pairwise(entries), start=1)
            if a.id == b.id
        ]
    if problems:
        raise PlanError(report("the plan", problems))
    Plan(tuple(entries)).covers(fleet.layers, fleet.profile.first_layers)
    return entries


def _does_not_fit(fleet: Fleet, layout: Layout) -> PlanError:
    lines = []
    if (short := fleet.short_host(layout)) is not None:
        name, bytes_short = process_name(fleet.ids[short[0]]), short[1]
        if bytes_short < math.inf:
            lines.append(f"{name}: {size(bytes_short)} of host memory are missing for offload")
        else:
            why = "trained, or its device has no memory beside its machine's"
            lines.append(f"{name} cannot stream layers: they are {why}; take its offload out")
    for d in dict.fromkeys(part.device for part in layout):
        needs = fleet.memory_bytes(layout, d, [1] * len(layout))
        has = fleet.costs[d].memory_bytes + fleet.costs[d].device.reserved_bytes
        if needs > has:
            lines.append(
                f"{process_name(fleet.ids[d])} needs {size(needs)} with one micro-batch in flight"
                f" and has {size(max(0.0, has))}: {size(needs - has)} are missing"
            )
    hint = (
        "give it fewer layers, or gradient_checkpointing, or offload; or let `hetero plan` cut anew"
    )
    return PlanError("\n".join(lines), hint=hint)


def _option_problems(
    profile: FleetProfile,
    pins: Mapping[WorkerId, tuple[int, int]],
    excluded: Collection[WorkerId],
    margins: Mapping[WorkerId, float],
    allow: Collection[str],
) -> Iterator[Problem]:
    ids = [device.id for device in profile.devices]
    named = [("pin", d) for d in pins] + [("exclude", d) for d in excluded]
    for option, owner in [*named, *(("margin", d) for d in margins)]:
        if owner not in ids:
            text = f"{shown(owner)} is not a device; there are: {ids_text(ids)}"
            yield Problem(f"--{option}", text)
    if "local" in excluded:
        yield Problem("--exclude", "the coordinator holds the first stage and cannot be left out")
    for owner, free in margins.items():
        if free < 0:
            yield Problem("--margin", f"of {process_name(owner)} must not be negative")
    for word in allow:
        if word not in CHOICES:
            yield Problem("--allow", f"{shown(word)} is none of {', '.join(sorted(CHOICES))}")
    yield from _pin_problems(profile.layers, pins, excluded)


def _pin_problems(
    layers: int, pins: Mapping[WorkerId, tuple[int, int]], excluded: Collection[WorkerId]
) -> Iterator[Problem]:
    for owner, (start, end) in pins.items():
        here = f"{process_name(owner)} at {start}:{end}"
        if owner in excluded:
            yield Problem("--pin", f"{process_name(owner)} is excluded too")
        if not 0 <= start < end <= layers:
            yield Problem("--pin", f"{here} is not a range within the {layers} layers")
        elif owner == "local" and start:
            yield Problem("--pin", f"{here}: the coordinator holds the first layers")
        elif owner != "local" and "local" in pins and start < pins["local"][1]:
            yield Problem("--pin", f"{here} overlaps with the coordinator's layers")
    workers = sorted((pin, owner) for owner, pin in pins.items() if owner != "local")
    for (one, a), (other, b) in pairwise(workers):
        if other[0] < one[1]:
            yield Problem("--pin", f"{process_name(a)} and {process_name(b)} overlap")
