"""`hetero plan --dry-run`: a fleet's profile, estimated from config.json and makers' figures.

Only the model's configuration is read, and no other machine is contacted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from hetero_framework.commands.init import LORA, QLORA, Answers, propose
from hetero_framework.config import AUTO, Config, ModelConfig, apply_override, process_name
from hetero_framework.core import addresses
from hetero_framework.core.devices import open_device, without_four_bit
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import key_owner
from hetero_framework.data.sources import find_sources
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import load_data
from hetero_framework.errors import UserError, attempt
from hetero_framework.extras.planner import FleetProfile, plan_report
from hetero_framework.extras.planner.host_link import HostLink
from hetero_framework.extras.planner.known_devices import (
    KnownDevice,
    describe,
    factor,
    host_memory,
    known_device,
)
from hetero_framework.extras.planner.measuring import ModelCost, PartCost, profile_of
from hetero_framework.extras.planner.plan_report import Wishes
from hetero_framework.extras.planner.work import ModelWork, PartWork, model_work
from hetero_framework.log import at_work
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.files.quantization import check_devices, stored_quantization
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import StageMemory
from hetero_framework.units import bit_rate, share, size

DEFAULT_BANDWIDTH = "1Gbit/s"
_LINK_SHARE = 0.94  # of the line's rate: the headers of Ethernet, IP and TCP take the rest
_LATENCY_S = 3e-4
_COUNTED_BYTES = 64 << 20  # most training data that is tokenised: a few seconds
_NO_EVALUATION = {"eval_strategy": None, "eval_steps": None, "eval_on_start": False}
_RATE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(bit/s|bps|b/s)", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@at_work("estimating memory and time")
def estimate_fleet(
    config: Config, devices: Sequence[str], bandwidths: Sequence[str], excluded: Sequence[str] = ()
) -> tuple[FleetProfile, dict[str, Any]]:
    """The estimated profile of the machines of `config`, and as JSON types its assumptions and how
    far it may be off. `devices` are as in "1=RTX 3090". `bandwidths` are as in "1Gbit/s" for all
    processes and "2=100Mbit/s" for one. A worker in `excluded` needs no device. Raises UserError
    for wrong options, and what `ModelSource` and `model_work` raise."""
    config.require("model")
    for name in excluded:
        config.worker(name)
    ids = ["local", *(w.id for w in config.workers if str(w.id) not in excluded)]
    needed = [text for text in devices if text.partition("=")[0] not in excluded]
    known, rates = _devices(config, ids, needed), _rates(ids, bandwidths)
    source = ModelSource.of(config)
    model = source.config
    # The plan in the file does not count: any of these processes may hold layers.
    fleet = config.with_changes(shard_plan=AUTO)
    check_devices(fleet, model, {id: _no_four_bit(known[id]) for id in ids})
    with _one_thread():
        works = config.per_quantization(ids, lambda id: model_work(fleet.held_by(id), model))
    profile = profile_of(
        config,
        {id: works[id].memory for id in ids},
        {id: _cost(works[id], known[id]) for id in ids},
        {id: known[id].usable_bytes for id in ids},
        _links(config, ids, rates),
        {id: (d.usable_host_bytes, _link(d)) for id, d in known.items() if d.host_bytes},
    )
    about = _about(known, rates, works["local"])
    about["assumed"] += source.stored_lines()
    if not all(part.counted for part in works["local"].memory):
        about["assumed"].append("what layers store of a micro-batch is unknown and left out")
    job = _job(config, model, ids)
    if hasattr(model.get_text_config(), "num_attention_heads"):
        job["decoding"] = {str(id): _decoding(works[id], known[id], model, job) for id in ids}
    return profile, {**about, "job": job}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread in the block: on tiny tensors others would wait, and cost as much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _link(device: KnownDevice) -> HostLink:
    return HostLink(device.host_link, device.host_link, 1.0, host_memory()["copy_slowdown"])


def _no_four_bit(device: KnownDevice) -> str | None:
    return without_four_bit("mps") if device.kind == "apple" else None


def _job(config: Config, model: PretrainedConfig, ids: Sequence[WorkerId]) -> dict[str, Any]:
    """Facts of the job: trained weights, sizes of micro-batches, and `epoch_tokens` if the data are
    here."""
    assert config.model is not None
    training, adapter, dtype = config.training, config.adapter, config.model.dtype
    known = str(model.dtype or "float32").removeprefix("torch.") if dtype == "auto" else dtype
    stored = stored_quantization(model) or known
    return {
        "adapter": None if adapter is None else {"r": adapter.r, "modules": adapter.target_modules},
        "weights": {str(id): config.quantization(id) or stored for id in ids},
        "rows": training.per_device_train_batch_size,
        "max_length": config.row_tokens,
        "micro_batches": training.gradient_accumulation_steps,
        "epoch_tokens": _epoch_tokens(config),
    }


def _epoch_tokens(config: Config) -> int | None:
    """Tokens of the training data, if tokenizer and small data files are here; else None."""
    data, model = config.data, config.model
    name = (model.tokenizer or model.name_or_path) if model is not None else None
    if data is None or data.streaming or name is None or not config.path(name).is_dir():
        return None
    try:
        specs = [part.paths for part in data.parts]
        found = [source for spec in specs for source in find_sources(spec, config.base_dir)]
        paths = [source.path for source in found]
        if any(path is None or path.stat().st_size > _COUNTED_BYTES for path in paths):
            return None
        only_train = config.with_changes(data={"eval": None}, training=_NO_EVALUATION)
        return load_data(only_train, load_tokenizer(only_train)).examples.tokens
    except UserError:
        return None  # a plan needs no data


def paper_config(
    model: str, devices: Sequence[str], settings: Sequence[str], adapter: str | None = None
) -> Config:
    """The proposal of `hetero init` for a model here and on the workers of `devices`. Machines that
    lack 4 bits hold a quantised model in full precision. Raises as `estimate_fleet` does."""
    named = {text.partition("=")[0]: text.partition("=")[2] for text in devices}
    ids = [owner for owner in named if owner != "local"]
    loaded = ModelSource(ModelConfig(name_or_path=model), Path.cwd()).config
    answers = Answers(model, [f"worker-{k}" for k, _ in enumerate(ids)], adapter=adapter)
    layers = introspect(loaded).num_layers
    raw = propose(answers, layers, hostname=None, own_address="127.0.0.1")
    names = {k + 1: int(id) if id.isdecimal() else id for k, id in enumerate(ids)}
    for entry in (*raw["workers"], *raw["shard_plan"][1:]):
        entry["id"] = names[entry["id"]]
    if adapter == "qlora":
        machines = {"local": raw["coordinator"], **{str(w["id"]): w for w in raw["workers"]}}
        for owner, text in named.items():
            if _no_four_bit(_named(f"{owner}={text}", text)) is not None:
                machines[owner]["quantization"] = "none"
    for setting in settings:
        apply_override(raw, setting)
    if isinstance(data := raw.get("data"), dict):  # only its length counts
        data.setdefault("train", "train.jsonl")
    return Config.from_dict(raw, name="--model and --device")


def other_job(
    config: Config, adapter: str | None, *, max_length: int | None, rows: int | None
) -> Config:
    """The configuration with another adapter ("lora", "qlora", "none"), `max_length` or `rows` per
    micro-batch, as far as they are given. Raises ConfigError."""
    config.require("model")
    changes: dict[str, Any] = {}
    if adapter is not None:
        changes["adapter"] = None if adapter == "none" else (config.adapter or LORA)
        changes["model"] = dict(QLORA) if adapter == "qlora" else {"quantization": None}
    if max_length is not None:
        data = {"max_length": max_length}
        changes["data"] = data if config.data is not None else {"train": "train.jsonl", **data}
    if rows is not None:
        changes["training"] = {"per_device_train_batch_size": rows}
    return config.with_changes(**changes)


def dry_run(config: Config) -> str:
    """Lines on the plan of a run, its memory, and an estimate of its time. A plan that is left to
    the run is made here. Raises as `estimate_fleet`, `make_plan` and `judge_plan` do."""
    profile, about = estimate_fleet(config, (), ())
    if config.is_planned:
        result = plan_report.judge_plan(profile, Path(), Wishes(), config.to_dict())
    else:
        result = plan_report.make_plan(profile, Wishes())
    about["pace"] = pace(about["job"], result.predicted_step_s)
    return plan_report.text({**plan_report.described(result), "estimate": about})


def pace(job: Mapping[str, Any], step_s: float) -> dict[str, float]:
    """Tokens per second of a step with full rows, and the hours for the tokens of the data, or for
    a million tokens if their number is unknown."""
    tokens = job["rows"] * job["max_length"] * job["micro_batches"]
    per_s = tokens / step_s if step_s > 0 else math.inf
    whole = job["epoch_tokens"] or 1_000_000
    return {"tokens_per_s": per_s, "tokens": whole, "hours": whole / per_s / 3600}


def _decoding(
    work: ModelWork, device: KnownDevice, model: PretrainedConfig, job: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds of the next tokens of a group, which is a micro-batch of texts, in a layer and in the
    head. `cache_bytes` is what a layer keeps of the group in the end."""
    share_of_tokens = 1 / job["max_length"]

    def seconds(piece: PartWork, memory: StageMemory) -> float:
        flops = piece.forward_flops * share_of_tokens
        given = flops, memory.weights, piece.unpacked
        return device.seconds(*given, half=work.half, width=work.width, tensors=piece.tensors)

    text = model.get_text_config()
    heads = text.num_attention_heads
    kept = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or work.width // heads
    numbers = 2 * kept * width * job["rows"] * job["max_length"]
    return {
        "layer_s": seconds(work.layers[0], work.memory[1]),
        "head_s": seconds(work.head, work.memory[-1]),
        "cache_bytes": numbers * getattr(torch, work.dtype).itemsize,
    }


