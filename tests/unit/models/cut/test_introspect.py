"""Layers that are alike, found without weights."""

from __future__ import annotations

from transformers import AutoConfig

from hetero_framework.models.cut.introspect import layer_kinds

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}


def test_layers_of_a_plain_model_are_all_alike() -> None:
    assert layer_kinds(AutoConfig.for_model("llama", **SMALL, num_hidden_layers=3)) == [0, 0, 0]


def test_kinds_of_attention_are_distinguished_despite_equal_weights() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    own = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
    config = AutoConfig.for_model("gemma3_text", **own, layer_types=types, sliding_window=8)
    assert layer_kinds(config) == [0, 1, 0]


def test_layers_of_experts_are_a_kind_of_their_own() -> None:
    own = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": 4, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        "qwen3_moe",
        **own,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0, 2],
    )
    assert layer_kinds(config) == [0, 1, 0, 1]
