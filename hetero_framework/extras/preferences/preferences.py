"""Preferences beside a reference: direct (DPO) and Kahneman-Tversky optimization (KTO).

Losses and metrics are those of TRL's DPOTrainer and KTOTrainer (1.16), which name their papers.

Shapes: P pairs, B = 2 P rows, chosen rows first; S tokens, V vocabulary; C sums of a row. N rated
answers have B = N or 2 N rows: first the answers, then the same prompts with other answers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hetero_framework.config import TOKEN_METRICS, StageSpec, TrainingConfig
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ConfigError
from hetero_framework.extras.preferences.pair_losses import PAIR_LOSSES
from hetero_framework.extras.preferences.pair_objective import (
    LOGITS,
    LOGPS,
    MEANS,
    PairObjective,
    lengths_of,
    log_probabilities,
)
from hetero_framework.extras.preferences.pairs import REFERENCE
from hetero_framework.extras.preferences.settings import PreferenceSettings
from hetero_framework.models.adapters.adapter_plan import AdapterPlan
from hetero_framework.models.cut.objective import COUNT
from hetero_framework.models.cut.shard import Inputs

SIDES = ("chosen", "rejected")


def can_switch(plan: AdapterPlan | None) -> bool:
    """Whether the model with its adapter switched off is the model that training begins with."""
    if plan is None or plan.weights is not None or plan.rewrites_base:
        return False
    return bool(plan.lora_config.bias == "none")


class Referenced(PairObjective):
    """Learns beside a reference: a batch also has each answer's log-probability by the reference.
    Without these numbers the loss is 0, and LOGPS come with it."""

    has_reference = True

    def __init__(
        self, training: TrainingConfig, id_layers: frozenset[int] = frozenset(), *further: str
    ) -> None:
        super().__init__(training, id_layers, *further)
        self._measures = training.token_metrics
        self._precomputes = PreferenceSettings.of(training).precompute_ref_log_probs
        self._reference = REFERENCE[training.data_kind]
        self.beside = self._reference
        """Names of the inputs of the last stage that have one number for each example."""

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        needed = super().stage_inputs(spec, names)
        return [name for name in needed if spec.is_last or name not in self.beside]

    def check(self, plan: AdapterPlan | None) -> None:
        if not self._precomputes and not can_switch(plan):
            raise ConfigError(
                "training.precompute_ref_log_probs is false, but without a new adapter no step can"
                " ask the model that training began with",
                hint="leave it out: the reference is asked once, before the first step",
            )

    def probe_inputs(self, config: PretrainedConfig, inputs: Inputs) -> Inputs:
        labels = inputs["labels"]
        zeros = labels.new_zeros(len(labels) // self._each, dtype=torch.float32)
        return {**inputs, **dict.fromkeys(self.beside, zeros)}

    def mean_loss(self, inputs: Inputs, sums_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self._reference[0] not in inputs:
            return sums_BC.new_zeros(()), {LOGPS: sums_BC[:, 0].detach()}
        reference_B = torch.cat([inputs[name] for name in self._reference])
        return self.compared(inputs, sums_BC, sums_BC[:, 0] - reference_B)

    @abstractmethod
    def compared(
        self, inputs: Inputs, sums_BC: Tensor, ratios_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`mean_loss`, from each row's log-probability minus the reference's (`ratios_B`)."""


