"""Next-token prediction, the objective of fine-tuning on texts.

Shapes: B rows of a micro-batch, S tokens, T tokens of several rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hetero_framework import registry
from hetero_framework.config import TOKEN_METRICS
from hetero_framework.data.batches import MicroBatch, num_items
from hetero_framework.data.examples import IGNORE_INDEX
from hetero_framework.errors import ArchitectureError, ProtocolError
from hetero_framework.models.cut.chunked_loss import chunk_tokens, chunked_loss, spans
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import meta_model, model_class
from hetero_framework.models.cut.objective import ROUTING, ChunkedObjective, Predictions
from hetero_framework.models.cut.shard import Inputs, Look, Shard
from hetero_framework.models.cut.side import Bundle

SUMS = "token_sums"
_LOGITS = 1 << 24  # read at once, in float32: less memory than the loss's backward needs


class CausalLM(ChunkedObjective):
    """Each token's label is the token after it; -100 is not a label."""

    counts_tokens = True

    def __init__(
        self,
        loss_chunk_tokens: int | Literal["auto"] | None,
        id_layers: frozenset[int] = frozenset(),
        label_smoothing: float = 0.0,
        token_metrics: bool = False,
    ) -> None:
        """`loss_chunk_tokens`, `id_layers`: as for `ChunkedObjective`. `label_smoothing`: the share
        of a token's loss that is the mean over the whole vocabulary. `token_metrics`: whether
        TOKEN_METRICS are measured."""
        super().__init__(loss_chunk_tokens, id_layers)
        self._smoother = LabelSmoother(label_smoothing) if label_smoothing else None
        self.metric_names: tuple[str, ...] = TOKEN_METRICS if token_metrics else ()

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
        """The loss, and the tensors for `metrics` and of `predictions`. Outside training the loss
        is without the routers' term, which is ROUTING."""
        divisor, differentiate = num_items, backward
        if backward is not None and averages_means(type(shard.model)):
            predicted = inputs["labels"][..., shard.ids_per_token :]
            divisor = predicted.ne(IGNORE_INDEX).sum().clamp(min=1)
            differentiate = _divided(backward, num_items)
        sums = TokenSums() if self.metric_names else None
        sources, routing = None, list[torch.Tensor]()
        if "sources" in inputs:
            sources = registry.needed("mixtures", "losses", "data.train with several sources")()
        parts = (sums, predictions, sources)
        look = _every([part.look for part in parts if part is not None])
        limit = chunk_tokens(self._loss_chunk_tokens, shard.config)
        if predictions is not None and predictions.wants_all:
            limit = None
        how: Any = {"smoother": self._smoother, "look": look}
        if chunks := spans(inputs["labels"].shape, limit):
            loss = chunked_loss(
                *(shard, inputs, received, divisor, chunks),
                running=running,
                backward=differentiate,
                **how,
            )
        else:
            apart = None if backward is not None else routing
            with running():
                loss = shard.loss(inputs, received, divisor, apart=apart, **how)
            if differentiate is not None:
                differentiate(loss)
            loss = loss.detach()
        named = {} if sums is None or sums.total is None else {SUMS: sums.total}
        if routing:
            named[ROUTING] = routing[0].detach().float()
        if predictions is not None:
            named |= predictions.named(inputs["labels"], chunks)
        if sources is not None:
            named |= sources.named(inputs["sources"], inputs["labels"], chunks)
        return loss if divisor is num_items else loss / num_items, named

    def metrics(self, named: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """The token metrics as TRL's SFTTrainer has them: means over micro-batches, from the
        tensors that the last stage gave for each. Raises ProtocolError where sums are missing."""
        if not self.metric_names:
            return {}
        sums = [tensors[SUMS] for tensors in named if SUMS in tensors]
        if len(sums) != len(named) or any(
            s.shape != (3,) or s.dtype != torch.float32 for s in sums
        ):
            raise ProtocolError("the last stage gave no sums for training.token_metrics")
        if not sums:
            return {}
        found = torch.stack(sums).double().cpu()
        means = found[:, :2] / found[:, 2:].clamp(min=1)
        return dict(zip(TOKEN_METRICS, means.mean(0).tolist(), strict=True))

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts items as transformers' Trainer does. The Trainer leaves out the first label of
        each row, which is not predicted, only where it knows the loss from the class's name, so not
        for `GPT2LMHeadModel`. Where it averages the means of micro-batches, these are the items.
        Smoothed losses are divided by the same number."""
        if averages_means(model_class(config)):
            return len
        loss = LOSS_MAPPING.get(getattr(meta_model(config), "loss_type", None) or "")
        divides = self._smoother is not None or introspect(config).loss_counts_items
        if loss is not ForCausalLMLoss and divides:
            return lambda batches: num_items(batches, first=0)
        return self.prediction_counter(config)

    def prediction_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts tokens with a label."""
        first = introspect(config).ids_per_token
        return lambda batches: num_items(batches, first=first)


def _every(looks: Sequence[Look]) -> Look | None:
    """One function that calls all of these; None without any."""

    def look(logits: torch.Tensor, labels: torch.Tensor) -> None:
        for each in looks:
            each(logits, labels)

    return look if looks else None


def _divided(
    backward: Callable[[torch.Tensor], None], num_items: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """A `backward` that first divides the loss by `num_items`."""
    return lambda loss: backward(loss / num_items)


def averages_means(cls: type[PreTrainedModel]) -> bool:
    """Whether the Trainer averages the losses of a step's micro-batches, each the mean over its own
    tokens. The Trainer does so for classes whose loss takes no number of items, and for classes
    that ask for it, most of them multimodal."""
    accepts = getattr(cls, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(cls.forward).parameters.values()
        accepts = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return not accepts


class TokenSums:
    """Sums over label tokens, in one tensor [3]: the entropy of the model's predictions, the number
    of tokens whose label is the likeliest token, and the number of tokens."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None

    @torch.no_grad()
    def look(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> None:
        """Add a part of a micro-batch, without the first label of each row. Raises
        ArchitectureError unless each label has one row of logits."""
        if logits_BSV.shape[:-1] != labels_BS.shape:
            raise ArchitectureError(
                f"the model makes logits of {list(logits_BSV.shape)} for labels of"
                f" {list(labels_BS.shape)}: there is no prediction for each token to be measured",
                hint="set training.token_metrics to false",
            )
        next_BS = torch.nn.functional.pad(labels_BS[..., 1:], (0, 1), value=IGNORE_INDEX)
        at_once = max(1, _LOGITS // logits_BSV.shape[-1])
        parts = logits_BSV.flatten(0, -2).split(at_once)
        for logits_TV, label_T in zip(parts, next_BS.flatten().split(at_once), strict=True):
            share_TV = logits_TV.float().softmax(-1)
            is_label_T = label_T != IGNORE_INDEX
            # xlogy: a token that the model rules out adds nothing, where 0 * log(0) is NaN.
            entropy_T = -torch.xlogy(share_TV, share_TV).sum(-1)
            found = entropy_T.where(is_label_T, 0), logits_TV.argmax(-1) == label_T, is_label_T
            sums = torch.stack([values_T.sum(dtype=torch.float32) for values_T in found])
            self.total = sums if self.total is None else self.total + sums
