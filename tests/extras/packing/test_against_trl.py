"""Packed training against TRL's SFTTrainer(packing=True), whole and cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_framework.models.cut.tiny import tiny_config
from tests.integration.oracles import assert_agree, assert_close, save_adapter, sft_run
from tests.integration.test_oracle_sft import pairs, words
from tests.integration.test_parity import weights
from tests.unit.data_helpers import tiny_tokenizer, write_jsonl

pytestmark = [
    pytest.mark.xdist_group("pool2"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
_OTHERS = ("qwen3", "gemma3_text", "gpt2")


def texts(draw: random.Random) -> list[dict[str, Any]]:
    return [{"text": words(draw, 40)} for _ in range(40)]


def saved(model_type: str, folder: Path) -> Path:
    """A tiny model of six layers with a tokenizer."""
    torch.manual_seed(3)
    config = tiny_config(model_type)
    config.vocab_size = 400
    config.pad_token_id = None
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "strategy", "lora"),
    [
        ("llama", "bfd", True),
        pytest.param("llama", "bfd_split", False, marks=pytest.mark.long),
        pytest.param("llama", "wrapped", True, marks=pytest.mark.long),
        *[pytest.param(name, "bfd", True, marks=pytest.mark.long) for name in _OTHERS],
        *[pytest.param(name, "bfd_split", False, marks=pytest.mark.long) for name in _OTHERS],
    ],
)
def test_agrees_with_sft_trainer(losses, model_type, strategy, lora, tmp_path):
    model = saved(model_type, tmp_path / "model")
    rows = (pairs if strategy == "bfd" else texts)(random.Random(1))
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    names = {"target_modules": "all-linear", "fan_in_fan_out": model_type == "gpt2"}
    adapter = save_adapter(model, tmp_path / "adapter", **names) if lora else None
    packing = {"packing": True, "packing_strategy": strategy, "max_length": 48}
    training = {"num_train_epochs": 1, "per_device_train_batch_size": 2}
    sections = {"data": {"train": str(file), **packing}, "training": training}
    sections |= {"model": {"name_or_path": str(model)}}
    sections |= {"adapter": {"init_from": str(adapter)}} if adapter else {}
    found = losses([2, 4], "run", **sections)
    assert losses([], "alone", **sections) == found
    assert losses([3], "two", **sections) == found
    theirs, trained = sft_run(model, file, tmp_path / "trl", adapter, **packing, **training)
    assert_agree(found, theirs)
    written = weights(tmp_path / "run")
    assert trained.keys() - written.keys() <= {"lm_head.weight"}  # tied to the embedding
    assert_close(written, {name: trained[name] for name in written})
