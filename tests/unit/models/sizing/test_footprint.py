"""Footprints against the same parts run with values."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_framework.config import AdapterConfig
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.adapters.trainable import attach_adapter
from hetero_framework.models.cut.causal_lm import CausalLM
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.sizing import footprint
from hetero_framework.models.sizing.footprint import (
    Footprint,
    PeakMemory,
    Setting,
    embedding_footprint,
    head_footprint,
    layer_footprint,
)
from tests.cases import spread

ROWS, TOKENS = 2, 24
LORA = AdapterConfig(target_modules="all-linear")


def setting_of(model_type: str, adapter: AdapterConfig | None = None) -> Setting:
    config = tiny_config(model_type)
    plan = plan_adapter(config, adapter, Path()) if adapter is not None else None
    return Setting(config, plan, CausalLM("auto"), torch.float32, None, ROWS, TOKENS)


def measured(setting: Setting, rng: ShardRange, *, recompute: bool = False) -> tuple[int, int]:
    """(kept, most besides backward) of a part that runs on numbers, padded."""
    shard = build_shard(setting.model, None, rng, dtype=setting.dtype)
    attach_adapter(shard, setting.plan, 0)
    shard.train()
    if recompute:
        shard.recompute_blocks()
    own = [*shard.model.parameters(), *shard.model.buffers()]
    for parameter in shard.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            own.append(parameter.grad)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[-1, -5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    hidden = torch.randn(ROWS, TOKENS, shard.width).requires_grad_()
    received = () if rng.is_first else (hidden,)
    with PeakMemory([*own, ids, mask, *received]) as peak:
        (out,) = shard.forward(inputs, received)
        kept = peak.most = peak.now
        if out.requires_grad:
            torch.autograd.backward(out, torch.empty_like(out))
    return kept, peak.most - kept


@pytest.mark.parametrize(
    ("model_type", "way"),
    spread(
        ["llama", "gpt2", "qwen3_moe"],
        {
            "full": (None, False),
            "full, recomputed": (None, True),
            "lora": (LORA, False),
            "lora, recomputed": (LORA, True),
        },
    ),
)
def test_a_layer_is_counted_as_it_runs(model_type, way):
    adapter, recompute = way
    setting = setting_of(model_type, adapter)
    found = layer_footprint(setting, 2, recompute=recompute)
    kept, backward = measured(setting, ShardRange(2, 3, False, False), recompute=recompute)
    assert (found.kept, found.backward) == (kept, backward)
    assert found.shared < found.kept
    assert model_type != "llama" or found.shared > 0  # the mask


@pytest.mark.parametrize("attention", ["flash_attention_2", "per_sample"])
def test_attention_without_a_mask_stores_what_sdpa_stores(attention):
    setting = setting_of("llama")
    plain, setting = setting, replace(setting, model=copy.deepcopy(setting.model))
    setting.model._attn_implementation = attention
    masked, found = (layer_footprint(one, 2) for one in (plain, setting))
    assert 0.9 < found.kept / masked.kept < 1


def test_recomputing_keeps_less_and_takes_more_for_a_moment():
    plain, again = (layer_footprint(setting_of("llama"), 2, recompute=on) for on in (False, True))
    assert again.kept < plain.kept / 3
    assert again.backward > plain.backward


def test_the_embedding_takes_a_gradient_of_its_size_for_a_moment():
    setting = setting_of("llama")
    found = embedding_footprint(setting)
    assert (found.kept, found.backward) == measured(setting, ShardRange(0, 0, True, False))
    assert found.backward >= 4 * setting.model.vocab_size * setting.model.hidden_size


def test_layers_without_backward_store_nothing():
    setting = setting_of("llama", AdapterConfig(layers_to_transform=(5,)))
    found = layer_footprint(setting, 2, train=False)
    assert (found.kept, found.backward) == (0, 0)
    assert found.forward > 0


def test_the_head_holds_the_logits_of_all_tokens_or_of_a_chunk():
    setting = setting_of("llama")
    whole, chunked = (
        head_footprint(Setting(setting.model, None, CausalLM(limit), torch.float32, None, 2, 512))
        for limit in (None, 300)
    )
    assert whole.kept == 0
    assert whole.passing >= 3 * 4 * 2 * 512 * setting.model.vocab_size
    assert chunked.passing < 0.8 * whole.passing


def test_a_loss_of_many_chunks_is_counted_on_fewer(monkeypatch):
    setting = replace(setting_of("llama"), objective=CausalLM(40), rows=8, tokens=100)
    setting.model.vocab_size = 4000
    fewer = head_footprint(setting)
    monkeypatch.setattr(footprint, "_MOST_CHUNKS", 1000)
    every = head_footprint(setting)
    assert 0.95 < fewer.passing / every.passing < 1.05


def test_a_model_without_a_footprint_is_asked_once(monkeypatch):
    monkeypatch.setattr(footprint, "_counted", {})
    setting = setting_of("llama")
    asked = []

    def refuses(*args: object) -> Footprint:
        asked.append(args)
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(footprint, "_count", refuses)
    assert layer_footprint(setting, 2) is None
    assert layer_footprint(setting, 2) is None
    assert len(asked) == 1
