"""The objectives by name: those that training.objective may name."""

from __future__ import annotations

from collections.abc import Callable

from hetero_framework import control
from hetero_framework.config import TrainingConfig
from hetero_framework.config.objectives import NEEDS, DataKind, Needs, Task, needs_of
from hetero_framework.errors import ConfigError
from hetero_framework.extras.chains.chain_objective import ChainLoss, ImageLoss
from hetero_framework.extras.classification.classification import Classification, Rewards
from hetero_framework.extras.preferences.preferences import Preferences, Ratings
from hetero_framework.extras.preferences.unreferenced import Contrastive, OddsRatio
from hetero_framework.models.cut.causal_lm import CausalLM
from hetero_framework.models.cut.objective import Objective

Make = Callable[[TrainingConfig, frozenset[int]], Objective]


def _sft(training: TrainingConfig, id_layers: frozenset[int]) -> CausalLM:
    smoothing, metrics = training.label_smoothing_factor, training.token_metrics
    return CausalLM(training.loss_chunk_tokens, id_layers, smoothing, metrics)


_OBJECTIVES: dict[str, Make] = {
    **{"sft": _sft, "dpo": Preferences, "orpo": OddsRatio, "cpo": Contrastive, "kto": Ratings},
    "reward": Rewards,
    **dict.fromkeys(("classification", "token-classification"), Classification),
    "sequential": ChainLoss,
    "image-classification": ImageLoss,
}


def register_objective(
    name: str, make: Make, data: DataKind = "text", task: Task = "causal-lm"
) -> None:
    """Let training.objective name another objective, which `make` makes of the settings and of the
    layers that read token ids. `data` are the examples that it is trained on, `task` is what the
    model does. In a file of --import, on every machine."""
    _OBJECTIVES[name], NEEDS[name] = make, Needs(data, task)


def objective_of(training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> Objective:
    """The objective of a run; `id_layers` as for `Objective`. Raises ConfigError for an unknown
    one."""
    needs_of(training.objective)
    with control.users_code(f"the objective {training.objective!r} cannot be made", ConfigError):
        return _OBJECTIVES[training.objective](training, id_layers)
