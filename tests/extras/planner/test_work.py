"""Operations of a model's parts against those that torch counts on the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hetero_framework.config import Config
from hetero_framework.extras.planner.work import ModelWork, experts_per_token, model_work
from hetero_framework.models.files.source import ModelSource
from tests.samples import machines_here

ROWS, TOKENS, LAYERS = 2, 64, 4
LLAMA = {
    **{"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 64, "vocab_size": 160},
    **{"intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2},
}
GPT2 = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": 64, "n_head": 4, "vocab_size": 160}
LORA = {"r": 4, "target_modules": "all-linear"}
LATE = {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [2, 3]}


def config_of(fields: dict[str, Any], **sections: Any) -> Config:
    training = {"per_device_train_batch_size": ROWS, **sections.pop("training", {})}
    data = {"train": "none", "max_length": TOKENS}
    raw = {**machines_here(("local", LAYERS)), "data": data, "training": training, **sections}
    return Config.from_dict({**raw, "model": {"from_config": fields, "tokenizer": "none"}})


def work_of(config: Config) -> ModelWork:
    return model_work(config, ModelSource(config.model, Path()).config)


def total(work: ModelWork, name: str) -> float:
    return sum(getattr(part, name) for part in (work.embedding, *work.layers, work.head))


def counted(config: Config) -> tuple[int, int]:
    """What torch counts forward and backward."""
    loaded = ModelSource(config.model, Path()).config
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager")
    ids_BS = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=ids_BS, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_flops_of_full_training_equal_torchs_count(fields):
    config = config_of(fields)
    work = work_of(config)
    forward, backward = counted(config)
    assert total(work, "forward_flops") == pytest.approx(forward, rel=0.02)
    assert total(work, "backward_flops") == pytest.approx(backward, rel=0.02)


def test_an_adapter_spares_the_gradients_of_the_weights():
    full, lora = work_of(config_of(LLAMA)), work_of(config_of(LLAMA, adapter=LORA))
    layer, own = full.layers[0], lora.layers[0]
    assert layer.forward_flops < own.forward_flops < 1.3 * layer.forward_flops
    assert 0.4 < own.backward_flops / layer.backward_flops < 0.75
    assert lora.head.backward_flops == full.head.backward_flops / 2
    assert lora.embedding.backward_bytes == 0


def test_layers_below_the_adapter_have_no_backward():
    work = work_of(config_of(LLAMA, adapter=LATE))
    assert [layer.backward_flops > 0 for layer in work.layers] == [False, False, True, True]


def test_only_the_experts_that_a_token_visits_count():
    fields = {
        **LLAMA,
        **{"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    }
    one, two = (work_of(config_of({**fields, "num_experts_per_tok": n})) for n in (1, 2))
    expert = 2.0 * ROWS * TOKENS * 3 * 32 * 64
    assert two.layers[0].forward_flops - one.layers[0].forward_flops == expert
    assert two.layers[0].forward_bytes >= one.layers[0].forward_bytes


def test_a_boundary_has_the_types_and_numbers_of_the_hidden_state():
    work = work_of(config_of({**LLAMA, "dtype": "bfloat16"}))
    assert (work.hidden_numbers, work.dtype, work.half) == (ROWS * TOKENS * 64, "bfloat16", True)
    assert not work_of(config_of(LLAMA)).half
    assert work_of(config_of(LLAMA, training={"bf16": True})).half


EXPERTS = {
    "mixtral": "num_experts_per_tok", "hunyuan_v1_moe": "moe_topk", "aria_text": "moe_topk",
    "gemma4_text": "top_k_experts", "longcat_flash": "moe_topk", "ernie4_5_moe": "moe_k",
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "name"), EXPERTS.items())
def test_the_experts_of_a_token_are_those_of_the_configuration(model_type, name):
    assert experts_per_token(CONFIG_MAPPING[model_type](**{name: 5})) == 5
