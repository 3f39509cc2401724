"""Next-token prediction on texts with pictures."""

from __future__ import annotations

from collections.abc import Iterable

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.models.cut.causal_lm import CausalLM

_EVERYWHERE = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "sources"}


class PicturedLM(CausalLM):
    """As `CausalLM`; what the processor makes of pictures goes to the first stage alone."""

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        needed = super().stage_inputs(spec, names)
        return [name for name in needed if spec.is_first or name in _EVERYWHERE]


def next_token(training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> PicturedLM:
    """The objective "image-text-to-text"."""
    smoothing, metrics = training.label_smoothing_factor, training.token_metrics
    return PicturedLM(training.loss_chunk_tokens, id_layers, smoothing, metrics)
