"""Weights that bitsandbytes has stored: whether the tensors of one belong together.

bitsandbytes takes the sizes of tensors as given and may read foreign memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_STATE = ".quant_state.bitsandbytes__"
_BYTES = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}
_STATISTICS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB")
Stored = dict[str, tuple[str, list[int]]]


def misfit(slices: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of the first tensor that contradicts another or the `quantization_config`, and a
    description of the fault; None where all fit.

    Args:
        slices: Tensors of safetensors files by their names; only their types, shapes and small
            statistics are read.
        settings: The `quantization_config`.
    """
    expected: Stored = {}
    for name, part in slices.items():
        weight, is_state, kind = name.partition(_STATE)
        if is_state:
            if kind != settings.get("bnb_4bit_quant_type", "fp4") or not has_four_bits(settings):
                return name, "quantization_config has another bnb_4bit_quant_type or load_in_8bit"
            try:
                if part.get_dtype() != "U8":
                    raise TypeError(part.get_dtype())
                state = json.loads(bytes(part[...].tolist()))
                stored = slices[weight].get_dtype() if weight in slices else "U8"
                expected |= _of_four_bits(weight, state, stored)
            except (ValueError, KeyError, TypeError, ArithmeticError) as error:
                return name, f"it holds no state of a weight of 4 bits ({error!r})"
            if state["quant_type"] != kind:
                return name, f"it says {state['quant_type']!r} inside"
        elif (
            part.get_dtype() == "I8" and name.endswith(".weight") and name + ".absmax" not in slices
        ):
            if has_four_bits(settings) or settings.get("llm_int8_has_fp16_weight"):
                return name, "it has 8 bits, and quantization_config says 4 or 16 (has_fp16_weight)"
            module, sizes = name.removesuffix(".weight"), part.get_shape()
            expected.setdefault(name, ("I8", sizes))
            expected.setdefault(f"{module}.SCB", ("F32", sizes[:1]))
    for name, (dtype, shape) in expected.items():
        if name not in slices:
            return name, "it is missing, and other tensors of its weight are there"
        if (has := (slices[name].get_dtype(), slices[name].get_shape())) != (dtype, shape):
            return name, f"it is {has[0]} {has[1]}; {dtype} {shape} belongs to its weight"
        if dtype == "F32" and name.endswith(_STATISTICS) and not slices[name][...].isfinite().all():
            return name, "some of its numbers are infinite or NaN"
    for name, part in slices.items():
        is_packed = name.endswith(".weight") and part.get_dtype() in ("U8", "I8")
        if name not in expected and (is_packed or name.endswith(_STATISTICS)):
            return name, "other tensors of its weight are missing"
    return None


def has_four_bits(settings: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` of bitsandbytes is one of 4 bits."""
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


def contradictory(model: nn.Module) -> str | None:
    """The name of the first weight of a loaded model whose form its module cannot compute with:
    full numbers in a module for packed ones, or packed ones elsewhere. None where all fit."""
    for name, module in model.named_modules():
        if not isinstance(weight := getattr(module, "weight", None), Tensor) or weight.is_meta:
            continue
        state, fits = getattr(weight, "quant_state", None), weight.is_floating_point()
        if (kind := type(module).__name__) == "Linear4bit":
            sizes = [module.out_features, module.in_features]
            fits = state is not None and [*state.shape] == sizes
        elif kind == "Linear8bitLt":
            fits = getattr(weight, "SCB", None) is not None
        if not fits:
            return f"{name}.weight"
    return None


def _of_four_bits(weight: str, state: Mapping[str, Any], stored: str) -> Stored:
    """Types and shapes of the tensors of a weight with this state, whose values have the type
    `stored`."""
    count = math.prod(state["shape"])
    blocks = -(-count // state["blocksize"])
    values = (stored, [-(-count // 2) // _BYTES[stored], 1])
    made = {"": values, ".quant_map": ("F32", [16]), ".absmax": ("F32", [blocks])}
    if "nested_blocksize" in state:
        outer = -(-blocks // state["nested_blocksize"])
        made |= {".absmax": ("U8", [blocks]), ".nested_absmax": ("F32", [outer])}
        made |= {".nested_quant_map": ("F32", [256])}
    return {weight + end: what for end, what in made.items()}
