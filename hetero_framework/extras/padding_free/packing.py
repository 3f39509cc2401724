"""Shows that samples which share a row train as in padded rows.

A tiny copy of an architecture gets samples in one row, whole and cut, and must give the same loss
and gradients as in padded rows; else `data.padding_free` is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from hetero_framework.data.batches import collate, num_items, pack
from hetero_framework.data.examples import ExamplesBuilder
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.padding_free.varlen_attention import VARLEN, register_per_sample
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.tiny import shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.verify.equivalence import (
    FLOOR,
    TOLERANCE,
    Chain,
    build_both,
    deterministic,
    gradients,
    largest_difference,
    remembered,
    whole_step,
)
from hetero_framework.trainer.resolution import Resolved
from hetero_framework.trainer.setup import shard_ranges

# One row rounds otherwise than many rows. Architectures that keep samples apart differ by 2e-5 or
# less, the others by 0.09 or more.
PACKING_TOLERANCE = 1e-3
# Most are longer than the sliding windows of tiny models (8); all together exceed 128 positions.
_PACKED_LENGTHS = (23, 2, 31, 12, 19, 27, 9, 14)


@dataclass(frozen=True)
class Packing:
    """Whether samples may share a row (`data.padding_free`): the reason against it, if any, and the
    attention implementation to train with (None: the model's own choice)."""

    attention: str | None
    reason: str = ""


def without_padding(resolved: Resolved, model_config: PretrainedConfig) -> Resolved:
    """The settings with the attention that keeps samples of one row apart. Raises ArchitectureError
    where the model has none."""
    attention = admit_packing(model_config, shard_ranges(resolved.config))
    cost = "takes each sample by itself" if attention == VARLEN else "is the model's own"
    reason = f"a tiny {model_config.model_type} trains alike without padding; its attention {cost}"
    return resolved.decide("model.attn_implementation", attention, reason)


def admit_packing(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> str | None:
    """`Packing.attention` for training with `data.padding_free`, remembered. Raises
    ArchitectureError where samples of one row would see each other."""

    def tried() -> dict[str, str | None]:
        packing = try_packing(config, ranges)
        if packing.reason:
            raise ArchitectureError(
                f"a {config.model_type} model cannot be trained with data.padding_free:"
                f" {packing.reason}",
                hint="set data.padding_free to false (docs/architectures.md lists the architectures"
                " that can do without padding)",
            )
        return {"attention": packing.attention}

    found: dict[str, str | None] = remembered(
        "packing", config, ranges, tried, Path(__file__).parent
    )
    return found["attention"]


def try_packing(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Packing:
    """Try on a tiny copy whether samples of one row train as in padded rows, by which attention.

    `VARLEN` is preferred to the library's mask over the row, which costs more. It is also tried in
    place of kernels of variable lengths, which do not run on a CPU: the positions are the same.
    """
    asked = config._attn_implementation
    tried: dict[str | None, str | None] = {VARLEN: VARLEN, asked: asked}
    if asked is not None and "flash" in asked:
        tried = {VARLEN: asked}
    elif asked == "flex_attention":
        tried = {None: asked}  # the same mask functions
    elif asked not in (None, "sdpa"):
        tried = {asked: asked}
    reason = ""
    register_per_sample()
    try:
        config = deterministic(shrink(config))
        samples = _Samples(config)
        for attention, chosen in tried.items():
            config._attn_implementation = attention
            reason = _packing_problem(config, samples, ranges)
            if not reason:
                return Packing(chosen)
    except LIBRARY_ERRORS as error:
        reason = f"its tiny copy does not run ({briefly(error)})"
    return Packing(None, reason)


class _Samples:
    """Some samples in one row, and a whole model's results on them in padded rows."""

    def __init__(self, config: PretrainedConfig) -> None:
        text = config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        builder = ExamplesBuilder()
        for length in _PACKED_LENGTHS:
            ids = torch.randint(3, int(text.vocab_size), (length,), generator=generator).tolist()
            builder.add(ids, [True] * length)
        examples, rows = builder.build(), range(len(_PACKED_LENGTHS))
        self.packed = pack(examples, rows)
        self.items = torch.tensor(float(num_items([self.packed])))
        padded = collate(examples, rows, max(0, getattr(text, "pad_token_id", None) or 0))
        whole, _ = build_both(config, [], None)
        self.loss = whole_step(whole, padded, self.items, config)
        self.gradients = gradients(whole)


def _packing_problem(
    config: PretrainedConfig, samples: _Samples, ranges: Sequence[ShardRange]
) -> str:
    """Why samples cannot share a row under the configured attention; empty where they can. Compares
    the whole model on one row and on padded rows, then the chain of shards and the whole."""
    try:
        whole, shards = build_both(config, ranges, None)
        loss = whole_step(whole, samples.packed, samples.items, config)
        of_row = gradients(whole)
        difference, worst = largest_difference(of_row, samples.gradients, FLOOR)
        if not max(difference, abs(loss - samples.loss)) <= PACKING_TOLERANCE:
            return (
                "samples that share a row do not stay apart: gradients differ from those of"
                f" padded rows by {difference:.2g} (relative), most in {worst}"
            )
        chain = Chain(shards)
        with quiet_library():
            cut_loss = chain.forward_backward(samples.packed, samples.items)
    except ArchitectureError as error:
        return error.message
    except LIBRARY_ERRORS as error:
        return f"it cannot take many samples in one row ({briefly(error)})"
    difference, worst = largest_difference(chain.gradients(), of_row)
    if max(difference, abs(cut_loss - loss)) <= TOLERANCE:
        return ""
    return f"a cut changes gradients of one row by {difference:.2g} (relative), most in {worst}"
