"""gpt-oss' experts: 4-bit floating point (E2M1), an exponent of two for each 32 numbers.

A weight of all experts is stored by its output, [E, out, in / 32, 16] bytes, the lower four bits
first; the model holds it by its input, [E, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hetero_framework.extras.stored_formats.form import Ends, Form
from hetero_framework.extras.stored_formats.fp8 import factors, numbers


class Mxfp4(Form):
    """`quant_method` mxfp4."""

    ends: ClassVar[Ends] = {"values": ("_blocks",), "scales": ("_scales",)}
    target = ""

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        stored, scales = parts["values"].get_shape(), parts["scales"].get_shape()
        if len(stored) != 4 or stored[:-1] != scales:
            raise ValueError(f"its shape is {stored}, that of its scales {scales}")
        experts, out, groups, size = stored
        return experts, groups * size * 2, out

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form. Products by powers of two are exact."""
        made = numbers(parts["values"][first:last], device)
        made *= factors(parts["scales"][first:last], device)[..., None]
        return made.flatten(-2).transpose(1, 2)
