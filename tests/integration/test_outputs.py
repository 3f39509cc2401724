"""Other architectures under other cuts, and a run's results as the stock libraries load them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForSeq2Seq,
)

from hetero_framework.cli import main
from hetero_framework.models.cut.tiny import tiny_config
from tests.integration.oracles import tokenized
from tests.integration.test_parity import assert_same, assert_same_runs, weights
from tests.samples import read_jsonl, save_llama, save_tokenizer

pytestmark = [
    pytest.mark.xdist_group("pool2"),
    # PEFT gives fused experts a rank of their own, then misses them among the modules.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

# Dropout, tied ends, experts, soft caps and sliding windows, linear attention.
ARCHITECTURES = [
    "qwen3_moe",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "gemma2", "qwen3_next")),
]
EXPERTS = ("qwen3_moe", "qwen3_next")
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
SHORT = {
    "max_steps": 3,
    "gradient_accumulation_steps": 3,
    "warmup_steps": 0,
    "learning_rate": 1e-2,
    "per_device_eval_batch_size": 4,
    "eval_steps": 3,
}
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
)
Run = Callable[..., list[tuple]]


def save_tiny(directory: Path, model_type: str, **changes: Any) -> Path:
    tokenizer = save_tokenizer(directory)
    config = tiny_config(model_type)
    config.update({"vocab_size": len(tokenizer), **changes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def cut_ways(losses: Run, tmp_path: Path, texts: Path, **sections: Any) -> Path:
    """Train uncut and in two and three stages; all equal. Returns the last run's directory."""
    sections["data"] = {"train": str(texts), "eval": str(texts), "max_length": 64}
    sections["training"] = {**SHORT, **sections.get("training", {})}
    assert len({loss for loss, _, _ in losses([], "whole", **sections)}) == 3
    for cuts in ([3], [1, 4]):
        name = "-".join(map(str, cuts))
        losses(cuts, name, **sections)
        assert_same_runs(tmp_path / name, tmp_path / "whole")
        assert final_eval(tmp_path / name) == final_eval(tmp_path / "whole")
    return tmp_path / name


def final_eval(output: Path) -> float:
    lines = read_jsonl(output / "metrics.jsonl")
    return [line["eval_token_loss"] for line in lines if "eval_token_loss" in line][-1]


def mean_token_loss(model: torch.nn.Module, tokenizer: Any, texts: Path) -> float:
    """What a stock model says of the evaluation data, in batches as the run had them."""
    model.train(False)
    rows, collate = tokenized(texts, tokenizer), DataCollatorForSeq2Seq(tokenizer)
    total, items = [], 0
    for first in range(0, len(rows), SHORT["per_device_eval_batch_size"]):
        last = min(first + SHORT["per_device_eval_batch_size"], len(rows))
        batch = dict(collate([rows[i] for i in range(first, last)]))
        items += int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            loss = model(**batch, num_items_in_batch=torch.tensor(1.0)).loss
        total.append(float(loss))
    return math.fsum(total) / items


def load_complete(folder: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {kind: list(keys) for kind, keys in report.items() if keys} == {}
    return model


@pytest.mark.long
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_full_training_of(model_type, losses, texts, tmp_path):
    model = save_tiny(tmp_path / "model", model_type)
    output = cut_ways(losses, tmp_path, texts, model={"name_or_path": str(model)})
    trained = load_complete(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert mean_token_loss(trained, tokenizer, texts) == final_eval(output)


@pytest.mark.parametrize(
    "model_type", [pytest.param("llama", marks=pytest.mark.long), *ARCHITECTURES]
)
def test_lora_of(model_type, losses, texts, tmp_path):
    model = save_tiny(tmp_path / "model", model_type)
    # PEFT has no dropout for experts that are one tensor.
    adapter = {**LORA, "lora_dropout": 0.0} if model_type in EXPERTS else LORA
    output = cut_ways(losses, tmp_path, texts, model={"name_or_path": str(model)}, adapter=adapter)
    stock = PeftModel.from_pretrained(load_complete(model), output / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(output / "adapter")
    assert mean_token_loss(stock, tokenizer, texts) == final_eval(output)


def test_merged_adapter_is_the_trained_model(losses, llama, texts, tmp_path):
    losses([2, 4], adapter=LORA, training={"max_steps": 2})
    merged = tmp_path / "merged"
    arguments = ["merge", "--adapter", str(tmp_path / "run" / "adapter")]
    assert main([*arguments, "--model", str(llama), "--output", str(merged)]) == 0
    adapted = PeftModel.from_pretrained(load_complete(llama), tmp_path / "run" / "adapter")
    assert_same(load_complete(merged).state_dict(), adapted.merge_and_unload().state_dict())


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_continued_adapter_starts_where_it_ended(model_type, losses, texts, tmp_path):
    model = {"name_or_path": str(save_tiny(tmp_path / "model", model_type))}
    data = {"train": str(texts), "eval": str(texts), "max_length": 64}
    adapter = {**LORA, "lora_dropout": 0.0}
    losses([3], "first", model=model, adapter=adapter, training=SHORT, data=data)
    adapter = {"init_from": str(tmp_path / "first" / "adapter")}
    training = {**SHORT, "learning_rate": 0.0}
    losses([2, 4], "second", model=model, adapter=adapter, training=training, data=data)
    assert final_eval(tmp_path / "second") == final_eval(tmp_path / "first")
    assert_same(weights(tmp_path / "second"), weights(tmp_path / "first"))


@pytest.mark.parametrize(
    "stored", [True, pytest.param(False, marks=pytest.mark.long)], ids=["stored", "while_loading"]
)
def test_qlora(stored, losses, texts, tmp_path):
    model = save_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)
    section: dict[str, Any] = {"name_or_path": str(model), "quantization": "nf4"}
    if stored:
        quantised = AutoModelForCausalLM.from_pretrained(
            model, quantization_config=NF4, device_map={"": "cpu"}
        )
        section = {"name_or_path": str(save_quantised(quantised, tmp_path / "nf4"))}
    cut_ways(losses, tmp_path, texts, model=section, adapter=LORA)


def save_quantised(model: Any, directory: Path) -> Path:
    save_tokenizer(directory)
    model.save_pretrained(directory)
    return directory
