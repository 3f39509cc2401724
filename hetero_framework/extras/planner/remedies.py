"""Settings with which a plan would fit, where none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from hetero_framework.commands.init import LORA, QLORA
from hetero_framework.config import Config
from hetero_framework.errors import HeteroError
from hetero_framework.extras.planner.explain import Remedy
from hetero_framework.extras.planner.known_devices import usable_host_bytes
from hetero_framework.extras.planner.profile import FleetProfile, bytes_of_parts
from hetero_framework.extras.planner.work import model_work
from hetero_framework.models.cut.shard import load_model_config
from hetero_framework.models.files.quantization import stored_quantization

_SHARES = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8)  # of the length of samples
_LEAST_TOKENS = 64
_HOST_GIB = (32, 64, 128, 256, 512)


def remedies_of(config: Config, profile: FleetProfile) -> Iterator[Remedy]:
    """Changes of the settings of `config`, from cheap to dear; those of one kind from small to
    large. Only sizes that can be set."""

    def of(**sections: Any) -> Callable[[], FleetProfile | None]:
        return partial(_changed, config, profile, sections)

    training, data = config.training, config.data
    rows, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    for fewer in (n for n in range(rows - 1, 0, -1) if rows % n == 0):
        more = steps * rows // fewer
        sizes = {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": more}
        text = " and ".join(f"training.{name} {value}" for name, value in sizes.items())
        yield "batch", text, of(training=sizes)
    length = config.row_tokens
    for part in _SHARES:
        if shorter := int(part * length) // _LEAST_TOKENS * _LEAST_TOKENS:
            source = {} if data else {"train": "train.jsonl"}
            text = f"data.max_length {shorter}"
            yield "max_length", text, of(data={"max_length": shorter, **source})
    cards = any(device.host_to_device_bytes_per_s for device in profile.devices)
    for name in ("offload_optimizer", "activation_offloading") if cards else ():
        if not getattr(training, name):
            yield name, f"training.{name} true", of(training={name: True})
    for gib in _HOST_GIB if cards else ():
        text = f"{gib} GiB of memory in each machine with a card, for offload"
        yield "offload", text, partial(_with_host_memory, profile, usable_host_bytes(gib * 2**30))
    adapter = {} if config.adapter else {"adapter": dict(LORA)}
    if adapter:
        yield "adapter", "a LoRA adapter", of(**adapter)
    if not config.quantizes:
        text = 'model.quantization "nf4"' + " with a LoRA adapter" * bool(adapter)
        yield "quantization", text, of(model=dict(QLORA), **adapter)


def _with_host_memory(profile: FleetProfile, nbytes: float) -> FleetProfile:
    larger = (
        device.model_copy(update={"host_bytes": max(device.host_bytes, nbytes)})
        for device in profile.devices
    )
    return profile.model_copy(update={"devices": tuple(larger)})


def _changed(
    config: Config, profile: FleetProfile, sections: dict[str, Any]
) -> FleetProfile | None:
    """The profile of a changed configuration, with the times of this one."""
    with suppress(HeteroError):
        other = config.with_changes(**sections)
        assert other.model is not None
        model = load_model_config(other.model, other.base_dir)
        if "model" in sections and stored_quantization(model):
            return None
        ids, raw = [device.id for device in profile.devices], profile.to_dict()
        works = other.per_quantization(ids, lambda id: model_work(other.held_by(id), model))
        for device in raw["devices"]:
            work = works[device["id"]]
            one_memory = not device["host_to_device_bytes_per_s"]
            device |= bytes_of_parts(work.memory, one_memory=one_memory)
            again = [part.per_micro_batch for part in work.recomputing[1:-1]]
            device["activation_bytes_recomputed"] = again
            device["reserved_bytes"] = max(part.working for part in work.memory[:-1])
        return FleetProfile.from_dict(raw)
    return None
