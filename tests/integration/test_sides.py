"""Models with side tensors at their boundaries: cut over processes, they train to the bit as in
one."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.trainer.coordinator import train
from tests.integration.test_parity import assert_same_runs
from tests.integration.test_resume import stop_after
from tests.samples import plan_of, save_tiny, save_tokenizer

LORA = {"r": 4, "target_modules": "all-linear"}
SHORT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "mixtral": {"router_aux_loss_coef": 0.1},
    "qwen4_exp_text": {},
    "zamba2": {},
}
INTERLEAVED = plan_of(("local", 1), (1, 3), (2, 4), (1, 5), ("local", 6))
INTERLEAVED[1]["gradient_checkpointing"] = True


@pytest.mark.long
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_per_layer_inputs_and_shared_keys_cross_and_get_gradients(adapter, losses, tmp_path):
    model = save_tiny("gemma3n_text", tmp_path / "model")
    sections = {"model": {"name_or_path": str(model)}, "adapter": adapter}
    losses([], "whole", **sections)
    losses([], "cut", shard_plan=INTERLEAVED, **sections)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


def test_token_ids_go_to_the_stages_whose_layers_read_them(losses, tmp_path):
    model = save_tiny("deepseek_v4", tmp_path / "model")
    sections = {"model": {"name_or_path": str(model)}}
    losses([], "whole", **sections)
    losses([1, 4], "cut", **sections)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", ["musicgen", "musicgen_melody"])
def test_tokens_of_several_codebooks_equal_one_process(model_type, adapter, losses, tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    parts = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
    decoder = {**tiny_config(model_type).to_dict(), "vocab_size": 320}
    fields = {"model_type": model_type, "decoder": decoder, **parts}
    model = {"from_config": fields, "tokenizer": str(tmp_path / "tokenizer")}
    sections = {"model": model, "adapter": adapter}
    losses([], "whole", **sections)
    checkpointing = {"gradient_checkpointing": True}
    for name, cuts, training in (("two", [3], {}), ("three", [2, 4], checkpointing)):
        losses(cuts, name, training=training, **sections)
        assert_same_runs(tmp_path / name, tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("links", ["direct", "relay"])
def test_the_loss_of_routers_crosses_processes_that_hold_several_stages(links, losses, tmp_path):
    model = save_tiny("mixtral", tmp_path / "model")
    sections = {
        "model": {"name_or_path": str(model), "router_aux_loss_coef": 0.1},
        "adapter": {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    }
    whole = losses([], "whole", **sections)
    plan = plan_of(("local", 1), (1, 3), (2, 4), (1, 6), ("local", 6))
    plan[1]["gradient_checkpointing"] = plan[3]["gradient_checkpointing"] = True
    losses([], "cut", shard_plan=plan, links=links, **sections)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
    assert losses([2, 4], "three", **sections) == whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        *((model_type, None) for model_type in SETTINGS),
        # Gemma 3n's own code does not run over 4 bits.
        *((model_type, "nf4") for model_type in SETTINGS if model_type != "gemma3n_text"),
    ],
)
def test_runs_continued_under_other_cuts_and_links_equal_one_process(
    model_type, adapter, configured, tmp_path
):
    model = {"name_or_path": str(save_tiny(model_type, tmp_path / "model"))}
    sections: dict[str, Any] = {
        "model": {**model, **SETTINGS[model_type], "quantization": adapter},
        "adapter": adapter and {"r": 4, "target_modules": r".*\.(q_proj|q_b_proj|o_proj)"},
        "training": SHORT,
    }
    train(configured([], "whole", **sections))
    stop_after(configured([], "parts", shard_plan=INTERLEAVED, links="relay", **sections), 3)
    train(configured([2, 4], "parts", links="direct", **sections), resume=2)
    assert_same_runs(tmp_path / "parts", tmp_path / "whole")
