"""Multimodal classes whose non-text modules need a package that is not installed, against their own
classes."""

from __future__ import annotations

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.utils import is_timm_available

from hetero_framework.config import AdapterConfig, ModelConfig
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.extras.multimodal.towers import AbsentPart, stand_in
from hetero_framework.models.cut import language
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import towers
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.tiny import tiny_config
from hetero_framework.models.files.export import OutputDirectory, weights_beside, write_checkpoint
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.verify.equivalence import compare
from tests.integration.test_parity import assert_same
from tests.samples import save_multimodal
from tests.unit.adapter_helpers import shards, write_trained
from tests.unit.models.files.test_export import files_of, parts_of

pytestmark = pytest.mark.skipif(is_timm_available(), reason="timm is there")

NAME = "FastVlmForConditionalGeneration"


@pytest.mark.parametrize(
    "name", [NAME, *(pytest.param(n, marks=pytest.mark.long) for n in ("gemma3n", "perception_lm"))]
)
def test_text_trains_to_the_bit_without_the_package(name):
    config = tiny_config(name)
    assert "model.vision_tower" in towers(config)
    result = compare(config, ranges_between([0, 2, 5, 6]))
    assert (result.verdict, result.reason) == ("bit-equal", "")


def test_a_part_that_is_there_is_never_replaced():
    config = tiny_config("LlavaForConditionalGeneration")
    assert not stand_in(config)
    assert not issubclass(AutoModel._model_mapping[type(config.vision_config)], AbsentPart)


def test_text_that_needs_the_part_is_refused_with_the_package(monkeypatch):
    config = tiny_config(NAME)
    towers(config)
    cls = language.stock_class(config)
    forward = cls.forward

    def looking(self, *args, **kwargs):
        self.model.vision_tower(torch.zeros(1))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", looking)
    config.text_config.rope_parameters["rope_theta"] = 777.0  # another question than those before
    with pytest.raises(ArchitectureError, match="requires the timm library"):
        introspect(config)


def test_tensors_of_missing_parts_are_copied_into_the_result(tmp_path):
    base = save_multimodal(tmp_path / "base", NAME)
    source = ModelSource(ModelConfig(name_or_path=str(base)), base)
    with pytest.raises(ModelError, match=r"lacks 1 .* has to hold: model\.vision_tower"):
        weights_beside(source)
    added = {f"model.vision_tower.timm_model.stem.{i}.weight": torch.randn(3, i) for i in (1, 2)}
    file = base / "model.safetensors"
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    source = ModelSource(source.model, base)
    parts, besides = parts_of(shards(base, 0, 3, 6)), weights_beside(source)
    write_checkpoint(OutputDirectory(tmp_path / "out"), parts, source.config, beside=besides)
    ours = files_of(tmp_path / "out")
    assert added.keys() <= ours.keys()
    assert_same(ours, files_of(base))


def test_an_adapter_excludes_missing_parts(tmp_path):
    base = save_multimodal(tmp_path / "base", NAME)
    pieces = shards(base, 0, 3, 6, adapter=AdapterConfig(r=4, target_modules=("q_proj",)))
    folder = write_trained(pieces, base, tmp_path / "adapter")
    assert "vision_tower" in PeftConfig.from_pretrained(folder).exclude_modules
