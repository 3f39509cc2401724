"""The last stage's loss in chunks, so that the logits of all tokens never exist at once.

The blocks run on the whole micro-batch. The part behind them works token by token in nearly every
causal model, so it runs on one loss chunk at a time, each differentiated before the next begins.
The chunks depend on the shape alone, so chunks and result have the same bits for every cut.

Shapes: B rows of a micro-batch, S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from transformers import PretrainedConfig
from transformers.trainer_pt_utils import LabelSmoother

from hetero_framework.models.cut.known_masks import all_seen
from hetero_framework.models.cut.shard import Inputs, Look, Shard
from hetero_framework.models.cut.side import Bundle

Span = tuple[slice, slice]

# Logits of a loss chunk by default: 1 GiB at the 16 bytes that each takes in float32. More make no
# matrix product faster; fewer read and write the head's gradient more often than needed.
AUTO_LOGITS = 1 << 26


def chunk_tokens(chosen: int | Literal["auto"] | None, config: PretrainedConfig) -> int | None:
    """The largest number of tokens whose logits exist at once; None: no limit."""
    if chosen != "auto":
        return chosen
    return max(2, AUTO_LOGITS // int(config.get_text_config().vocab_size))


def spans(shape: torch.Size | tuple[int, int], limit: int | None) -> list[Span]:
    """(rows, tokens) of each loss chunk for labels of `shape` [B, S]; empty if one is enough.

    A chunk has at most `limit` tokens (at least 2): whole rows where they fit, else a part of
    one row that overlaps the next by a token, since each token's label is the token after it.
    """
    rows, tokens = shape
    if limit is None or rows * tokens <= limit or tokens < 2:
        return []
    if limit >= tokens:
        height = limit // tokens
        return [(slice(r, min(r + height, rows)), slice(0, tokens)) for r in range(0, rows, height)]
    count = math.ceil((tokens - 1) / (limit - 1))
    width = math.ceil((tokens - 1) / count)
    return [
        (slice(r, r + 1), slice(t, min(t + width + 1, tokens)))
        for r in range(rows)
        for t in range(0, tokens - 1, width)
    ]


def chunked_loss(
    shard: Shard,
    inputs: Inputs,
    received: Bundle,
    num_items: torch.Tensor,
    chunks: list[Span],
    *,
    running: Callable[[], AbstractContextManager[None]],
    backward: Callable[[torch.Tensor], None] | None,
    smoother: LabelSmoother | None = None,
    look: Look | None = None,
) -> torch.Tensor:
    """`CausalLM.loss` over `chunks`; `backward` differentiates the loss of each."""
    with running():
        (top_BSD,) = shard.forward(inputs, received)
    # No mask: only blocks use it. Given positions keep a long row within the model's table.
    cut = {name: inputs[name] for name in inputs.keys() & {"labels", "position_ids"}}

    def loss(number: int, span: Span, chunk_BSD: torch.Tensor) -> torch.Tensor:
        # Positions may have several axes in front.
        chunk = {name: values[(..., *span)] for name, values in cut.items()}
        if hasattr(inputs.get("attention_mask"), "_hetero_host"):
            # Without a mask transformers reads positions on the device, to make one that is unused.
            chunk["attention_mask"] = all_seen(chunk["labels"])
        with running():
            return shard.chunk_loss(chunk, chunk_BSD, num_items, number, smoother, look)

    return sum_of_chunks(shard, top_BSD, chunks, loss, backward)


def sum_of_chunks(
    shard: Shard,
    top_BSD: torch.Tensor,
    chunks: list[Span],
    loss: Callable[[int, Span, torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """The sum of `loss(number, span, hidden_BSD)` over the chunks of the blocks' output, detached.
    `backward` differentiates each chunk before the next begins."""
    gradient_BSD = torch.zeros_like(top_BSD) if backward and top_BSD.requires_grad else None
    total = torch.zeros((), device=top_BSD.device)
    sums = _Sums(shard.parameters_outside_blocks())
    for number, span in enumerate(chunks):
        chunk_BSD = top_BSD.detach()[span].contiguous()
        chunk_BSD.requires_grad_(gradient_BSD is not None)
        part = loss(number, span, chunk_BSD)
        total += part.detach()
        if backward is not None:
            backward(part)
            sums.take()
        if gradient_BSD is not None and chunk_BSD.grad is not None:
            # A token at the end of one chunk and the start of the next has its loss in the next.
            gradient_BSD[span] += chunk_BSD.grad
    sums.give_back()
    if gradient_BSD is not None:
        torch.autograd.backward(top_BSD, gradient_BSD)
    return total


class _Sums:
    """Adds up the chunks' gradients in float32 where a parameter's own type is narrower. Each sum
    is rounded once, at the end, as the gradient of the whole micro-batch is."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._narrow = [p for p in parameters if p.requires_grad and p.dtype.itemsize < 4]
        self._before = [p.grad for p in self._narrow]
        self._sums: list[torch.Tensor | None] = [None] * len(self._narrow)
        for parameter in self._narrow:
            parameter.grad = None

    def take(self) -> None:
        """Add what the last backward left in the parameters."""
        for index, parameter in enumerate(self._narrow):
            if parameter.grad is not None:
                so_far = self._sums[index]
                gradient = parameter.grad.float()
                self._sums[index] = gradient if so_far is None else so_far.add_(gradient)
                parameter.grad = None

    def give_back(self) -> None:
        """Add the sums to the gradients of the parameters."""
        for parameter, before, total in zip(self._narrow, self._before, self._sums, strict=True):
            gradient = None if total is None else total.to(parameter.dtype)
            if before is not None and gradient is not None:
                gradient = before.add_(gradient)
            parameter.grad = before if gradient is None else gradient
