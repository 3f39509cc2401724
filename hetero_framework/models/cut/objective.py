"""The objective of a run: everything that another loss would change.

It tells the engine which tensors a stage needs, how the last stage computes the loss from them, by
how many items a step is divided, and what is logged of the tensors that come with the losses.

Shapes: B rows of a micro-batch, S tokens, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hetero_framework.config import TOKEN_METRICS, StageSpec
from hetero_framework.data.batches import IGNORE_INDEX, MicroBatch, num_items
from hetero_framework.models.cut.chunked_loss import chunk_tokens, chunked_loss, spans
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model, model_class
from hetero_framework.models.cut.predictions import Predictions
from hetero_framework.models.cut.shard import Inputs, Look, Shard
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.cut.token_metrics import SUMS, TokenSums, token_metrics


class CausalLM:
    """Next-token prediction: each token's label is the token after it; -100 is not a label."""

    counts_tokens = True
    """Whether `prediction_counter` counts tokens."""

    has_reference = False
    """Whether the model as it was before the training is asked about each pair."""

    def __init__(
        self,
        loss_chunk_tokens: int | Literal["auto"] | None,
        id_layers: frozenset[int] = frozenset(),
        label_smoothing: float = 0.0,
        token_metrics: bool = False,
    ) -> None:
        """`loss_chunk_tokens`: tokens whose logits exist at once, at most; None: all. `id_layers`:
        the model's layers that read token ids (`ModelStructure.id_readers`). `label_smoothing`: the
        share of a token's loss that is the mean over all tokens in its place. `token_metrics`:
        whether TOKEN_METRICS are measured."""
        self._loss_chunk_tokens = loss_chunk_tokens
        self._id_layers = id_layers
        self._smoother = LabelSmoother(label_smoothing) if label_smoothing else None
        self.metric_names: tuple[str, ...] = TOKEN_METRICS if token_metrics else ()

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        """The tensors that a stage needs: tokens in front and where its layers read them, labels at
        the end, others everywhere."""
        reads = not self._id_layers.isdisjoint(range(spec.start, spec.end))
        needed = {"input_ids": spec.is_first or reads, "labels": spec.is_last}
        return [name for name in names if needed.get(name, True)]

    def loss(
        self,
        shard: Shard,
        inputs: Inputs,
        received: Bundle,
        num_items: torch.Tensor,
        *,
        running: Callable[[], AbstractContextManager[None]],
        backward: Callable[[torch.Tensor], None] | None,
        predictions: Predictions | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The last shard's loss of a micro-batch divided by `num_items`, as `item_counter` counts
        them; 0-d, detached. Outside training without what routers add to it. With it come the
        tensors that `metrics` wants, and those of `predictions`.

        `running` is the context of each forward. `backward` differentiates a loss, scaled as the
        caller likes; None outside training. Gradients are left in parameters and `received`.
        """
        divisor, differentiate = num_items, backward
        if backward is not None and averages_means(type(shard.model)):
            predicted = inputs["labels"][..., shard.ids_per_token :]
            divisor = predicted.ne(IGNORE_INDEX).sum().clamp(min=1)
            differentiate = _divided(backward, num_items)
        sums = TokenSums() if self.metric_names else None
        look = _every([part.look for part in (sums, predictions) if part is not None])
        limit = chunk_tokens(self._loss_chunk_tokens, shard.config)
        if predictions is not None and predictions.wants_all:
            limit = None
        if chunks := spans(inputs["labels"].shape, limit):
            loss = chunked_loss(
                *(shard, inputs, received, divisor, chunks),
                running=running,
                backward=differentiate,
                smoother=self._smoother,
                look=look,
            )
        else:
            tokens_only, smoother = backward is None, self._smoother
            with running():
                loss = shard.loss(
                    *(inputs, received, divisor),
                    tokens_only=tokens_only,
                    smoother=smoother,
                    look=look,
                )
            if differentiate is not None:
                differentiate(loss)
            loss = loss.detach()
        named = {} if sums is None or sums.total is None else {SUMS: sums.total}
        if predictions is not None:
            named |= predictions.named(inputs["labels"], chunks)
        return loss if divisor is num_items else loss / num_items, named

    @property
    def predicts(self) -> bool:
        """Whether `loss` takes predictions along."""
        return "predictions" in inspect.signature(self.loss).parameters

    def probe_inputs(self, inputs: Inputs) -> Inputs:
        """The last stage's inputs of a micro-batch without data."""
        return inputs

    def metrics(self, named: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """The metrics that `metric_names` names, each a mean over micro-batches, from the tensors
        that came with their losses. Raises ProtocolError for tensors that this objective does not
        make."""
        return token_metrics(named) if self.metric_names else {}

    def num_chunks(self, config: PretrainedConfig, rows: int, tokens: int) -> int:
        """How many pieces the loss of a micro-batch is computed in."""
        limit = chunk_tokens(self._loss_chunk_tokens, config)
        return max(1, len(spans((rows, tokens), limit)))

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """For training this model: the divisor of the losses of a step's micro-batches, as in
        transformers' Trainer. It leaves the first label of each row, which is not predicted, out
        only where it knows the loss from the class's name, and so not for `GPT2LMHeadModel`. Where
        it averages means, these are the items. Smoothed losses are divided by the same number."""
        if averages_means(model_class(config)):
            return len
        loss = LOSS_MAPPING.get(getattr(meta_model(config), "loss_type", None) or "")
        divides = self._smoother is not None or introspect(config).loss_counts_items
        if loss is not ForCausalLMLoss and divides:
            return lambda batches: num_items(batches, first=0)
        return self.prediction_counter(config)

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts what an evaluation's loss is divided by."""
        first = introspect(config).ids_per_token
        return lambda batches: num_items(batches, first=first)

    def loss_bytes(
        self, text: PretrainedConfig, tokens: int, number_bytes: int, head_numbers: int
    ) -> int:
        """Memory that the last stage needs for the loss of `tokens` tokens at once, with weights of
        `number_bytes`: logits, their float32 upcast, its log-softmax and the gradients of both; one
        copy more to smooth labels. Of one loss chunk, also a float32 sum for `head_numbers`, the
        narrower trained weights."""
        # In float32 the upcast is no copy.
        per_logit = 16 if number_bytes == 4 else number_bytes + 16
        per_logit += 4 * (self._smoother is not None)
        limit = chunk_tokens(self._loss_chunk_tokens, text)
        if limit is None or tokens <= limit:
            return tokens * int(text.vocab_size) * per_logit
        return limit * int(text.vocab_size) * per_logit + 4 * head_numbers


def _every(looks: Sequence[Look]) -> Look | None:
    """All of these as one; None for none."""

    def look(logits: torch.Tensor, labels: torch.Tensor) -> None:
        for each in looks:
            each(logits, labels)

    return look if looks else None


def _divided(
    backward: Callable[[torch.Tensor], None], num_items: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """`backward` of a loss that has not been divided yet."""
    return lambda loss: backward(loss / num_items)


def averages_means(cls: type[PreTrainedModel]) -> bool:
    """Whether the Trainer averages the losses of a step's micro-batches, each the mean of its own
    tokens. It does for classes whose loss takes no number of items, and for those that ask for it:
    multimodal ones, most of them."""
    accepts = getattr(cls, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(cls.forward).parameters.values()
        accepts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return not accepts
