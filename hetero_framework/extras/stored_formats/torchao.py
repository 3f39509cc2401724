"""torchao's weights: int8, float8 and int4, as flattened for safetensors.

A weight `x.weight` is stored as `x._weight_qdata`, `_scale` and perhaps `_zero_point`. Scales and
zeros have the axes of the weight, each for a block. Those of Int4Tensor, with two numbers of 4 bits
in a byte, are [groups, out], and its zeros are added to the product. Numbers less their zeros are
multiplied in the type of the scales, those of 4 bits in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form


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

    def weights(self, files: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """See StoredFormat."""
        every = super().weights(files)
        self.made = {re.sub(r"\._(\w+)$", r".\1", name): self.made[name] for name in self.made}
        return {name: parts for name, parts in every.items() if "" in parts} | self.made

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        shape, scales = parts["values"].get_shape(), parts["scales"].get_shape()
        types = [parts[role].get_dtype() for role in ("values", "scales")]
        if types[0] not in ("I8", "F8_E4M3", "F8_E5M2") or types[1] not in ("F32", "F16", "BF16"):
            raise ValueError(f"{types[0]} with scales in {types[1]} is packed for some device")
        if "more" in parts:
            raise ValueError("inputs or scales are scaled by another tensor, which cannot be read")
        if "zeros" in parts and parts["zeros"].get_shape() != scales:
            raise ValueError(f"its scales have the shape {scales}, its zeros another")
        if _is_int4(parts):
            shape, scales = [shape[0], shape[1] * 2], scales[::-1]
        if math.prod(scales) != 1 and (
            len(shape) != len(scales) or any(a % b for a, b in zip(shape, scales, strict=True))
        ):
            raise ValueError(f"its scales have the shape {scales}, which does not divide {shape}")
        return tuple(shape)

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form."""
        values: Tensor = parts["values"][first:last].to(device)
        shape = self.shape(parts)

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


def _is_int4(parts: Mapping[str, Any]) -> bool:
    """Whether these are the parts of an Int4Tensor."""
    scales, rows = parts["scales"].get_shape(), parts["values"].get_shape()[0]
    return "zeros" in parts and parts["zeros"].get_dtype() != "I8" and scales[-1:] == [rows]
