"""Permitted and refused differences between a checkpoint and the run that resumes it, without any
process."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from hetero_framework.config import Config, effects
from hetero_framework.config.section import FREE, IDENTITY, RESULT, ROUNDING
from hetero_framework.data.tokenizer import load_tokenizer
from hetero_framework.data.train_data import TrainData, load_data
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.continuation import check_identity, contents, identity, versions
from hetero_framework.trainer.resolution import Resolved
from tests.installed import needs, whole
from tests.samples import save_texts

STEP = 1
ALL = {
    "adapter": {"r": 2},
    "island": {"name": "a", "lighthouse": "127.0.0.1:29510"},
    "workers": [{"id": 1, "ip": "127.0.0.1", "port": 29511}],
}


def checkpoint(config: Config) -> Any:
    """Of a run with that configuration and no worker."""
    data, found = loaded(config)
    return checkpoint_of(config, data.fingerprint, found)


def loaded(config: Config) -> tuple[TrainData, Any]:
    """The data of a run, and what its checkpoints note of them and of the tokenizer."""
    tokenizer = load_tokenizer(config)
    data = load_data(config, tokenizer)
    return data, contents(tokenizer, data)


def checkpoint_of(config: Config, fingerprint: str, found: Any) -> Any:
    """As run_checkpoint.manifest writes it, through JSON as the file does."""
    manifest = {
        "identity": identity(config, fingerprint),
        "given": config.to_dict(),
        "contents": found,
        "config": {"settings": config.to_dict(), "base_dir": str(config.base_dir)},
        "position": {"step": STEP, "committed_steps": STEP},
        "versions": versions(),
    }
    return SimpleNamespace(step=STEP, manifest=json.loads(json.dumps(manifest)))


def take_up(reader: Any, config: Config) -> None:
    check_identity(reader, Resolved.start(config), *loaded(config))


@needs("islands")
def test_an_unchanged_run_resumes_without_remarks(alone, logged):
    take_up(checkpoint(alone(**ALL)), alone(**ALL))
    assert logged == []


@whole
def test_each_setting_of_the_schema_is_refused_reported_or_free(alone, logged):
    config = alone(**ALL, training={"run_name": "a"})  # of an extra that this run does not ask for
    (data, now), resolved = loaded(config), Resolved.start(config)
    seen = {}
    for name in effects.effects():
        section, _, key = name.partition(".")
        reader = checkpoint_of(config, data.fingerprint, now)
        settings = reader.manifest["given"]
        if section in ("workers", "shard_plan"):
            settings[section] = [{"other": 1}]
        elif key:
            settings[section][key] = {"other": 1}
        elif isinstance(settings[section], dict):
            settings[section] = None
        else:
            settings[section] = {"other": 1}
        if name == "model.quantization":
            reader.manifest["identity"]["model"]["quantization"] = "other"
        logged.clear()
        refused = ""
        try:
            check_identity(reader, resolved, data, now)
        except CheckpointError as error:
            refused = error.message
        is_said = any(line.startswith(f"{name} was") for line in logged)
        assert is_said == bool(logged), (name, logged)
        seen[name] = "refused" if f": {name} was" in refused else "said" if is_said else refused
    words = {IDENTITY: "refused", RESULT: "said", ROUNDING: "said", FREE: ""}
    assert seen == {name: words[effect] for name, effect in effects.effects().items()}


def test_a_changed_setting_that_may_change_is_reported(alone, logged):
    take_up(checkpoint(alone()), alone(training={"max_grad_norm": 0.5, "log_level": "ERROR"}))
    assert logged == [
        "training.max_grad_norm was 1.0 at checkpoint 1, now it is 0.5; the run goes on with that"
    ]


def test_all_settings_that_may_not_change_are_named(alone):
    reader = checkpoint(alone())
    other = alone(training={"seed": 7, "optim_args": "a=1"}, adapter={"r": 2})
    with pytest.raises(CheckpointError) as caught:
        take_up(reader, other)
    assert caught.value.message == (
        "checkpoint 1 belongs to another run: adapter was null, now it is given; training.seed was"
        ' 42, now it is 7; training.optim_args was null, now it is "a=1"'
    )


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "polynomial"])
def test_more_epochs_are_reported_with_the_learning_rate(alone, logged, kind):
    """Eight examples, four in a step: two steps an epoch. The rates are transformers'."""
    training = {"max_steps": -1, "num_train_epochs": 1, "lr_scheduler_type": kind}

    def rate(steps: int) -> float:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        schedule = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=steps)
        optimizer.step()
        schedule.step()
        return float(schedule.get_last_lr()[0])

    reader = checkpoint(alone(training=training))
    take_up(reader, alone(training={**training, "num_train_epochs": 2}))
    epochs = "training.num_train_epochs was 1.0 at checkpoint 1, now it is 2.0; the run goes on"
    rates = (
        f"the learning rate of the next step was {rate(2):.2e} and is {rate(4):.2e} now: its"
        " schedule runs over 4 steps, not 2"
    )
    assert logged == [f"{epochs} with that", *[rates] * (kind != "constant")]


