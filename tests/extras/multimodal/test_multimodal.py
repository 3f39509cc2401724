"""Multimodal checkpoints trained on text: training equals that of their own classes in one process,
and these classes load the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import is_timm_available

from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.integration.oracles import (
    assert_agree,
    assert_close,
    save_adapter,
    stock_model,
    trainer_run,
)
from tests.integration.test_outputs import mean_token_loss
from tests.integration.test_parity import assert_same, weights
from tests.integration.test_resume import make
from tests.samples import save_multimodal

pytestmark = pytest.mark.xdist_group("pool2")

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
SHORT = {"max_steps": 3, "warmup_steps": 0, "weight_decay": 0.5, "learning_rate": 1e-2}
NAMES = [
    "Gemma3ForConditionalGeneration",  # one weight for embedding and head
    "Mistral3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",  # a causal class takes its text configuration
    "Qwen2_5_VLForConditionalGeneration",  # positions of three axes
    "Qwen3VLMoeForConditionalGeneration",
    "VoxtralForConditionalGeneration",  # hears
]
CLASSES = seldom(NAMES, *NAMES[1:])


def original(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint as the class that its configuration names, towers and all."""
    model, report = stock_model(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.train(False)


@pytest.mark.parametrize(
    "adapter", [None, pytest.param(LORA, marks=pytest.mark.long)], ids=["full", "lora"]
)
@pytest.mark.parametrize("name", CLASSES)
def test_text_trains_under_any_cut_and_the_class_loads_the_result(
    name, adapter, losses, texts, tmp_path
):
    model = save_multimodal(tmp_path / "model", name)
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "adapter": adapter}
    sections["training"] = {**SHORT, "per_device_eval_batch_size": 4, "eval_steps": 3}
    sections["data"] = {"train": str(texts), "eval": str(texts)}
    whole = losses([], "whole", **sections)
    for cuts in ([3], [1, 4]):
        assert losses(cuts, "cut", **sections) == whole
        assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    before = original(model)
    trained: Any
    if adapter is None:
        trained = original(tmp_path / "cut" / "model")
    else:
        trained = PeftModel.from_pretrained(original(model), tmp_path / "cut" / "adapter")
        adapted = {n for n, _ in trained.named_parameters() if "lora" in n}
        assert adapted
        assert all("language_model" in n for n in adapted)
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    (said,) = [e["eval_token_loss"] for e in map(json.loads, lines) if "eval_token_loss" in e]
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = mean_token_loss(trained.train(False), tokenizer, texts)
    assert found == pytest.approx(said, rel=1e-5)
    assert found != pytest.approx(mean_token_loss(before, tokenizer, texts), rel=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("adapted", seldom([False, True], False), ids=["full", "lora"])
@pytest.mark.parametrize("name", CLASSES)
def test_training_agrees_with_trainer_over_the_class_itself(name, adapted, losses, texts, tmp_path):
    model = save_multimodal(tmp_path / "model", name)
    sections: dict[str, Any] = {"model": {"name_or_path": str(model)}, "training": SHORT}
    adapter = None
    if adapted:
        own = {**LORA, "exclude_modules": ".*(vision|visual|audio).*"}
        adapter = save_adapter(model, tmp_path / "adapter", **own)
        sections["adapter"] = {"init_from": str(adapter)}
    ours = losses([2, 4], **sections)
    theirs, trained = trainer_run(model, texts, tmp_path / "trainer", adapter, **SHORT)
    assert_agree(ours, theirs)
    run = tmp_path / "run"
    assert_close(weights(run) if adapted else original(run / "model").state_dict(), trained)


@pytest.mark.long
@pytest.mark.skipif(is_timm_available(), reason="timm is there")
def test_a_class_whose_tower_cannot_be_built_agrees_with_trainer(losses, texts, tmp_path):
    name = "Gemma3nForConditionalGeneration"
    test_training_agrees_with_trainer_over_the_class_itself(name, True, losses, texts, tmp_path)


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_checkpoint(pool, texts, tmp_path):
    model = save_multimodal(tmp_path / "model", "LlavaNextForConditionalGeneration")
    training = {**SHORT, "save_strategy": "steps", "save_steps": 2}
    train(make(pool, model, texts, tmp_path / "whole", [], training=training))
    once = original(tmp_path / "whole" / "model").state_dict()
    train(make(pool, model, texts, tmp_path / "whole", [1, 4], training=training), resume=2)
    assert_same(original(tmp_path / "whole" / "model").state_dict(), once)
