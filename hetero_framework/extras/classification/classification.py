"""Objectives of models whose head classifies: labels of texts or tokens, and rewards of answers.

Shapes: B rows of a micro-batch. Rewards have P pairs in B = 2 P rows, the chosen answers first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PretrainedConfig

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.config.objectives import needs_of
from hetero_framework.data.batches import MicroBatch, num_items
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.classification.settings import RewardSettings
from hetero_framework.extras.preferences.pair_objective import MEANS, means_table
from hetero_framework.extras.preferences.pairs import MARGIN
from hetero_framework.models.cut.objective import Objective, Predictions
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

HITS = "hits"


class _Classifies(Objective):
    """Gives the last stage the token ids, in which the model class finds the end of a text."""

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        names = list(names)
        needed = set(super().stage_inputs(spec, names)) - {"token_type_ids", MARGIN}
        needed |= {"input_ids", MARGIN} if spec.is_last else set()
        needed |= {"token_type_ids"} if spec.is_first else set()
        return [name for name in names if name in needed]


class Classification(_Classifies):
    """The model class's own loss: a mean over the labels of all micro-batches of a step."""

    metric_names = ("accuracy",)

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(id_layers)
        self._of_tokens = needs_of(training.objective).task == "token-classification"

    def loss(
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[Tensor], None] | None,
        predictions: Predictions | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        labels = inputs["labels"]
        problem, count = shard.config.problem_type, shard.config.num_labels or 1
        measures = problem in ("regression", "multi_label_classification") or count == 1
        if measures and not labels.is_floating_point() and not self._of_tokens:  # labels of a probe
            labels = labels.float()[:, None].expand(-1, count)
        with running():
            loss, logits = shard.classify({**inputs, "labels": labels}, received)
        has_label = labels != IGNORE_INDEX
        items = has_label.sum() if self._of_tokens else len(labels)
        loss = loss * (items / num_items)
        if backward is not None:
            backward(loss)
        named: dict[str, Tensor] = {}
        if not labels.is_floating_point():
            hits = (logits.detach().argmax(-1) == labels) & has_label
            named[HITS] = torch.stack([hits.sum(), has_label.sum()])
        if predictions is not None:
            named |= predictions.of_labels(logits, inputs["labels"])
        return loss.detach(), named

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The share of labels that the model finds likeliest. Empty where labels are floats."""
        found = [tensors[HITS] for tensors in named if HITS in tensors]
        if not found:
            return {}
        if len(found) != len(named) or any(part.shape != (2,) for part in found):
            raise ProtocolError("the last stage gave no numbers of labels")
        hits, labels = torch.stack([part.double().cpu() for part in found]).sum(0).tolist()
        if not 0 <= hits <= labels:
            raise ProtocolError(f"the last stage found {hits} of {labels} labels")
        return {"accuracy": hits / max(labels, 1)}

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts examples, or labels of tokens: a step's loss does not depend on its split."""
        if self._of_tokens:
            return lambda batches: num_items(batches, first=0)
        return lambda batches: sum(len(batch["labels"]) for batch in batches)

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        return self.item_counter(config)

    def probe_inputs(self, config: PretrainedConfig, inputs: Inputs) -> Inputs:
        labels = torch.zeros_like(inputs["labels"])
        of_tokens = labels.shape == inputs["input_ids"].shape
        return {**inputs, "labels": labels[:, 0] if of_tokens and not self._of_tokens else labels}


class Rewards(_Classifies):
    """Teaches a larger reward for the chosen answer than for the rejected answer (Bradley-Terry).
    Losses and metrics equal those of TRL's RewardTrainer (1.16)."""

    metric_names = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(id_layers)
        self._centers = RewardSettings.of(training).center_rewards_coefficient

    def loss(
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[Tensor], None] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with running():
            rewards_B = shard.logits(inputs, received).squeeze(-1)
            chosen_P, rejected_P = rewards_B.chunk(2)
            better_P = chosen_P - rejected_P
            wanted_P = better_P - inputs[MARGIN] if MARGIN in inputs else better_P
            loss = -logsigmoid(wanted_P).mean()
            if self._centers is not None:
                loss = loss + self._centers * torch.mean((chosen_P + rejected_P) ** 2)
        loss = (loss if backward is not None else loss * len(chosen_P)) / num_items
        if backward is not None:
            backward(loss)
        right = (better_P > 0).float().mean()
        spread = rewards_B.min(), rewards_B.mean(), rewards_B.max()
        means = torch.stack([part.float() for part in (right, better_P.mean(), *spread)])
        return loss.detach(), {MEANS: means.detach()}

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The mean of each metric over micro-batches."""
        if not named:
            return {}
        means = means_table(named, len(self.metric_names)).mean(0)
        return dict(zip(self.metric_names, means.tolist(), strict=True))

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts micro-batches: the loss of each is the mean of its pairs, as in TRL."""
        return len

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts pairs."""
        return lambda batches: sum(len(batch["labels"]) // 2 for batch in batches)
