"""AWQ ("gemm"): numbers of 4 bits, with a scale and a zero for each group of inputs.

Packed along the outputs, eight in a 32-bit word in the order 0 2 4 6 1 3 5 7: qweight
[in, out / 8]; qzeros [groups, out / 8]; scales [groups, out]. A weight is (number - zero) x scale,
in the type of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form, unpacked

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs lies."""


class Awq(Form):
    """`quant_method` awq."""

    ends: ClassVar[Ends] = {"values": ("qweight",), "scales": ("scales",), "zeros": ("qzeros",)}
    target = "weight"
    step = 8

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        if str(settings.get("version", "gemm")).lower() != "gemm":
            raise self.refused("version", "gemm")
        if settings.get("bits", settings.get("w_bit", 4)) != 4:
            raise self.refused("bits", "4")

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        inputs, words = parts["values"].get_shape()
        scales = parts["scales"].get_shape()
        zeros = parts["zeros"].get_shape() if "zeros" in parts else [scales[0], words]
        if scales[1:] != [words * 8] or zeros != [scales[0], words] or inputs % scales[0]:
            raise ValueError(
                f"its shape is {[inputs, words]}, that of its scales {scales}, of its zeros"
                f" {zeros}, which do not belong together"
            )
        return words * 8, inputs

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form."""
        words = slice(first // 8, last // 8)
        values = _outputs(parts["values"][:, words].to(device))
        scales = parts["scales"][:, first:last].to(device)
        group = len(values) // len(scales)
        if "zeros" in parts:
            zeros = _outputs(parts["zeros"][:, words].to(device))
            values = values - zeros.repeat_interleave(group, 0)
        else:
            values = values - 8
        made: Tensor = values.to(scales.dtype) * scales.repeat_interleave(group, 0)
        return made.t()


def _outputs(words: Tensor) -> Tensor:
    """The numbers of words [rows, W], in the order of the outputs: [rows, 8 W]."""
    numbers: Tensor = unpacked(words.t(), 4).unflatten(0, (-1, 8))[:, list(_PLACES)]
    return numbers.flatten(0, 1).t().to(torch.int16)
