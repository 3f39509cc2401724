"""Classifiers of pictures as a family of models, and their loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import AutoModelForImageClassification, PretrainedConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from hetero_framework.config import ModelConfig, TrainingConfig
from hetero_framework.errors import ArchitectureError, DataError
from hetero_framework.extras.chains.chain import INPUT, TARGET
from hetero_framework.extras.chains.chain_family import Chains, forms_of
from hetero_framework.extras.chains.chain_objective import ChainLoss
from hetero_framework.extras.classification.heads import set_labels
from hetero_framework.extras.pictures.image_chain import ImageConfig
from hetero_framework.models.cut.shard import stated


class Pictures(Chains):
    """Cuts a classifier as a chain: the part in front of its blocks, each block, and the rest."""

    def read(self, model: ModelConfig, base_dir: Path) -> ImageConfig:
        config, place = stated(model, base_dir)
        if type(config) not in AutoModelForImageClassification._model_mapping:
            raise ArchitectureError(
                f"transformers has no class for image-classification of model type"
                f" {config.model_type!r}",
                hint="choose another model, or another training.objective",
            )
        set_labels(config, model)
        source = place if model.name_or_path is not None else None
        return ImageConfig(config.to_dict(), source, model.revision, forms=forms_of(model))

    def tiny(self, config: PretrainedConfig) -> ImageConfig:
        """A classifier with random weights, for pictures of the configuration's size."""
        size = getattr(config, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else size
        shape = (getattr(config, "num_channels", 3), *sides)
        forms = {INPUT: (shape, "float32"), TARGET: ((), "int64")}
        return ImageConfig(config.to_dict(), forms=forms)

    def new_weights(self, config: Any) -> list[str]:
        return list(config.new_weights())

    def compare(self, config: Any, ranges: Any) -> Any:
        name = config.classifier["model_type"]
        subject = "the model itself" if config.source else "the classifier with random weights"
        result = super().compare(config, ranges)
        return replace(result, model_type=name, subject=subject, task="image-classification")

    def saved(self, config: Any) -> PretrainedConfig:
        """The classifier's own configuration."""
        classifier: PretrainedConfig = config.of_classifier
        return classifier

    def loading(self, weights: Path) -> str | None:
        return None

    def processor(self, config: Any) -> tuple[str, str | None] | None:
        return (config.source, config.revision) if config.source is not None else None


class ImageLoss(ChainLoss):
    """The loss of transformers' image classifiers, for pictures with one class, several labels or
    measures."""

    averages_means, predicts = False, True

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers)
        self.metric_names = ("accuracy",)

    def called(
        self, config: PretrainedConfig, output: Any, target: Any
    ) -> tuple[Tensor, list[Tensor]]:
        classifier = cast(ImageConfig, config).of_classifier
        try:
            loss = ForSequenceClassificationLoss(target, output, classifier)
        except (IndexError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the targets do not fit the model's {classifier.num_labels} labels: {error}",
                hint="set model.num_labels, or correct the data set",
            ) from error
        if target.is_floating_point():  # several labels, or measures
            return loss, []
        return loss, [(output.argmax(-1) == target).float().mean()]


PICTURES = Pictures()
