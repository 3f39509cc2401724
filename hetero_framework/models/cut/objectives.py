"""The objectives by name: those that training.objective may name."""

from __future__ import annotations

from collections.abc import Callable

from hetero_framework.config import TrainingConfig
from hetero_framework.config.objectives import DATA_KINDS, DataKind
from hetero_framework.errors import ConfigError
from hetero_framework.models.cut.objective import CausalLM
from hetero_framework.models.cut.preferences import Preferences
from hetero_framework.models.cut.unreferenced import Contrastive, OddsRatio

Make = Callable[[TrainingConfig, frozenset[int]], CausalLM]


def _sft(training: TrainingConfig, id_layers: frozenset[int]) -> CausalLM:
    smoothing, metrics = training.label_smoothing_factor, training.token_metrics
    return CausalLM(training.loss_chunk_tokens, id_layers, smoothing, metrics)


_OBJECTIVES: dict[str, Make] = {
    **{"sft": _sft, "dpo": Preferences, "orpo": OddsRatio, "cpo": Contrastive},
}


def register_objective(name: str, make: Make, data: DataKind = "text") -> None:
    """Let training.objective name another objective, which `make` makes of the settings and of the
    layers that read token ids. It is trained on texts, or on pairs of rows. In a file of --import,
    on every machine."""
    _OBJECTIVES[name], DATA_KINDS[name] = make, data


def objective_of(training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> CausalLM:
    """The objective of a run; `id_layers` as for `CausalLM`. Raises ConfigError for an unknown
    one."""
    make = _OBJECTIVES.get(training.objective)
    if make is None:
        raise ConfigError(
            f"there is no objective {training.objective!r}; there are {', '.join(_OBJECTIVES)}",
            hint="register it in a file for --import, on every machine",
        )
    return make(training, id_layers)
