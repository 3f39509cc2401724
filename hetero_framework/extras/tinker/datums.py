"""The examples of a call: from the client's message to micro-batches, and the answer to it.

Shapes: B rows of a micro-batch, S tokens of its longest example.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetero_framework.data.batches import MicroBatch
from hetero_framework.errors import UserError
from hetero_framework.extras.tinker.token_losses import (
    LOGPROBS,
    LOSSES,
    RATIO_MASK,
    RECIPE,
    recipe,
)

_TARGETS = "target_tokens"
_MESSAGES = {
    "asample": "SampleRequest",
    "create_model": "CreateModelRequest",
    "load_weights": "LoadWeightsRequest",
    "save_weights": "SaveWeightsRequest",
    "save_weights_for_sampler": "SaveWeightsForSamplerRequest",
}


@dataclass(frozen=True)
class Limits:
    """The model's number of tokens, and the most tokens of an example."""

    vocabulary: int
    longest: int

    def check(self, tokens: np.ndarray, what: str) -> None:
        """Raise UserError for token ids that the model does not have, or too many of them."""
        if len(tokens) == 0:
            raise UserError(f"{what} has no tokens")
        if len(tokens) > self.longest:
            raise UserError(f"{what} has {len(tokens)} tokens, the model takes {self.longest}")
        wrong = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if len(wrong):
            most = self.vocabulary - 1
            raise UserError(f"{what} has the token {int(wrong[0])}; the model has 0 to {most}")


@dataclass(frozen=True)
class CallExamples:
    """A call of forward or forward_backward: micro-batches, and the tokens of each example."""

    batches: list[MicroBatch]
    lengths: list[int]


def message_of(kind: str, body: bytes) -> Any:
    """A request as the client's own types read it: a ForwardBackwardRequest, or a dict in which
    fields that the client left out have their defaults. Raises UserError."""
    from google.protobuf.message import DecodeError
    from pydantic import ValidationError
    from tinker import types
    from tinker.proto import tinker_public_pb2 as pb

    try:
        if kind == "forward_backward":
            return pb.ForwardBackwardRequest.FromString(body)
        told = dict(json.loads(body or b"{}").items())
        if kind == "optim_step":
            told["adam_params"] = types.AdamParams.model_validate(told["adam_params"]).model_dump()
        elif kind in _MESSAGES:
            return getattr(types, _MESSAGES[kind]).model_validate(told).model_dump()
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"{kind}: {place}: {error.errors()[0]['msg']}") from None
    except KeyError as error:
        raise UserError(
            f"{kind}: only Adam's numbers are supported, and {error} is absent"
        ) from None
    except (DecodeError, ValueError, AttributeError, RecursionError):
        raise UserError(f"{kind}: the body cannot be read") from None
    return told


def call_of(request: Any, rows: int, limits: Limits) -> CallExamples:
    """The call that a ForwardBackwardRequest asks for, `rows` examples in a micro-batch. Raises
    UserError, which names what the client has to change."""
    loss, settings = request.loss_fn, dict(request.loss_fn_config)
    settings |= {name: value.number for name, value in request.loss_fn_config_v2.items()}
    if loss not in LOSSES:
        raise UserError(f"there is no loss {loss!r} here; there are {', '.join(LOSSES)}")
    needed, read = LOSSES[loss]
    if unknown := settings.keys() - set(read):
        known = ", ".join(read) or "none"
        raise UserError(f"the loss {loss} has no setting {min(unknown)!r} (settings: {known})")
    if not np.isfinite(list(settings.values())).all():
        raise UserError(f"a setting of the loss {loss} is not finite")
    if not request.data:
        raise UserError("the call has no examples")
    examples = [_example(datum, needed, k, limits) for k, datum in enumerate(request.data)]
    told = recipe(loss, settings)
    parts = [examples[first : first + rows] for first in range(0, len(examples), rows)]
    lengths = [len(example["input_ids"]) for example in examples]
    return CallExamples([_padded(part, told) for part in parts], lengths)


