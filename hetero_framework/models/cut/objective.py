"""Objectives: what a run learns.

Engine, planner, memory estimate and evaluation know an objective by the class `Objective` alone: a
new objective needs no change in any of them.

Shapes: B rows of a micro-batch, S tokens.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from transformers import PretrainedConfig

from hetero_framework.config import StageSpec
from hetero_framework.data.batches import PICTURES, MicroBatch
from hetero_framework.errors import ProtocolError
from hetero_framework.models.cut.chunked_loss import Span, chunk_tokens, spans
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

if TYPE_CHECKING:
    from hetero_framework.models.adapters.adapter_plan import AdapterPlan

COUNT = "batches/"
"""Prefix for the number of micro-batches that have a metric, where not all have it."""

ROUTING = "routing"
"""Names what the model adds to the mean loss of an evaluated micro-batch for its routers, 0-d."""


class Predictions(Protocol):
    """Takes, from the logits of one micro-batch, what users' compute_metrics is given."""

    @property
    def wants_all(self) -> bool:
        """Whether the logits have to exist at once, and not in the loss's chunks."""

    def look(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> None:
        """Take logits, in the order of the chunks."""

    def named(
        self, labels_BS: torch.Tensor, chunks: Sequence[Span] = ()
    ) -> dict[str, torch.Tensor]:
        """The tensors to send beside the loss; `chunks` are the places of the logits."""

    def of_labels(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to send beside a classifier's loss."""


class Objective(ABC):
    """An objective of a run: the loss of a micro-batch, the tensors it needs, and its metrics. The
    registry has the kind of data and the model's task by the objective's name."""

    counts_tokens = False
    """Whether `prediction_counter` counts tokens."""

    has_reference = False
    """Whether the model as it was before the training is also run on each pair."""

    adds_routing = False
    """Whether the loss has a term for the model's routers."""

    metric_names: tuple[str, ...] = ()
    """The names of the metrics."""

    unit = "tokens"
    """The unit that speed is counted in; "examples" where examples have no tokens."""

    label_name = "labels"
    """The tensor of a micro-batch that users' compute_metrics gets as label_ids."""

    def __init__(self, id_layers: frozenset[int] = frozenset()) -> None:
        """`id_layers`: the model's layers that read token ids (`ModelStructure.id_readers`)."""
        self._id_layers = id_layers

    # -- a micro-batch --------------------------------------------------------------------------

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        """The tensors of a micro-batch that a stage needs. Here: token ids on the first stage and
        where layers read them, pictures on the first one, labels and sources on the last, others
        everywhere."""
        reads = not self._id_layers.isdisjoint(range(spec.start, spec.end))
        needed = {"input_ids": spec.is_first or reads}
        needed |= dict.fromkeys(("labels", "sources"), spec.is_last)
        return [n for n in names if needed.get(n, spec.is_first or not n.startswith(PICTURES))]

    @abstractmethod
    def loss(
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: torch.Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[torch.Tensor], None] | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """On the last stage: the loss of a micro-batch divided by `num_items`, 0-d, detached, and
        tensors by name, for `metrics`. Outside training `num_items` is 1, and the loss is the sum
        over what `prediction_counter` counts.

        Args:
            shard: the last shard, which computes logits from `inputs` and `received`.
            inputs: the tensors of `stage_inputs`.
            received: what the stage before has sent.
            num_items: what `item_counter` counts in all micro-batches of the step, 0-d.
            running: the context of each forward.
            backward: differentiates a loss that is divided, and leaves the gradients in parameters
                and `received`. None outside training.

        A `loss` that also takes `predictions: Predictions | None` serves users' compute_metrics.
        """

    def metrics(self, named: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Numbers to log by `metric_names`, from the tensors that came with the losses of all
        micro-batches of a step or an evaluation. Names with COUNT are not logged. Raises
        ProtocolError for tensors of another objective: they come from another machine."""
        return {}

    def gathered(
        self, named: Sequence[Mapping[str, torch.Tensor]], most: int
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        """The tensors for `metrics` of a step that ends an epoch: of the first `most` examples of
        each micro-batch where TRL's trainer measures only these, else (as here) of all."""
        return named

    def routing(self, named: Mapping[str, torch.Tensor]) -> float:
        """ROUTING of an evaluated micro-batch, 0 if it has none. Raises ProtocolError."""
        term = named.get(ROUTING, torch.zeros(()))
        if term.shape != () or not term.is_floating_point():
            raise ProtocolError("the last stage gave no number for its routers")
        return float(term)

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics on the screen; metrics.jsonl has all."""
        return tuple(name for name in self.metric_names if name not in ("entropy", "kl"))

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The metrics of an evaluation, beside its loss."""
        of_tokens = ("token_loss", "perplexity") if self.counts_tokens else ()
        return (*of_tokens, *self.metric_names, *["num_tokens"] * self.logs_num_tokens)

    @property
    def logs_num_tokens(self) -> bool:
        """Whether the number of tokens trained on so far is among the metrics, as in TRL."""
        return bool(self.metric_names) and self.unit == "tokens"

    @property
    def predicts(self) -> bool:
        """Whether `loss` takes `predictions`."""
        return "predictions" in inspect.signature(self.loss).parameters

    # -- counts ---------------------------------------------------------------------------------

    @abstractmethod
    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """A function that counts what the losses of a step are divided by in training; `len` where
        each is the mean of its micro-batch."""

    @abstractmethod
    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """A function that counts what an evaluation's loss is divided by."""

    def num_chunks(self, config: PretrainedConfig, inputs: Inputs) -> int:
        """The number of chunks in which the loss of a micro-batch is computed."""
        return 1

    # -- before the run -------------------------------------------------------------------------

    def check(self, plan: AdapterPlan | None) -> None:
        """Raise ConfigError if this objective cannot train with this adapter (None: no adapter)."""
        return

    def probe_inputs(self, config: PretrainedConfig, inputs: Inputs) -> Inputs:
        """A micro-batch of the largest size without data: `inputs` has input_ids, attention_mask
        and labels, all [B, S]."""
        return inputs


class ChunkedObjective(Objective):
    """An objective whose loss is made of the logits of all tokens, a loss chunk at a time."""

    def __init__(
        self,
        loss_chunk_tokens: int | Literal["auto"] | None,
        id_layers: frozenset[int] = frozenset(),
    ) -> None:
        """`loss_chunk_tokens`: most tokens whose logits exist at once; None: no limit."""
        super().__init__(id_layers)
        self._loss_chunk_tokens = loss_chunk_tokens

    def num_chunks(self, config: PretrainedConfig, inputs: Inputs) -> int:
        limit = chunk_tokens(self._loss_chunk_tokens, config)
        return max(1, len(spans(inputs["labels"].shape, limit)))
