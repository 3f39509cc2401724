"""Compares how a cut model and the whole model continue a text, on a tiny copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hetero_framework.core.cache import recall, remember
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.talking.decoding import ShardCache
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.cut.side import Bundle
from hetero_framework.models.cut.tiny import shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.models.verify.equivalence import (
    TOLERANCE,
    build_both,
    deterministic,
    own_code,
    question,
)

_PROMPT_TOKENS = 11  # longer than the sliding windows of tiny models (8)
_NEW_TOKENS = 7


@dataclass(frozen=True)
class Continuing:
    """Whether a model decodes with a cache in each stage. `reason` says why not, `impossible` that
    it cannot decode without a cache either."""

    cached: bool
    reason: str = ""
    impossible: bool = False


def admit_decoding(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Continuing:
    """How a model that is cut this way continues a text, remembered. Raises ArchitectureError where
    it cannot."""
    asked = question(f"decoding {own_code(Path(__file__).parent)}", config, ranges)
    if answer := recall("verdicts", asked):
        return Continuing(answer["cached"], answer["reason"])
    found = try_decoding(config, ranges)
    if found.impossible:
        raise ArchitectureError(
            f"a {config.model_type} model cannot continue a text here: {found.reason}",
            hint="leave training.sample_prompts out",
        )
    remember("verdicts", asked, {"cached": found.cached, "reason": found.reason})
    return found


def try_decoding(config: PretrainedConfig, ranges: Sequence[ShardRange]) -> Continuing:
    """Continue a text by a tiny copy: in one piece without a cache, and by shards with caches, or
    else without. The shards must give the same logits."""
    reasons = []
    try:
        tiny = deterministic(shrink(config))
        with quiet_library(), torch.no_grad():
            whole, shards = build_both(tiny, ranges, None)
            for model in (whole, *shards):
                model.train(False)
            if shards[0].ids_per_token > 1:
                return Continuing(False, "its tokens have several ids each", impossible=True)
            generator = torch.Generator().manual_seed(0)
            vocabulary = int(tiny.get_text_config().vocab_size)
            ids = torch.randint(
                3, vocabulary, (1, _PROMPT_TOKENS + _NEW_TOKENS), generator=generator
            )
            expected = _whole(whole, ids)
            for cached in (True, False):
                try:
                    difference = _difference(_cut(shards, ids, cached), expected)
                except LIBRARY_ERRORS as error:
                    reasons.append(briefly(error))
                    continue
                if difference <= TOLERANCE:
                    return Continuing(cached, "; ".join(reasons))
                reasons.append(f"the logits of a cut differ by {difference:.2g} (relative)")
    except ArchitectureError as error:
        reasons = [error.message]
    except LIBRARY_ERRORS as error:
        reasons = [f"its tiny copy does not run ({briefly(error)})"]
    return Continuing(False, reasons[-1], impossible=True)


def _whole(model: torch.nn.Module, ids_1S: Tensor) -> list[Tensor]:
    ends = range(_PROMPT_TOKENS, ids_1S.shape[1])
    return [model(input_ids=ids_1S[:, :end], use_cache=False).logits[0, -1] for end in ends]


def _cut(shards: Sequence[Shard], ids_1S: Tensor, cached: bool) -> list[Tensor]:
    """The logits of each next token, by a chain of shards."""
    caches = [ShardCache(s.config, s.range) if cached else None for s in shards]
    logits, first = [], 0
    for end in range(_PROMPT_TOKENS, ids_1S.shape[1]):
        inputs = {
            "input_ids": ids_1S[:, first:end],
            "positions": torch.arange(first, end)[None],
        }
        received: Bundle = ()
        for shard, cache in zip(shards[:-1], caches, strict=False):
            received = shard.forward(inputs, received, cache)
        logits.append(shards[-1].next_logits(inputs, received, caches[-1]))
        first = end if cached else 0
    return logits


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest logit."""
    one, other = torch.stack(list(found)), torch.stack(list(expected))
    difference = (one - other).abs().max() / other.abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")
