"""Classes that are tried with pictures without files, and models with their own processor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.utils import is_torchvision_available

from hetero_framework.extras.verify.verification import verify_model, with_pictures
from hetero_framework.models.cut.tiny import multimodal_classes
from tests.extras.vision.seeing import FAMILIES, LAYERS
from tests.samples import config_for

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"
TOLD = {
    "LlavaForConditionalGeneration": "admitted",
    "PaliGemmaForConditionalGeneration": "refused: its processor is of another kind (ValueError",
    "BlipForConditionalGeneration": "refused: its processor is of another kind (AttributeError",
    "FastVlmForConditionalGeneration": "cannot be tried here: transformers names no processor",
    "llama": "",
    "VoxtralForConditionalGeneration": "",
}
if not is_torchvision_available():
    TOLD["Llama4ForConditionalGeneration"] = (
        "cannot be tried here: no processor of its defaults is made (ImportError: "
    )


@pytest.mark.parametrize("name", TOLD)
def test_a_class_is_tried_with_a_processor_of_its_defaults(name, verdicts):
    told = with_pictures(name)
    assert told.startswith(TOLD[name]) if TOLD[name] else told == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_admits_what_is_compared_with_trl(family, models):
    config = AutoConfig.from_pretrained(models(family))
    names = {config.model_type, *config.architectures}
    assert names & {*multimodal_classes()}
    rows = dict(re.findall(r"^\| `(\w+)` \| (admitted|refused|cannot)", PAGE.read_text(), re.M))
    assert "admitted" in {rows.get(name) for name in names}


def test_verify_tries_a_models_own_processor(models, verdicts, tmp_path):
    sections = {"model": {"name_or_path": str(models("llava"))}}
    config = config_for(("local", 1), (1, LAYERS), **sections)
    assert verify_model(config).pictures == "admitted"
    for file in models("llava").glob("*processor_config.json"):
        file.rename(tmp_path / file.name)
    try:
        found = verify_model(config).pictures
    finally:
        for file in tmp_path.glob("*processor_config.json"):
            file.rename(models("llava") / file.name)
    assert found.startswith("refused: the model ")
