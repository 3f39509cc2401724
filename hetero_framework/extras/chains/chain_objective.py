"""The objective of a chain: a user's loss of what the last child returns.

Shapes: B examples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hetero_framework import control
from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.data.batches import MicroBatch
from hetero_framework.errors import DataError, ModelError, ProtocolError
from hetero_framework.extras.chains.chain import (
    INPUT,
    TARGET,
    ChainConfig,
    examples,
    members,
    part_of,
)
from hetero_framework.extras.chains.chain_shard import ChainShard
from hetero_framework.models.cut.objective import Objective, Predictions
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

LOSS, METRICS = "loss", "loss_metrics"
"""Names in the user's file: the loss function, and the list that names its further means."""


class ChainLoss(Objective):
    """The function `loss(output, target)` in a file of --import. It returns the mean over a
    micro-batch's examples, or a pair of that mean and a dictionary of further means."""

    label_name, unit = TARGET, "examples"
    predicts = False  # a chain may return several tensors
    averages_means = True
    """Whether a step averages the means of its micro-batches; else it averages its examples."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(id_layers)
        self.metric_names = tuple(control.named(METRICS) or ())

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        needed = {INPUT: spec.is_first, TARGET: spec.is_last}
        return [name for name in names if needed[name.partition(".")[0]]]

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
        target = part_of(inputs, TARGET)
        rows = len(next(iter(members(target).values())))
        with running():
            output = cast(ChainShard, shard).output(inputs, received)
            mean, means = self.called(shard.config, output, target)
        loss = mean * (1 if self.averages_means and backward is not None else rows) / num_items
        if backward is not None:
            backward(loss)
        named: dict[str, Tensor] = {}
        if means:
            count = mean.new_full((1,), rows, dtype=torch.float32)
            named[METRICS] = torch.cat([torch.stack(means), count]).detach()
        if predictions is not None:
            assert isinstance(output, Tensor)
            assert isinstance(target, Tensor)
            named |= predictions.of_labels(output, target)
        return loss.detach(), named

    def called(
        self, config: PretrainedConfig, output: Any, target: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the further means in the order of `metric_names`."""
        function = control.named(LOSS)
        if function is None:
            raise ModelError(
                f"no imported file has a function {LOSS}(output, target)",
                hint="add it to the file of --import on every machine",
            )
        try:
            with control.users_code(f"{LOSS}(output, target) fails", DataError):
                found = function(output, target)
        except DataError as error:
            ranges = ", ".join(
                f"{name or TARGET} {part.min():g} to {part.max():g}"
                for name, part in members(target).items()
            )
            raise DataError(error.message, hint=f"of this micro-batch: {ranges}") from error
        loss, means = found if isinstance(found, tuple) else (found, {})
        if not isinstance(loss, Tensor) or loss.dim() or means.keys() != set(self.metric_names):
            raise ModelError(
                f"{LOSS}(output, target) has to return a mean over the examples, a tensor of no"
                f" axes, or a pair of it and of a dictionary with the means that {METRICS} names"
            )
        return loss, [torch.as_tensor(means[name]).float() for name in self.metric_names]

    def metrics(self, named: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The mean of each metric over the examples of all micro-batches."""
        found = [tensors[METRICS] for tensors in named if METRICS in tensors]
        if not found:
            return {}
        shape = (len(self.metric_names) + 1,)
        if len(found) != len(named) or any(part.shape != shape for part in found):
            raise ProtocolError("the last stage gave no means of a micro-batch")
        table = torch.stack([part.double().cpu() for part in found])
        means = (table[:, :-1] * table[:, -1:]).sum(0) / table[:, -1].sum()
        return dict(zip(self.metric_names, means.tolist(), strict=True))

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        return len if self.averages_means else self.prediction_counter(config)

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts examples."""
        return lambda batches: sum(len(next(iter(batch.values()))) for batch in batches)

    def probe_inputs(self, config: PretrainedConfig, inputs: Inputs) -> Inputs:
        return examples(cast(ChainConfig, config), len(next(iter(inputs.values()))))
