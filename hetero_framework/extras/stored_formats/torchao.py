"""torchao's weights: int8, float8 and int4, as flattened for safetensors.

A weight `x.weight` is stored as `x._weight_qdata`, `_scale` and perhaps `_zero_point`. Scales and
zeros have the axes of the weight, with one number for each block. Numbers minus their zeros are
multiplied in the type of the scales. Int4Tensor has two numbers of 4 bits in a byte, and scales and
zeros [groups, out]. It multiplies in float32 and adds its zeros to the product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import FLOATS, Ends, Form, Layout, Parts


class TorchAo(Form):
    """`quant_method` torchao."""

    ends: ClassVar[Ends] = {
        "values": ("_qdata",),
        "scales": ("_scale", "_scale_and_zero"),
        "zeros": ("_zero_point",),
        "more": ("_act_pre_scale", "_per_tensor_scale"),
    }
    target = ""
    unread = ("_act_quant_scale", "_act_quant_zero_point")
    axes = (2, 3)
    types: Mapping[str, Sequence[str]] = {"zeros": ("I8", *FLOATS)}

    def weights(self, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
        every = super().weights(files)
        self.made = {re.sub(r"\._(\w+)$", r".\1", name): self.made[name] for name in self.made}
        return {name: parts for name, parts in every.items() if "" in parts} | self.made

    def how(self, module: str) -> dict[str, Any] | None:
        """See Form. A stated `quant_type` gives the settings that it has for the module."""
        if (how := super().how(module)) is None or not (stated := how.get("quant_type")):
            return how
        try:
            own = stated["default"]
            while own is not None and own["_type"] in ("FqnToConfig", "ModuleFqnToConfig"):
                data = own["_data"]
                own = _of_module(data.get("fqn_to_config") or data["module_fqn_to_config"], module)
            how = None if own is None else {"_type": own["_type"], "block": _block(own["_data"])}
        except (re.error, TypeError, AttributeError, KeyError) as error:
            raise self.refused("quant_type", "settings of torchao under 'default'") from error
        return how

    def layout(self, parts: Parts) -> Layout:
        shape, scales = parts["values"].get_shape(), parts["scales"].get_shape()
        types = [parts[role].get_dtype() for role in ("values", "scales")]
        if types[0] not in ("I8", "F8_E4M3", "F8_E5M2") or types[1] not in FLOATS:
            raise ValueError(f"{types[0]} with scales in {types[1]} is packed for some device")
        if _is_int4(parts) and types[0] != "I8":
            raise ValueError(f"it is stored as {types[0]}, and its zeros are those of 4 bits in I8")
        if "more" in parts:
            raise ValueError("inputs or scales are scaled by another tensor, which cannot be read")
        if "zeros" in parts and parts["zeros"].get_shape() != scales:
            raise ValueError(f"its scales have the shape {scales}, its zeros another")
        if _is_int4(parts):
            shape, scales = [*shape[:-1], shape[-1] * 2], scales[::-1]
        kind, one = parts["how"].get("_type", ""), [1] * len(shape)
        blocks = one if math.prod(scales) == 1 else scales
        if len(shape) != len(blocks) or any(a % b for a, b in zip(shape, blocks, strict=True)):
            raise ValueError(f"its scales have the shape {scales}, which does not divide {shape}")
        block = [a // b for a, b in zip(shape, blocks, strict=True)]
        stated = parts["how"].get("block") or [-1 if blocks == one else 1] * (len(shape) - 1)
        if any(a != (b if b > 0 else c) for a, b, c in zip(block, stated, shape, strict=False)):
            raise ValueError(f"its scales have the shape {scales}, which does not divide {shape}")
        is_int4 = "Int4Weight" in kind
        if kind and (
            is_int4 != _is_int4(parts) or ("Float8" in kind and not is_int4) == (types[0] == "I8")
        ):
            raise ValueError(f"its type, {types[0]}, is none of its quant_type, {kind}")
        return tuple(shape), {}

    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        values: Tensor = parts["values"][first:last].to(device)
        shape, _ = self.layout(parts)

        def spread(role: str) -> Tensor:
            part: Tensor = parts[role][...].to(device)
            part = part.t() if _is_int4(parts) else part.reshape(part.shape or [1] * len(shape))
            height = shape[0] // part.shape[0]
            part = part[first // height : -(-last // height)].repeat_interleave(height, 0)
            part = part[first % height :][: last - first]
            for axis in range(1, len(shape)):
                part = part.repeat_interleave(shape[axis] // part.shape[axis], axis)
            return part

        scales = spread("scales")
        if _is_int4(parts):
            low = (values << 4) >> 4  # the sign comes in from above
            values = torch.stack((low, values >> 4), -1).flatten(-2)
            return values.float() * scales.float() + spread("zeros").float()
        made = values.to(scales.dtype)
        return (made - spread("zeros").to(made.dtype) if "zeros" in parts else made) * scales


def _is_int4(parts: Parts) -> bool:
    """Whether these are the parts of an Int4Tensor."""
    return "zeros" in parts and parts["zeros"].get_dtype() != "I8"


def _of_module(layers: Mapping[str, Any], module: str) -> Any:
    """What torchao's FqnToConfig has for a module's weight: by its name, else by a pattern."""
    names = (f"{module}.weight", module)
    patterns = [p for p in layers if p.startswith("re:")]
    found = [n for n in names if n in layers]
    found += [p for n in names for p in patterns if re.fullmatch(p[3:], n)]
    return layers.get(found[0] if found else "_default")


def _block(data: Mapping[str, Any]) -> Sequence[int] | None:
    """The rows and columns of a block with one scale, by torchao's settings; -1 stands for all.
    None where the settings do not say it."""
    grain = data.get("weight_granularity") or data.get("granularity") or {}
    grain = grain[-1] if isinstance(grain, list) else grain  # of inputs, then of weights
    more = grain.get("_data") or {}
    if size := more.get("group_size") or data.get("group_size"):
        return [1, size]
    kinds = {"PerTensor": [-1, -1], "PerRow": [1, -1], "PerAxis": [1, -1]}
    return more.get("block_size") or kinds.get(str(grain.get("_type")))