def tokens_of(chunks: Iterable[Any]) -> np.ndarray:
    """The token ids of a message's chunks, int64. Raises UserError for pictures and sound."""
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(f"a chunk of kind {kind!r} is not supported: only tokens of text are")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _example(
    datum: Any, needed: Sequence[str], number: int, limits: Limits
) -> dict[str, np.ndarray]:
    what = f"example {number}"
    tokens = tokens_of(datum.model_input)
    limits.check(tokens, what)
    given = {name: _array(value, f"{what}: {name}") for name, value in datum.loss_fn_inputs.items()}
    if "mask" in given and "weights" not in given:
        given["weights"] = given.pop("mask")
    if RATIO_MASK in needed and RATIO_MASK not in given and "advantages" in given:
        given[RATIO_MASK] = (given["advantages"] != 0).astype(np.float32)
    if "weights" in needed and "weights" not in given:
        given["weights"] = np.ones(len(tokens), np.float32)
    if absent := [name for name in (_TARGETS, *needed) if name not in given]:
        raise UserError(f"{what} has no {absent[0]}")
    if unread := given.keys() - {_TARGETS, *needed, "weights", "mask"}:
        raise UserError(f"{what} has {min(unread)!r}, which the loss does not read")
    found = {name: given[name] for name in (_TARGETS, *needed)}
    for name, values in found.items():
        if values.shape != tokens.shape:
            shape = list(values.shape)
            raise UserError(f"{what}: {name} has the shape {shape} for {len(tokens)} tokens")
        if name != _TARGETS and not np.isfinite(values).all():
            raise UserError(f"{what}: {name} has values that are not finite")
    labels = found.pop(_TARGETS).astype(np.int64)
    limits.check(labels, f"{what}: {_TARGETS}")
    return {"input_ids": tokens, "labels": labels, **found}


def _array(tensor: Any, what: str) -> np.ndarray:
    kinds = {1: np.float32, 2: np.int64, 3: np.int32}
    if tensor.WhichOneof("encoding") != "dense" or tensor.dtype not in kinds:
        raise UserError(f"{what} is sparse or of an unknown type: send a dense float32 or int64")
    try:
        values = np.frombuffer(tensor.dense, kinds[tensor.dtype])
        values = values.reshape(tuple(tensor.shape) or (-1,))
    except ValueError:
        raise UserError(f"{what} does not have the bytes of its shape") from None
    return values.astype(np.float32) if tensor.dtype == 1 else values


def _padded(examples: Sequence[Mapping[str, np.ndarray]], told: torch.Tensor) -> MicroBatch:
    """A micro-batch of these examples, padded on the right with zeros, which no loss counts."""
    longest = max(len(example["input_ids"]) for example in examples)
    batch: MicroBatch = {}
    for name, first in examples[0].items():
        table = np.zeros((len(examples), longest), first.dtype)
        for row, example in zip(table, examples, strict=True):
            row[: len(example[name])] = example[name]
        batch[name] = torch.from_numpy(table)
    lengths = torch.tensor([[len(example["input_ids"])] for example in examples])
    batch["attention_mask"] = (torch.arange(longest)[None] < lengths).long()
    return {**batch, RECIPE: told}


def logprobs_of(
    call: CallExamples, named: Sequence[Mapping[str, torch.Tensor]]
) -> list[np.ndarray]:
    """The log-probabilities of each example's targets, float32, from all micro-batches."""
    rows = [row for tensors in named for row in tensors[LOGPROBS].cpu().float().numpy()]
    return [row[:length] for row, length in zip(rows, call.lengths, strict=True)]


def answer(
    call: CallExamples, losses: Sequence[float], named: Sequence[Mapping[str, Any]]
) -> bytes:
    """The ForwardBackwardOutput of a call."""
    from tinker.proto import tinker_public_pb2 as pb

    metrics = {"loss:sum": float(sum(losses))}
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    found = [np.ascontiguousarray(row) for row in logprobs_of(call, named)]
    record = output.loss_fn_outputs.add()
    record.num_datums = len(found)
    field = record.fields["logprobs"]
    field.data, field.dtype = b"".join(row.tobytes() for row in found), pb.DTYPE_FLOAT32
    field.offsets = np.cumsum([0, *(row.nbytes for row in found)]).astype(np.int64).tobytes()
    return bytes(output.SerializeToString())
