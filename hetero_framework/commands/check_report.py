"""The report of `hetero check`: each machine's part of the model and the memory for it.

Also reports whether `hetero train` would accept model and data. Loads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework import registry
from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.commands.diagnosis import facts_here
from hetero_framework.commands.options import role_here
from hetero_framework.commands.preflight import raised
from hetero_framework.config import Config, process_name
from hetero_framework.core.fields import WorkerId
from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.schedule.tuner import assumed_profile
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.log import at_work
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.adapters.trainable import adapter_plan_of
from hetero_framework.models.cut.attention import check_attention
from hetero_framework.models.cut.family import as_saved
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.files.quantization import check_devices, devices_known
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import quiet_libraries
from hetero_framework.models.sizing.memory import (
    ONE_MEMORY,
    StageMemory,
    estimate_memory,
    recomputing,
)
from hetero_framework.tables import Part, lines, table
from hetero_framework.trainer.memory_checks import check_memory, devices_of, host_memory_lines
from hetero_framework.trainer.resolution import Decision, Resolved
from hetero_framework.trainer.setup import check_objective, prepare, read_data, resolve_loss_chunk
from hetero_framework.units import plural, share, size

_LARGE_BUBBLE = 0.2
MOST_EXAMPLES = 20_000
"""Most examples of a data set that are read."""
_UNPLANNED = (
    'shard_plan is "auto": `hetero train` measures the machines when it begins, and keeps the plan'
    " with its results; `hetero plan --measure` does so without a run, and `hetero plan --dry-run`"
    " estimates"
)
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "host")
_HEAD = ("process", "machine", "device", "layers", "memory needed", "with checkpointing")


@dataclass
class _Look:
    """Facts known before any process starts, and `notes` with lines for the user."""

    config: Config
    model: PretrainedConfig | None = None
    adapter: AdapterPlan | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    tokens: int | None = None  # of the longest row
    pictures: MicroBatch | None = None
    decisions: Sequence[Decision] = ()
    facts: dict[WorkerId, MachineFacts] = field(default_factory=dict)  # of this machine
    notes: list[str] = field(default_factory=list)


@at_work("checking the configuration, the model and the data")
def check(config: Config, *, show: int = 0) -> dict[str, Any]:
    """The whole report as JSON types; sizes are in bytes. Raises PlanError when the plan does not
    fit the model, and whatever `hetero train` raises before it starts a process.

    Args:
        show: How many examples of the training data the report holds.
    """
    quiet_libraries(config.training.log_level)
    role = role_here(config)
    here: tuple[WorkerId, ...] = () if role is None else role.ids
    owners: Sequence[WorkerId] = ["local", *(worker.id for worker in config.workers)]
    layers: int | None = None
    schedule: dict[str, Any] | None = None
    if config.is_planned:
        owners, layers, schedule = config.plan.owners, config.plan.num_layers, forecast(config)
    look = _look_at(config, here)
    look.facts, absent = facts_here(config, here)
    look.notes += [f"warning: {error.message}" for error in absent]
    memory: list[StageMemory] = []
    lessened: list[StageMemory] = []
    if look.model is not None:
        layers = introspect(look.model).num_layers
        if schedule is not None:
            memory, lessened = _memory(look, look.model, schedule["held"])
    examples = []
    if show and look.tokenizer is not None:
        examples = registry.needed("views", "shown", "--show")(look.config, look.tokenizer, show)
    processes = [_process(look.config, owner, memory, lessened) for owner in owners]
    return {
        "layers": layers,
        "model_type": as_saved(look.model).model_type if look.model is not None else None,
        "objective": config.training.objective,
        "processes": processes,
        "schedule": schedule,
        "this_machine": _this_machine(look, here, memory, lessened or memory),
        "decisions": [asdict(decision) for decision in look.decisions],
        "notes": look.notes,
        "examples": [asdict(example) for example in examples],
    }


def _look_at(config: Config, here: Sequence[WorkerId]) -> _Look:
    """Look at the model and the data: as a run would where that is possible, else in part."""
    look = _Look(config)
    if config.model is not None:
        look.model = ModelSource.of(config).config
        if config.is_planned:
            config.plan.covers(introspect(look.model).num_layers)
        check_devices(config, look.model, devices_known(config, here))
        if config.is_planned and config.data is not None and "local" in here:
            return _as_a_run(config)
    look.notes += [f"warning: {warning}" for warning in config.warnings()]
    if look.model is not None:
        look.adapter = adapter_plan_of(config, look.model)
        check_objective(config, look.model, look.adapter)
        remarks = look.adapter.remarks if look.adapter is not None else ()
        look.notes += [f"warning: {remark}" for remark in remarks]
    if not config.is_planned:
        look.notes.append(_UNPLANNED)
    elif look.model is None:
        look.notes.append("there is no model section, so layers and memory are not checked")
    else:
        check_attention(config)
        resolved = resolve_loss_chunk(Resolved.start(config), look.model, config.row_tokens)
        look.config, look.decisions = resolved.config, resolved.decisions
    if config.data is None:
        look.notes.append("there is no data section, so this configuration cannot be trained")
    elif here and "local" not in here:
        look.notes.append("the data are not looked for: only the coordinator needs them")
    elif look.model is not None:
        look.tokenizer, data = read_data(config, look.model, most=MOST_EXAMPLES)
        look.notes += [*data.report, *_padding_lines(config, data)]
    return look


def _as_a_run(config: Config) -> _Look:
    """Look at what a run reads before it starts a process."""
    said: list[str] = []
    made = prepare(config, say=said.append, most=MOST_EXAMPLES)
    decisions = made.resolved.decisions
    reasons = {decision.reason for decision in decisions}
    notes = [note for note in said if note not in reasons]
    notes += _padding_lines(made.config, made.data)
    return _Look(
        made.config,
        model=made.model_config,
        adapter=made.adapter_plan,
        tokenizer=made.tokenizer,
        tokens=made.data.settings.max_length or made.data.row_tokens,
        pictures=made.data.pictures,
        decisions=decisions,
        notes=notes,
    )


def _has_one_memory(look: _Look, owner: WorkerId) -> bool:
    """Whether a device shares the machine's memory. Elsewhere the kind of the device tells."""
    if (fact := look.facts.get(owner)) is not None:
        return fact.host_free is None
    return look.config.machine(owner).device.partition(":")[0] in ONE_MEMORY


