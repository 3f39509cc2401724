"""Models whose head classifies, cut and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    LlamaForCausalLM,
)

from hetero_framework import registry
from hetero_framework.config import Config, ModelConfig
from hetero_framework.config.objectives import needs_of
from hetero_framework.core.devices import open_device
from hetero_framework.errors import ArchitectureError, ConfigError, ModelError
from hetero_framework.extras.classification.settings import LabelSettings
from hetero_framework.extras.verify.verification import verify_model
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import model_class
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import load_shard
from hetero_framework.models.cut.tiny import config_for, stock_class, tiny_config
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.verify import equivalence
from hetero_framework.models.verify.equivalence import compare
from tests.samples import plan_of

TEXTS, TOKENS = "sequence-classification", "token-classification"
CUTS = ([0, 6], [0, 2, 6], [0, 0, 3, 4, 6, 6])


@pytest.fixture(autouse=True)
def objectives(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("objectives", "texts", None, task=TEXTS)


def section(place: Path, **settings: Any) -> ModelConfig:
    """The `model` section of a run that classifies texts."""
    model = LabelSettings(name_or_path=str(place), **settings)
    model._objective = "texts"
    return model


def saved(folder: Path, model_type: str = "llama", task: Any = "causal-lm") -> Path:
    """A tiny random model of this class on disk."""
    torch.manual_seed(3)
    config = tiny_config(model_type, task)
    model_class(config)._from_config(config).save_pretrained(folder)
    return folder


def chain(model: ModelConfig, bounds: list[int]) -> list[Any]:
    spans = ranges_between(bounds)
    shards = [load_shard(model, Path(), rng, open_device("cpu"), seed=5) for rng in spans]
    for shard in shards:
        shard.train(False)
    return shards


def weights(shards: list[Any]) -> dict[str, torch.Tensor]:
    return {n: p.detach() for shard in shards for n, p in shard.model.named_parameters()}


def logits(shards: list[Any], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    received: Any = ()
    with torch.no_grad():
        for shard in shards[:-1]:
            received = shard.forward(inputs, received)
        return shards[-1].logits(inputs, received)


def padded(side: str) -> dict[str, torch.Tensor]:
    """Rows of 7, 4 and 1 tokens; 0 pads."""
    ids, mask = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    for row, length in enumerate((7, 4, 1)):
        place = slice(7 - length, 7) if side == "left" else slice(length)
        ids[row, place] = torch.arange(5, 5 + length) + row
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


LONG = ("distilbert", "roberta", "qwen3", "mistral", "gpt_neox", "modernbert")


@pytest.mark.parametrize("task", [TEXTS, TOKENS])
@pytest.mark.parametrize(
    "model_type",
    ["llama", "bert", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", *LONG))],
)
def test_a_cut_classifier_trains_as_the_whole(model_type, task):
    config = tiny_config(model_type, task)
    layers = introspect(config).num_layers
    result = compare(config, ranges_between([0, 2, layers - 1, layers]))
    assert result.verdict == "bit-equal", result.reason


@pytest.mark.parametrize(
    "model_type", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("gpt2", "bert"))]
)
def test_a_base_gets_the_same_new_head_under_every_cut(model_type, tmp_path):
    place = saved(tmp_path / "base", model_type)
    if model_type == "bert":
        place = tmp_path / "bert"
        BertForMaskedLM(tiny_config(model_type, TEXTS)).save_pretrained(place)
    model = section(place, num_labels=3, pad_token_id=0)
    whole = weights(chain(model, CUTS[0]))
    stock = AutoModelForSequenceClassification.from_pretrained(place, num_labels=3, pad_token_id=0)
    missing = stock.load_state_dict(whole, strict=False).missing_keys
    assert not [name for name in missing if "position_ids" not in name]
    head = next(name for name in whole if name.startswith(("score", "classifier")))
    assert whole[head].shape[0] == 3
    assert 0.01 < float(whole[head].std()) < 0.03
    stock.train(False)
    for bounds in CUTS:
        shards = chain(model, bounds)
        for name, weight in weights(shards).items():
            assert torch.equal(weight, whole[name]), name
        for side in ("right", "left"):
            inputs = padded(side)
            with torch.no_grad():
                expected = stock(**inputs).logits
            assert torch.equal(logits(shards, inputs), expected)
    assert head in ModelSource(model, Path()).new_weights
    assert ModelSource(model, Path()).held()[1] == []  # the heads of other classes are no news


def test_a_head_in_the_checkpoint_is_kept(tmp_path):
    place = saved(tmp_path, task=TEXTS)
    config = AutoConfig.from_pretrained(place)
    model = section(place)
    there = load_file(place / "model.safetensors")
    assert torch.equal(weights(chain(model, [0, 3, 6]))["score.weight"], there["score.weight"])
    assert ModelSource(model, Path()).config.id2label == config.id2label
    assert ModelSource(model, Path()).held()[1] == []
    with pytest.raises(ModelError, match=r"score\.weight") as error:
        chain(section(place, num_labels=5), [0, 6])
    assert "model.num_labels" in str(error.value.hint)


def test_other_lost_weights_are_an_error(tmp_path):
    place = saved(tmp_path)
    file = place / "model.safetensors"
    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        whole = load_file(file)
        save_file({n: t for n, t in whole.items() if n != name}, file, {"format": "pt"})
        with pytest.raises(ModelError, match="lacks 1 weights"):
            chain(section(place, pad_token_id=0), [0, 6])
        save_file(whole, file, {"format": "pt"})


def test_text_is_generated_by_a_class_that_can(tmp_path):
    """The checkpoint names its classifier; the task decides."""
    place = saved(tmp_path, task=TEXTS)
    config = ModelSource(ModelConfig(name_or_path=str(place)), Path()).config
    assert model_class(config) is LlamaForCausalLM
    for task, name in ((TEXTS, "LlamaForSequenceClassification"), (TOKENS, None)):
        config = config_for(AutoConfig.from_pretrained(place), task)
        assert config.architectures == [name or "LlamaForTokenClassification"]
    with pytest.raises(ArchitectureError, match="no class for token-classification"):
        config_for(AutoConfig.for_model("mamba"), TOKENS)


def test_labels_are_settings(tmp_path):
    model = section(saved(tmp_path), label_names=("no", "yes", "maybe"), problem_type="regression")
    config = ModelSource(model, Path()).config
    assert (config.num_labels, config.id2label[2], config.label2id["yes"]) == (3, "maybe", 1)
    assert config.problem_type == "regression"
    assert json.loads(config.to_json_string())["id2label"] == {"0": "no", "1": "yes", "2": "maybe"}
    for wrong in ({"num_labels": 2}, {"label_names": ("a", "a")}):
        with pytest.raises(ValueError, match="label_names"):
            LabelSettings(name_or_path="m", **{"label_names": ("a", "b", "c"), **wrong})


def test_a_model_without_the_setting_is_a_causal_one(tmp_path):
    place = saved(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(place)
    config = ModelSource(LabelSettings(name_or_path=str(place), num_labels=7), Path()).config
    assert config.num_labels == model.config.num_labels


@pytest.mark.parametrize("objective", ["classification", "reward", "token-classification"])
@pytest.mark.parametrize("has_head", [False, True])
def test_verify_takes_the_class_that_the_objective_trains(
    objective, has_head, tmp_path, monkeypatch
):
    """A head that the weights lack is the same in the whole and in a shard."""
    stored = tiny_config("llama", needs_of(objective).task if has_head else "causal-lm")
    if has_head:
        stored.num_labels = 1 if objective == "reward" else 3
    stock_class(stored)._from_config(stored).save_pretrained(tmp_path / "model")
    machine = {"hostname": "a", "ip": "127.0.0.1"}
    raw = {
        "coordinator": machine,
        "workers": [{"id": 1, **machine, "port": 9871}],
        "shard_plan": plan_of(("local", 2), (1, 6)),
        "model": {"name_or_path": "model"},
        "training": {"objective": objective},
    }
    steps: list[str] = []
    real = equivalence.whole_step

    def step(whole: Any, inputs: Any, items: Any, config: Any, *half: Any) -> float:
        steps.append(type(whole).__name__)
        loss = real(whole, inputs, items, config, *half)
        if not half:
            target = inputs["labels"]
            logits = whole(**{**inputs, "labels": None}).logits
            if objective == "reward":
                expected = torch.nn.functional.mse_loss(logits, target)
            else:
                flat = logits.view(-1, logits.shape[-1])
                expected = torch.nn.functional.cross_entropy(flat, target.view(-1))
            assert loss == float(expected.detach())
        return loss

    monkeypatch.setattr(equivalence, "whole_step", step)
    result = verify_model(Config.from_dict(raw, tmp_path))
    assert (result.verdict, result.reason, result.half) == ("bit-equal", "", "")
    assert (result.subject, result.task) == ("the model itself", needs_of(objective).task)
    name = needs_of(objective).task.title().replace("-", "")
    assert steps == [f"LlamaFor{name}"] * 4


@pytest.mark.parametrize(("name", "value"), [("num_labels", 3), ("label_names", ["a"])])
def test_labels_of_a_model_that_has_none_are_refused(name, value):
    raw: dict[str, Any] = {
        "coordinator": {"ip": "127.0.0.1"},
        "shard_plan": [{"id": "local", "start": 0, "end": 2}],
        "model": {"name_or_path": "model", name: value},
    }
    for objective in ("sft", "dpo"):
        with pytest.raises(ConfigError, match=rf"model\.{name}: is for classifiers"):
            Config.from_dict({**raw, "training": {"objective": objective}})
    raw["training"] = {"objective": "token-classification"}
    config = Config.from_dict(raw)
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="label_names has 2 names for 3 labels"):
        config.with_changes(model={"num_labels": 3, "label_names": ["a", "b"]})