class Preferences(Referenced):
    """The objective of DPO."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers)
        self.metric_names += TOKEN_METRICS * self._measures
        own = PreferenceSettings.of(training)
        weights = own.loss_weights or (1.0,) * len(own.losses)
        losses = list(zip(own.losses, weights, strict=True))
        if own.rpo_alpha:
            losses.append(("sft", own.rpo_alpha))
        self._losses = [(PAIR_LOSSES["dpo"][name], weight) for name, weight in losses]
        self._ld_alpha, self._weighs = own.ld_alpha, own.use_weighting

    def compared(
        self, inputs: Inputs, sums_BC: Tensor, ratios_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logps_B, plain_B, aligned_B = sums_BC.unbind(1)
        lengths_B = lengths_of(inputs["labels"])
        loss = logps_B.new_zeros(())
        for loss_of, weight in self._losses:
            loss_P = loss_of(self._training, ratios_B, plain_B, lengths_B)
            if self._weighs:
                one_P, other_P = (aligned_B / lengths_B.clamp(min=1)).exp().detach().chunk(2)
                loss_P = loss_P * one_P * other_P
            loss = loss + weight * loss_P.mean()
        return loss, self.means(logps_B, ratios_B)

    def targets(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return inputs["labels"], self._weights(inputs["labels"])

    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        """Each answer's log-probability, weighted and plain, and the sum that weighs its pair."""
        labels_BS, weights_BS = targets_BS
        logps_BS = log_probabilities(logits_BSV, labels_BS)
        aligned_B = logps_BS.new_zeros(len(logps_BS))
        if self._weighs:
            with torch.no_grad():
                squares_BS = (2 * logits_BSV).logsumexp(-1) - 2 * logits_BSV.logsumexp(-1)
                aligned_B = ((logps_BS - squares_BS) * labels_BS.ne(IGNORE_INDEX)).sum(1)
        plain_B = logps_BS.sum(1)
        weighted_B = plain_B if self._ld_alpha is None else (logps_BS * weights_BS).sum(1)
        return [weighted_B, plain_B, aligned_B]

    def _weights(self, labels_BS: Tensor) -> Tensor:
        """A weight for each label: 1, or ld_alpha beyond the length of the shorter answer."""
        if self._ld_alpha is None:
            return labels_BS
        is_label_BS = labels_BS.ne(IGNORE_INDEX)
        is_label_BS[:, 0] = False  # not predicted
        length_B = is_label_BS.sum(1)
        shared_P = torch.minimum(*length_B.chunk(2))
        is_shared_BS = is_label_BS.cumsum(1) <= torch.cat([shared_P, shared_P])[:, None]
        return torch.where(is_shared_BS, 1.0, self._ld_alpha)


class Ratings(Referenced):
    """KTO: judges each answer alone, against the model's average distance from the reference."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers)
        sides = (f"{name}/{side}" for name in ("rewards", "logps") for side in SIDES)
        self.metric_names = ("kl", *sides, "rewards/margins", *LOGITS)
        self.metric_names += TOKEN_METRICS[:1] * self._measures
        self.beside = (*self._reference, "desirable")
        own = PreferenceSettings.of(training)
        self._weights = own.desirable_weight, own.undesirable_weight

    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        return [log_probabilities(logits_BSV, *targets_BS).sum(1)]

    def compared(
        self, inputs: Inputs, sums_BC: Tensor, ratios_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        is_good_N = inputs["desirable"].bool()
        logps_N, ratios_N = sums_BC[: len(is_good_N), 0], ratios_B[: len(is_good_N)]
        kl = ratios_B.new_zeros(())
        if len(ratios_B) > len(is_good_N):
            kl = ratios_B[len(is_good_N) :].detach().mean().clamp(min=0)
        signed_N = torch.where(is_good_N, ratios_N - kl, kl - ratios_N)
        loss_N = torch.where(is_good_N, *self._weights) * (1 - torch.sigmoid(self._beta * signed_N))
        means = [
            _mean(values_N, torch.ones_like(values_N), side_N)
            for values_N in (self._beta * ratios_N, logps_N)
            for side_N in (is_good_N, ~is_good_N)
        ]
        margin = means[0] - means[1]
        return loss_N.mean(), {MEANS: torch.stack([kl, *means, margin]).detach()}

    def looks(self, inputs: Inputs, sums_BC: Tensor, counts_B: Tensor) -> list[Tensor]:
        is_good_N = inputs["desirable"].bool()
        sums_NC, counts_N = sums_BC[: len(is_good_N)], counts_B[: len(is_good_N)]
        means = [_mean(sums_NC[:, 0], counts_N, side_N) for side_N in (is_good_N, ~is_good_N)]
        return [*means, *(sums_NC[:, 1:2].sum(0) / counts_N.sum())]

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The mean of each metric over the micro-batches that have a value of it."""
        if not named:
            return {}
        table = self.table(named)
        counts, means = table.isnan().logical_not().sum(0).tolist(), table.nanmean(0).tolist()
        found = list(zip(self.metric_names, counts, means, strict=True))
        metrics = {name: mean for name, count, mean in found if count}
        return metrics | {COUNT + name: n for name, n, _ in found if n < len(named)}


def _mean(sums_N: Tensor, counts_N: Tensor, side_N: Tensor) -> Tensor:
    """The mean over a side's answers; NaN where there are none. No number leaves the device."""
    return sums_N.where(side_N, 0.0).sum() / counts_N.where(side_N, 0).sum()