def _memory(
    look: _Look, model: PretrainedConfig, held: Sequence[int]
) -> tuple[list[StageMemory], list[StageMemory]]:
    """The memory of each stage, which stores up to `held` forwards, and the least memory if "auto"
    settings can lower it, else []."""
    one = {owner for owner in look.config.plan.owners if _has_one_memory(look, owner)}
    look.notes += host_memory_lines(look.config, one)

    def estimated(config: Config) -> list[StageMemory]:
        how: Any = {"tokens": look.tokens, "pictures": look.pictures, "plan": look.adapter}
        found = estimate_memory(config, model, in_flight=held, **how)
        return [m.placed(m.device, one_memory=m.stage.owner in one) for m in found]

    memory = estimated(look.config)
    if (least := recomputing(look.config)) == look.config:
        return memory, []
    look.notes.append(
        '"auto" of gradient_checkpointing and offload: a run computes as few stages again,'
        " and then streams as few layers, as it takes to fit the devices; the last column"
        " has as many as there may be"
    )
    return memory, estimated(least)


def _padding_lines(config: Config, data: TrainData) -> Iterator[str]:
    if share := data.padding:
        rows = config.training.per_device_train_batch_size
        yield f"padding: {share:.1%} of the tokens, {rows} samples to a micro-batch"


def forecast(config: Config) -> dict[str, Any]:
    """The expected use of the pipeline; `bubble` is the share of time in which devices are idle.
    Assumed: time grows with layers, a backward takes two forwards, and a boundary takes a tenth of
    a forward. The run itself measures and chooses anew."""
    stages, training = config.plan.stages, config.training
    m = training.gradient_accumulation_steps
    choice = tune(assumed_profile(stages), m, max_in_flight=training.max_in_flight)
    owners = [spec.owner for spec in stages]
    return {
        "micro_batches": m,
        "chunks": max(owners.count(owner) for owner in owners),
        "bubble": 1.0 - sum(choice.forecast.busy) / len(choice.forecast.busy),
        "max_in_flight": choice.max_in_flight,
        "held": list(choice.in_flight_limits),
    }


def text(facts: dict[str, Any]) -> str:
    """The report for a person."""
    layers = f" with {facts['layers']} layers" if facts["layers"] is not None else ""
    count, here = len(facts["processes"]), facts["this_machine"]
    objective = "" if facts["objective"] == "sft" else f", to learn with {facts['objective']}"
    shows_weights = any(process["weights"] != "none" for process in facts["processes"])
    rows = [_row(process, shows_weights) for process in facts["processes"]]
    notes = [f"Note: {note}".replace("Note: warning: ", "Warning: ") for note in facts["notes"]]
    return lines(
        f"The configuration is valid: {facts['model_type'] or 'a model'}{layers} on"
        f" {plural(count, 'process') if count > 1 else 'one process'}{objective}.",
        "",
        *table(_HEAD[: len(rows[0])], rows, left=(0, 1, 2, 3)),
        *_forecast_lines(facts),
        "",
        f"This machine: {here['role']}.",
        here["devices"],
        *(
            f"Decided: {made['setting']} = {json.dumps(made['value'])}: {made['reason']}"
            for made in facts["decisions"]
        ),
        *notes,
    )


