"""4-bit and 8-bit frozen weights through bitsandbytes, quantised the same under any cut.

transformers leaves some modules in full precision: the head, tied weights and the model's last
module. The last module of a middle shard is one of its projections, so the list is taken from the
whole model and handed over explicitly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert

from hetero_framework.config import Config, Kind, process_name
from hetero_framework.core.devices import Device, open_device, without_four_bit
from hetero_framework.errors import ConfigError, DeviceError
from hetero_framework.models.cut.language import on_meta
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.files.packed import has_four_bits
from hetero_framework.models.files.weights import stored_format

_WITHOUT = (
    'set "quantization": "none" (full precision) in its entry of the configuration, or give its'
    " layers to other machines"
)
_FULL = (
    'take the full-precision model with "model.quantization": "nf4", and set "quantization": "none"'
    " in the entry of such a machine"
)
_WORDS = {"none": "full precision"}


def quantization_config(
    kind: Kind | None, model_config: PretrainedConfig, compute_dtype: torch.dtype, device: Device
) -> BitsAndBytesConfig | dict[str, Any] | None:
    """How to hold a model's weights quantised; None for full precision.

    "nf4" is QLoRA's 4-bit NormalFloat with double quantisation (Dettmers et al. 2023), with
    products in `compute_dtype`. "int8" is LLM.int8(). A quantised checkpoint is read with its own
    settings, a dictionary for `model_config`. Raises DeviceError where bitsandbytes cannot run,
    ConfigError for a checkpoint quantised otherwise.
    """
    stored = stored_quantization(model_config)
    if kind is None and stored is None:
        return None
    if kind is not None and stored not in (None, kind):
        raise ConfigError(
            f"model.quantization is {kind!r}, but the checkpoint is quantised already ({stored})",
            hint="remove model.quantization",
        )
    if not (support := device.four_bit()).ok:
        raise DeviceError(
            f"{device.name} cannot hold quantised weights: {support.reason}", hint=_WITHOUT
        )
    skipped = modules_left_alone(model_config)
    if stored is not None:
        settings = stored_settings(model_config)
        named = settings.get("llm_int8_skip_modules")
        return {**settings, "llm_int8_skip_modules": skipped if named is None else named}
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=skipped,
    )


def stored_quantization(model_config: PretrainedConfig) -> str | None:
    """How bitsandbytes has quantised a checkpoint: "nf4", "fp4" or "int8"; None for weights that
    are full once they are loaded."""
    settings = stored_settings(model_config)
    if not settings or stored_format(settings) is not None:
        return None
    if has_four_bits(settings):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8"


def modules_left_alone(model_config: PretrainedConfig) -> list[str]:
    """The modules of the whole model that transformers keeps in full precision by default."""
    return sorted(get_keys_to_not_convert(on_meta(stock_class(model_config), model_config)))


def stored_settings(model_config: PretrainedConfig) -> dict[str, Any]:
    """The checkpoint's `quantization_config` as a dictionary, empty for full precision."""
    stored = getattr(model_config, "quantization_config", None) or {}
    return dict(stored if isinstance(stored, dict) else stored.to_dict())


def devices_known(config: Config, local: Collection[int | str] = ()) -> dict[int | str, str | None]:
    """For each process, why its device cannot do 4 bits; None if it can, or if that is not known.
    The kind of the device tells; devices of `local` processes, on this machine, are also opened."""
    reasons: dict[int | str, str | None] = {}
    for owner in ["local", *(worker.id for worker in config.planned_workers)]:
        device = config.machine(owner).device
        reasons[owner] = without_four_bit(device.partition(":")[0])
        if owner in local:
            with suppress(DeviceError):  # an absent device is reported elsewhere
                reasons[owner] = open_device(device).no_four_bit
    return reasons


def check_devices(
    config: Config, model: PretrainedConfig, reasons: Mapping[int | str, str | None]
) -> None:
    """Raise ConfigError that names the processes whose device cannot hold their quantised weights,
    or whose kind is not that of a quantised checkpoint. `reasons` says why a device cannot, as far
    as devices are known."""
    stored = stored_quantization(model)
    problems: list[str] = []
    for owner in config.plan.owners if config.is_planned else reasons:
        name, kind = process_name(owner), config.machine(owner).quantization
        if stored is not None and kind not in (None, stored):
            problems.append(f"{name} is to hold {kind!r}, but the checkpoint is stored as {stored}")
        elif (stored or config.quantization(owner)) and (why := reasons.get(owner)) is not None:
            problems.append(f"{name} cannot hold quantised weights: {why}")
    if problems:
        raise ConfigError("\n".join(problems), hint=_FULL if stored else _WITHOUT)


def mixed_lines(config: Config) -> list[str]:
    """A note on layers in different precisions; nothing where all are alike."""
    kinds = config.kinds
    if not isinstance(kinds, dict):
        return []
    held = "; ".join(f"{_WORDS.get(kind, kind)}: {stages}" for kind, stages in kinds.items())
    return [
        f"the precision of frozen weights differs by machine ({held}); the result is that of one"
        " process with these layers in this precision"
    ]
