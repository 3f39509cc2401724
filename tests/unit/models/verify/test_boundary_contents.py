"""Report lines about boundaries with side tensors."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PretrainedConfig

from hetero_framework.config import AdapterConfig, Config
from hetero_framework.errors import ConfigError
from hetero_framework.models.adapters.lora import plan_adapter
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.verify.boundary_contents import (
    check_codec,
    crossing_lines,
    largest_sides,
    tiny_crossing,
)
from hetero_framework.units import size
from tests.installed import needs
from tests.samples import config_for, plan_of

TOKENS = 16
UNTIED = {"tie_word_embeddings": False}


def configured(model_type: str, **changes: Any) -> tuple[Config, PretrainedConfig]:
    fields = {**tiny_config(model_type).to_dict(), **changes}
    model = {"from_config": fields, "tokenizer": "none", "dtype": "bfloat16"}
    config = config_for(("local", 4), (1, 6), model=model)
    return config, ModelSource.of(config).config


def test_a_model_without_side_tensors_causes_no_lines():
    config, model = configured("llama")
    assert crossing_lines(config, model, TOKENS) == []
    assert largest_sides(config, model, 2, TOKENS) == 0
    assert tiny_crossing(introspect(model), [2, 4]) == ""


def test_bytes_of_side_tensors_are_reported_for_each_boundary():
    config, model = configured("gemma3n_text", hidden_size_per_layer_input=32, **UNTIED)
    [line] = crossing_lines(config, model, TOKENS)
    # In bfloat16: 2 x 32 inputs of layers, keys and values of 2 heads of 16 in two layers; four
    # streams of 64.
    assert line == (
        "in front of layer 4, 384 B of side tensors per token cross the boundary beside 512 B of"
        " hidden state: per_layer_input x 2, shared_kv_states.sliding_attention.0,"
        " shared_kv_states.sliding_attention.1, shared_kv_states.full_attention.0,"
        " shared_kv_states.full_attention.1"
    )
    # In front of layer 0: the inputs of all six layers, in float32.
    assert largest_sides(config, model, 2, TOKENS) == 2 * TOKENS * 6 * 32 * 4


def test_side_tensors_of_many_times_the_hidden_state_are_warned_of():
    config, model = configured("gemma3n_text", hidden_size_per_layer_input=512, **UNTIED)
    [line] = crossing_lines(config, model, TOKENS)
    assert line.startswith("warning: in front of layer 4, 2.25 KiB of side tensors per token")
    assert line.endswith("; that is 4.5 times as much")


def test_the_logits_of_many_experts_are_warned_of():
    config, model = configured("mixtral", output_router_logits=True, num_local_experts=64)
    assert crossing_lines(config, model, TOKENS) == [
        "warning: in front of layer 4, 512 B of side tensors per token cross the boundary beside"
        " 128 B of hidden state: mlp.gate.0 x 4; that is 4.0 times as much"
    ]


@needs("codecs")
def test_a_codec_that_takes_not_all_gradients_of_a_boundary_is_refused():
    def check(adapter: AdapterConfig | None = None, **sections: Any) -> None:
        config, model = configured("gemma3n_text")
        sections["model"] = {"dtype": "float32"}
        plan = None if adapter is None else plan_adapter(model, adapter)
        check_codec(config.with_changes(**sections), model, plan, TOKENS)

    half, rounded = {"fp16": True}, {"gradients": "bf16"}
    check(wire=rounded)
    check(training=half)
    check(training=half, wire={"gradients": "int8"})
    text = "wire.gradients bf16 cannot take the gradient of .*, which crosses in front of layer 4"
    with pytest.raises(ConfigError, match=text):
        check(training=half, wire=rounded)
    # Nothing in front of the boundary is trained.
    behind = AdapterConfig(target_modules=r".*layers\.5\..*o_proj")
    check(behind, training=half, wire=rounded)


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("hy_v4", "16 bytes a token beside 1024 of hidden state: prev_topk_indices"),
        ("deepseek_v4", "token ids go to layers 0, 1, 2"),
    ],
)
def test_a_tiny_copy_shows_the_crossing_tensors(model_type, said):
    assert tiny_crossing(introspect(tiny_config(model_type)), [2, 5]) == said


TIED = "model.embed_tokens.weight and lm_head.weight are one weight in 2 processes: each step sends"


def test_a_weight_trained_in_two_processes_is_reported_with_its_bytes():
    config, model = configured("llama", tie_word_embeddings=True, vocab_size=512)
    # In bfloat16: 512 x 64 numbers each way.
    assert crossing_lines(config, model, TOKENS) == [
        f"{TIED} 64.0 KiB of gradients and 64.0 KiB of new weights for it"
    ]
    adapted = config.with_changes(adapter={"r": 4, "target_modules": ["q_proj"]})
    assert crossing_lines(adapted, model, TOKENS) == []
    entries = plan_of(("local", 2), (1, 4), ("local", 6))
    assert crossing_lines(config.with_changes(shard_plan=entries), model, TOKENS) == []


def test_each_place_of_a_weight_sends_its_gradient():
    kinds = ["hybrid"] * 6
    config, model = configured(
        "zamba2", layers_block_type=kinds, hybrid_layer_ids=[*range(6)], num_mem_blocks=1
    )
    lines = crossing_lines(config, model, TOKENS)
    [line] = [line for line in lines if "q_proj.weight and" in line]
    nbytes = meta_model(model).get_parameter(line.partition(" and ")[0]).numel() * 2
    # Layers 4 and 5 are on worker 1.
    assert f"sends {size(2 * nbytes)} of gradients and {size(nbytes)} of new weights" in line
