"""4-bit and 8-bit frozen weights through bitsandbytes, quantised the same under any cut.

transformers leaves some modules in full precision: the head, tied weights and whatever comes last
in the model. In a middle shard that is one of its projections, so the answer is taken from the
whole model and handed over explicitly.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert

from hetero_framework.core.devices import Device
from hetero_framework.errors import ConfigError, DeviceError
from hetero_framework.models.language import on_meta
from hetero_framework.models.tiny import stock_class
from hetero_framework.models.weights import check_quantizer

Kind = Literal["nf4", "int8"]


def quantization_config(
    kind: Kind | None, model_config: PretrainedConfig, compute_dtype: torch.dtype, device: Device
) -> BitsAndBytesConfig | dict[str, Any] | None:
    """How to hold a model's weights quantised; None for full precision.

    "nf4" is QLoRA's 4-bit NormalFloat with double quantisation (Dettmers et al. 2023), its products
    in `compute_dtype`. "int8" is LLM.int8(). A quantised checkpoint is read with its own settings,
    a dictionary that belongs into `model_config`. Raises as `stored_quantization`, DeviceError
    where bitsandbytes cannot run, ConfigError for a checkpoint quantised otherwise.
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
            f"{device.name} cannot hold quantised weights: {support.reason}",
            hint='use a full-precision model with "model.quantization": null, or move the layers',
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
    """How a checkpoint is quantised: "nf4", "fp4" or "int8"; None for full precision. Raises
    ModelError for methods other than bitsandbytes'."""
    if not (settings := stored_settings(model_config)):
        return None
    check_quantizer(settings, str(model_config.name_or_path))
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8"


def modules_left_alone(model_config: PretrainedConfig) -> list[str]:
    """The modules of the whole model that transformers keeps in full precision by default."""
    return sorted(get_keys_to_not_convert(on_meta(stock_class(model_config), model_config)))


def stored_settings(model_config: PretrainedConfig) -> dict[str, Any]:
    """The checkpoint's `quantization_config` as a dictionary, empty for full precision."""
    stored = getattr(model_config, "quantization_config", None) or {}
    return dict(stored if isinstance(stored, dict) else stored.to_dict())
