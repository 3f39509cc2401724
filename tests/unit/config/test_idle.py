"""Settings without an effect are said, and only these: beside our own losses and transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from hetero_framework import registry
from hetero_framework.config import Config, load_config
from hetero_framework.config.asked_extras import absent_extras
from hetero_framework.config.composition import whole_schema
from hetero_framework.config.effects import settings
from hetero_framework.config.objectives import needs_of, objectives_reading
from hetero_framework.config.section import ReadIf
from hetero_framework.engine.optimizer import LearningRate
from hetero_framework.errors import ConfigError
from tests.installed import needs, whole

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ISLAND = {"name": "a", "lighthouse": "127.0.0.1:29510"}


def config_of(**sections: Any) -> Config:
    raw: dict[str, Any] = {
        "coordinator": {"ip": "127.0.0.1"},
        "shard_plan": [{"id": "local", "start": 0, "end": 2}],
        "data": {"train": "a"},
        "training": {"gradient_accumulation_steps": 4},
    }
    for name, section in sections.items():
        given = isinstance(section, dict) and name in raw
        raw[name] = {**raw[name], **section} if given else section
    return Config.from_dict(raw)


def idle(config: Config) -> dict[str, str]:
    lines = (line.partition(" has no effect: ") for line in config.warnings())
    return {name: why for name, separator, why in lines if separator}


def T(**training: Any) -> dict[str, Any]:
    return {"training": training}


@needs("preferences", "talking", "reporting", "classification", "islands")
@pytest.mark.parametrize(
    ("sections", "name", "why"),
    [
        (T(beta=0.1), "training.beta", "objective dpo, image-dpo, orpo, cpo, kto or image-kto"),
        (
            T(objective="dpo", simpo_gamma=1.0),
            "training.simpo_gamma",
            "training.objective cpo and training.loss_type simpo",
        ),
        (T(save_strategy="no", save_steps=9), "training.save_steps", "steps"),
        (T(sample_steps=9), "training.sample_steps", "with training.sample_prompts"),
        (T(sample_prompts=["a"], sample_top_p=0.5), "training.sample_top_p", "sample_temperature"),
        (T(hub_model_id="a/b"), "training.hub_model_id", "push_to_hub"),
        (T(early_stopping_threshold=0.1), "training.early_stopping_threshold", "p"),
        (T(greater_is_better=False), "training.greater_is_better", "save_strategy"),
        (T(max_steps=3, num_train_epochs=1.0), "training.num_train_epochs", "-1"),
        (T(objective="reward", token_metrics=True), "training.token_metrics", ""),
        ({"data": {"eval": "b"}}, "data.eval", "another training.eval_strategy than no, or with"),
        ({"data": {"eval_split": "dev"}}, "data.eval_split", "with data.eval"),
        (T(replicate_steps=4), "training.replicate_steps", "with adapter"),
        ({"adapter": {"layers_pattern": "h"}}, "adapter.layers_pattern", "layers_to_transform"),
        ({"adapter": {"r": 4, "init_from": "x"}}, "adapter.r", "adapter.init_from null"),
        (
            T(activation_offloading=True),
            "training.activation_offloading",
            "with training.gradient_checkpointing",
        ),
        ({"wire": {"activations": "bf16"}}, "wire.activations", "with workers"),
        (
            {"island": {**ISLAND, "sync_steps": 8, "method": "local_sgd", "outer_momentum": 0.5}},
            "island.outer_momentum",
            "island.method diloco",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_said_with_what_it_counts_with(sections, name, why):
    config = config_of(**sections)
    assert list(idle(config)) == [name]
    assert why in idle(config)[name]
    assert idle(config.with_changes(training={"seed": 7})) == idle(config)


@pytest.mark.parametrize("setting", [True, "auto"])
def test_a_setting_may_be_read_by_a_stage_of_the_plan(setting):
    offloading = {"activation_offloading": True}
    assert idle(config_of(training={**offloading, "gradient_checkpointing": setting})) == {}
    stages = [{"id": "local", "start": 0, "end": 1}, {"id": "local", "start": 1, "end": 2}]
    assert idle(config_of(training=offloading, shard_plan=stages)) != {}
    stages[1]["gradient_checkpointing"] = True
    assert idle(config_of(training=offloading, shard_plan=stages)) == {}


@needs("preferences")
def test_what_a_run_has_written_and_what_is_off_are_no_complaint(monkeypatch):
    plain = config_of(adapter={})
    assert idle(Config.from_dict(plain.to_dict())) == {}
    assert idle(config_of(training={"rpo_alpha": None, "use_weighting": False, "beta": 0.1})) != {}
    assert idle(config_of(training={"rpo_alpha": None, "use_weighting": False})) == {}
    monkeypatch.setattr(registry, "_registered", {})
    registry.register("objectives", "half", None)
    assert idle(config_of(training={"objective": "half", "beta": 0.3})) == {}, "it may read it"
    monkeypatch.setattr(registry, "is_installed", lambda extra: extra != "preferences")
    half = config_of(training={"objective": "half"})
    assert not any("objective" in line for line in absent_extras(half))
    with pytest.raises(ConfigError, match=r"^training\.objective: \"dpo\" needs the extra 'pref"):
        list(absent_extras(config_of(training={"objective": "dpo"})))


@whole
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.json")), ids=lambda file: file.stem)
def test_no_example_has_a_setting_without_effect(file):
    if "shard_plan" in json.loads(file.read_text()):
        assert idle(load_config(file)) == {}


@whole
def test_every_run_reads_a_setting_or_those_that_meet_its_condition():
    """Of each setting of the schema with all extras the condition names settings and, where the
    registry says of the objectives what they read, some of those."""
    schema, known = whole_schema(Config), registry.entries("objectives")
    names = {name for name, _, _ in settings(schema)}
    asked = set()
    for name, section, field in settings(schema):
        place, _, key = name.rpartition(".")
        own = [mark for mark in field.metadata if isinstance(mark, ReadIf)]
        assert len(own) <= 1, name
        for mark in own or filter(None, [section.read_if]):
            for part in re.split(" or | and ", mark.condition):
                path, has_values, values = part.partition("=")
                path = path.rstrip("!")
                assert {path, f"{place}.{path}"} & names, (name, part)
                assert not has_values or values, (name, part)
            if getattr(mark.given, "func", None) is objectives_reading:
                asked.add(key)
                readers = {one for one in known if key in needs_of(one).reads}
                assert readers == {*mark.condition.partition("=")[2].split("|")}, name
    assert asked == {key for one in known for key in needs_of(one).reads}


# -- the marks beside the losses -------------------------------------------------------------------


def test_the_marks_say_what_each_optimizer_and_each_schedule_reads(tmp_path):
    def kwargs(**given: Any) -> str:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **given)
        return repr(Trainer.get_optimizer_cls_and_kwargs(arguments))

    known = "adamw_torch adamw_torch_fused adafactor sgd adagrad rmsprop"
    changes = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3, "optim_args": "alpha=2"}
    for optim in known.split():
        for name, value in changes.items():
            if name == "optim_args":
                value = "weight_decay=3,momentum=2,lr_decay=1,alpha=4"
            reads = kwargs(optim=optim) != kwargs(optim=optim, **{name: value})
            config = config_of(training={"optim": optim, name: value})
            assert (f"training.{name}" not in idle(config)) == reads, (optim, name)
    for kind in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"):
        config = config_of(training={"lr_scheduler_type": kind, "warmup_steps": 4})
        plain = config.with_changes(training={"warmup_steps": 0})
        rates = [LearningRate(one.training, 9).rate(2) for one in (config, plain)]
        assert (not idle(config)) == (rates[0] != rates[1]), kind
