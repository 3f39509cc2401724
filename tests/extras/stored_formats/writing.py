"""Writes checkpoints in forms that no library writes on a CPU, by their published formulas.

Each function takes a tensor and returns what a file holds of it, and the weight that this stands
for, which is computed before anything is packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the weight."""


def rewrite(
    dense: Path, folder: Path, settings: dict[str, Any], store: Callable[[str, Tensor], Any]
) -> dict[str, Tensor]:
    """Write the checkpoint `dense` into `folder`, with a `quantization_config` of `settings`.
    `store(name, tensor)` gives a Stored for a tensor, its names whole, or None to leave it. Returns
    the weights that it stands for."""
    folder.mkdir(parents=True)
    stands_for, files = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        if (stored := store(name, tensor)) is None:
            stands_for[name] = files[name] = tensor
        else:
            parts, stands_for[name] = stored
            files |= parts
    files = {name: tensor.contiguous() for name, tensor in files.items()}
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return stands_for


def is_linear(name: str) -> bool:
    """Whether quantisers take the weight of this name."""
    return name.endswith(("proj.weight", "proj_with_mqa.weight"))


def fp8_blocks(tensor: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, factors of their blocks, of which the last may be smaller, and the weight."""
    rows, columns = tensor.shape
    down, across = -(-rows // height), -(-columns // width)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    factors = torch.empty(down, across)
    weight = torch.empty(rows, columns)
    for i in range(down):
        for j in range(across):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            factors[i, j] = tensor[at].abs().max().float() / 448
            values[at] = (tensor[at].float() / factors[i, j]).to(torch.float8_e4m3fn)
            weight[at] = values[at].float() * factors[i, j]
    return values, factors, weight


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [N, ...] as one stream of bits along the first axis, in words [N bits / 32, ...]."""
    shifts = torch.arange(bits).reshape(bits, *[1] * (numbers.dim() - 1))
    stream = ((numbers.to(torch.int64)[:, None] >> shifts) & 1).flatten(0, 1)
    stream = stream.unflatten(0, (-1, 32))
    places = torch.arange(32).reshape(32, *[1] * (numbers.dim() - 1))
    words = (stream << places).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def gptq(
    tensor: Tensor, bits: int, group: int, *, act_order: bool = False, less: int = 1
) -> Stored:
    """GPTQ's tensors of a weight [out, in], rounded to nearest."""
    out, inputs = tensor.shape
    groups = inputs // group
    order = torch.arange(inputs) // group
    if act_order:
        order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    most = (1 << bits) - 1
    w = tensor.t().float()  # [in, out]
    scales = torch.empty(groups, out, dtype=torch.float16)
    zeros = torch.empty(groups, out, dtype=torch.int64)
    for g in range(groups):
        part = w[order == g]
        low, high = part.min(0).values.clamp(max=0), part.max(0).values.clamp(min=0)
        scales[g] = ((high - low) / most).to(torch.float16)
        zeros[g] = (-low / scales[g].float()).round().clamp(1, most)
    numbers = (w / scales.float()[order] + zeros[order]).round().clamp(0, most).to(torch.int64)
    weight = scales[order] * (numbers - zeros[order]).to(torch.float16)
    parts = {
        ".qweight": pack(numbers, bits),
        ".qzeros": pack((zeros - less).t(), bits).t(),
        ".scales": scales,
        ".g_idx": order.to(torch.int32),
    }
    return parts, weight.t()


def awq(tensor: Tensor, group: int) -> Stored:
    """AWQ's tensors ("gemm") of a weight [out, in]."""
    scales = gptq(tensor, 4, group)[0][".scales"]
    order = torch.arange(tensor.shape[1]) // group
    w = tensor.t().float()
    low = torch.stack([w[order == g].min(0).values.clamp(max=0) for g in range(len(scales))])
    zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int64)
    numbers = (w / scales.float()[order] + zeros[order]).round().clamp(0, 15).to(torch.int64)
    weight = (numbers - zeros[order]).to(torch.float16) * scales[order]

    def words(numbers: Tensor) -> Tensor:
        places = [0, 2, 4, 6, 1, 3, 5, 7]
        return pack(numbers.unflatten(1, (-1, 8))[:, :, places].flatten(1).t(), 4).t()

    return {".qweight": words(numbers), ".qzeros": words(zeros), ".scales": scales}, weight.t()


def mxfp4(tensor: Tensor) -> Stored:
    """gpt-oss' tensors of the weights [E, in, out] of all experts."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))  # [E, out, in / 32, 32]
    exponents = (groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1)
    weight = table[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    parts = {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}
    return parts, weight.flatten(-2).transpose(1, 2)


def nvfp4(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ModelOpt's values of a weight [out, in], the scales of its blocks, the scale of these, and
    the weight."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = tensor.float().unflatten(-1, (-1, 16))
    whole = blocks.abs().max() / (6 * 448)
    scales = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factors = scales.float() * whole
    codes = ((blocks / factors[..., None]).abs()[..., None] - table).abs().argmin(-1)
    weight = table[codes] * blocks.sign() * factors[..., None]
    codes = (codes + 8 * (blocks < 0)).flatten(-2)
    values = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return values, scales, whole, weight.flatten(-2)


def int4(tensor: Tensor, group: int) -> Stored:
    """torchao's Int4Tensor of a weight [out, in]."""
    groups = tensor.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low).clamp(min=1e-6) / 15).to(tensor.dtype)
    zeros = (low + scales.float() * 8).to(tensor.dtype)
    numbers = ((groups - low[..., None]) / scales.float()[..., None]).round().clamp(0, 15) - 8
    weight = numbers * scales.float()[..., None] + zeros.float()[..., None]
    numbers = numbers.flatten(-2).to(torch.int8)
    values = (numbers[:, 0::2] & 15) | (numbers[:, 1::2] << 4)
    parts = {"_qdata": values, "_scale": scales.t(), "_zero_point": zeros.t()}
    return parts, weight.flatten(-2)
