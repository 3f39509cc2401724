"""The report of `hetero check`: each machine's part of the model and the memory for it.

Also reports whether `hetero train` would accept model and data. Loads no weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hetero_framework import control
from hetero_framework.cluster.roles import Role, decide_role
from hetero_framework.config import Config, process_name
from hetero_framework.config.asked_extras import asked
from hetero_framework.config.optimizers import check_optimizer
from hetero_framework.core.devices import open_device
from hetero_framework.data.shown import shown_examples
from hetero_framework.data.sources import find_sources
from hetero_framework.engine.schedule.tuner import assumed_profile
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.errors import ConfigError, DeviceError
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.cut.attention import check_attention
from hetero_framework.models.cut.family import as_saved
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import tower_lines
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.cut.shard import load_model_config
from hetero_framework.models.files.quantization import check_devices, devices_known, mixed_lines
from hetero_framework.models.library import quiet_libraries
from hetero_framework.models.sizing.memory import (
    DEFAULT_TOKENS,
    StageMemory,
    estimate_memory,
    recomputing,
)
from hetero_framework.models.verify.boundary_contents import check_codec, crossing_lines
from hetero_framework.security.access import key_directory
from hetero_framework.tables import table
from hetero_framework.trainer.given import COMPUTE
from hetero_framework.trainer.resolved import Resolved
from hetero_framework.trainer.setup import (
    check_compiled,
    check_objective,
    prepare,
    read_data,
    resolve_loss_chunk,
)
from hetero_framework.units import share, size

WorkerId = int | str
_LARGE_BUBBLE = 0.2
MOST_EXAMPLES = 20_000
"""Examples of a set of data that are read."""
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits")
_HEAD = ("process", "machine", "device", "layers", "memory needed", "with checkpointing")


def check(config: Config, *, show: int = 0) -> dict[str, Any]:
    """The whole report as JSON types; sizes are in bytes. Raises PlanError when the plan does not
    fit the model, and whatever `hetero train` raises before it starts a process.

    Args:
        show: Examples of the training data that the report holds.
    """
    check_optimizer(config.training)
    computes = control.function(COMPUTE) is not None
    config.check_metric(objective_of(config.training).evaluated, computes=computes)
    quiet_libraries(config.training.log_level)
    role = _role(config)
    if not config.is_planned:
        return _unplanned(config, role, show)
    resolved = Resolved.start(config)
    notes: list[str] = []
    examples: list[dict[str, Any]] = []
    model_config: PretrainedConfig | None = None
    memory: list[StageMemory] = []
    lessened: list[StageMemory] = []
    schedule = forecast(config)
    model, plan = config.model, None
    if model is None:
        notes += [f"warning: {warning}" for warning in config.warnings()]
        notes.append("there is no model section, so layers and memory are not checked")
        _find_data(config, role, notes)
    else:
        model_config = load_model_config(model, config.base_dir)
        config.plan.covers(introspect(model_config).num_layers)
        check_devices(config, model_config, devices_known(config, _ids(role)))
    if model_config is not None and config.data is not None and _is_coordinator(role):
        parts = prepare(config, say=notes.append, most=MOST_EXAMPLES)
        resolved, model_config, plan = parts.resolved, parts.model_config, parts.adapter_plan
        reasons = {decision.reason for decision in resolved.decisions}
        notes = [note for note in notes if note not in reasons]
        config = resolved.config
        tokens = parts.data.settings.max_length or parts.data.row_tokens
        examples = _examples(config, parts.tokenizer, show)
    elif model_config is not None:
        notes += [f"warning: {warning}" for warning in config.warnings()]
        notes += mixed_lines(config)
        check_compiled(config, model_config)
        check_attention(config)
        tokens = (config.data.max_length if config.data else None) or DEFAULT_TOKENS
        resolved = resolve_loss_chunk(resolved, model_config, tokens)
        config = resolved.config
        plan = _adapter_plan(config, model_config)
        if plan is not None:
            notes += [f"warning: {remark}" for remark in plan.remarks]
        check_objective(config, model_config, plan)
        check_codec(config, model_config, plan, tokens)
        notes += crossing_lines(config, model_config, tokens)
        notes += tower_lines(model_config)
        examples = _look_at_data(config, model_config, role, notes, show)
    if model_config is not None:
        estimate = partial(
            estimate_memory,
            model_config=model_config,
            in_flight=schedule["held"],
            plan=plan,
            tokens=tokens,
        )
        memory = estimate(config)
        for remarks in asked("notes", config):
            notes += remarks(config, sum(m.trained for m in memory))
        if any(config.checkpointing(spec.index) == "auto" for spec in config.plan.stages):
            lessened = estimate(recomputing(config))
            notes.append(
                'gradient_checkpointing "auto": a run enables it on as few stages as it takes to'
                " fit the devices; the last column has it on all stages"
            )
    processes = [_process(config, owner, memory, lessened) for owner in config.plan.owners]
    return {
        "layers": config.shard_plan[-1].end,
        "model_type": as_saved(model_config).model_type if model_config is not None else None,
        "objective": config.training.objective,
        "processes": processes,
        "schedule": schedule,
        "this_machine": _this_machine(config, role, processes, notes),
        "decisions": [asdict(decision) for decision in resolved.decisions],
        "notes": notes,
        "examples": examples,
    }


def _unplanned(config: Config, role: Role | None, show: int) -> dict[str, Any]:
    """The report where the plan is left to the run."""
    layers = model_type = None
    notes = [f"warning: {warning}" for warning in config.warnings()]
    notes.append(
        'shard_plan is "auto": `hetero train` measures the machines when it begins, and keeps the'
        " plan with its results; `hetero plan --measure` does so without a run, and `hetero plan"
        " --dry-run` estimates"
    )
    examples: list[dict[str, Any]] = []
    if config.model is not None:
        model_config = load_model_config(config.model, config.base_dir)
        layers, model_type = introspect(model_config).num_layers, as_saved(model_config).model_type
        check_devices(config, model_config, devices_known(config, _ids(role)))
        check_objective(config, model_config, _adapter_plan(config, model_config))
        examples = _look_at_data(config, model_config, role, notes, show)
    else:
        _find_data(config, role, notes)
    owners: list[WorkerId] = ["local", *(worker.id for worker in config.workers)]
    processes = [{**_machine(config, owner), "stages": []} for owner in owners]
    return {
        "layers": layers,
        "model_type": model_type,
        "objective": config.training.objective,
        "processes": processes,
        "schedule": None,
        "this_machine": _this_machine(config, role, processes, notes),
        "decisions": [],
        "notes": notes,
        "examples": examples,
    }


def _adapter_plan(config: Config, model_config: PretrainedConfig) -> AdapterPlan | None:
    if config.adapter is None:
        return None
    from hetero_framework.models.adapters.lora import plan_adapter

    return plan_adapter(model_config, config.adapter, config.base_dir)


def _is_coordinator(role: Role | None) -> bool:
    return role is not None and role.is_coordinator


def _find_data(config: Config, role: Role | None, notes: list[str]) -> bool:
    """Check that the data are here; note why they need not be."""
    if config.data is None:
        notes.append("there is no data section, so this configuration cannot be trained")
        return False
    if role is not None and not role.is_coordinator:
        notes.append("the data are not looked for: only the coordinator needs them")
        return False
    for spec in config.data.sources:
        find_sources(spec, config.base_dir)
    return True


def _look_at_data(
    config: Config,
    model_config: PretrainedConfig,
    role: Role | None,
    notes: list[str],
    show: int,
) -> list[dict[str, Any]]:
    """Note remarks on the data, and return the examples to show."""
    if not _find_data(config, role, notes):
        return []
    tokenizer, data = read_data(config, model_config, most=MOST_EXAMPLES)
    notes += data.report
    return _examples(config, tokenizer, show)


def _examples(
    config: Config, tokenizer: PreTrainedTokenizerBase | None, count: int
) -> list[dict[str, Any]]:
    if tokenizer is None:
        return []
    return [asdict(example) for example in shown_examples(config, tokenizer, count)]


def forecast(config: Config) -> dict[str, Any]:
    """The expected use of the pipeline: `bubble` is the share of the devices' time without work. An
    estimate: time in proportion to layers, backward twice forward, a tenth of a forward for each
    boundary. The run itself measures and chooses anew."""
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


def _forecast_lines(schedule: dict[str, Any], stages: int) -> list[str]:
    if stages == 1:
        return []
    chunks = f", {schedule['chunks']} stages per process" if schedule["chunks"] > 1 else ""
    in_flight = ", ".join(map(str, schedule["held"]))
    lines = [
        "",
        f"A step of {schedule['micro_batches']} micro-batches{chunks}: devices idle "
        f"{share(schedule['bubble'])} of the time, by numbers of layers alone.",
        f"  {schedule['max_in_flight']} micro-batches under way;"
        f" stages store up to {in_flight} forwards",
    ]
    if schedule["bubble"] > _LARGE_BUBBLE:
        lines += [
            "  a larger training.gradient_accumulation_steps, with smaller micro-batches, or equal",
            "  stages would keep them busier",
        ]
    return lines


def text(facts: dict[str, Any]) -> str:
    """The report for a person."""
    layers = f" with {facts['layers']} layers" if facts["layers"] is not None else ""
    model = f"{facts['model_type'] or 'a model'}{layers}"
    count = len(facts["processes"])
    processes = f"{count} processes" if count > 1 else "one process"
    objective = "" if facts["objective"] == "sft" else f", to learn with {facts['objective']}"
    lines = [f"The configuration is valid: {model} on {processes}{objective}.", ""]
    rows = []
    shows_weights = any(process["weights"] != "none" for process in facts["processes"])
    for process in facts["processes"]:
        host = f"{process['hostname']}, " if process["hostname"] else ""
        port = f" port {process['port']}" if process["port"] else ", dials the coordinator"
        where = f"{host}{process['address']}{port}"
        stages = ", ".join(stage["contents"] for stage in process["stages"]) or "not planned yet"
        device = process["device"] + (f", {process['weights']}" if shows_weights else "")
        memory = size(process["memory_bytes"]) if process["memory_bytes"] is not None else "?"
        less = process["memory_recomputing_bytes"]
        with_it = (size(less),) if less is not None else ()
        rows.append((process["name"], where, device, stages, memory, *with_it))
    lines += table(_HEAD[: len(rows[0])], rows, left=(0, 1, 2, 3))
    count = sum(len(process["stages"]) for process in facts["processes"])
    if facts["schedule"] is not None:
        lines += _forecast_lines(facts["schedule"], count)
    lines += ["", f"This machine: {facts['this_machine']['role']}."]
    lines += [f"  {line}" for line in facts["this_machine"]["devices"]]
    for decision in facts["decisions"]:
        value = json.dumps(decision["value"])
        lines.append(f"Decided: {decision['setting']} = {value}: {decision['reason']}")
    for note in facts["notes"]:
        warning = note.removeprefix("warning: ")
        lines.append(f"Note: {note}" if warning == note else f"Warning: {warning}")
    return "\n".join(lines)


def _machine(config: Config, owner: WorkerId) -> dict[str, Any]:
    machine = config.machine(owner)
    return {
        "name": process_name(owner),
        "hostname": machine.hostname,
        "address": machine.ip,
        "port": machine.port,
        "device": machine.device,
        "weights": config.quantization(owner) or "none",
        "memory_bytes": None,
        "memory_recomputing_bytes": None,
    }


def _process(
    config: Config, owner: WorkerId, memory: list[StageMemory], lessened: list[StageMemory]
) -> dict[str, Any]:
    """`lessened` is the memory with gradient checkpointing where "auto" may choose it."""
    stages = []
    for stage in config.plan.of(owner):
        entry = {**asdict(stage), "contents": config.contents(stage), "memory": None}
        if memory:
            entry["memory"] = {name: getattr(memory[stage.index], name) for name in _MEMORY}
        stages.append(entry)
    needed, less = (
        sum(m.total for m in estimate if m.stage.owner == owner) if estimate else None
        for estimate in (memory, lessened)
    )
    sizes = {"memory_bytes": needed, "memory_recomputing_bytes": less}
    return {**_machine(config, owner), **sizes, "stages": stages}


def _role(config: Config) -> Role | None:
    try:
        return decide_role(config, keys=key_directory(config).processes())
    except ConfigError:
        return None  # a configuration may be checked anywhere


def _ids(role: Role | None) -> tuple[WorkerId, ...]:
    """The processes of this machine."""
    return (*("local",) * role.is_coordinator, *role.worker_ids) if role is not None else ()


def _this_machine(
    config: Config, role: Role | None, processes: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """This machine's part, and whether that fits its devices."""
    if role is None:
        notes.append("nothing here names this machine; train on it needs --role or --worker-id")
        return {"role": "has no role in this configuration", "devices": []}
    names = [process_name(owner) for owner in _ids(role)]
    needed: dict[str, int] = {}
    least: dict[str, int] = {}
    free: dict[str, tuple[str, int]] = {}
    for process in processes:
        if process["name"] in names:
            try:
                device = open_device(process["device"])
            except DeviceError as error:
                notes.append(f"warning: {process['name']}: {error.message}")
                continue
            most = process["memory_bytes"] or 0
            less = process["memory_recomputing_bytes"]
            needed[device.name] = needed.get(device.name, 0) + most
            least[device.name] = least.get(device.name, 0) + (most if less is None else less)
            free[device.name] = (device.label, device.memory().free)
    lines = []
    for name, (label, available) in free.items():
        needs = f"needs {size(needed[name])}, " if needed[name] else ""
        if least[name] < needed[name]:
            needs += f"{size(least[name])} with gradient checkpointing, "
        lines.append(f"{name} ({label}): {needs}{size(available)} free")
        if least[name] > available:
            notes.append(f"warning: {name} of this machine has too little free memory")
    return {"role": " and ".join(names), "devices": lines}
