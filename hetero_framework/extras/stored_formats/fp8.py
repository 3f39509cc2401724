"""Weights in 8-bit floating point, scaled by tensor, by row, or by blocks of rows and columns.

DeepSeek-V3's blocks are of 128 x 128 ("weight_scale_inv", which is the factor itself; the last
block of a weight may be smaller), FBGEMM's scales are by row, Ministral's by tensor. Experts may be
one weight for all of them. MXFP8 and DeepSeek-V4's experts have exponents of two for blocks of 32
in a row, the latter with two 4-bit numbers (E2M1) in a byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetero_framework.extras.stored_formats.form import Ends, Form

# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PACKED = ("I8", "U8", "F4")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


class Fp8(Form):
    """`quant_method` fp8, mxfp8 and fbgemm_fp8."""

    ends: ClassVar[Ends] = {"values": ("",), "scales": ("_scale_inv", "_scale")}
    unread = ("activation_scale", "input_scale", "input_scale_ub", "k_scale", "v_scale")

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        self.block: tuple[int, int] | None = None
        if given := settings.get("weight_block_size"):
            rows, columns = given if isinstance(given, list) and len(given) == 2 else (0, 0)
            if not (isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0):
                raise self.refused("weight_block_size", "two numbers above 0")
            self.block = rows, columns

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        if (stored := parts["values"].get_dtype()) not in (*_EIGHT_BITS, *_PACKED):
            raise ValueError(f"it is stored as {stored}, and has scales")
        sizes = values_shape(parts["values"])
        _grid(tuple(sizes), tuple(parts["scales"].get_shape()), self.block)
        return sizes

    def rows(self, parts: Mapping[str, Any], first: int, last: int, device: torch.device) -> Tensor:
        """See Form. The product is in float32, as the library's own."""
        values = numbers(parts["values"][first:last], device)
        shape = self.shape(parts)
        scales = factors(parts["scales"][...], device)
        if "global" in parts:
            scales = scales * factors(parts["global"][...], device)
        height, width, grid = _grid(shape, tuple(scales.shape), self.block)
        scales = scales.reshape(grid)
        if len(shape) > 2:  # of many experts: the first axis counts these
            for k, expert in enumerate(range(first, last)):
                _scale(values[k], scales[expert if len(scales) > 1 else 0], 0, height, width)
        else:
            _scale(values, scales[0], first, height, width)
        return values


class ModelOpt(Fp8):
    """`quant_method` modelopt: FP8, and NVFP4, where one scale of the tensor scales those of the
    blocks of 16 first."""

    ends: ClassVar[Ends] = {"values": ("",), "scales": ("_scale",), "global": ("_scale_2",)}

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        known = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")
        if settings.get("quant_algo") not in known:
            raise self.refused("quant_algo", ", ".join(known))

    def shape(self, parts: Mapping[str, Any]) -> tuple[int, ...]:
        """See Form."""
        if "global" in parts and math.prod(size := parts["global"].get_shape()) != 1:
            raise ValueError(f"the scale of its scales has the shape {size}")
        if "global" not in parts and parts["values"].get_dtype() in _PACKED:
            raise ValueError("its scales have no scale (weight_scale_2)")
        return super().shape(parts)


def values_shape(values: Any) -> tuple[int, ...]:
    """The shape of a weight, by an unread slice of its values."""
    *rows, columns = values.get_shape()
    return (*rows, columns * 2 if values.get_dtype() in _PACKED else columns)


def numbers(values: Tensor, device: torch.device) -> Tensor:
    """Values without their scales, in float32; of packed ones the low four bits come first."""
    values = values.to(device)
    if values.dtype == torch.float8_e4m3fn and device.type == "cpu":
        return _wide(values)
    if str(values.dtype) not in ("torch.int8", "torch.uint8", "torch.float4_e2m1fn_x2"):
        return values.to(torch.float32)
    table, codes = torch.tensor(E2M1, device=device), torch.arange(256, device=device)
    pairs = torch.stack((table[codes & 15], table[codes >> 4]), -1)
    return nn.functional.embedding(values.view(torch.uint8).to(torch.int32), pairs).flatten(-2)


def _wide(values: Tensor) -> Tensor:
    """Numbers of E4M3 in float32, at several times the speed of torch's conversion: the bits of
    exponent and mantissa are moved to their places, and the bias of the exponent made up for."""
    codes = values.view(torch.int8)
    if len(codes) == 0 or int((codes & 127).max()) == 127:  # NaN, which has no such bits
        return values.to(torch.float32)
    moved = (
        codes.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    )  # the sign and 7 bits
    return moved.view(torch.float32).mul_(2.0**120)


def factors(scales: Tensor, device: torch.device) -> Tensor:
    """Scales in float32; bytes are exponents of two (E8M0)."""
    scales = scales.to(device)
    if scales.dtype == torch.uint8:
        return (scales.to(torch.float32) - 127).exp2()
    return scales.to(torch.float32)


def _grid(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int, tuple[int, int, int]]:
    """Rows and columns of a block, and the shape of the scales by expert, row and column. Raises
    ValueError for scales that do not belong to these values."""
    rows, columns = shape[-2:]
    experts = math.prod(shape[:-2])
    count = math.prod(scales)
    if count in (1, experts):
        return rows, columns, (count, 1, 1)
    if count == experts * rows:
        return 1, columns, (experts, rows, 1)
    down, across = scales[-2:] if len(scales) > 1 else (0, 0)
    if count == experts * down * across and down and across:
        if block is not None and (-(-rows // block[0]), -(-columns // block[1])) == (down, across):
            return *block, (experts, down, across)
        if rows % down == 0 and columns % across == 0:
            return rows // down, columns // across, (experts, down, across)
    raise ValueError(
        f"its scales have the shape {[*scales]}, which does not divide {[*shape]}"
        + (f" into blocks of {block[0]} x {block[1]}" if block else "")
    )


def _scale(values: Tensor, scales: Tensor, first: int, height: int, width: int) -> None:
    """Multiply rows of a weight, of which `first` is the first, by the scales of its blocks."""
    last, columns = first + len(values), values.shape[1]
    scales = scales[first // height : -(-last // height)]
    if width < columns:
        scales = scales.repeat_interleave(width, 1)[:, :columns]
    if height == 1:
        values *= scales
        return
    for k, row in enumerate(scales, first // height):
        values[max(k * height - first, 0) : (k + 1) * height - first] *= row
