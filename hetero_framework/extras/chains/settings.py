"""Model settings of chains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from hetero_framework.config import ModelConfig
from hetero_framework.config.objectives import needs_if_known
from hetero_framework.config.problems import Problem, shown
from hetero_framework.config.section import FREE, SOURCE, Name


class ChainSettings(ModelConfig):
    """The model section with a model from a file of --import."""

    chain: Annotated[Name | None, SOURCE] = None
    """Instead of name_or_path: the name of an nn.Sequential, or of a function that returns one, in
    a file of --import. For training.objective "sequential"."""
    chain_forms: Annotated[dict[str, tuple[tuple[int, ...], str]] | None, FREE] = None
    """Shapes and types of the first example's tensors; a run decides them."""
    chain_modules: Annotated[str | None, FREE] = None
    """A digest of the chain's modules. A run decides it, and each worker compares its chain's."""


def disagreements(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions to other sections."""
    model, training = parts.get("model"), parts.get("training")
    if model is None or training is None:
        return
    is_chain = needs_if_known(training.objective).task == "chain"
    if is_chain != (ChainSettings.of(model).chain is not None):
        yield Problem(
            "training.objective",
            f"{shown(training.objective)} and model.chain do not go together: a chain is trained"
            ' with "sequential", and nothing else is',
        )
