"""gpt-oss' experts: 4-bit floating point (E2M1), with an exponent of two for each 32 numbers.

A weight of all experts is stored by its output, [E, out, in / 32, 16] bytes, the lower four bits
first; the model holds it by its input, [E, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form, Layout, Parts
from hetero_framework.extras.stored_formats.fp8 import factors, numbers


class Mxfp4(Form):
    """`quant_method` mxfp4."""

    ends: ClassVar[Ends] = {"values": ("_blocks",), "scales": ("_scales",)}
    target = ""
    types: Mapping[str, Sequence[str]] = {"values": ("U8",), "scales": ("U8",)}
    axes = (4,)

    def layout(self, parts: Parts) -> Layout:
        """See Form."""
        *sizes, each = parts["values"].get_shape()
        scales = parts["scales"].get_shape()
        if each != 16 or sizes != scales:
            raise ValueError(f"its shape is {[*sizes, each]}, that of its scales {scales}")
        experts, out, groups = sizes
        return (experts, groups * 32, out), {}

    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        """See Form. Products by powers of two are exact."""
        made = numbers(parts["values"][first:last], device)
        made *= factors(parts["scales"][first:last], device)[..., None]
        return made.flatten(-2).transpose(1, 2)