def test_another_precision_of_a_layer_is_refused(alone):
    started = alone()
    data, now = loaded(started)
    config = started.with_changes(
        adapter={"r": 2},
        model={"quantization": "nf4"},
        workers=[{"id": 1, "ip": "127.0.0.1", "port": 1, "quantization": "none"}],
        shard_plan=[{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}],
    )
    reader = checkpoint_of(config, data.fingerprint, now)
    check_identity(reader, Resolved.start(config), data, now)
    alike = config.with_changes(coordinator={"quantization": "none"})
    with pytest.raises(CheckpointError, match=r'"none": "layer 1 \+ head"}, now it is null'):
        check_identity(reader, Resolved.start(alike), data, now)


def test_other_spellings_of_a_folder_or_list_are_no_change(alone, alone_model, logged, monkeypatch):
    monkeypatch.setenv("HOME", str(alone_model.parent))
    monkeypatch.setenv("USERPROFILE", str(alone_model.parent))
    reader = checkpoint(alone(adapter={"target_modules": ["q_proj", "v_proj"]}))
    here = {"name_or_path": f"~/{alone_model.name}"}
    take_up(reader, alone(model=here, adapter={"target_modules": ["v_proj", "q_proj"]}))
    assert logged == []


def test_other_data_are_refused_with_the_change(alone, tmp_path):
    reader = checkpoint(alone())
    texts = str(tmp_path / "texts.jsonl")
    with pytest.raises(CheckpointError, match=r"data.max_length was 32, now it is 4\)"):
        take_up(reader, alone(data={"train": texts, "max_length": 4}))
    save_texts(tmp_path / "texts.jsonl", 8, seed=1)
    with pytest.raises(CheckpointError, match=r"other training data than data.train holds now\n"):
        take_up(reader, alone())


def test_changes_outside_of_the_settings_are_reported(alone, alone_model, tmp_path, logged):
    """The same tokens to train on, but another tokenizer, template, evaluation and libraries."""
    model = tmp_path / "model"
    shutil.copytree(alone_model, model)
    evaluation = save_texts(tmp_path / "eval.jsonl", 3)
    data = {"train": str(tmp_path / "texts.jsonl"), "max_length": 32, "eval": str(evaluation)}
    config = alone(model={"name_or_path": str(model)}, data=data)
    reader = checkpoint(config)
    reader.manifest["versions"]["torch"] = "1.0"
    tokenizer = load_tokenizer(config)
    tokenizer.add_tokens(["unheard"])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(model)
    save_texts(evaluation, 3, seed=5)
    take_up(reader, config)
    assert [line.partition(" of checkpoint 1")[0] for line in logged[:3]] == [
        "the tokenizer differs from that",
        "the chat template differs from that",
        "the evaluation data differ from those",
    ]
    assert logged[3].startswith("checkpoint 1 was written with torch 1.0 (here ")
    assert len(logged) == 4
