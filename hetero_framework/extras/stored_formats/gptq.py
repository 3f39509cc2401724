"""GPTQ: whole numbers of 2, 3, 4 or 8 bits, with a scale and a zero for each group of inputs.

Packed along the inputs into 32-bit words: qweight [in x bits / 32, out]; qzeros
[groups, out x bits / 32]; scales [groups, out]. g_idx has the group of each input, which are not in
a row where the most important ones were quantised first (`desc_act`). A weight is
scale x (number - zero), in the type of the scales. The format "gptq" stores each zero less one,
"gptq_v2" as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form, unpacked

_FORMATS = {"gptq": 1, "gptq_v2": 0}


class Gptq(Form):
    """`quant_method` gptq."""

    ends: ClassVar[Ends] = {
        "values": ("qweight",),
        "scales": ("scales",),
        "zeros": ("qzeros",),
        "order": ("g_idx",),
    }
    target = "weight"
    step = 32

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        if settings.get("checkpoint_format", "gptq") not in _FORMATS:
            raise self.refused("checkpoint_format", " and ".join(_FORMATS))
        if settings.get("bits") not in (2, 3, 4, 8):
            raise self.refused("bits", "2, 3, 4 and 8")
        self.bits = int(settings["bits"])
        self.less = _FORMATS[settings.get("checkpoint_format") or "gptq"]

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        words, out = parts["values"].get_shape()
        inputs = words * 32 // self.bits
        groups = parts["scales"].get_shape()
        if "zeros" not in parts:
            raise ValueError("it has no zeros (qzeros)")
        zeros = parts["zeros"].get_shape()
        if groups[1:] != [out] or zeros != [groups[0], out * self.bits // 32]:
            raise ValueError(
                f"its shape is {[words, out]}, that of its scales {groups}, of its zeros {zeros},"
                f" which do not belong together at {self.bits} bits"
            )
        order = parts["order"].get_shape() if "order" in parts else [inputs]
        if order != [inputs] or ("order" not in parts and inputs % groups[0]):
            raise ValueError(f"its {inputs} inputs do not divide into {groups[0]} groups")
        if "order" in parts:
            of = parts["order"][...]
            if wrong := int(((of < 0) | (of >= groups[0])).sum()):
                raise ValueError(f"{wrong} inputs (g_idx) are in none of its {groups[0]} groups")
        return out, inputs

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form."""
        words = slice(first * self.bits // 32, -(-last * self.bits // 32))
        values = unpacked(parts["values"][:, first:last].to(device), self.bits)
        scales = parts["scales"][:, first:last].to(device)
        zeros, less = parts["zeros"][:, words].to(device), self.less
        if self.bits != 3:  # taken from whole words: a zero of 0 borrowed from the one above it
            zeros, less = zeros + less * sum(1 << k for k in range(0, 32, self.bits)), 0
        zeros = unpacked(zeros.t(), self.bits).t()[:, : last - first].to(torch.int16) + less
        zeros &= (1 << self.bits) - 1
        inputs = len(values)
        if "order" in parts:
            order = parts["order"][...].to(device).long()
        else:
            order = torch.arange(inputs, device=device) // (inputs // len(scales))
        made: Tensor = (values.to(torch.int16) - zeros[order]).to(scales.dtype) * scales[order]
        return made.t()
