"""Samples of a run: the tokens of `generate` whatever the cut; training stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetero_framework.config import Config
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.integration.test_parity import assert_same, weights
from tests.samples import plan_of, save_tiny

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("verdicts")]

PROMPTS = ("red green", "the old house on the", "a", "one two three four five six seven eight nine")
SAMPLING = {"sample_prompts": PROMPTS, "sample_steps": 1, "sample_max_new_tokens": 21}
TRAINING = {"max_steps": 2, "learning_rate": 1e-2, "gradient_accumulation_steps": 2}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
# Sliding windows, a state-space model, keys that layers share, experts, linear attention, learned
# positions, and two without a cache of ours.
SELDOM = (
    *("gemma4_text", "mistral", "qwen3_moe", "qwen3_next", "gpt2", "gemma2", "minimax"),
    "openai-gpt",
)
ARCHITECTURES = seldom(("llama", "mamba", *SELDOM), "mamba", *SELDOM)


def samples(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def generated(model: Any, tokenizer: Any, most: int = 21) -> list[tuple[str, int]]:
    """The text and the number of tokens that the library puts behind each prompt."""
    model.train(False)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        told = model.generation_config.eos_token_id
        ends = told if isinstance(told, list) else [told]
        ends = [end for end in [*ends, tokenizer.eos_token_id] if end is not None]
        settings = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends}
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, pad_token_id=0, **settings)
        new = whole[0, ids.shape[1] :]
        found.append((tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return found


def last(output: Path) -> list[tuple[str, int]]:
    lines = samples(output)
    return [(line["text"], line["tokens"]) for line in lines if line["step"] == lines[-1]["step"]]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_samples_are_those_of_generate(model_type, pool, texts, tmp_path):
    model = save_tiny(model_type, tmp_path / "model")
    layers = introspect(tiny_config(model_type)).num_layers
    third = max(1, layers // 3)
    ends = zip(("local", 1, "local", 1), (third, layers // 2, layers - 1, layers), strict=True)
    between = [entry for entry in plan_of(*ends) if entry["start"] < entry["end"]]
    ways: dict[str, Any] = {
        "whole": {"cuts": []},
        "two": {"cuts": [layers // 2]},
        "three": {"cuts": sorted({third, layers - 1})},
        "interleaved": {"cuts": [], "shard_plan": between},
    }
    sections = {
        **{"model": {"name_or_path": str(model)}, "training": {**TRAINING, **SAMPLING}},
        "data": {"train": str(texts), "max_length": 64},
    }
    for name, way in ways.items():
        raw = pool.config(tmp_path / name, way.pop("cuts"), layers, **sections, **way)
        train(Config.from_dict(raw))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    expected = generated(trained, AutoTokenizer.from_pretrained(tmp_path / "whole" / "model"))
    assert len({text for text, _ in expected}) > 1
    for name in ways:
        assert last(tmp_path / name) == expected
        assert samples(tmp_path / name) == samples(tmp_path / "whole")


@pytest.mark.long
def test_samples_of_an_adapter_are_those_of_the_merged_model(losses, llama, tmp_path):
    losses([2, 4], adapter=LORA, training={**TRAINING, **SAMPLING})
    model = AutoModelForCausalLM.from_pretrained(llama)
    merged = PeftModel.from_pretrained(model, tmp_path / "run" / "adapter").merge_and_unload()
    assert last(tmp_path / "run") == generated(merged, AutoTokenizer.from_pretrained(llama))


def test_samples_and_evaluations_do_not_change_the_training(losses, llama, texts, tmp_path):
    sections: dict[str, Any] = {
        "adapter": LORA,
        "data": {"train": str(texts), "eval": str(texts), "max_length": 64},
    }
    plain = losses([2, 4], "plain", training=TRAINING, **sections)
    drawn = {**SAMPLING, "sample_temperature": 0.8, "sample_top_p": 0.9}
    training = {**TRAINING, **drawn, "eval_strategy": "steps", "eval_steps": 1}
    assert losses([2, 4], "sampled", training=training, **sections) == plain
    assert_same(weights(tmp_path / "sampled"), weights(tmp_path / "plain"))
    assert losses([3], "other", training=training, **sections) == plain
    assert samples(tmp_path / "other") == samples(tmp_path / "sampled")
    assert len({text for text, _ in last(tmp_path / "sampled")}) == len(PROMPTS)
