"""Settings of rewards and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hetero_framework.config import ModelConfig, TrainingConfig
from hetero_framework.config.objectives import needs_if_known
from hetero_framework.config.problems import Problem
from hetero_framework.config.section import Name, ReadIf

MAX_LABELS = 4096
"""The most classes, or other numbers, that a classifier may have."""
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
_CLASSIFIES = ReadIf("training.objective=classification|image-classification")


class RewardSettings(TrainingConfig):
    """The training section with the setting of rewards."""

    center_rewards_coefficient: Annotated[float | None, ReadIf("objective=reward")] = Field(
        default=None, ge=0
    )
    """Reward: weight of the squared sum of a pair's rewards; it keeps rewards near 0. null: 0."""


class LabelSettings(ModelConfig):
    """The model section with the labels of a classifier."""

    num_labels: int | None = Field(default=None, ge=1, le=MAX_LABELS)
    """Classification: how many labels, or other numbers, the model learns. null: as many as the
    checkpoint's classifier has, else as the data have."""
    problem_type: Annotated[ProblemType | None, _CLASSIFIES] = None
    """Classification of texts: the kind of loss. null: as the checkpoint's classifier says, else as
    the data's labels look."""
    label_names: tuple[Name, ...] | None = None
    """Classification: the labels' names in the order of their numbers. null: the names in the
    checkpoint's classifier, else in the data."""
    pad_token_id: int | None = Field(default=None, ge=0)
    """Classification: the padding token, by which some classes find the end of a text. null: the
    tokenizer's padding token."""

    @model_validator(mode="after")
    def _labels_fit(self) -> LabelSettings:
        names = self.label_names
        if names is not None and self.num_labels not in (None, len(names)):
            raise ValueError(f"label_names has {len(names)} names for {self.num_labels} labels")
        if names is not None and len(set(names)) < len(names):
            raise ValueError("label_names has a name twice")
        return self


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    model, training = parts.get("model"), parts.get("training")
    if model is None or training is None:
        return
    if needs_if_known(training.objective).task.endswith("-classification"):
        return
    labels = LabelSettings.of(model)
    for setting in ("num_labels", "problem_type", "label_names"):
        if getattr(labels, setting) is not None:
            yield Problem(
                f"model.{setting}",
                "is for classifiers; take it out, or set training.objective to one of theirs",
            )
