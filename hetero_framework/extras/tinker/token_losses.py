"""The objective "calls": losses of target tokens, with the tensors that a call brings.

The formulas are those that the `tinker` client documents. Each is a sum over tokens, so nothing is
divided. Shapes: B rows of a micro-batch, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from hetero_framework.config import StageSpec, TrainingConfig
from hetero_framework.data.batches import MicroBatch, collate
from hetero_framework.data.kinds import ExampleKind
from hetero_framework.errors import ArchitectureError, ConfigError
from hetero_framework.models.cut.chunked_loss import Span, chunk_tokens, sum_of_chunks
from hetero_framework.models.cut.objective import ChunkedObjective
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

LOGPROBS = "logprobs"
RATIO_MASK = "sequence_ratio_mask"
RECIPE = "recipe"
"""An input of the last stage: the number of the loss in LOSSES, then the values of SETTINGS."""
SETTINGS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}
"""The settings of the losses, and their defaults."""
_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("weights",), ()),
    "importance_sampling": (_POLICY, ()),
    "ppo": (_POLICY, ("clip_low_threshold", "clip_high_threshold")),
    "cispo": (_POLICY, ("clip_low_threshold", "clip_high_threshold")),
    "dro": (_POLICY, ("beta",)),
    "gspo": ((*_POLICY, RATIO_MASK), ("clip_low_threshold", "clip_high_threshold")),
}
"""The losses, each with the tensors [B, S] that it takes beside the targets, and its settings."""
_NAMES = tuple(LOSSES)


def recipe(loss: str, settings: Mapping[str, float]) -> Tensor:
    """The RECIPE of a loss, float32."""
    values = [settings.get(name, default) for name, default in SETTINGS.items()]
    return torch.tensor([float(_NAMES.index(loss)), *values])


def loss_of(name: str, logprobs_BS: Tensor, given: Mapping[str, Tensor], recipe: Tensor) -> Tensor:
    """The loss of some tokens, 0-d: minus the objective, summed. For "gspo", whole rows."""
    if name == "cross_entropy":
        return -(logprobs_BS * given["weights"]).sum()
    low, high, beta = recipe[1], recipe[2], recipe[3]
    change_BS, advantages_BS = logprobs_BS - given["logprobs"], given["advantages"]
    if name == "dro":
        return -(logprobs_BS * advantages_BS - 0.5 * beta * change_BS.square()).sum()
    if name == "gspo":
        mask_BS = given[RATIO_MASK]
        mean_B1 = (change_BS * mask_BS).sum(1, True) / mask_BS.sum(1, True).clamp(min=1)
        # The value is the row's ratio, the gradient that of each token's own probability.
        ratio_BS = mean_B1.detach().exp() * (logprobs_BS - logprobs_BS.detach()).exp()
    else:
        ratio_BS = change_BS.exp()
    if name == "importance_sampling":
        return -(ratio_BS * advantages_BS).sum()
    clipped_BS = ratio_BS.clamp(low, high)
    if name == "cispo":
        return -(clipped_BS.detach() * logprobs_BS * advantages_BS).sum()
    return -torch.min(ratio_BS * advantages_BS, clipped_BS * advantages_BS).sum()


def no_data(*args: Any) -> Any:
    """Raise ConfigError: a run from files has no calls."""
    raise ConfigError(
        'training.objective "calls" is trained by the calls of a client',
        hint="hetero serve answers them; hetero train needs another objective",
    )


CALLS = ExampleKind("calls of a client", (), no_data, no_data, collate, needs=(("calls",),))
"""The kind of data that no file has."""


class TokenLosses(ChunkedObjective):
    """Trains on the calls of a client. `labels` [B, S] are the targets: the token that each token
    is to be followed by. The log-probabilities of all targets come with each loss."""

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training.loss_chunk_tokens, id_layers)

    def item_counter(self, config: PretrainedConfig) -> Callable[[Sequence[MicroBatch]], int]:
        """Counts 1: sums are not divided."""
        return lambda batches: 1

    prediction_counter = item_counter

    def stage_inputs(self, spec: StageSpec, names: Iterable[str]) -> list[str]:
        of_loss = {RECIPE, *(name for tensors, _ in LOSSES.values() for name in tensors)}
        needed = super().stage_inputs(spec, names)
        return needed if spec.is_last else [name for name in needed if name not in of_loss]

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
        targets_BS, told = inputs["labels"], inputs[RECIPE]
        name = _NAMES[int(getattr(told, "_hetero_host", told)[0])]
        given = {key: inputs[key] for key in LOSSES[name][0]}
        chunks = spans(targets_BS.shape, chunk_tokens(self._loss_chunk_tokens, shard.config))
        if chunks:
            with running():
                (top_BSD,) = shard.forward(inputs, received)

            def of(found_BS: Tensor, span: Span = (slice(None), slice(None))) -> Tensor:
                return loss_of(name, found_BS, {k: v[span] for k, v in given.items()}, told)

            whole = of if name == "gspo" else None
            return _chunked(shard, top_BSD, targets_BS, chunks, of, whole, running, backward)
        with running():
            found_BS = _logprobs(shard.logits(inputs, received), targets_BS)
            loss = loss_of(name, found_BS, given, told)
        if backward is not None:
            backward(loss)
        return loss.detach(), {LOGPROBS: found_BS.detach()}

    def probe_inputs(self, config: PretrainedConfig, inputs: Inputs) -> Inputs:
        ones = torch.ones(inputs["labels"].shape)
        given = dict.fromkeys(LOSSES["gspo"][0], ones)
        labels = inputs["labels"].clamp(min=0)
        return {**inputs, "labels": labels, **given, RECIPE: recipe("gspo", {})}


def _chunked(
    shard: Shard,
    top_BSD: Tensor,
    targets_BS: Tensor,
    chunks: Sequence[Span],
    of: Callable[[Tensor, Span], Tensor],
    whole: Callable[[Tensor], Tensor] | None,
    running: Callable[[], AbstractContextManager[None]],
    backward: Callable[[Tensor], None] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss `of` each chunk's log-probabilities. With `whole` it is one of whole rows: a first
    pass finds what each log-probability is worth, and a second one differentiates."""
    all_BS, worth_BS = torch.zeros(targets_BS.shape, device=top_BSD.device), None

    def logprobs(number: int, span: Span, hidden_BSD: Tensor) -> Tensor:
        labels = targets_BS[span]
        found = _logprobs(shard.chunk_logits({"labels": labels}, hidden_BSD, number), labels)
        all_BS[span] = found.detach()
        return found

    if whole is not None and backward is not None:
        for number, span in enumerate(chunks):
            with running(), torch.no_grad():
                logprobs(number, span, top_BSD[span].contiguous())
        leaf_BS = all_BS.clone().requires_grad_()
        (worth_BS,) = torch.autograd.grad(whole(leaf_BS), leaf_BS)

    def part(number: int, span: Span, hidden_BSD: Tensor) -> Tensor:
        with running():
            found = logprobs(number, span, hidden_BSD)
            return of(found, span) if worth_BS is None else (found * worth_BS[span]).sum()

    loss = sum_of_chunks(shard, top_BSD, list(chunks), part, backward)
    return (loss if whole is None else whole(all_BS)).detach(), {LOGPROBS: all_BS}


def spans(shape: torch.Size, limit: int | None) -> list[Span]:
    """(rows, tokens) of each loss chunk of at most `limit` tokens: whole rows, or a part of one.
    Empty if one is enough. Unlike next-token labels, targets of one chunk need no other."""
    rows, tokens = shape
    if limit is None or rows * tokens <= limit:
        return []
    height, width = max(1, limit // tokens), min(limit, tokens)
    return [
        (slice(r, min(r + height, rows)), slice(t, min(t + width, tokens)))
        for r in range(0, rows, height)
        for t in range(0, tokens, width)
    ]


def _logprobs(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    if logits_BSV.shape[:-1] != targets_BS.shape:
        raise ArchitectureError(
            f"the model makes logits of {list(logits_BSV.shape)} for targets of"
            f" {list(targets_BS.shape)}: its tokens have no probabilities"
        )
    flat = logits_BSV.float().flatten(0, 1), targets_BS.flatten()
    return -cross_entropy(*flat, reduction="none").view(targets_BS.shape)


__all__ = ["LOGPROBS", "LOSSES", "RATIO_MASK", "RECIPE", "SETTINGS", "TokenLosses", "recipe"]
