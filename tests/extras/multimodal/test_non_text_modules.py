"""The non-text modules of a multimodal checkpoint in the result, against transformers' and PEFT's
own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from hetero_framework.config import AdapterConfig, ModelConfig
from hetero_framework.errors import ModelError
from hetero_framework.extras.exporting.merge import merge_adapter
from hetero_framework.models.files.export import OutputDirectory, weights_beside, write_checkpoint
from hetero_framework.models.files.source import ModelSource
from tests.cases import seldom
from tests.extras.multimodal.test_multimodal import original
from tests.integration.test_parity import assert_same
from tests.samples import save_multimodal
from tests.unit.adapter_helpers import (
    chain_logits,
    randomise,
    shards,
    stock_logits,
    write_trained,
)
from tests.unit.models.files.test_export import files_of, parts_of

NAMES = [
    *("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("Qwen3VLMoeForConditionalGeneration", "LlavaNextForConditionalGeneration"),
]
CLASSES = seldom(NAMES, *NAMES[1:])


def source_of(base: Path) -> ModelSource:
    return ModelSource(ModelConfig(name_or_path=str(base)), base)


def beside(base: Path) -> Any:
    return weights_beside(source_of(base))


def write(base: Path, target: Path, pieces: list) -> Path:
    config = pieces[0].config
    write_checkpoint(OutputDirectory(target), parts_of(pieces), config, beside=beside(base))
    return target


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_a_checkpoint_is_the_librarys_own_byte_for_byte(name, size, tmp_path):
    base = save_multimodal(tmp_path / "base", name, max_shard_size=size)
    (base / "preprocessor_config.json").write_text('{"image_size": 32}')
    target = write(base, tmp_path / "out", shards(base, 0, 1, 3, 6))
    assert_same(files_of(target), files_of(base))
    read = [json.loads((folder / "config.json").read_text()) for folder in (target, base)]
    assert read[0] == read[1]
    assert (target / "preprocessor_config.json").read_text() == '{"image_size": 32}'
    original(target)


def test_towers_under_the_names_of_the_class_are_converted_for_the_result(tmp_path):
    """That class has its attention's rows in another order than the checkpoints that it reads."""
    base = save_multimodal(tmp_path / "base", "MistralLarge4ForConditionalGeneration")
    published = dict(beside(base).tensors())
    tensors = original(base).state_dict()
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert_same(dict(beside(base).tensors()), published)


def test_trained_weights_stand_beside_untouched_towers(tmp_path):
    base = save_multimodal(tmp_path / "base", "LlavaNextForConditionalGeneration")
    pieces = shards(base, 0, 1, 3, 6)
    randomise(pieces)
    target = write(base, tmp_path / "out", pieces)
    assert torch.equal(stock_logits(original(target)), chain_logits(pieces))
    ours, theirs = files_of(target), files_of(base)
    same = {key for key in theirs if torch.equal(ours[key], theirs[key])}
    assert same == {key for key in theirs if "language_model" not in key and "lm_head" not in key}


def test_the_towers_of_another_versions_checkpoint_get_the_names_of_today(tmp_path):
    base = save_multimodal(tmp_path / "base", "LlavaForConditionalGeneration")
    file = base / "model.safetensors"
    stored = load_file(file)
    older = {f"model.{key}" if "vision_tower" in key else key: t for key, t in stored.items()}
    assert older.keys() != stored.keys()
    save_file(older, file, metadata={"format": "pt"})
    assert_same(files_of(write(base, tmp_path / "out", shards(base, 0, 6))), stored)


def test_a_checkpoint_without_its_towers_is_refused_before_it_is_trained(tmp_path):
    base = save_multimodal(tmp_path / "base", "Gemma3ForConditionalGeneration")
    file = base / "model.safetensors"
    language = {key: t for key, t in load_file(file).items() if "vision" not in key}
    save_file(language, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks \d+ weights that text does not use"):
        beside(base)


def test_a_processor_that_brings_code_is_refused_before_the_first_step(tmp_path):
    base = save_multimodal(tmp_path / "base", "LlavaForConditionalGeneration")
    text = json.dumps({"auto_map": {"AutoProcessor": "processing.Own"}})
    source = source_of(base)
    assert source.config.sub_configs
    (base / "processor_config.json").write_text(text)
    with pytest.raises(ModelError, match="code of its own"):
        weights_beside(source)


def test_random_weights_have_no_towers_to_copy(tmp_path):
    base = save_multimodal(tmp_path / "base", "Gemma3ForConditionalGeneration")
    model = ModelConfig(from_config=json.loads((base / "config.json").read_text()))
    with pytest.raises(ModelError, match="from_config"):
        weights_beside(ModelSource(model, base))


def test_a_tower_of_another_shape_is_named(tmp_path):
    base = save_multimodal(tmp_path / "base", "LlavaNextForConditionalGeneration")
    file = base / "model.safetensors"
    save_file({**load_file(file), "image_newline": torch.ones(3)}, file, metadata={"format": "pt"})
    found = beside(base)
    with pytest.raises(ModelError, match=r"image_newline .* \[3\]"):
        list(found.tensors())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("excluded", [None, ("k_proj",), r".*layers\.0\..*"])
def test_an_adapter_is_one_of_the_original_class(name, excluded, tmp_path):
    base = save_multimodal(tmp_path / "base", name)
    adapter = AdapterConfig(r=4, target_modules=("q_proj", "k_proj"), exclude_modules=excluded)
    pieces = shards(base, 0, 1, 3, 6, adapter=adapter)
    randomise(pieces)
    folder = write_trained(pieces, base, tmp_path / "adapter")
    assert PeftConfig.from_pretrained(folder).base_model_name_or_path == str(base)
    adapted: Any = PeftModel.from_pretrained(original(base), folder)
    assert torch.equal(stock_logits(adapted.train(False)), chain_logits(pieces))
    assert get_peft_model_state_dict(adapted).keys() == pieces[0].adapter.plan.tensors.keys()
    # It is read here again, and what it excludes does not grow.
    continued = shards(base, 0, 6, adapter=AdapterConfig(init_from=str(folder)))
    assert torch.equal(chain_logits(continued), chain_logits(pieces))
    again = write_trained(continued, base, tmp_path / "again")
    configs = [PeftConfig.from_pretrained(place) for place in (folder, again)]
    assert configs[0].exclude_modules == configs[1].exclude_modules


@pytest.mark.long
@pytest.mark.parametrize("modules", [("q_proj", "down_proj"), ("q_proj", "lm_head")])
def test_a_merged_adapter_is_a_whole_checkpoint(modules, tmp_path):
    base = save_multimodal(tmp_path / "base", "Gemma3ForConditionalGeneration")
    pieces = shards(base, 0, 2, 6, adapter=AdapterConfig(r=4, target_modules=modules))
    randomise(pieces)
    folder = write_trained(pieces, base, tmp_path / "adapter")
    merge_adapter(folder, str(base), OutputDirectory(tmp_path / "merged"))
    merged = original(tmp_path / "merged")
    assert torch.allclose(stock_logits(merged), chain_logits(pieces), rtol=1e-4, atol=1e-5)
    ours, theirs = merged.state_dict(), original(base).state_dict()
    assert ours.keys() == theirs.keys()
    same = {key for key in theirs if torch.equal(ours[key], theirs[key])}
    assert {key for key in theirs if "vision" in key or "projector" in key} <= same
