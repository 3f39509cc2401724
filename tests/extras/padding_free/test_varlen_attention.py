"""Attention by sample against the plain formula with a mask over the row."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from hetero_framework.config import ModelConfig
from hetero_framework.engine.boundary_io import inputs_in
from hetero_framework.extras.padding_free.varlen_attention import (
    VARLEN,
    per_sample_attention,
    sample_lengths,
)
from hetero_framework.models.cut.partition import ShardRange, ranges_between
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.quantization import modules_left_alone
from hetero_framework.models.files.source import ModelSource
from tests.unit.adapter_helpers import save_model
from tests.unit.device_helpers import QueuedDevice

LENGTHS = (5, 1, 9, 3)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
TOKENS, HEADS, GROUPS, SIZE = sum(LENGTHS), 4, 2, 8


class Layer(nn.Module):
    num_key_value_groups = HEADS // GROUPS
    is_causal = True


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, TOKENS, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float = SIZE**-0.5,
    sliding_window: int = TOKENS,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    sample = (POSITIONS[0] == 0).cumsum(0)
    place = torch.arange(TOKENS)
    distance = place[:, None] - place[None, :]
    seen = (sample[:, None] == sample[None, :]) & (distance >= 0) & (distance < sliding_window)
    repeat = HEADS // GROUPS
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(1, -1, TOKENS, 1)], -1)
    weights = scores.softmax(-1)[..., :TOKENS]
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"scaling": 0.3}, {"sliding_window": 3}, {"sliding_window": 1}, {"softcap": 2.0}),
        {"s_aux": torch.tensor([0.1, -1.0, 2.0, 0.0])},
        {"softcap": 1.0, "s_aux": torch.zeros(HEADS), "sliding_window": 4, "scaling": 1.0},
    ],
)
def test_equals_the_formula_with_a_mask(settings):
    ours, theirs = tensors(), tensors()
    output, _ = per_sample_attention(Layer(), *ours, None, position_ids=POSITIONS, **settings)
    expected = formula(*theirs, **settings)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_a_sample_in_a_row_equals_itself_alone_to_the_bit():
    query, key, value = tensors()
    row, _ = per_sample_attention(Layer(), query, key, value, None, position_ids=POSITIONS)
    part = slice(6, 15)
    own = [t[:, :, part] for t in (query, key, value)]
    alone, _ = per_sample_attention(Layer(), *own, None, position_ids=POSITIONS[:, part])
    assert torch.equal(row[:, part], alone)


def test_positions_are_read_once():
    positions = POSITIONS.clone()
    assert sample_lengths(positions) == list(LENGTHS)
    positions.zero_()
    assert sample_lengths(positions) == list(LENGTHS)


@pytest.mark.parametrize(
    ("mask", "positions", "reason"),
    [
        (None, None, "do not reach"),
        (None, POSITIONS[:, 1:], "do not reach"),
        (torch.ones(1, 1, TOKENS, TOKENS), POSITIONS, "without a mask"),
    ],
)
def test_attention_without_positions_or_with_a_mask_is_refused(mask, positions, reason):
    with pytest.raises(ValueError, match=reason):
        per_sample_attention(Layer(), *tensors(), mask, position_ids=positions)


def test_a_worker_that_only_builds_shards_knows_the_attention(monkeypatch):
    monkeypatch.delitem(AttentionInterface._global_mapping, VARLEN, raising=False)
    config = tiny_config("llama")
    config._attn_implementation = VARLEN
    shard = build_shard(config, None, ShardRange(0, 1, True, False), dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    positions = torch.tensor([[0, 1, 0]])
    (hidden_BSD,) = shard.forward({"input_ids": ids, "position_ids": positions}, ())
    assert hidden_BSD.shape[:2] == ids.shape


def test_lengths_of_the_samples_of_a_row_are_not_asked_of_the_device():
    config = tiny_config("llama")
    config._attn_implementation = VARLEN
    config.num_hidden_layers = 2
    [whole] = ranges_between([0, 2])
    shard = build_shard(config, None, whole, dtype=torch.float32)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    expected = shard.loss(batch, (), torch.tensor(3))
    there = inputs_in(QueuedDevice(), batch)
    assert torch.equal(shard.loss(there, (), torch.tensor(3)), expected)
    assert there["position_ids"]._hetero_lengths == [3, 2]  # type: ignore[attr-defined]
    there = inputs_in(QueuedDevice(), batch)
    there["position_ids"].zero_()
    assert sample_lengths(there["position_ids"]) == [3, 2]


def test_attention_per_sample_is_known_before_a_shard_is_built(tmp_path, monkeypatch):
    """A worker's first look at a quantised model is at its modules, and came too early."""
    known = {k: f for k, f in AttentionInterface._global_mapping.items() if k != VARLEN}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
    model = ModelConfig(
        name_or_path=str(save_model(tmp_path / "model")), attn_implementation=VARLEN
    )
    assert modules_left_alone(ModelSource(model, tmp_path).config) == ["lm_head"]
