"""Weights that contradict their config.json, and how transformers reads both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_framework.config import ModelConfig
from hetero_framework.errors import ModelError
from hetero_framework.models.adapters.trainable import export_parts
from hetero_framework.models.files.export import OutputDirectory, write_checkpoint
from hetero_framework.models.files.source import ModelSource
from tests.unit.adapter_helpers import chain_logits, save_model, shards, stock, stock_logits
from tests.unit.models.files.test_export import load_cleanly

Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewritten(base: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """The checkpoint with other tensors, and other settings."""
    tensors = {k: t for f in base.glob("*.safetensors") for k, t in load_file(f).items()}
    for file in base.glob("model*"):
        file.unlink()
    save_file(change(tensors), base / "model.safetensors", {"format": "pt"})
    fields = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**fields, **config}))
    return base


def own_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].flip(0).contiguous()}


def held(base: Path) -> tuple[ModelConfig, list[str]]:
    source, lines = ModelSource(ModelConfig(name_or_path=str(base)), base).held()
    return source.model, lines


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (own_head, False),
        (lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].clone()}, True),
        (lambda tensors: tensors, None),
        # The one that is there is both.
        (lambda tensors: {HEAD if k == EMBEDDING else k: t for k, t in tensors.items()}, None),
    ],
    ids=["own", "equal", "absent", "head_alone"],
)
def test_a_head_is_tied_where_the_library_ties_it(change, tied, tmp_path):
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    rewritten(base, change)
    settings, lines = held(base)
    assert settings.tie_word_embeddings is tied
    assert len(lines) == (tied is False)
    whole = stock(base)
    ends = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    assert torch.equal(*ends) == (tied is not False)
    pieces = shards(base, 0, 1, 3, 4, tie_word_embeddings=tied)
    assert torch.equal(chain_logits(pieces), stock_logits(whole))
    assert chain_logits(shards(base, 0, 4, tie_word_embeddings=tied)).equal(stock_logits(whole))
    parts = [dict(export_parts(piece)) for piece in pieces]
    write_checkpoint(OutputDirectory(tmp_path / "out"), parts, pieces[0].config)
    again = load_cleanly(tmp_path / "out")
    assert torch.equal(stock_logits(again), stock_logits(whole))
    assert again.config.tie_word_embeddings == (tied is not False)


def without_the_last_layer(base: Path) -> Path:
    return rewritten(base, lambda tensors: tensors, num_hidden_layers=3)


def with_another_tensor(base: Path) -> Path:
    more = {"model.norm_2.weight": torch.ones(3), "model.rotary_emb.inv_freq": torch.ones(3)}
    return rewritten(base, lambda tensors: {**tensors, **more})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_the_last_layer, "(it asks for 3 layers, they are of 4)"),
        (
            with_another_tensor,
            "has no place for; they are left out, and not in the result: model.n",
        ),
    ],
)
def test_unexpected_tensors_are_reported_as_by_the_library(change, said, tmp_path):
    base = change(save_model(tmp_path / "base"))
    _, report = type(stock(base)).from_pretrained(base, output_loading_info=True)
    unexpected = sorted(report["unexpected_keys"])
    assert unexpected
    (line,) = held(base)[1]
    assert f"holds {len(unexpected)} tensors that its config.json has no" in line
    assert said in line
    assert ", ".join(unexpected[:4]) in line


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "qwen3_moe", "zamba2", "gemma"])
def test_a_consistent_checkpoint_causes_no_remark(model_type, tmp_path):
    base = save_model(tmp_path / "base", model_type)
    assert held(base) == (ModelConfig(name_or_path=str(base)), [])


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    [("_orig_mod.", "torch.compile"), ("module.", "DataParallel"), ("base_model.model.", "PEFT")],
)
def test_names_that_a_wrapper_made_are_refused_with_the_cause(prefix, wrapper, tmp_path):
    base = save_model(tmp_path / "base")
    rewritten(base, lambda tensors: {prefix + name: t for name, t in tensors.items()})
    with pytest.raises(ModelError, match=f"that {wrapper}.* has wrapped: {prefix}lm_head") as e:
        held(base)
    assert f"take '{prefix}' out of the names" in e.value.hint
    with pytest.raises(ModelError, match=f"that {wrapper}.* has wrapped"):
        shards(base, 0, 2, 4)


def test_names_that_a_compiled_block_made_are_refused_with_the_cause(tmp_path):
    base = save_model(tmp_path / "base")
    rewritten(base, lambda ts: {n.replace("layers.1.", "layers.1._orig_mod."): ts[n] for n in ts})
    with pytest.raises(ModelError, match=r"torch.compile has wrapped: model.layers.1._orig_mod"):
        held(base)
