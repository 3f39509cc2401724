"""Heads of classifiers and reward models, in place of a language model's head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hetero_framework.config import ModelConfig
from hetero_framework.errors import ConfigError, DataError
from hetero_framework.extras.classification.settings import LabelSettings
from hetero_framework.models.cut.family import Head
from hetero_framework.models.cut.tiny import task_of

if TYPE_CHECKING:
    from hetero_framework.data.train_data import TrainData


class ClassifierHead(Head):
    """A head that gives one number for each label, or one number as a reward."""

    misfit = ", or leave model.num_labels and label_names out"

    def enter(self, model: ModelConfig, config: PretrainedConfig) -> None:
        set_labels(config, model)
        if model.needs.data == "compared":
            config.num_labels = 1  # a reward
        text: Any = config.get_text_config()
        if (padding := LabelSettings.of(model).pad_token_id) is not None:
            text.pad_token_id = padding
        elif getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # until the data say it; some classes take one row without it

    def decided(self, model: ModelConfig, data: TrainData) -> tuple[dict[str, Any], str]:
        settings: dict[str, Any] = {"pad_token_id": data.pad_token_id}
        if data.labels is not None:
            names = data.labels.names
            if len(names) == 1 and data.labels.problem == "single_label_classification":
                raise DataError(
                    f"all examples have the label {names[0]}, and a classifier tells two apart",
                    hint="add examples of another class, or name all classes in model.label_names",
                )
            settings |= {"num_labels": len(names), "label_names": list(names)}
            settings["problem_type"] = data.labels.problem
            return settings, f"labels: {data.labels}"
        if (count := LabelSettings.of(model).num_labels) not in (None, 1):
            raise ConfigError(f"model.num_labels is {count}, but a reward is one number")
        return {**settings, "num_labels": 1}, "rewards: one number for each answer"

    def found(self, model: ModelConfig, config: PretrainedConfig) -> ModelConfig:
        labels = LabelSettings.of(model).changed(
            label_names=tuple(name for _, name in sorted((config.id2label or {}).items())),
            problem_type=config.problem_type,
            pad_token_id=config.get_text_config().pad_token_id,
        )
        of_tokens = task_of(config) == "token-classification"
        return labels.for_objective("token-classification" if of_tokens else "classification")

    def probe(
        self, config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
        count = config.num_labels or 1
        if task_of(config) == "token-classification":
            labels = (ids % count).masked_fill(mask == 0, -100)
        elif config.problem_type in (None, "single_label_classification") and count > 1:
            labels = ids[:, 0] % count
        else:
            labels = torch.rand(len(ids), count, generator=generator).round()
        # Some classes find the end of a row by the padding token.
        padding = getattr(config.get_text_config(), "pad_token_id", None) or 0
        ids = ids.masked_fill(mask == 0, max(0, padding))
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def set_labels(config: PretrainedConfig, model: ModelConfig) -> None:
    """Enter the label settings of the model section into the configuration."""
    labels = LabelSettings.of(model)
    if labels.num_labels is not None:
        config.num_labels = labels.num_labels
    if labels.label_names is not None:
        config.id2label = dict(enumerate(labels.label_names))
        config.label2id = {name: number for number, name in config.id2label.items()}
    if labels.problem_type is not None:
        config.problem_type = labels.problem_type


HEAD = ClassifierHead()
