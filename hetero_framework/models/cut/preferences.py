"""Direct preference optimization: pairs beside a reference.

Losses and metrics are those of TRL's DPOTrainer (1.16), which names their papers.

Shapes: P pairs, B = 2 P rows, first the chosen ones; S tokens, V vocabulary; C sums of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.data.pairs import REFERENCE
from hetero_framework.models.cut.pair_objective import (
    PairObjective,
    chosen_loss,
    lengths_of,
    log_probabilities,
)
from hetero_framework.models.cut.shard import Inputs

LOGPS = "logps"


class Preferences(PairObjective):
    """A batch also has the log-probability of each answer by the reference; without these the loss
    is none, and LOGPS come with it."""

    has_reference = True

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers)
        weights = training.loss_weights or (1.0,) * len(training.losses)
        self._losses = list(zip(training.losses, weights, strict=True))
        if training.rpo_alpha:
            self._losses.append(("sft", training.rpo_alpha))
        self._ld_alpha, self._weighs = training.ld_alpha, training.use_weighting
        self._tau = training.discopop_tau

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        needed = super().stage_inputs(spec, names)
        return [name for name in needed if spec.is_last or name not in REFERENCE]

    def probe_inputs(self, inputs: Inputs) -> Inputs:
        zeros = inputs["labels"].new_zeros(len(inputs["labels"]) // 2, dtype=torch.float32)
        return {**inputs, **dict.fromkeys(REFERENCE, zeros)}

    def mean_loss(self, inputs: Inputs, sums_BC: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if REFERENCE[0] not in inputs:
            return sums_BC.new_zeros(()), {LOGPS: sums_BC[:, 0].detach()}
        logps_B, plain_B, aligned_B = sums_BC.unbind(1)
        lengths_B = lengths_of(inputs["labels"])
        ratios_B = logps_B - torch.cat([inputs[name] for name in REFERENCE])
        loss = logps_B.new_zeros(())
        for name, weight in self._losses:
            if name == "sft":
                loss_P = chosen_loss(plain_B, lengths_B)
            else:
                loss_P = self._loss_of(name, ratios_B, lengths_B)
            if self._weighs:
                one_P, other_P = (aligned_B / lengths_B.clamp(min=1)).exp().detach().chunk(2)
                loss_P = loss_P * one_P * other_P
            loss = loss + weight * loss_P.mean()
        return loss, self.means(logps_B, ratios_B)

    def _loss_of(self, name: str, ratios_B: Tensor, lengths_B: Tensor) -> Tensor:
        """The loss of each pair, from how much likelier its answers are than for the reference."""
        beta, epsilon = self._beta, self._smoothing
        chosen_P, rejected_P = ratios_B.chunk(2)
        delta_P = chosen_P - rejected_P
        if name in ("ipo", "sigmoid_norm"):
            one_P, other_P = (ratios_B / lengths_B.clamp(min=1)).chunk(2)
            if name == "ipo":
                return (one_P - other_P - 1 / (2 * beta)) ** 2
            return -logsigmoid(beta * (one_P - other_P))
        if name == "sigmoid":
            return -logsigmoid(beta * delta_P)
        if name == "hinge":
            return torch.relu(1 - beta * delta_P)
        if name == "exo_pair":
            p_P, q_P = torch.sigmoid(beta * delta_P), torch.sigmoid(-beta * delta_P)
            return p_P * (logsigmoid(beta * delta_P) - math.log1p(-epsilon)) + q_P * (
                logsigmoid(-beta * delta_P) - math.log(epsilon)
            )
        if name == "nca_pair":
            both = logsigmoid(-beta * chosen_P) + logsigmoid(-beta * rejected_P)
            return -logsigmoid(beta * chosen_P) - 0.5 * both
        if name == "robust":
            clean, flipped = logsigmoid(beta * delta_P), logsigmoid(-beta * delta_P)
            return (-(1 - epsilon) * clean + epsilon * flipped) / (1 - 2 * epsilon)
        if name == "bco_pair":
            return -logsigmoid(beta * chosen_P) - logsigmoid(-beta * rejected_P)
        if name == "sppo_hard":
            return (chosen_P - 0.5 / beta) ** 2 + (rejected_P + 0.5 / beta) ** 2
        if name == "apo_zero":
            return 1 - torch.sigmoid(beta * chosen_P) + torch.sigmoid(beta * rejected_P)
        if name == "apo_down":
            return torch.sigmoid(beta * chosen_P) + 1 - torch.sigmoid(beta * delta_P)
        assert name == "discopop"
        share_P = torch.sigmoid(beta * delta_P / self._tau)
        return -logsigmoid(beta * delta_P) * (1 - share_P) + torch.exp(-beta * delta_P) * share_P

    def targets(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return inputs["labels"], self._weights(inputs["labels"])

    def sums(self, logits_BSV: Tensor, *targets_BS: Tensor) -> list[Tensor]:
        """Of an answer: its weighted log-probabilities, the plain ones, and what weights pairs."""
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
        """Of each label: 1, or ld_alpha beyond the length of the pair's shorter answer."""
        if self._ld_alpha is None:
            return labels_BS
        is_label_BS = labels_BS.ne(IGNORE_INDEX)
        is_label_BS[:, 0] = False  # not predicted
        length_B = is_label_BS.sum(1)
        shared_P = torch.minimum(*length_B.chunk(2))
        is_shared_BS = is_label_BS.cumsum(1) <= torch.cat([shared_P, shared_P])[:, None]
        return torch.where(is_shared_BS, 1.0, self._ld_alpha)