def rollouts(job: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """A step of GRPO under a plan: its micro-batches are groups of texts, which are sampled up to
    max_length and then trained on. Tokens per second of sampling, the seconds of the whole step,
    and the bytes of caches by process. Raises UserError for a model without attention."""
    if "decoding" not in job:
        raise UserError("sampling by a model without attention is not estimated")
    stages, groups = facts["shard_plan"], job["micro_batches"]
    at_once = min(groups, 2 * len(stages))
    times, caches = [], dict.fromkeys((str(entry["id"]) for entry in stages), 0)
    for k, entry in enumerate(stages):
        one, layers = job["decoding"][str(entry["id"])], entry["end"] - entry["start"]
        times.append(layers * one["layer_s"] + one["head_s"] * (k == len(stages) - 1))
        caches[str(entry["id"])] += layers * at_once * one["cache_bytes"]
    hops = [b["latency_s"] + b["activation_s"] / job["max_length"] for b in facts["boundaries"]]
    # A group's next tokens wait for the last ones to come all the way round.
    round_s = sum(times) + sum(hops) + sum(b["latency_s"] for b in facts["boundaries"][:1])
    per_s = job["rows"] / max(*times, *hops, round_s / at_once)
    sampling_s = groups * job["rows"] * job["max_length"] / per_s
    step_s = sampling_s + facts["predicted_step_s"]
    return {"tokens_per_s": per_s, "step_s": step_s, "caches": caches}


def _about(
    known: Mapping[WorkerId, KnownDevice], rates: Mapping[WorkerId, float], work: ModelWork
) -> dict[str, Any]:
    speeds = ", ".join(dict.fromkeys(bit_rate(rate) for rate in rates.values()))
    assumed = [f"networks of {speeds}, {_LATENCY_S * 1e3:g} ms"]
    for name in dict.fromkeys(device.generation for device in known.values()):
        reached = next(d for d in known.values() if d.generation == name).efficiency
        assumed.append(
            f"{name}: at most {share(reached.compute)} of the arithmetic,"
            f" {share(reached.bandwidth)} of the memory's speed,"
            f" {share(reached.usable_memory)} of the memory for layers"
        )
    cards = {id: device for id, device in known.items() if device.host_bytes}
    if cards:
        about = host_memory()
        sizes = ", ".join(
            f"{process_name(id)} {size(device.host_bytes)}" + " (assumed)" * device.host_is_assumed
            for id, device in cards.items()
        )
        links = ", ".join(dict.fromkeys(f"{d.host_link / 1e9:g} GB/s" for d in cards.values()))
        assumed.append(
            f"memory of the machines beside their cards: {sizes}; {about['kept_gib']:g} GiB or"
            f" {share(about['kept_share'])} of it stay for the system; copies at {links}, computing"
            f" {share(about['copy_slowdown'] - 1)} slower meanwhile"
        )
    return {
        "factor": factor(),
        "memory_margin": {
            str(id): device.memory_bytes - device.usable_bytes for id, device in known.items()
        },
        "devices": [
            {
                "id": id,
                "name": device.name,
                "figures": describe(device, half=work.half),
                "network_bytes_per_s": rates[id],
                "source": device.source,
                "efficiency": asdict(device.efficiency),
            }
            for id, device in known.items()
        ],
        "assumed": assumed,
    }


def _devices(
    config: Config, ids: Sequence[WorkerId], options: Sequence[str]
) -> dict[WorkerId, KnownDevice]:
    """The device of each process: as named, else this machine's for processes that run here."""
    named: dict[str, str] = {}
    for option in options:
        owner, _, name = option.partition("=")
        if not name.strip() or owner not in map(str, ids):
            raise UserError(
                f"--device {option} is not of the form ID=NAME",
                hint=f'for example: --device 1="RTX 3090"; IDs are {", ".join(map(str, ids))}',
            )
        named[owner] = name
    known: dict[WorkerId, KnownDevice] = {}
    for id in ids:
        given, machine = named.get(str(id)), config.machine(id)
        is_here = id == "local" or addresses.is_local_address(machine.ip)
        if is_here and given in (None, "cpu"):
            known[id] = _own_device(given or machine.device)
        elif given is not None:
            known[id] = _named(f"{id}={given}", given)
    if missing := [str(id) for id in ids if id not in known]:
        raise UserError(
            f"the device of {' and '.join(f'worker {id}' for id in missing)} is not known",
            hint=f'name it, as in --device {missing[0]}="RTX 3090", or leave the worker out'
            f" with --exclude {missing[0]}",
        )
    return known


def _named(option: str, name: str) -> KnownDevice:
    return _known(name, f"--device {option}")


def _known(name: str, place: str, advice: str = "", **sizes: float) -> KnownDevice:
    device = attempt(lambda: known_device(name, **sizes))
    if isinstance(device, UserError):
        raise UserError(f"{place}: {device.message}", hint=f"{advice}{device.hint}")
    return device


def _own_device(name: str) -> KnownDevice:
    device = open_device(name)
    label, memory = device.label, device.memory().total
    if device.kind == "cpu":
        label += f", {psutil.cpu_count(logical=False) or psutil.cpu_count() or 1} cores"
    advice = "name one that is like it, as in --device local=...; "
    sizes = {"memory_bytes": memory, "host_bytes": psutil.virtual_memory().total}
    return _known(label, f"this machine's {device.name}", advice, **sizes)


def _rates(ids: Sequence[WorkerId], options: Sequence[str]) -> dict[WorkerId, float]:
    """Bytes per second of each process's network."""
    rates = dict.fromkeys(ids, _rate(DEFAULT_BANDWIDTH, DEFAULT_BANDWIDTH))
    for option in sorted(options, key=lambda option: "=" in option):  # a rate for all comes first
        owner, equals, rate = option.rpartition("=")
        owners = [id for id in ids if not equals or str(id) == owner]
        if not owners:
            known = ", ".join(map(str, ids))
            raise UserError(f"--bandwidth {option}: {owner!r} is not a process; there are: {known}")
        rates |= dict.fromkeys(owners, _rate(rate, option))
    return rates


def _rate(text: str, option: str) -> float:
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UserError(
            f"--bandwidth {option} is not a network speed",
            hint="for example: --bandwidth 1Gbit/s, --bandwidth 2=100Mbit/s or --bandwidth 110MB/s",
        )
    per_bit = 1.0 if match[3] == "B/s" else 1 / 8
    return float(match[1]) * _POWERS[match[2].lower()] * per_bit


def _links(
    config: Config, ids: Sequence[WorkerId], rates: Mapping[WorkerId, float]
) -> list[dict[str, Any]]:
    """Links of all pairs, but none between workers if `links` is "relay" or neither can be dialled:
    a worker that dials can be by others of its machine."""

    callers = {worker.id for worker in config.workers if worker.dials}
    return [
        {
            "from": one,
            "to": other,
            "bytes_per_s": _LINK_SHARE * min(rates[one], rates[other]),
            "latency_s": _LATENCY_S,
        }
        for one, other in itertools.permutations(ids, 2)
        if "local" in (one, other)
        or (
            config.links != "relay"
            and (key_owner(one) == key_owner(other) or not {one, other} <= callers)
        )
    ]


def _cost(work: ModelWork, device: KnownDevice) -> ModelCost:
    """The estimated costs of the model's parts on a device."""

    def part(piece: PartWork, kept: int = 0, again: int = 0) -> PartCost:
        def seconds(flops: float, nbytes: float) -> float:
            width, tensors, half = work.width, piece.tensors, work.half
            return device.seconds(
                flops, nbytes, piece.unpacked, half=half, width=width, tensors=tensors
            )

        forward_s = seconds(piece.forward_flops, piece.forward_bytes)
        backward = piece.backward_flops, piece.backward_bytes
        backward_s = seconds(*backward) if any(backward) else 0.0
        return PartCost(forward_s, backward_s, forward_s if backward_s else 0.0, kept, again)

    layers = {
        k: part(layer, work.memory[1 + k].per_micro_batch, work.recomputing[1 + k].per_micro_batch)
        for k, layer in enumerate(work.layers)
    }
    hidden_bytes = work.hidden_numbers * getattr(torch, work.dtype).itemsize
    ends = part(work.embedding), part(work.head)
    return ModelCost(ends[0], layers, ends[1], list(layers), hidden_bytes, work.dtype)
