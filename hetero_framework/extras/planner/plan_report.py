"""Makes, evaluates, prints and saves the plans of `hetero plan` and of `"shard_plan": "auto"`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from hetero_framework.config import Config, layers_text, process_name
from hetero_framework.config.strict_json import read_object
from hetero_framework.core.files import write_json
from hetero_framework.errors import ConfigError, UserError
from hetero_framework.extras.planner import FleetProfile, Result, evaluate, plan
from hetero_framework.extras.planner.planning import ALLOWED, compared
from hetero_framework.extras.planner.result import save_plan
from hetero_framework.log import at_work
from hetero_framework.security.access import Access
from hetero_framework.tables import Part, lines, table
from hetero_framework.units import count, plural, seconds, share, size

WorkerId = int | str
_log = logging.getLogger(__name__)
_UNITS = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
T = TypeVar("T")
_HIDDEN = 0.01  # of a step: streaming that costs less is hidden
_COMPARED = 8  # most machines, as each takes another search
_HEAD = ("process", "layers", "busy", "memory", "left")
_LIMIT_HEAD = ("process", "limited by", "figure", "would help")
_STAGE_HEAD = (
    *("stage", "process", "layers", "forward", "backward"),
    *("to the next", "activation", "gradient", "delay"),
)


@dataclass(frozen=True)
class Wishes:
    """The options that limit a plan, as they were written: "1=4:12", "2", "1=2GiB"."""

    pins: Sequence[str] = ()
    excluded: Sequence[str] = ()
    margins: Sequence[str] = ()
    allow: Collection[str] = field(default_factory=frozenset)


def make_plan(profile: FleetProfile, wishes: Wishes) -> Result:
    """The best plan for a profile. Raises UserError for wishes that contradict each other or the
    profile, PlanError where nothing fits."""
    return plan(profile, **_read(profile, wishes))


def _read(profile: FleetProfile, wishes: Wishes) -> dict[str, Any]:
    """The wishes as `plan` takes them."""
    ids = [device.id for device in profile.devices]
    words = (word.strip() for words in wishes.allow for word in words.split(","))
    return {
        "pins": _by_process("--pin", wishes.pins, ids, _layers),
        "excluded": [_known(name, ids) for name in wishes.excluded],
        "margins": _by_process("--margin", wishes.margins, ids, _margin),
        "allow": ALLOWED | {word for word in words if word},
    }


def compared_machines(
    profile: FleetProfile, wishes: Wishes, result: Result, config: Config | None
) -> dict[str, Any]:
    """Facts on the worth of each machine: seconds of a step without it, and tokens of a step of
    full rows if `config` is known. Fleets of too many machines get no seconds."""
    machines = {device.machine or f"process {device.id}" for device in profile.devices}
    if len(machines) == 1 or result.changes:
        return {}
    tokens = None
    if config is not None:
        training = config.training
        tokens = config.row_tokens * training.train_rows * training.gradient_accumulation_steps
    every = [] if len(machines) > _COMPARED else compared(profile, **_read(profile, wishes))
    return {"compared": every, "tokens": tokens}


def judge_plan(
    profile: FleetProfile, file: Path, wishes: Wishes, raw: Mapping[str, Any] | None = None
) -> Result:
    """Predict a step of the plan in `file`: a configuration, or output of `hetero plan --json`.
    `raw` is its content if it was read already. Raises ConfigError and PlanError."""
    if raw is None:
        if not file.exists():
            raise ConfigError(f"plan {file} does not exist")
        raw = read_object(file)
    entries = raw.get("shard_plan")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f'{file}: shard_plan: must be a list of {{"id", "start", "end"}}')
    if isinstance(links := raw.get("links"), str):  # the run's, for boundaries without their own
        entries = [{**entry, "links": entry.get("links") or links} for entry in entries]
    training = raw.get("training")
    settings = training if isinstance(training, dict) else raw
    if settings is training and settings.get("gradient_checkpointing") is True:
        name = "gradient_checkpointing"
        entries = [{**one, name: True if one.get(name) is None else one[name]} for one in entries]
    most = settings.get("max_in_flight")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigError(f"{file}: max_in_flight: must be a whole number of at least 1")
    ids = [device.id for device in profile.devices]
    margins = _by_process("--margin", wishes.margins, ids, _margin)
    return evaluate(profile, entries, max_in_flight=most, margins=margins)


def described(result: Result) -> dict[str, Any]:
    """A plan in JSON types, with the times of its stages and boundaries for one micro-batch."""
    pipeline = result.pipeline
    times = zip(pipeline.forward_s, pipeline.backward_s, strict=True)
    stages = [{"forward_s": forward_s, "backward_s": backward_s} for forward_s, backward_s in times]
    boundaries = [
        {
            "way": "direct" if edge.relay is None else "relay",
            "activation_s": edge.forward_s,
            "gradient_s": edge.backward_s,
            "latency_s": edge.latency_s,
        }
        for edge in pipeline.edges
    ]
    return {**result.to_dict(), "stages": stages, "boundaries": boundaries}


def write_plan(facts: Mapping[str, Any], file: Path) -> Config:
    """Put a plan into a configuration file; return the configuration. Other settings and the order
    stay. Raises ConfigError if the plan does not fit it, UserError if it cannot be written."""
    raw = read_object(file)
    raw["shard_plan"] = facts["shard_plan"]
    changes = facts["changes"]
    if "wire" in changes:
        raw["wire"] = {**(raw.get("wire") or {}), **changes["wire"]}
    if "micro_batches" in changes:
        _split_samples(raw, changes["micro_batches"])
    config = Config.from_dict(raw, file.absolute().parent, name=str(file))
    # Through a symbolic link the file behind it is written; the link stays.
    write_json(file.resolve(), raw)
    return config


def _split_samples(raw: dict[str, Any], micro_batches: int) -> None:
    """Split the samples of a step into this many micro-batches, in `raw`. Raises UserError."""
    before = Config.from_dict(raw).training
    samples = before.per_device_train_batch_size * before.gradient_accumulation_steps
    if samples % micro_batches:
        raise UserError(
            f"the {samples} samples of a step are no {micro_batches} equal micro-batches",
            hint="plan without --allow micro-batch",
        )
    training = raw.setdefault("training", {})
    training["per_device_train_batch_size"] = samples // micro_batches
    training["gradient_accumulation_steps"] = micro_batches


def text(facts: dict[str, Any]) -> str:
    """The plan for a person."""
    rows = []
    for device in facts["devices"]:
        entries = [entry for entry in facts["shard_plan"] if entry["id"] == device["id"]]
        held = held_text([(entry["start"], entry["end"]) for entry in entries])
        sizes = (size(device["memory_bytes"]), size(max(0, device["free_bytes"])))
        name = process_name(device["id"])
        rows.append((name, held, share(device["busy"]), *sizes))
    about = facts.get("estimate")
    return lines(
        *(_estimate_lines(about) if about else ()),
        *table(_HEAD, rows, left=(0, 1)),
        "",
        "One micro-batch:",
        *table(_STAGE_HEAD, _stage_rows(facts), left=(0, 1, 2, 5)),
        "",
        f"A step is predicted to take {_spread(seconds, facts['predicted_step_s'], about)}.",
        _step_lines(facts),
        *(("", "Layers in host memory:") if any(d["streamed"] for d in facts["devices"]) else ()),
        [
            _streamed_text(device, facts["predicted_step_s"])
            for device in facts["devices"]
            if device["streamed"]
        ],
        *(("", "A step of fewer machines:") if "compared" in facts else ()),
        [*_compared_lines(facts)] if "compared" in facts else (),
        "",
        "What bounds the plan, and what would help:",
        *table(_LIMIT_HEAD, _limit_rows(facts), left=(0, 1, 2, 3)),
    )


def _limit_rows(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = ("by", "figure", "help")
    limits = facts["limits"]
    rows = [(process_name(one["id"]), *(one[name] for name in names)) for one in limits]
    if (more := len(facts["devices"]) + len(facts["unused"]) - len(rows)) > 0:
        rows.append((f"{more} more", "", "not used", ""))
    return rows


def _streamed_text(device: Mapping[str, Any], step_s: float) -> str:
    """A line on the cost of streaming, compared with holding all layers on the device."""
    bound = "copying" if device["limit"] == "streaming" else "computing"
    held = f"{device['streamed']} of {plural(device['layers'], 'layer')}"
    hidden = " (hidden)" if device["streaming_s"] < _HIDDEN * step_s else ""
    return (
        f"{process_name(device['id'])}: {held}, {size(device['host_bytes'])}; its work of a step is"
        f" {seconds(device['streaming_s'])} longer than with all of them on the device{hidden}, and"
        f" {bound} bounds it"
    )


def _compared_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the step without each machine."""
    step_s, tokens = facts["predicted_step_s"], facts["tokens"]
    if not facts["compared"]:
        yield f"not searched for more than {_COMPARED} machines"
    # Of two machines, the fleet without the worker's is the coordinator's machine alone.
    for one in facts["compared"][-1:] if len(facts["compared"]) == 2 else facts["compared"]:
        names = " and ".join(map(process_name, one["ids"]))
        what = f"{names} alone" if one["alone"] else f"without {names}"
        if one["step_s"] is None:
            yield f"{what}: nothing fits"
            continue
        rate = f", {tokens / one['step_s']:,.0f} tokens/s" if tokens and one["step_s"] else ""
        less = 1 - step_s / one["step_s"] if one["step_s"] else 0.0
        yield f"{what}: {seconds(one['step_s'])}{rate} ({share(less)} less than with all)"


