"""Families of models, and heads: what the heart asks of kinds of models that it does not know.

transformers' classes for text are cut by the rules of this folder. Another kind of model is a
`Family` in the registry's table "families". Its key is a task of the model section and also the
`model_type` of the family's configurations. A class for text whose head is not a language model's
has a `Head` in the table "heads", by its task.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hetero_framework import registry

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from hetero_framework.config import Config, ModelConfig
    from hetero_framework.data.train_data import TrainData
    from hetero_framework.models.cut.side import Form


class Family(Protocol):
    """A kind of model; `config` is a configuration that `read` or `tiny` has made. Any stands for
    types from modules that import this one; the docstrings name them."""

    stock_class: type[PreTrainedModel]
    """The class of the family's models; only its names, shapes and types count."""

    def decided(self, config: Config) -> Config:
        """A run's configuration with all that its data, if they are here, decide on the model."""

    def read(self, model: ModelConfig, base_dir: Path) -> PretrainedConfig:
        """The configuration that the model section names. Raises ModelError, ArchitectureError."""

    def tiny(self, config: PretrainedConfig) -> PretrainedConfig:
        """The configuration of a model with random weights, from transformers' own `config`."""
        return config

    def structure(self, config: PretrainedConfig) -> Any:
        """The ModelStructure. Raises ArchitectureError."""

    def build(self, config: Any, rng: Any, *, dtype: Any, device: Any, seed: int) -> Any:
        """The Shard of a ShardRange; without data on the device "meta". Raises ModelError,
        ArchitectureError."""

    def compare(self, config: PretrainedConfig, ranges: Any) -> Any:
        """The Comparison of the model that is cut at these ShardRanges with the whole model."""

    def entering(self, config: PretrainedConfig, block: int, rows: int) -> tuple[Form, ...]:
        """The forms of the tensors that enter a block, or leave the last, for `rows` examples."""

    def flops(self, config: PretrainedConfig, block: int, rows: int) -> int:
        """Floating-point operations of a block's forward for `rows` examples."""

    def users_names(self, model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a model by their names in the result."""

    def new_weights(self, config: PretrainedConfig) -> list[str]:
        """The weights that the checkpoint lacks, so that they begin at random."""
        return []

    def saved(self, config: PretrainedConfig) -> PretrainedConfig:
        """The configuration that a result has."""
        return config

    def processor(self, config: PretrainedConfig) -> tuple[str, str | None] | None:
        """The checkpoint and its revision from which a result gets a processor's files."""
        return None

    def card(self, config: PretrainedConfig) -> tuple[str, str, str]:
        """For a result's card: its title, lines of Python that load it, and their library."""

    def loading(self, weights: Path) -> str | None:
        """A line of Python that loads a result's weights; None: as transformers does."""
        return None

    def load(self, fields: dict[str, Any], folder: Path) -> Any:
        """The model of a result in `folder`; `fields` are the fields of its config.json."""


class Head(Protocol):
    """A kind of head; `config` is a configuration of a class that has it."""

    misfit: str
    """Advice for a head whose size is not the configuration's, appended to other advice."""

    def enter(self, model: ModelConfig, config: PretrainedConfig) -> None:
        """Enter what the model section says of the head into `config`."""

    def decided(self, model: ModelConfig, data: TrainData) -> tuple[dict[str, Any], str]:
        """The settings of the model section that the data decide, and the reason. Raises
        ConfigError for a setting that contradicts the data, DataError for unfit data."""

    def found(self, model: ModelConfig, config: PretrainedConfig) -> ModelConfig:
        """The model section with the head of `config`, the configuration beside an adapter."""

    def probe(
        self, config: PretrainedConfig, ids: Tensor, mask: Tensor, generator: Generator
    ) -> dict[str, Tensor]:
        """A batch of these tokens for a tiny model."""


def family_named(name: str) -> Family | None:
    """The family with this name, if there is one."""
    return registry.find("families", name) if registry.has("families", name) else None


def family_of(config: PretrainedConfig) -> Family | None:
    """The family of a model; None for transformers' classes for text."""
    return family_named(config.model_type)


def family_asked(model: ModelConfig | None) -> Family | None:
    """The family that the model section asks for."""
    return family_named(model.task) if model is not None else None


def head_for(task: str) -> Head | None:
    """The head of models with this task; None for language models and for families. Raises
    ConfigError where no extra here has the head."""
    if task == "causal-lm" or registry.has("families", task):
        return None
    head: Head = registry.needed("heads", task, f"a model for {task}")
    return head


def decided(config: Config) -> Config:
    """See `Family.decided`."""
    family = family_asked(config.model)
    return config if family is None else family.decided(config)


def as_saved(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration that a result has."""
    family = family_of(config)
    return config if family is None else family.saved(config)
