"""Checks of a plan on the memory of its machines, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from transformers import PretrainedConfig

from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import Config, process_name
from hetero_framework.core.devices import Device, open_device
from hetero_framework.errors import DeviceError, PlanError, attempt
from hetero_framework.models.cut.objective import ChunkedObjective
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.sizing.memory import ONE_MEMORY, StageMemory, offload_layers
from hetero_framework.models.verify.equivalence import why_not_chunked
from hetero_framework.units import size

Facts = Mapping[str | int, MachineFacts]
Devices = list[tuple[set[str | int], int]]
"""The processes on each device, and the bytes that are free there."""
_SMALL_CHUNK = 256 * 16
"""Bytes for each word of the vocabulary that a loss of 256 tokens takes."""


def devices_of(config: Config, facts: Facts) -> Devices:
    """The devices of all processes."""
    devices: dict[tuple[str, str], tuple[set[str | int], int]] = {}
    for owner, fact in facts.items():
        place = (machine_of(config, config.machine(owner)), fact.device)
        owners, free = devices.get(place, (set(), fact.memory_free))
        devices[place] = (owners | {owner}, min(free, fact.memory_free))
    return list(devices.values())


def with_one_memory(config: Config, local: Collection[str | int]) -> set[str | int]:
    """Processes whose device shares the machine's memory, as far as that is known before they are
    asked: by the kind of device, and by opening those of this machine, `local`."""
    known = set()
    for owner in config.plan.owners:
        name = config.machine(owner).device
        device = attempt(partial(open_device, name)) if owner in local else None
        if (isinstance(device, Device) and device.one_memory) or name.split(":")[0] in ONE_MEMORY:
            known.add(owner)
    return known


def host_memory_lines(config: Config, one_memory: Collection[str | int]) -> list[str]:
    """A line on the settings for all stages that do nothing for the processes in `one_memory`,
    whose device shares the machine's memory. Raises DeviceError where stages of theirs are to keep
    tensors in host memory by their own entries."""
    here = [spec for spec in config.plan.stages if spec.owner in one_memory]
    if named := [name for spec in here for name in config.offloads_of(spec.index)]:
        owners = " and ".join(dict.fromkeys(s.process for s in here if config.offloads_of(s.index)))
        raise DeviceError(
            f"{', '.join(named)}: nothing is gained by keeping tensors in host memory where device"
            f" and host are one memory, as for {owners}",
            hint="take that out of shard_plan",
        )
    training, lines = config.training, list[str]()
    for name in ("offload_optimizer", "activation_offloading"):
        if getattr(training, name) and here:
            owners = ", ".join(dict.fromkeys(spec.process for spec in here))
            lines.append(
                f"training.{name} does nothing for {owners}: device and host are one memory"
            )
    return lines


def check_memory(
    config: Config, memory: Sequence[StageMemory], facts: Facts, model: PretrainedConfig
) -> None:
    """Raise PlanError if stages do not fit their device, or their machine's host memory.

    Processes that share a device (CPU workers of one machine, two workers on one card) share what
    is free, and all processes of a machine its host memory.
    """
    problems, ways = [], [""]
    for owners, free in devices_of(config, facts):
        here = [m for m in memory if m.stage.owner in owners]
        if (short := sum(m.total for m in here) - free) > 0:
            needs = "; ".join(f"stage {m.index} ({m.stage.layers}) needs {m}" for m in here)
            problems.append(f"{_have(owners)} {size(free)} free, {_mib(short)} too little: {needs}")
            ways += [*_streaming(here, owners, free, facts), *_ways(here, config, facts, model)]
    machines: dict[str, set[str | int]] = {}
    for owner in () if problems else facts:
        machines.setdefault(machine_of(config, config.machine(owner)), set()).add(owner)
    for owners in machines.values():
        here = [m for m in memory if m.stage.owner in owners]
        free = min((n for o in owners if (n := facts[o].host_free) is not None), default=0)
        short = (
            sum(m.total if facts[m.stage.owner].host_free is None else m.host for m in here) - free
        )
        away = [m for m in here if m.host]
        if away and short > 0:
            needs = "; ".join(f"stage {m.index} keeps {size(m.host)} there" for m in away)
            free_there = f"{size(free)} of host memory free, {_mib(short)} too little"
            problems.append(f"{_have(owners)} {free_there}: {needs}")
            streaming = [m for m in away if m.offload and not m.in_files]
            ways += [f"a smaller shard_plan[{m.index}].offload" for m in streaming]
            ways += [
                f'shard_plan[{m.index}].offload_from "file", as fast as the disk'
                for m in streaming
                if config.quantization(m.stage.owner) is None
            ]
            stored = any(m.host_inputs and m.in_flight > 1 for m in away)
            ways += ["a smaller training.max_in_flight"] * stored
            ways += ["no offload_optimizer"] * any(m.host_states for m in away)
    if problems:
        ways[0] = "give it fewer layers in shard_plan" if len(facts) > 1 else "add a machine"
        raise PlanError("\n".join(problems), hint="; or ".join(dict.fromkeys(ways)))


def _have(owners: Collection[int | str]) -> str:
    ordered = sorted(owners, key=lambda owner: (owner != "local", str(owner)))
    names = ["the coordinator" if owner == "local" else process_name(owner) for owner in ordered]
    return f"{' and '.join(names)} {'have' if len(names) > 1 else 'has'}"


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20)):,} MiB"


def _streaming(
    here: Sequence[StageMemory], owners: Collection[int | str], free: int, facts: Facts
) -> list[str]:
    """The streamed layers with which the stages of a device fit; nothing where none do."""
    room = {m.index: facts[m.stage.owner].host_free for m in here}
    counts = offload_layers(here, [k for k in room if room[k] is not None], [(owners, free)])
    there = [m.offloading(counts.get(m.index) or m.offload) for m in here]
    fits = sum(m.total for m in there) <= free and all(
        m.host <= (room[m.index] or 0) for m in there
    )
    return [
        f"keep {m.offload} of its layers in host memory (shard_plan[{m.index}].offload)"
        for m in there
        if fits and counts.get(m.index)
    ]


def _ways(
    here: Sequence[StageMemory], config: Config, facts: Facts, model: PretrainedConfig
) -> list[str]:
    """Settings that would need less memory, the largest share first; of sizes that can be less."""
    training, fact = config.training, facts[here[0].stage.owner]
    smaller = ["per_device_train_batch_size"] * (training.per_device_train_batch_size > 1)
    smaller += ["data.max_length"] * training.reads_text
    smaller += ["training.max_in_flight"] * any(m.in_flight > 1 for m in here)
    inputs = [f"a smaller {name}" for name in smaller]
    if any(config.checkpointing(m.index) is not True for m in here):
        inputs.append("gradient_checkpointing")
    logits = 0
    if isinstance(objective_of(training), ChunkedObjective) and why_not_chunked(model) is None:
        logits = sum(m.logits for m in here)
        logits *= logits > _SMALL_CHUNK * int(model.get_text_config().vocab_size)
    in_full = [m for m in here if config.quantization(m.stage.owner) is None]
    shares = {
        " or ".join(inputs): sum(m.activations + m.working for m in here),
        "a smaller training.loss_chunk_tokens": logits,
    }
    if fact.host_free is not None:
        shares["training.offload_optimizer"] = sum(m.optimizer for m in here)
    if config.adapter is None and training.reads_text:
        shares["an adapter instead of full training"] = sum(m.gradients + m.optimizer for m in here)
    if fact.no_four_bit is None and training.reads_text:
        shares['model.quantization "nf4" with an adapter'] = sum(m.weights for m in in_full)
    return sorted((way for way in shares if way and shares[way]), key=lambda way: -shares[way])
