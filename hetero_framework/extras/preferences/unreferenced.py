"""Preferences without a reference: odds ratio (ORPO) and contrastive (CPO, SimPO) optimization.

Losses and metrics are those of TRL's ORPOTrainer and CPOTrainer (1.16), which name their papers.

Shapes: P pairs, B = 2 P rows, chosen rows first; S tokens, V vocabulary; C sums of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.preferences.pair_losses import PAIR_LOSSES, chosen_loss
from hetero_framework.extras.preferences.pair_objective import (
    LOGPS,
    MEANS,
    METRICS,
    PairObjective,
    lengths_of,
    log_probabilities,
    means_table,
)
from hetero_framework.extras.preferences.settings import PreferenceSettings
from hetero_framework.models.cut.shard import Inputs

_LN_2 = 0.6931471805599453


class _Unreferenced(PairObjective):
    """Objectives whose trainers in TRL pass METRICS through accelerate's gather_for_metrics."""

    def means(self, logps_B: Tensor, rewards_B: Tensor, *further: Tensor) -> dict[str, Tensor]:
        """The means, and the log-probabilities of all rows, which are also the rewards."""
        return {**super().means(logps_B, rewards_B, *further), LOGPS: logps_B.detach()}

    def gathered(
        self, named: Sequence[Mapping[str, Tensor]], most: int
    ) -> Sequence[Mapping[str, Tensor]]:
        return [{MEANS: self._first(tensors, most)} for tensors in named]

    def _first(self, tensors: Mapping[str, Tensor], most: int) -> Tensor:
        """The means of a micro-batch, with METRICS over its first `most` pairs."""
        (means,), logps_B = means_table([tensors], len(self.metric_names)), tensors.get(LOGPS)
        if logps_B is None or logps_B.dim() != 1 or not len(logps_B) or len(logps_B) % 2:
            raise ProtocolError("the last stage gave no log-probabilities of answers")
        first_B = logps_B.cpu().unflatten(0, (2, -1))[:, :most].flatten()
        return torch.cat([super().means(first_B, first_B)[MEANS], means[len(METRICS) :]])


class OddsRatio(_Unreferenced):
    """ORPO: next-token prediction of prompts and chosen answers, and the odds of both answers."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        """The last stage also needs the tokens: prompts have no labels."""
        needed = super().stage_inputs(spec, names)
        return [*needed, "input_ids"] if spec.is_last and "input_ids" not in needed else needed

    def targets(self, inputs: Inputs) -> tuple[Tensor, ...]:
        is_padding_BS = inputs["attention_mask"].eq(0)
        return inputs["labels"], inputs["input_ids"].masked_fill(is_padding_BS, IGNORE_INDEX)

    def seen(self, inputs: Inputs) -> Tensor:
        """All tokens but the last, padding too."""
        return pad(torch.ones_like(inputs["labels"][:, 1:], dtype=torch.bool), (0, 1))

    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        """The log-probabilities summed over the answer, and over the whole row."""
        labels_BS, tokens_BS = targets_BS
        logps_BS = log_probabilities(logits_BSV, tokens_BS)
        return [(logps_BS * labels_BS.ne(IGNORE_INDEX)).sum(1), logps_BS.sum(1)]

    def mean_loss(self, inputs: Inputs, sums_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        answers_B, rows_B = sums_BC.unbind(1)
        labels_BS, tokens_BS = self.targets(inputs)
        logps_B = answers_B / lengths_of(labels_BS).clamp(min=1)
        log_odds_P = _difference(logps_B) - _difference(_log1mexp(logps_B))
        ratio_P = logsigmoid(log_odds_P)
        nll = chosen_loss(rows_B, lengths_of(tokens_BS))
        loss = nll - self._beta * ratio_P.mean()
        return loss, self.means(logps_B, logps_B, nll, ratio_P.mean(), log_odds_P.mean())


class Contrastive(_Unreferenced):
    """CPO: DPO's losses without a reference, and the chosen answers' own loss."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers, "nll_loss")
        own = PreferenceSettings.of(training)
        (name,) = own.losses
        self._loss_of, self._alpha = PAIR_LOSSES["cpo"][name], own.cpo_alpha

    def seen(self, inputs: Inputs) -> Tensor:
        """All tokens, padding too."""
        return torch.ones_like(inputs["labels"], dtype=torch.bool)

    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        """The log-probabilities of the answer."""
        return [log_probabilities(logits_BSV, *targets_BS).sum(1)]

    def mean_loss(self, inputs: Inputs, sums_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        (logps_B,) = sums_BC.unbind(1)
        lengths_B = lengths_of(inputs["labels"])
        nll = chosen_loss(logps_B, lengths_B) if self._alpha else logps_B.new_zeros(())
        loss = self._loss_of(self._training, logps_B, logps_B, lengths_B).mean() + self._alpha * nll
        if self._loss_of.averages:
            logps_B = logps_B / lengths_B.clamp(min=1)
        return loss, self.means(logps_B, logps_B, nll)


def _difference(values_B: Tensor) -> Tensor:
    """The chosen value minus the rejected one, of each pair."""
    chosen_P, rejected_P = values_B.chunk(2)
    return chosen_P - rejected_P


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0, finite also where x rounds to 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # Each form loses digits on the other side.
    return torch.where(x < -_LN_2, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))
