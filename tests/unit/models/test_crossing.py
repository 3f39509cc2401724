"""What is said of boundaries that carry more than the hidden state."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PretrainedConfig

from hetero_framework.config import Config
from hetero_framework.models.crossing import crossing_lines, largest_sides, tiny_crossing
from hetero_framework.models.introspect import introspect
from hetero_framework.models.shard import load_model_config
from hetero_framework.models.tiny import tiny_config

TOKENS = 16


def configured(model_type: str, **changes: Any) -> tuple[Config, PretrainedConfig]:
    fields = {**tiny_config(model_type).to_dict(), **changes}
    config = Config.from_dict(
        {
            "coordinator": {"ip": "127.0.0.1"},
            "workers": [{"id": 1, "hostname": "b", "ip": "127.0.0.2", "port": 9871}],
            "shard_plan": [
                {"id": "local", "start": 0, "end": 4},
                {"id": 1, "start": 4, "end": 6},
            ],
            "model": {"from_config": fields, "tokenizer": "none", "dtype": "bfloat16"},
        }
    )
    assert config.model is not None
    return config, load_model_config(config.model, config.base_dir)


def test_nothing_is_said_of_a_model_without_side_tensors() -> None:
    config, model = configured("llama")
    assert crossing_lines(config, model, TOKENS) == []
    assert largest_sides(config, model, 2, TOKENS) == 0
    assert tiny_crossing(introspect(model), [2, 4]) == ""


def test_bytes_of_side_tensors_are_said_for_each_boundary() -> None:
    config, model = configured("gemma3n_text", hidden_size_per_layer_input=32)
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


def test_side_tensors_of_many_times_the_hidden_state_are_warned_of() -> None:
    config, model = configured("gemma3n_text", hidden_size_per_layer_input=512)
    [line] = crossing_lines(config, model, TOKENS)
    assert line.startswith("warning: in front of layer 4, 2.25 KiB of side tensors per token")


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("hy_v4", "16 bytes a token beside 1024 of hidden state: prev_topk_indices"),
        ("deepseek_v4", "token ids go to layers 0, 1, 2"),
    ],
)
def test_a_tiny_copy_says_what_crosses(model_type: str, said: str) -> None:
    assert tiny_crossing(introspect(tiny_config(model_type)), [2, 5]) == said
