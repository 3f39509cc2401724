"""Weights in floating point of 8 and 4 bits, scaled by tensor, by row, or by blocks.

DeepSeek-V3 has blocks of 128 x 128 with "weight_scale_inv", which is the factor itself; the last
block of a weight may be smaller. FBGEMM's scales are by row, Ministral's by tensor. One weight may
hold all experts. MXFP8 and DeepSeek-V4's experts have exponents of two for blocks of 32 in a row.
DeepSeek-V4's experts have two 4-bit numbers (E2M1) in a byte.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetero_framework.extras.stored_formats.form import FLOATS, Ends, Form, Layout, Parts

# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PACKED = ("I8", "U8", "F4")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_DEFAULT = (128, 128)  # of the library, for blocks whose size is not stated
_MX = (1, 32)


class Fp8(Form):
    """`quant_method` fp8, mxfp8 and fbgemm_fp8."""

    ends: ClassVar[Ends] = {"values": ("",), "scales": ("_scale_inv", "_scale")}
    axes = (2, 3)
    known: ClassVar[Mapping[str, Sequence[object]]] = {
        "modules_to_not_convert|ignored_layers|ignore|exclude_modules": (),
        "scale_fmt": (None, "float", "ue8m0"),
        "expert_dtype": (None, "fp8", "fp4"),
        "fmt": (None, "e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"),
    }
    unread = ("activation_scale", "input_scale", "input_scale_ub", "k_scale", "v_scale")

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        self.method, said = settings.get("quant_method"), self.settings.get
        self.block = _MX if self.method == "mxfp8" else None
        if given := settings.get("weight_block_size"):
            rows, columns = given if isinstance(given, list) and len(given) == 2 else (0, 0)
            if not (type(rows) is type(columns) is int and min(rows, columns) > 0):
                raise self.refused("weight_block_size", "two numbers above 0")
            self.block = rows, columns
        values = [t for t in _EIGHT_BITS if t[3:].lower() in str(said("fmt") or t).lower()]
        has_four = self.method == "fp8" and said("expert_dtype") != "fp8"
        four = ("I8", "F4") if has_four else ()
        is_float = said("scale_fmt") == "float" or self.method == "fbgemm_fp8"
        scales = FLOATS if is_float else (*FLOATS, "U8", "F8_E8M0")
        self.types = {"values": (*values, *four), "scales": scales}

    def blocks(self, stored: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The sizes (rows, columns) that blocks with one scale may have, in a weight of this shape
        whose values have the type `stored`."""
        if self.method == "fbgemm_fp8":  # by output, the last axis of experts in one weight
            return [(1, shape[-1]), *([(shape[-2], 1)] if len(shape) > 2 else [])]
        if stored in _PACKED or self.block is not None:
            return [_MX if stored in _PACKED else self.block or _MX]
        is_stated = "weight_block_size" in self.settings  # even as null
        return [shape[-2:], (1, shape[-1]), *([] if is_stated else [_DEFAULT])]

    def layout(self, parts: Parts) -> Layout:
        self.grid(parts)
        return values_shape(parts["values"]), {}

    def grid(self, parts: Parts) -> tuple[int, int, tuple[int, int, int]]:
        """Rows and columns of a block, and the shape of scales by expert, row and column. Raises
        ValueError for scales whose shape fits none of the `blocks`, or two of them."""
        *experts, rows, columns = shape = values_shape(parts["values"])
        blocks = self.blocks(parts["values"].get_dtype(), shape)
        scales, found = _bare(parts["scales"].get_shape()), {}
        for height, width in blocks:
            down, across = -(-rows // height), -(-columns // width)
            # One number may be for all experts; scales by column may be [experts, columns, 1].
            alone = down == across == 1 and not scales
            last = [*experts, columns] if experts and width == 1 else [*experts, down, across]
            if alone or scales in (_bare([*experts, down, across]), _bare(last)):
                found[1 if alone else math.prod(experts), down, across] = height, width
        if len(found) != 1:
            listed = " or ".join(f"{height} x {width}" for height, width in blocks)
            raise ValueError(
                f"its scales have the shape {parts['scales'].get_shape()}, which"
                f" {'may' if found else 'does not'} divide {[*shape]} into"
                f" blocks of {listed}"
            )
        ((grid, (height, width)),) = found.items()
        return height, width, grid

    def rows(self, parts: Parts, first: int, last: int, device: torch.device) -> Tensor:
        """See Form. The product is in float32, as in the library."""
        values = numbers(parts["values"][first:last], device)
        height, width, grid = self.grid(parts)
        scales = factors(parts["scales"][...], device)
        if "global" in parts:
            scales = scales * factors(parts["global"][...], device)
        scales = scales.reshape(grid)
        if values.dim() > 2:  # of many experts: the first axis counts these
            for k, expert in enumerate(range(first, last)):
                _scale(values[k], scales[expert if len(scales) > 1 else 0], 0, height, width)
        else:
            _scale(values, scales[0], first, height, width)
        return values


class ModelOpt(Fp8):
    """`quant_method` modelopt: FP8 and NVFP4. In NVFP4 one scale of the tensor first multiplies the
    scales of the blocks of 16."""

    ends: ClassVar[Ends] = {"values": ("",), "scales": ("_scale",), "global": ("_scale_2",)}
    known: ClassVar[Mapping[str, Sequence[object]]] = {
        "modules_to_not_convert|ignore|exclude_modules": (),
        "quant_algo": ("fp8", "fp8_per_channel_per_token", "nvfp4"),
        "group_size": (None, 16),
        "weight_block_size": (None,),
    }

    def __init__(self, settings: dict[str, Any], source: str) -> None:
        super().__init__(settings, source)
        self.algorithm = self.settings["quant_algo"].lower()
        self.types = {"values": ("F8_E4M3",), "scales": FLOATS, "global": FLOATS}
        if self.algorithm == "nvfp4":
            self.types |= {"values": ("U8",), "scales": ("F8_E4M3",)}
        self._check_groups()
        left = self.settings["modules_to_not_convert"] or []
        self.settings["modules_to_not_convert"] = [fnmatch.translate(str(p)) for p in left]

    def _check_groups(self) -> None:
        """Raise ModelError for `config_groups` that say another form than `quant_algo`."""
        bits, size = (4, 16) if self.algorithm == "nvfp4" else (8, None)
        wanted = {"num_bits": (bits,), "type": ("float",), "group_size": (size,)}
        try:
            groups = (self.settings.get("config_groups") or {}).values()
            for how in [group["weights"] for group in groups]:
                for name, values in wanted.items():
                    if how.get(name) is not None and how[name] not in values:
                        raise self.refused(f"config_groups with {name}", str(values[0]), how[name])
        except (AttributeError, KeyError, TypeError) as error:
            raise self.refused("config_groups", "groups with weights") from error

    def blocks(self, stored: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [{"fp8": shape[-2:], "nvfp4": (1, 16)}.get(self.algorithm, (1, shape[-1]))]

    def layout(self, parts: Parts) -> Layout:
        sizes = [parts["global"].get_shape()] if "global" in parts else []
        if len(sizes) != (self.algorithm == "nvfp4") or any(map(_bare, sizes)):
            raise ValueError(f"scales of its scales have the shapes {sizes} in {self.algorithm}")
        return super().layout(parts)


class Mxfp4(Form):
    """`quant_method` mxfp4: gpt-oss' experts in E2M1, with an exponent of two for each 32 numbers.

    A weight of all experts is stored by its output, [E, out, in / 32, 16] bytes, the lower four
    bits first; the model holds it by its input, [E, in, out].
    """

    ends: ClassVar[Ends] = {"values": ("_blocks",), "scales": ("_scales",)}
    target = ""
    types: Mapping[str, Sequence[str]] = {"values": ("U8",), "scales": ("U8",)}
    axes = (4,)

    def layout(self, parts: Parts) -> Layout:
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


def values_shape(values: Any) -> tuple[int, ...]:
    """The shape of a weight, by an unread slice of its values."""
    *rows, columns = values.get_shape()
    return (*rows, columns * 2 if values.get_dtype() in _PACKED else columns)


def numbers(values: Tensor, device: torch.device) -> Tensor:
    """Values without their scales, in float32. In packed values the low four bits come first."""
    values = values.to(device)
    if values.dtype == torch.float8_e4m3fn and device.type == "cpu":
        return _wide(values)
    if str(values.dtype) not in ("torch.int8", "torch.uint8", "torch.float4_e2m1fn_x2"):
        return values.to(torch.float32)
    table, codes = torch.tensor(E2M1, device=device), torch.arange(256, device=device)
    pairs = torch.stack((table[codes & 15], table[codes >> 4]), -1)
    return nn.functional.embedding(values.view(torch.uint8).to(torch.int32), pairs).flatten(-2)


def _wide(values: Tensor) -> Tensor:
    """E4M3 numbers in float32, several times faster than torch's conversion: the bits of exponent
    and mantissa are moved to their places, and a factor corrects the exponent's bias."""
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


def _bare(shape: Sequence[int]) -> list[int]:
    """A shape without the axes of size 1 at its end."""
    kept = [*shape]
    while kept and kept[-1] == 1:
        kept.pop()
    return kept


def _scale(values: Tensor, scales: Tensor, first: int, height: int, width: int) -> None:
    """Multiply the rows of a weight from row `first` on by the scales of their blocks."""
    last, columns = first + len(values), values.shape[1]
    scales = scales[first // height : -(-last // height)]
    if width < columns:
        scales = scales.repeat_interleave(width, 1)[:, :columns]
    if height == 1:
        values *= scales
        return
    for k, row in enumerate(scales, first // height):
        values[max(k * height - first, 0) : (k + 1) * height - first] *= row