def _stage_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """A row for each stage: its seconds for a micro-batch, and those of the next boundary."""
    rows = []
    for k, (entry, stage) in enumerate(zip(facts["shard_plan"], facts["stages"], strict=True)):
        row = [str(k), process_name(entry["id"]), held_text([(entry["start"], entry["end"])])]
        row += map(seconds, (stage["forward_s"], stage["backward_s"]))
        for edge in facts["boundaries"][k : k + 1]:
            times = (edge["activation_s"], edge["gradient_s"], edge["latency_s"])
            row += [edge["way"], *map(seconds, times)]
        rows.append([*row, *[""] * (len(_STAGE_HEAD) - len(row))])
    return rows


def held_text(ranges: Sequence[tuple[int, int]]) -> str:
    """The layers of a process, whose stages hold layers [start, end): "layers 0-7, 19-31"."""
    ends = {True: "embedding", False: "head"}  # of a stage without layers, by its place
    parts = [layers_text(a, b) if b > a else ends[a == 0] for a, b in ranges]
    joined = ", ".join(parts)
    return joined.replace(", layers ", ", ") if joined.startswith("layers") else joined


def _estimate_lines(about: Mapping[str, Any]) -> tuple[Part, ...]:
    """The basis of an estimate, and how far it may be off."""
    job, pace, shown = about["job"], about["pace"], []
    weights = job["weights"]
    for device in about["devices"]:
        held = f", holds {weights[str(device['id'])]}" if len({*weights.values()}) > 1 else ""
        name = process_name(device["id"])
        shown.append(f"{name}: {device['name']} ({device['figures']}){held}")
    trained, adapter = "all weights,", job["adapter"]
    if adapter is not None:
        modules = adapter["modules"] or "PEFT's choice of modules"
        named = modules if isinstance(modules, str) else ", ".join(modules)
        trained = f"LoRA of rank {adapter['r']} on {named}, over"
    known = job["epoch_tokens"] is not None
    what = f"an epoch of {count(pace['tokens'])} tokens" if known else "a million tokens"
    return (
        f"An ESTIMATE from config.json and makers' figures: times may be {about['factor']:g} times"
        " longer or shorter. `hetero plan --measure` measures.",
        shown,
        [
            f"job: {trained} {' and '.join(dict.fromkeys(weights.values()))}",
            f"  {plural(job['rows'], 'sample')} of {job['max_length']} tokens in a micro-batch,"
            f" {plural(job['micro_batches'], 'micro-batch')} in a step",
            f"  {_spread('{:,.0f}'.format, pace['tokens_per_s'], about, ' tokens/s')}; {what} takes"
            f" {_spread(_long, pace['hours'], about)}",
            *_rollout_lines(about),
        ],
        [f"assumed: {line}" for line in about["assumed"]],
        "",
    )


