"""Samples of one packed row do not see each other, on every architecture that is admitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from hetero_framework.extras.padding_free.packing import try_packing
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.tiny import shrink, stock_class, tiny_config
from hetero_framework.models.verify.equivalence import deterministic
from tests.cases import seldom

LENGTHS = (9, 14, 6)
PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"
ADMITTED = re.findall(
    r"`([\w.-]+)`", re.split("## Without padding", PAGE.read_text("utf-8"))[1].split("\n## ")[0]
)
EXPERTS = """
DeepseekOcr2ForConditionalGeneration MiniMaxM3SparseForConditionalGeneration beam dbrx deepseek_v3
dots1 ernie4_5_moe flint hunyuan_v1_moe longcat_flash mellum mimo_v2_flash mixtral phimoe qwen3_moe
solar_open
"""
"""An expert gets another number of tokens, whose product rounds otherwise: 1.8e-7 at most."""
OFTEN = ("llama", "qwen3", "gemma3_text", "gpt2", "gpt_oss", "qwen3_moe")


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        return model(input_ids=ids, position_ids=places, use_cache=False).logits[0]


def model_of(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return stock_class(config)._from_config(config, dtype=torch.float32).train(False)


@pytest.mark.parametrize("name", seldom(ADMITTED, *(set(ADMITTED) - set(OFTEN))))
def test_a_changed_sample_leaves_the_bits_of_the_others(name):
    config = deterministic(shrink(tiny_config(name)))
    admitted = try_packing(config, ranges_between([0, 1, introspect(config).num_layers]))
    assert not admitted.reason
    if admitted.attention is not None:
        config._attn_implementation = admitted.attention
    model = model_of(config)
    draw = torch.Generator().manual_seed(1)
    most = min(60, config.get_text_config().vocab_size)
    ids = torch.randint(3, most, (1, sum(LENGTHS)), generator=draw)
    changed = ids.clone()
    changed[0, : LENGTHS[0]] = torch.randint(3, most, (LENGTHS[0],), generator=draw)
    before, after = logits(model, ids), logits(model, changed)
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])
    others = before[LENGTHS[0] :], after[LENGTHS[0] :]
    if name in EXPERTS.split():
        assert float((others[0] - others[1]).abs().max()) < 1e-6
    else:
        assert torch.equal(*others)
