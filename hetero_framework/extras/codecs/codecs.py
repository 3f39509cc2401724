"""The codecs of `wire`: bfloat16, and int8 with a scale for each block.

An Intel GPU may round a scale's reciprocal differently: int8 may differ there in a last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hetero_framework.core.codecs import Codec, Layout, dtype_text
from hetero_framework.core.devices import Support

BLOCK = 64
_LARGEST = 127  # the largest int8 value; -128 is not used, so that both signs reach equally far
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # its reciprocal is finite
# Elements in one run. On a CPU two float32 scratch buffers of this size stay in the cache, and
# smaller runs take Python's lock more often. Elsewhere the size only bounds the scratch memory.
_CPU_RUN = 2**17
_DEVICE_RUN = 2**24


class BFloat16(Codec):
    """Rounds float32 to bfloat16: 8 significant bits, the same range. Below 1.2e-38 the error is up
    to 1e-40. bfloat16 tensors arrive unchanged."""

    name = "bf16"
    error = (
        "Every float32 value arrives within 1/256 of itself, magnitudes above 3.39e38 as infinity."
    )

    def supports(self, dtype: torch.dtype) -> Support:
        if dtype == torch.float32:
            return Support(True, "float32 travels as bfloat16")
        if dtype == torch.bfloat16:
            return Support(True, "bfloat16 travels as it is")
        return Support(
            False, f"{dtype_text(dtype)} would lose precision and hardly a byte; use none or int8"
        )

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        return ((torch.bfloat16, tuple(shape)),)

    def _encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(torch.bfloat16)]

    def _decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return parts[0].to(dtype)


class Int8(Codec):
    """Blocks of values along the flattened tensor, each with its own scale.

    value = q * scale with scale = bfloat16(amax / 127) and q = round(value / scale), ties to even.
    The parts are q ([N] int8) and the scales ([ceil(N / block)] bfloat16); the last block may be
    short. |q| needs no clamp: bfloat16 rounds the scale down by 1/257 at most, and amax / scale <=
    127 * 257/256 < 127.5 still rounds to 127. At both ends of the range the stated error does not
    hold: a step is never smaller than 1.2e-38, and magnitudes above 0.99 of the type's largest
    number may become infinite, which the check for finite gradients notices.
    """

    name = "int8"

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.error = (
            f"Every value arrives within 1/252 of the largest magnitude in its block of {block},"
            " rounded to its type; zeros are exact; a NaN or an infinity leaves no finite value in"
            " its block."
        )

    def supports(self, dtype: torch.dtype) -> Support:
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return Support(
                True, f"{dtype_text(dtype)} travels as int8 with a scale per {self.block} values"
            )
        return Support(False, f"{dtype_text(dtype)} tensors cannot travel as int8; use none")

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        count = math.prod(shape)
        return (torch.int8, (count,)), (torch.bfloat16, (-(-count // self.block),))

    def _encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = tensor.view(-1)
        parts = [
            torch.empty(size, dtype=kind, device=tensor.device)
            for kind, size in self.layout(tensor.shape, tensor.dtype)
        ]
        magnitudes, widened = _scratch(flat), _scratch(flat)
        for values, quantized, scales in _block_runs(self.block, flat, *parts):
            room = magnitudes[: values.numel()].view_as(values)
            if values.dtype != torch.float32:
                values = widened[: values.numel()].view_as(values).copy_(values)
            step = torch.abs(values, out=room).amax(-1, keepdim=True)
            # Times the reciprocal: devices differ in how they divide by a number. NaN and infinity
            # pass through the scale, and spoil the whole block when it is decoded.
            scales.copy_(step.mul_(1 / _LARGEST).clamp_min_(_SMALLEST_SCALE))
            step.copy_(scales).reciprocal_()
            quantized.copy_(torch.mul(values, step, out=room).round_())
        return parts

    def _decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        decoded = torch.empty(shape, dtype=dtype, device=parts[0].device)
        flat = decoded.view(-1)
        scratch = _scratch(flat)
        for values, quantized, scales in _block_runs(self.block, flat, *parts):
            if dtype == torch.float32:
                values.copy_(quantized).mul_(scales)
            else:
                room = scratch[: values.numel()].view_as(values)
                values.copy_(room.copy_(quantized).mul_(scales))
        return decoded


def _block_runs(
    block: int, flat: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of the three tensors run by run: [n, block] twice, [n, 1]. A short block is last."""
    whole = flat.numel() // block
    step = (_CPU_RUN if flat.device.type == "cpu" else _DEVICE_RUN) // block
    for first in range(0, whole, step):
        last = min(first + step, whole)
        inside = slice(first * block, last * block)
        yield (
            flat[inside].view(-1, block),
            quantized[inside].view(-1, block),
            scales[first:last].view(-1, 1),
        )
    if flat.numel() % block:
        rest = slice(whole * block, None)
        yield flat[rest].view(1, -1), quantized[rest].view(1, -1), scales[whole:].view(1, 1)


def _scratch(flat: torch.Tensor) -> torch.Tensor:
    """Float32 room for each run of `flat` in turn: fresh memory costs a page fault per 4 KiB."""
    run = _CPU_RUN if flat.device.type == "cpu" else _DEVICE_RUN
    return torch.empty(min(flat.numel(), run), device=flat.device)


BF16, INT8 = BFloat16(), Int8()