def _rollout_lines(about: Mapping[str, Any]) -> Iterator[str]:
    """What sampling adds, if it was asked for."""
    if (found := about.get("rollouts")) is not None:
        speed = _spread("{:,.0f}".format, found["tokens_per_s"], about, " tokens/s")
        step = _spread(seconds, found["step_s"], about)
        yield f"  sampling: {speed}; with it a step takes {step}"
        kept = found["caches"].items()
        sizes = ", ".join(f"{process_name(id)} {size(each)}" for id, each in kept)
        yield f"  its caches, beside what the plan counts: {sizes}"


def _long(hours: float) -> str:
    return f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.3g} min"


def _spread(
    show: Callable[[float], str], value: float, about: Mapping[str, Any] | None, unit: str = ""
) -> str:
    """A value as text, for an estimate with the least and the most that it may be."""
    if about is None:
        return show(value)
    factor = about["factor"]
    return f"{show(value)}{unit} ({show(value / factor)} to {show(value * factor)})"


def _step_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    step_s, plan = facts["predicted_step_s"], facts["shard_plan"]
    if facts["alone"]:
        single, name = facts["alone"]["step_s"], process_name(facts["alone"]["id"])
        faster = f" ({single / step_s:.2f} times as long)" if step_s > 0 else ""
        yield f"{name} alone, the fastest that could: {seconds(single)}{faster}"
    held = f"stages store up to {', '.join(map(str, facts['in_flight']))} forwards"
    yield f"{facts['max_in_flight']} micro-batches under way; {held}"
    again = [str(k) for k, entry in enumerate(plan) if entry.get("gradient_checkpointing")]
    if again:
        yield f"gradient_checkpointing on stage {', '.join(again)}"
    direct = [
        f"{process_name(before['id'])} to {process_name(entry['id'])}"
        for before, entry in pairwise(plan)
        if entry.get("links") == "direct"
    ]
    if direct:
        yield f"direct: {', '.join(direct)}"
    for device in facts["devices"]:
        if stored := device["stored_bytes"]:
            name = process_name(device["id"])
            yield f"{name} has {size(stored)} of optimizer states and stored inputs in host memory"
    if facts["changes"]:
        yield f"it needs {json.dumps(facts['changes'])}"


