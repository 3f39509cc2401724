"""Attention for samples that share a row: each sample by itself, with torch's own kernels.

transformers tells samples of one row apart by their positions. For torch's attention it makes a
mask over the whole row, which then costs as much as one long sample. This attention cuts the row
where positions start at 0 again: it is exact, needs no mask, and costs what the samples cost. Not
every model passes positions to its attention; `packing.py` tries it first.

Shapes: H heads (K of keys and values), T tokens of the row, L tokens of a sample, E size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# transformers takes a name with "sdpa" or "flash" in it for one of its own.
VARLEN = "per_sample"


def register_per_sample() -> None:
    """Make the attention known to transformers, for models whose configuration names `VARLEN`."""
    # No mask function of this name: transformers makes no mask, and does not look at the positions
    # to see whether it needs one, which would wait for the device.
    AttentionInterface.register(VARLEN, per_sample_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ in every call: nothing to compile once
def per_sample_attention(
    module: nn.Module,
    query_1HTE: torch.Tensor,
    key_1KTE: torch.Tensor,
    value_1KTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one row of samples, [1, T, H, E]; called by transformers.

    Raises ValueError where a model gives it no positions, a mask, or several rows.
    """
    rows, _, tokens, _ = query_1HTE.shape
    if position_ids is None or position_ids.numel() != tokens:
        raise ValueError("the positions of the row do not reach the attention")
    if attention_mask is not None or rows != 1:
        raise ValueError("samples can be told apart only in one row and without a mask")
    lengths = sample_lengths(position_ids)
    parts = zip(*(t.split(lengths, dim=2) for t in (query_1HTE, key_1KTE, value_1KTE)), strict=True)
    outputs = [_one_sample(module, q, k, v, sliding_window, settings) for q, k, v in parts]
    return torch.cat(outputs, dim=1), None


def sample_lengths(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each sample of a row. They are remembered, and read from the CPU tensor of which a
    device has the copy: every layer asks, and a device answers slowly."""
    positions: Any = position_ids
    if not hasattr(positions, "_hetero_lengths"):
        row = getattr(positions, "_hetero_host", position_ids).reshape(-1)
        starts = (row == 0).nonzero().reshape(-1).tolist()
        ends = [*starts[1:], position_ids.numel()]
        positions._hetero_lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    lengths: list[int] = positions._hetero_lengths
    return lengths


def _one_sample(
    module: nn.Module,
    query_1HLE: torch.Tensor,
    key_1KLE: torch.Tensor,
    value_1KLE: torch.Tensor,
    sliding_window: int | None,
    settings: dict[str, Any],
) -> torch.Tensor:
    mask_LL = None
    if sliding_window is not None and query_1HLE.shape[2] > sliding_window:
        mask_LL = _causal(query_1HLE, sliding_window)
    if settings.get("softcap") is None and settings.get("s_aux") is None:
        tensors = query_1HLE, key_1KLE, value_1KLE, mask_LL
        return sdpa_attention_forward(module, *tensors, **settings)[0]
    if mask_LL is None:
        mask_LL = _causal(query_1HLE, query_1HLE.shape[2])
    return _spelled_out(query_1HLE, key_1KLE, value_1KLE, mask_LL, **settings)


def _causal(query_1HLE: torch.Tensor, window: int) -> torch.Tensor:
    """[1, 1, L, L], true where a token (row) sees another: itself and the window - 1 before it."""
    length = query_1HLE.shape[2]
    all_LL = torch.ones(length, length, dtype=torch.bool, device=query_1HLE.device)
    return all_LL.tril().triu(1 - window)[None, None]


def _spelled_out(
    query_1HLE: torch.Tensor,
    key_1KLE: torch.Tensor,
    value_1KLE: torch.Tensor,
    mask_LL: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attention that torch's kernels lack: capped scores (Gemma 2), attention sinks (gpt_oss)."""
    groups = query_1HLE.shape[1] // key_1KLE.shape[1]
    key_1HLE, value_1HLE = (t.repeat_interleave(groups, dim=1) for t in (key_1KLE, value_1KLE))
    scale = query_1HLE.shape[-1] ** -0.5 if scaling is None else scaling
    scores_1HLL = query_1HLE @ key_1HLE.transpose(2, 3) * scale
    if softcap is not None:
        scores_1HLL = softcap * torch.tanh(scores_1HLL / softcap)
    scores_1HLL = scores_1HLL.masked_fill(~mask_LL, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.to(scores_1HLL.dtype).reshape(1, -1, 1, 1)
        scores_1HLL = torch.cat([scores_1HLL, sinks.expand(1, -1, scores_1HLL.shape[2], 1)], dim=-1)
    weights = scores_1HLL.softmax(dim=-1, dtype=torch.float32).to(query_1HLE.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = nn.functional.dropout(weights, p=dropout)
    return (weights @ value_1HLE).transpose(1, 2).contiguous()