def _forecast_lines(facts: dict[str, Any]) -> list[Part]:
    schedule = facts["schedule"]
    if schedule is None or sum(len(process["stages"]) for process in facts["processes"]) == 1:
        return []
    chunks = f", {schedule['chunks']} stages per process" if schedule["chunks"] > 1 else ""
    held = [
        f"{schedule['max_in_flight']} micro-batches under way;"
        f" stages store up to {', '.join(map(str, schedule['held']))} forwards"
    ]
    if schedule["bubble"] > _LARGE_BUBBLE:
        held += [
            "a larger training.gradient_accumulation_steps, with smaller micro-batches, or equal",
            "stages would keep them busier",
        ]
    return [
        "",
        f"A step of {schedule['micro_batches']} micro-batches{chunks}: devices idle"
        f" {share(schedule['bubble'])} of the time, by numbers of layers alone.",
        held,
    ]


def _row(process: dict[str, Any], shows_weights: bool) -> list[str]:
    host = f"{process['hostname']}, " if process["hostname"] else ""
    port = f" port {process['port']}" if process["port"] else ", dials the coordinator"
    stages = ", ".join(stage["contents"] for stage in process["stages"]) or "not planned yet"
    device = process["device"] + (f", {process['weights']}" if shows_weights else "")
    needed, less = process["memory_bytes"], process["memory_recomputing_bytes"]
    sizes = ["?" if needed is None else size(needed), *([] if less is None else [size(less)])]
    if process["host_bytes"]:
        sizes[0] += f", {size(process['host_bytes'])} of host memory"
    return [process["name"], f"{host}{process['address']}{port}", device, stages, *sizes]


def _process(
    config: Config, owner: WorkerId, memory: list[StageMemory], lessened: list[StageMemory]
) -> dict[str, Any]:
    """The report of a process; `lessened` is the memory if each "auto" saves as much as it can."""
    stages = []
    for stage in config.plan.of(owner) if config.is_planned else ():
        entry = {**asdict(stage), "contents": config.contents(stage), "memory": None}
        if memory:
            entry["memory"] = {name: getattr(memory[stage.index], name) for name in _MEMORY}
        stages.append(entry)
    needed, less = (
        sum(m.total for m in estimate if m.stage.owner == owner) if estimate else None
        for estimate in (memory, lessened)
    )
    machine = config.machine(owner)
    return {
        "name": process_name(owner),
        "hostname": machine.hostname,
        "address": machine.ip,
        "port": machine.port,
        "device": machine.device,
        "weights": config.quantization(owner) or "none",
        "memory_bytes": needed,
        "memory_recomputing_bytes": less,
        "host_bytes": sum(m.host for m in memory if m.stage.owner == owner),
        "stages": stages,
    }


def _this_machine(
    look: _Look,
    here: Sequence[WorkerId],
    memory: Sequence[StageMemory],
    least: Sequence[StageMemory],
) -> dict[str, Any]:
    """This machine's processes, and whether they fit its devices and host memory. `least` is the
    memory if each "auto" saves as much as it can."""
    if not here:
        text = "nothing here names this machine; train on it needs --role or --worker-id"
        look.notes.append(text)
        return {"role": "has no role in this configuration", "devices": []}
    shown = []
    for owners, free in devices_of(look.config, look.facts):
        needed, less = (
            sum(m.total for m in estimate if m.stage.owner in owners)
            for estimate in (memory, least)
        )
        fact = look.facts[min(owners, key=str)]
        needs = f"needs {size(needed)}, " if needed else ""
        if less < needed:
            needs += f"{size(less)} with gradient checkpointing, "
        shown.append(f"{fact.device} ({fact.label}): {needs}{size(free)} free")
    if look.model is not None:
        fits = partial(check_memory, look.config, least, look.facts, look.model)
        for error in raised(fits):
            look.notes += [f"warning: {line}" for line in error.message.splitlines()]
            look.notes.append(f"to fit the memory: {error.hint}")
    return {"role": " and ".join(map(process_name, here)), "devices": shown}
