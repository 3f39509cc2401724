"""Samples that share a row, against padded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig

from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.padding_free import packing as packing_module
from hetero_framework.extras.padding_free.packing import (
    Packing,
    admit_packing,
    try_packing,
    without_padding,
)
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.trainer.resolution import Resolved
from tests.unit.trainer.test_setup import LLAMA
from tests.unit.trainer.test_setup import config as settings


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("llama", "per_sample"),
        ("gemma3_text", "per_sample"),  # sliding windows
        ("gpt_oss", "per_sample"),  # sinks; it gives its masks no positions
        ("gpt2", "per_sample"),  # learned positions
        ("persimmon", None),  # its attention gets no positions, its masks do
    ],
)
def test_samples_may_share_a_row(model_type, attention):
    assert try_packing(tiny_config(model_type), ranges_between([0, 2, 5, 6])) == Packing(attention)


@pytest.mark.parametrize(
    ("model_type", "asked", "attention"),
    [
        ("llama", "sdpa", "per_sample"),
        ("llama", "eager", "eager"),
        ("llama", "flash_attention_2", "flash_attention_2"),
        ("llama", "flex_attention", "flex_attention"),
        ("whisper", None, None),
    ],
)
def test_attention_that_was_asked_for_is_kept(model_type, asked, attention):
    config = tiny_config(model_type)
    config._attn_implementation = asked
    assert admit_packing(config, ranges_between([0, 3, 6])) == attention


@pytest.mark.parametrize(
    ("model_type", "asked", "reason"),
    [
        ("mamba", None, "do not stay apart: .* most in backbone"),
        ("roberta", None, "do not stay apart"),  # its positions begin at 2
        ("gpt_neo", None, "cannot take many samples in one row"),  # a table of masks that ends
        ("gpt_oss", "eager", "do not stay apart"),
        ("whisper", "flash_attention_2", "positions of the row do not reach the attention"),
    ],
)
def test_samples_that_would_meet_in_a_row_are_refused_with_the_reason(model_type, asked, reason):
    config = tiny_config(model_type)
    if model_type == "mamba":
        config.num_hidden_layers = 2  # its scan is slow
    config._attn_implementation = asked
    with pytest.raises(ArchitectureError, match=reason) as caught:
        admit_packing(config, ranges_between([0, 1, introspect(config).num_layers]))
    assert "data.padding_free to false" in str(caught.value)


def test_positions_that_do_not_begin_again_are_noticed(monkeypatch):
    right = packing_module.pack

    def wrong(*args: Any) -> dict[str, torch.Tensor]:
        batch = right(*args)
        return {**batch, "position_ids": torch.arange(batch["labels"].numel())[None]}

    monkeypatch.setattr(packing_module, "pack", wrong)
    packing = try_packing(tiny_config("llama"), ranges_between([0, 3, 6]))
    assert "do not stay apart" in packing.reason


def test_positions_that_reach_the_first_stage_only_are_noticed(monkeypatch):
    run = Shard._run

    def without(self: Shard, inputs: dict[str, torch.Tensor], *args: Any, **extra: Any) -> Any:
        if not self.range.is_first:
            inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
        return run(self, inputs, *args, **extra)

    monkeypatch.setattr(Shard, "_run", without)
    config = tiny_config("llama")
    config._attn_implementation = "eager"
    packing = try_packing(config, ranges_between([0, 3, 6]))
    assert "a cut changes gradients" in packing.reason


def test_padding_free_sets_the_attention_of_every_process():
    told = without_padding(Resolved.start(settings()), LLAMA)
    assert told.config.model.attn_implementation == "per_sample"
    assert "takes each sample by itself" in told.decisions[0].reason


def test_padding_free_is_refused_where_samples_meet():
    with pytest.raises(ArchitectureError, match="do not stay apart") as caught:
        without_padding(Resolved.start(settings()), BloomConfig(n_layer=4))
    assert "data.padding_free to false" in str(caught.value)
