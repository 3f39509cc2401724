"""Image classifiers against transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import HeteroError
from hetero_framework.trainer.coordinator import train
from tests.extras.classification.test_classification_runs import accuracy
from tests.extras.pictures.test_image_chain import CLASSIFIERS
from tests.extras.reporting.test_callbacks import Recorder
from tests.samples import machines_here

SETTINGS = {
    **{"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 4},
    **{"lr_scheduler_type": "linear", "report_to": "none"},
    **{"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 4},
    "adam_epsilon": 1e-4,  # the gradients of a ViT's key biases are rounding alone
}


def pictures() -> TensorDataset:
    dice = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(24, 3, 32, 32, generator=dice), torch.randint(5, (24,), generator=dice)
    )


def configuration(model: Path, output: Path) -> Config:
    training = {"objective": "image-classification", "output_dir": str(output), **SETTINGS}
    layers = {"vit": 5, "resnet": 6, "swin": 5}[model.name]
    return Config.from_dict(
        {
            **machines_here(("local", 2), ("local", layers)),
            "model": {"name_or_path": str(model)},
            "data": {"train": "train_set", "eval": "eval_set"},
            "training": {"visualize": False, "save_strategy": "no", **training},
        }
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "vit", "swin"])
def test_losses_and_weights_are_those_of_the_trainer(name, tmp_path, monkeypatch):
    held_out = TensorDataset(*pictures()[:7])
    module = SimpleNamespace(train_set=pictures(), eval_set=held_out)
    monkeypatch.setattr(control, "_modules", [module])
    torch.manual_seed(1)
    model: Any = AutoModelForImageClassification.from_config(CLASSIFIERS[name])
    model.save_pretrained(tmp_path / name)
    rows, tested = (
        [{"pixel_values": picture, "labels": label} for picture, label in examples]
        for examples in (pictures(), held_out)
    )
    own = {"save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path / "theirs"), **own, **SETTINGS)
    trainer = Trainer(
        *(model, arguments), train_dataset=rows, eval_dataset=tested, compute_metrics=accuracy
    )
    trainer.train()
    ours = Recorder()
    config = configuration(tmp_path / name, tmp_path / "ours")
    summary = train(config, callbacks=[ours], compute_metrics=accuracy)
    lines = [
        next(line for line in history if "eval_share" in line)
        for history in (ours.state.log_history, trainer.state.log_history)
    ]
    for metric in ("eval_loss", "eval_share", "eval_spread"):
        assert lines[0][metric] == pytest.approx(lines[1][metric], rel=1e-5)
    expected = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert summary.losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
    loaded = summary.load()
    assert type(loaded) is type(model)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=1e-5, atol=1e-5)


def test_labels_that_are_no_classes_are_said(tmp_path, monkeypatch):
    wrong = [(picture, 7) for picture, _ in pictures()]
    monkeypatch.setattr(control, "_modules", [SimpleNamespace(train_set=wrong, eval_set=wrong)])
    AutoModelForImageClassification.from_config(CLASSIFIERS["resnet"]).save_pretrained(
        tmp_path / "resnet"
    )
    with pytest.raises(HeteroError, match="the targets do not fit the model's 5 labels"):
        train(configuration(tmp_path / "resnet", tmp_path / "run"))
