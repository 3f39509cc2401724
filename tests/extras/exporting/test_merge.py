"""Merged adapters against PEFT's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import PreTrainedModel

from hetero_framework.config import AdapterConfig, Config
from hetero_framework.errors import CheckpointError, ConfigError, DataError, ModelError
from hetero_framework.extras.exporting.merge import merge_adapter
from hetero_framework.extras.verify.verification import verify_model
from hetero_framework.models.files.export import OutputDirectory
from tests.samples import plan_of
from tests.unit.adapter_helpers import (
    randomise,
    save_model,
    shards,
    stock,
    stock_logits,
    write_trained,
)
from tests.unit.models.files.test_export import load_cleanly
from tests.unit.models.files.test_source import own_head, rewritten


def saved_adapter(base: Path, folder: Path, adapter: AdapterConfig, layers: int = 4) -> Path:
    pieces = shards(base, 0, 2, layers, adapter=adapter)
    randomise(pieces)
    return write_trained(pieces, base, folder)


def merged_with(adapter: Path, base: Path, folder: Path, **how: Any) -> PreTrainedModel:
    merge_adapter(adapter, str(base), OutputDirectory(folder), **how)
    return load_cleanly(folder)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"target_modules": "all-linear", "use_dora": True}),
        ("llama", {"modules_to_save": ("lm_head",), "target_modules": ("q_proj", "embed_tokens")}),
        ("gpt2", {"bias": "all"}),
        ("gpt2", {"lora_bias": True}),
        ("mixtral", {"target_modules": ("q_proj", "w1", "w2", "w3")}),
    ],
)
def test_merged_checkpoint_equals_pefts_merge(model_type, settings, tmp_path):
    base = save_model(tmp_path / "base", model_type)
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig(**settings))
    merged = merged_with(adapter, base, tmp_path / "merged")
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("transformers", None)
    assert "an adapter, folded into its weights" in card.text
    assert str(tmp_path) not in str(card)
    reference = PeftModel.from_pretrained(stock(base), str(adapter)).merge_and_unload()
    assert torch.equal(stock_logits(merged), stock_logits(reference))
    assert (tmp_path / "merged" / "generation_config.json").is_file()


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.parametrize("layers", [4, 1])
def test_merge_into_one_end_of_tied_embeddings_unties_them(layers, tmp_path):
    base = save_model(tmp_path / "base", "gemma", num_hidden_layers=layers)
    pieces = shards(base, 0, layers, adapter=AdapterConfig(target_modules=("embed_tokens",)))
    randomise(pieces)
    adapter = write_trained(pieces, base, tmp_path / "adapter")
    merged = merged_with(adapter, base, tmp_path / "merged")
    assert not merged.config.tie_word_embeddings
    unmerged = PeftModel.from_pretrained(stock(base), str(adapter))
    torch.testing.assert_close(stock_logits(merged), stock_logits(unmerged))


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_merge_into_weights_that_blocks_share_unties_them(tmp_path):
    """An adapter is each block's own, as PEFT's is over the whole model."""
    base = save_model(tmp_path / "base", "zamba2")
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig(target_modules=("q_proj",)))
    merged = merged_with(adapter, base, tmp_path / "merged")
    adapted = PeftModel.from_pretrained(stock(base), str(adapter))
    torch.testing.assert_close(stock_logits(merged), stock_logits(adapted))


def test_merge_writes_the_wanted_type(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig())
    model = merged_with(adapter, base, tmp_path / "merged", dtype="bfloat16")
    whole = stock(base, dtype=torch.bfloat16)
    reference = PeftModel.from_pretrained(whole, str(adapter)).merge_and_unload()
    assert model.dtype == torch.bfloat16
    assert torch.equal(stock_logits(model), stock_logits(reference))


def test_merge_into_a_quantised_model_says_to_give_the_full_one(tmp_path):
    base = save_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="full-precision model"):
        merge_adapter(tmp_path / "adapter", str(base), OutputDirectory(tmp_path / "merged"))


def test_biases_of_updates_are_merged_into_biases_only(tmp_path):
    base = save_model(tmp_path / "base")
    settings = AdapterConfig(lora_bias=True, target_modules=("q_proj",))
    adapter = saved_adapter(base, tmp_path / "adapter", settings)
    with pytest.raises(ConfigError, match=r"lora_bias\), and 4 of its layers have no bias"):
        merge_adapter(adapter, str(base), OutputDirectory(tmp_path / "merged"))


def test_tokenizer_that_names_code_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    base = save_model(tmp_path / "base")
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig())
    canary = tmp_path / "canary"
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for folder in (adapter, base):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
        with pytest.raises(DataError, match=r"names code of its own(.|\n)*take tokenizer_config"):
            merge_adapter(adapter, str(base), OutputDirectory(tmp_path / "merged"))
        (folder / "tokenizer_config.json").unlink()
    assert not canary.exists()
    assert not (tmp_path / "merged").exists()


def test_a_result_never_replaces_its_source(tmp_path):
    base = save_model(tmp_path / "base")
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for source in (base, adapter):
        with pytest.raises(CheckpointError, match="is needed to make the result"):
            merge_adapter(adapter, str(base), OutputDirectory(source, overwrite=True))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_stored_head_is_merged_and_verified(tmp_path):
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    adapter = saved_adapter(base, tmp_path / "adapter", AdapterConfig(target_modules=("q_proj",)))
    rewritten(base, own_head)
    merged = merged_with(adapter, base, tmp_path / "merged")
    with pytest.warns(UserWarning, match="no longer tied"):
        reference = PeftModel.from_pretrained(stock(base), str(adapter)).merge_and_unload()
    assert torch.equal(stock_logits(merged), stock_logits(reference))
    machine, plan = {"hostname": "a", "ip": "127.0.0.1"}, plan_of(("local", 4))
    raw = {"coordinator": machine, "shard_plan": plan, "model": {"name_or_path": "base"}}
    assert verify_model(Config.from_dict(raw, tmp_path), cuts=[1, 3]).verdict == "bit-equal"
