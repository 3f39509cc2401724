"""The last stage's loss in chunks, so that the logits of all tokens never exist at once.

The blocks run on the whole micro-batch. What follows them works token by token in nearly every
causal model, so it runs on one loss chunk at a time, and each chunk is differentiated before the
next begins: memory for logits depends on the chunk, not on the micro-batch. The chunks depend on
the shape alone, so they are the same for every cut, and so are the bits.

Shapes: B rows of a micro-batch, S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from transformers import PretrainedConfig

from hetero_framework.models.introspect import LIBRARY_ERRORS, introspect, one_line, probe_inputs
from hetero_framework.models.quiet import quiet_library
from hetero_framework.models.shard import Inputs, Shard, ShardRange, build_shard
from hetero_framework.models.tiny import shrink

Span = tuple[slice, slice]

# Logits of a loss chunk by default: 1 GiB at the 16 bytes that each takes in float32.
# More tokens than this make no matrix product faster; fewer read and write the head's gradient
# more often than needed.
AUTO_LOGITS = 1 << 26
# Relative to a tensor's largest entry; sums in another order stay far below in float32. Some
# gradients are zero but for rounding (a key's bias under softmax), so the scale has a floor,
# relative to the largest entry of all.
_TOLERANCE, _FLOOR = 1e-4, 1e-3
_PROBES = (2, 5, 13)


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
    hidden_BSD: torch.Tensor | None,
    num_items: torch.Tensor,
    chunks: list[Span],
    *,
    running: Callable[[], AbstractContextManager[None]],
    backward: Callable[[torch.Tensor], None] | None,
) -> torch.Tensor:
    """The loss of the last shard, as `Shard.loss` gives it, over `chunks`; 0-d, detached.

    `running` is the context of each forward. `backward` differentiates a chunk's loss, scaled as
    the caller likes; None outside training. Gradients are left in the parameters and in
    `hidden_BSD`.
    """
    with running():
        top_BSD = shard.forward(inputs, hidden_BSD)
    received = torch.zeros_like(top_BSD) if backward and top_BSD.requires_grad else None
    total = torch.zeros((), device=top_BSD.device)
    sums = _Sums(shard.parameters_outside_blocks())
    # No mask: it masks what the blocks see. Positions keep those of a long row within their table.
    names = inputs.keys() & {"labels", "position_ids"}
    cut = {name: inputs[name] for name in names}
    for number, span in enumerate(chunks):
        chunk_BSD = top_BSD.detach()[span].contiguous()
        chunk_BSD.requires_grad_(received is not None)
        with running():
            chunk = {name: values[span] for name, values in cut.items()}
            loss = shard.chunk_loss(chunk, chunk_BSD, num_items, number)
        total += loss.detach()
        if backward is not None:
            backward(loss)
            sums.take()
        if received is not None and chunk_BSD.grad is not None:
            # A token at the end of one chunk and the start of the next has its loss in the next.
            received[span] += chunk_BSD.grad
    sums.give_back()
    if received is not None:
        torch.autograd.backward(top_BSD, received)
    return total


class _Sums:
    """Adds up the gradients of the chunks in float32 where a parameter's own type is narrower.

    Rounded once at the end, as the gradient of the whole micro-batch is.
    """

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
        """Leave the sums in the parameters, added to what was there before."""
        for parameter, before, total in zip(self._narrow, self._before, self._sums, strict=True):
            gradient = None if total is None else total.to(parameter.dtype)
            if before is not None and gradient is not None:
                gradient = before.add_(gradient)
            parameter.grad = before if gradient is None else gradient


def why_not_chunked(config: PretrainedConfig) -> str | None:
    """Why the loss of this architecture cannot be computed in chunks; None where it can.

    A tiny random model of it computes loss and gradients both ways. Raises ArchitectureError when
    no tiny copy runs.
    """
    tiny = shrink(config)
    layers = introspect(tiny).num_layers
    with quiet_library():
        shard = build_shard(tiny, None, ShardRange(0, layers, True, True), dtype=torch.float32)
        shard.train(False)
        inputs = probe_inputs(tiny)
        items = (inputs["labels"][:, 1:] != -100).sum()
        try:
            whole = _whole(shard, inputs, items)
            for limit in _PROBES:
                if (reason := _difference(whole, _chunks(shard, inputs, items, limit))) is not None:
                    return reason
        except LIBRARY_ERRORS as error:
            return (
                f"what follows the layers does not run on a part of the tokens ({one_line(error)})"
            )
    return None


Outcome = dict[str, torch.Tensor]


def _whole(shard: Shard, inputs: Inputs, items: torch.Tensor) -> Outcome:
    loss = shard.loss(inputs, None, items)
    loss.backward()
    return _outcome(shard, loss)


def _chunks(shard: Shard, inputs: Inputs, items: torch.Tensor, limit: int) -> Outcome:
    chunks = spans(inputs["labels"].shape, limit)
    loss = chunked_loss(
        shard,
        inputs,
        None,
        items,
        chunks,
        running=torch.enable_grad,
        backward=torch.Tensor.backward,
    )
    return _outcome(shard, loss)


def _outcome(shard: Shard, loss: torch.Tensor) -> Outcome:
    """The loss and all gradients, which are taken out of the model."""
    gradients = {n: p.grad for n, p in shard.model.named_parameters() if p.grad is not None}
    shard.model.zero_grad()
    return {"the loss": loss.detach(), **gradients}


def _difference(expected: Outcome, actual: Outcome) -> str | None:
    if lost := sorted(expected.keys() ^ actual.keys()):
        return f"no gradient reaches {lost[0]}"
    floor = _FLOOR * max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=floor)
        difference = float(((actual[name] - value).abs().max() / scale).nan_to_num(nan=math.inf))
        if difference > _TOLERANCE:
            subject = name if name == "the loss" else f"the gradient of {name}"
            return f"{subject} would differ by {difference:.2g} (relative)"
    return None