def _known(name: str, ids: Sequence[WorkerId]) -> WorkerId:
    """The id that is written `name`; `name` itself if there is none, which `plan` reports."""
    return next((known for known in ids if str(known) == name), name)


def _by_process(
    option: str, texts: Sequence[str], ids: Sequence[WorkerId], read: Callable[[str], T]
) -> dict[WorkerId, T]:
    """Values of an option, ID=VALUE, by process. Raises UserError, also for two values of one."""
    given: dict[WorkerId, T] = {}
    for text in texts:
        value, owner = read(text), _known(text.partition("=")[0], ids)
        if owner in given:
            raise UserError(f"{option} is given twice for {process_name(owner)}; keep one")
        given[owner] = value
    return given


def _layers(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text.partition("=")[2])
    if match is None:
        raise UserError(
            f"--pin {text} is not of the form ID=START:END",
            hint="for example: --pin 1=4:12 for layers 4 to 11",
        )
    return int(match[1]), int(match[2])


def _margin(text: str) -> float:
    match = _SIZE.fullmatch(text.partition("=")[2])
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(
            f"--margin {text} is not of the form ID=SIZE", hint="for example: --margin 1=2GiB"
        )
    return float(match[1]) * _UNITS[match[2].upper()]


def plan_run(config: Config, access: Access | None = None) -> Config:
    """The configuration with a plan for its machines, which are measured for it. The plan is
    written into `output_dir`, and workers that it leaves out are told. Raises what `measure_fleet`
    raises, PlanError where nothing fits, and ResourceError where the plan cannot be written."""
    _log.info('shard_plan is "auto": the machines are measured, and the run planned for them')
    with at_work("measuring the machines"):
        from hetero_framework.extras.planner.fleet import plan_fleet  # imports torch

        result = plan_fleet(config, partial(_logged_plan, config), access=access)
    planned = config.with_changes(shard_plan=result.to_dict()["shard_plan"])
    save_plan(planned, result)
    return planned


def _logged_plan(config: Config, fleet: FleetProfile) -> Result:
    result = make_plan(fleet, Wishes())
    for line in text(described(result)).splitlines():
        _log.info("%s", line)
    return result
