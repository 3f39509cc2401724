"""The objectives by name: those that training.objective may name."""

from __future__ import annotations

from collections.abc import Callable

from hetero_framework import control, registry
from hetero_framework.config import TrainingConfig
from hetero_framework.config.objectives import Task, needs_of
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.causal_lm import CausalLM
from hetero_framework.models.cut.objective import Objective

Make = Callable[[TrainingConfig, frozenset[int]], Objective]


def next_token(training: TrainingConfig, id_layers: frozenset[int]) -> CausalLM:
    """The objective "sft"."""
    smoothing, metrics = training.label_smoothing_factor, training.token_metrics
    return CausalLM(training.loss_chunk_tokens, id_layers, smoothing, metrics)


def register_objective(name: str, make: Make, data: str = "text", task: Task = "causal-lm") -> None:
    """Let training.objective name another objective. `make` makes it of the settings and of the
    layers that read token ids. `data` is its kind of examples, `task` the model's task. Call this
    in a file of --import, on every machine."""
    registry.register("objectives", name, make, data=data, task=task)


def objective_of(training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> Objective:
    """The objective of a run; `id_layers` as for `Objective`. Raises ConfigError for an unknown
    name."""
    needs_of(training.objective)
    with control.users_code(f"the objective {training.objective!r} cannot be made", ConfigError):
        make: Make = registry.find("objectives", training.objective)
        return make(training, id_layers)
