"""The parts of a multimodal model that text does not use."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn
from transformers import Gemma3Config

from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.multimodal import towers as find
from hetero_framework.models.cut import language
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import (
    lies_in,
    meta_model,
    model_class,
    tower_lines,
    towers,
)
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.tiny import stock_class, tiny_config
from hetero_framework.models.files.weights import Checkpoint
from hetero_framework.models.verify.equivalence import compare
from tests.cases import seldom, spread
from tests.samples import save_multimodal
from tests.unit.adapter_helpers import chain_logits, shards, stock_logits

# With what text does not use: seen, heard, spoken, a parameter beside modules that are used.
TOWERS = {
    "Gemma3ForConditionalGeneration": {"model.vision_tower", "model.multi_modal_projector"},
    "Llama4ForConditionalGeneration": {"vision_model", "multi_modal_projector"},
    "Qwen2_5_VLForConditionalGeneration": {"model.visual"},
    "Qwen2AudioForConditionalGeneration": {"model.audio_tower", "model.multi_modal_projector"},
    "LlavaNextForConditionalGeneration": {
        "model.vision_tower",
        "model.multi_modal_projector",
        "model.image_newline",
    },
}


@pytest.mark.parametrize("name", seldom(TOWERS, *[*TOWERS][2:]))
def test_the_original_class_trains_as_its_language_part(name):
    config = tiny_config(name)
    assert set(towers(config)) == TOWERS[name]
    whole = getattr(transformers, name)
    assert stock_class(config) is whole
    assert issubclass(model_class(config), whole)
    assert compare(config, ranges_between([0, 2, 5, 6])).verdict == "bit-equal"


@pytest.mark.parametrize(
    ("name", "sharded"),
    spread(
        ["Gemma3ForConditionalGeneration", *list(TOWERS)[2:3]], {"one file": False, "many": True}
    ),
)
def test_no_tensor_of_a_tower_is_read(name, sharded, monkeypatch, tmp_path):
    changes = {"max_shard_size": "100KB"} if sharded else {}
    base = save_multimodal(tmp_path / "base", name, **changes)
    assert len(list(base.glob("*.safetensors"))) > 1 or not sharded
    read: set[str] = set()
    slices = Checkpoint.slices

    @contextmanager
    def spied(self, wanted, *how):
        with slices(self, wanted, *how) as found:
            read.update(found)
            yield found

    monkeypatch.setattr(Checkpoint, "slices", spied)
    pieces = shards(base, 0, 1, 3, 6)
    whole = getattr(transformers, name).from_pretrained(base).train(False)
    gone = towers(pieces[0].config)
    beside = {key for key in Checkpoint(str(base)).files if "visual" in key or "vision" in key}
    assert beside
    assert not read & beside
    names = {n for piece in pieces for n, _ in piece.model.named_parameters()}
    expected = {n for n, _ in whole.named_parameters() if not lies_in(n, gone)}
    assert names - {"lm_head.weight"} == expected - {"lm_head.weight"}  # tied in one of them
    assert torch.equal(chain_logits(pieces), stock_logits(whole))


def test_towers_are_not_made_for_a_real_configuration():
    model = meta_model(Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not [n for n, _ in model.named_parameters() if "vision" in n or "projector" in n]


class Experts(nn.Module):
    """Of two experts one is used; what a called module holds back may be a list's, or its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.picture = nn.Sequential(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))


def test_unused_members_of_a_list_are_no_towers():
    model = Experts()
    found = find._unused_in("", model, {"experts.0.weight", "experts.0.bias"}, set())
    assert sorted(found) == ["picture", "scale"]
    found = find._unused_in("", model, {"scale"}, {model.picture})
    assert sorted(found) == ["experts", "picture.0"]


def test_modules_that_stay_on_disk_are_reported():
    (line,) = tower_lines(tiny_config("LlavaForConditionalGeneration"))
    assert "model.vision_tower, model.multi_modal_projector" in line
    assert "neither loaded nor sent" in line
    assert tower_lines(tiny_config("llama")) == []


def test_a_class_that_needs_pictures_is_refused_with_its_inputs():
    with pytest.raises(ArchitectureError, match=r"on text alone.*pixel_values") as refused:
        towers(tiny_config("Blip2ForConditionalGeneration"))
    assert "without pictures and sound" in str(refused.value.hint)
    missing = language.no_tiny_copy(tiny_config("llama"), ImportError("needs timm"))
    assert "install" in str(missing.hint)


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_a_class_that_the_library_cannot_build_says_so(model_type):
    """All its layers share the keys of another model, and 5.23 asks for one that makes them."""
    with pytest.raises(ArchitectureError, match="transformers builds no tiny copy") as refused:
        introspect(tiny_config(model_type))
    assert "another version of transformers" in refused.value.message
