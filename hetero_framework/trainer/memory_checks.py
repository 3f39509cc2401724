"""Checks of a plan on the memory of its machines, before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from transformers import PretrainedConfig

from hetero_framework import registry
from hetero_framework.cluster.cluster import MachineFacts
from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import Config, process_name
from hetero_framework.errors import DeviceError, PlanError
from hetero_framework.models.cut.objective import ChunkedObjective
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.sizing.memory import StageMemory, keeps_states, offload_layers
from hetero_framework.models.verify.equivalence import why_not_chunked
from hetero_framework.units import size

Facts = Mapping[str | int, MachineFacts]
_SMALL_CHUNK = 256  # tokens; a smaller loss chunk is not advised


def devices_of(config: Config, facts: Facts) -> list[tuple[set[str | int], int]]:
    """The processes on each device, and the bytes that are free there."""
    devices: dict[tuple[str, str], tuple[set[str | int], int]] = {}
    for owner, fact in facts.items():
        place = (machine_of(config, config.machine(owner)), fact.device)
        owners, free = devices.get(place, (set(), fact.memory_free))
        devices[place] = (owners | {owner}, min(free, fact.memory_free))
    return list(devices.values())


def host_memory_lines(config: Config, one_memory: Collection[str | int]) -> list[str]:
    """Lines on host-memory settings that do nothing: with this optimizer, or for the processes in
    `one_memory`, whose device shares the machine's memory. Raises DeviceError if a shard_plan entry
    of those processes sets such a thing itself, and ConfigError if host memory needs an extra that
    is not installed."""
    for k in range(len(config.shard_plan)):
        if config.uses_host_memory(k):
            registry.needed("stages", "host_memory", f"shard_plan[{k}]: host memory for tensors")
    here = [spec for spec in config.plan.stages if spec.owner in one_memory]
    named: dict[str, str] = {}
    for spec in here:
        entry, at = config.shard_plan[spec.index], f"shard_plan[{spec.index}]"
        named |= {f"{at}.offload": spec.process} if entry.offload not in (0, "auto") else {}
        named |= {f"{at}.offload_optimizer": spec.process} if entry.offload_optimizer else {}
    if named:
        raise DeviceError(
            f"{', '.join(named)}: nothing is gained by keeping tensors in host memory where device"
            f" and host are one memory, as for {' and '.join(dict.fromkeys(named.values()))}",
            hint="take that out of shard_plan",
        )
    owners = ", ".join(dict.fromkeys(spec.process for spec in here))
    optim, stages = config.training.optim, config.plan.stages
    stay = keeps_states(optim) and any(config.offloads_optimizer(s.index) for s in stages)
    states = f"offload_optimizer does nothing with {optim}, whose states stay where they are"
    return [
        *[states] * stay,
        *(
            f"training.{name} does nothing for {owners}: device and host are one memory"
            for name in ("offload_optimizer", "activation_offloading")
            if getattr(config.training, name) and here
        ),
    ]


def check_memory(
    config: Config, memory: Sequence[StageMemory], facts: Facts, model: PretrainedConfig
) -> None:
    """Raise PlanError if stages do not fit their device, or their machine's host memory. Processes
    that share a device (CPU workers of one machine, two workers on one card) share its free memory.
    All processes of a machine share its host memory."""
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
        room = {owner: facts[owner].host_free for owner in owners}
        free = min((n for n in room.values() if n is not None), default=0)
        here = [m for m in memory if m.stage.owner in owners]
        taken = sum(m.total for m in here if room[m.stage.owner] is None)
        here = [m for m in here if m.host]
        if here and (short := taken + sum(m.host for m in here) - free) > 0:
            needs = "; ".join(f"stage {m.index} keeps {size(m.host)} there" for m in here)
            lack = f"{size(free)} of host memory free, {_mib(short)} too little"
            problems.append(f"{_have(owners)} {lack}: {needs}")
            ways += [f"a smaller shard_plan[{m.index}].offload" for m in here if m.offload]
            stored = any(m.host_inputs and m.in_flight > 1 for m in here)
            ways += ["a smaller training.max_in_flight"] * stored
            with_states = [m.index for m in here if m.host_states]
            ways += ["no offload_optimizer"] * any(map(config.offloads_optimizer, with_states))
            if with_states and not re.search("8bit|4bit", config.training.optim):
                ways.append('a training.optim with smaller states, such as "adamw_8bit"')
    if problems:
        more = len(config.plan.owners) > 1
        ways[0] = "give it fewer layers in shard_plan" if more else "add a machine"
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
    """Advice on how many layers to stream so that a device's stages fit; empty if none helps."""
    room = {m.index: facts[m.stage.owner].host_free for m in here}
    counts = offload_layers(here, [k for k in room if room[k] is not None], [(owners, free)])
    there = [m.offloading(counts.get(m.index) or m.offload) for m in here]
    if sum(m.total for m in there) > free or any(m.host > (room[m.index] or 0) for m in there):
        return []
    return [
        f"keep {m.offload} of its layers in host memory (shard_plan[{m.index}].offload)"
        for m in there
        if counts.get(m.index)
    ]


def _ways(
    here: Sequence[StageMemory], config: Config, facts: Facts, model: PretrainedConfig
) -> list[str]:
    """Settings to change for less memory, the largest share first; no size that is smallest."""
    training, fact = config.training, facts[here[0].stage.owner]
    inputs = ["a smaller per_device_train_batch_size"] * (training.per_device_train_batch_size > 1)
    inputs += ["a smaller data.max_length"] * training.reads_text
    inputs += ["a smaller training.max_in_flight"] * any(m.in_flight > 1 for m in here)
    again = all(config.checkpointing(m.index) is True for m in here)
    inputs += ["gradient_checkpointing"] * (not again)
    chunks = isinstance(objective_of(training), ChunkedObjective) and why_not_chunked(model) is None
    chunks &= training.loss_chunk_tokens not in range(_SMALL_CHUNK + 1)
    small = 16 * _SMALL_CHUNK * int(model.get_text_config().vocab_size) if chunks else math.inf
    full, states = config.adapter is None, sum(m.optimizer for m in here)
    in_full = [m for m in here if config.quantization(m.stage.owner) is None]
    shares = {
        " or ".join(inputs): sum(m.activations + m.working for m in here),
        "a smaller training.loss_chunk_tokens": sum(m.logits for m in here if m.logits > small),
        "training.offload_optimizer": states * (fact.host_free is not None),
        "an adapter instead of full training": (sum(m.gradients for m in here) + states) * full,
        'model.quantization "nf4" with an adapter': sum(m.weights for m in in_full)
        * (fact.no_four_bit is None and training.reads_text),
    }
    return sorted((way for way in shares if way and shares[way]), key=lambda way: -shares[way])
