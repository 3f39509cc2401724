"""Continuing texts on a shard: its cache of earlier tokens, and the choice of the next tokens.

The model's own code keeps keys, values and states in the library's cache. It asks the cache how
many tokens came before, to place and mask new tokens. So a shard's cache has the layers of the
whole model; the layers of other shards only count.

Shapes: B rows, which are texts of one prompt; S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PretrainedConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetero_framework.core.messages import Decoding
from hetero_framework.extras.talking import text_generation as names
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.cut.side import Bundle

_LOGITS = 1 << 24  # of a prompt's tokens that exist at once


class ShardCache:
    """The keys, values and states that one shard keeps of one group of texts; `library` is the
    cache that the model gets."""

    def __init__(self, config: PretrainedConfig, rng: ShardRange) -> None:
        self.library = DynamicCache(config=config)
        self._counting: dict[Any, Any] = {}
        layers = self.library.layers
        self._own = layers[rng.start : rng.end]
        for index, layer in enumerate(layers):
            if not rng.start <= index < rng.end:
                kind = type(layer), getattr(layer, "sliding_window", None)
                layers[index] = self._counting.setdefault(kind, layer)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        layer: Any  # which wants the older type LongTensor
        for layer in self._own:
            layer.reorder_cache(rows)

    def advance(self, positions_BS: Tensor) -> None:
        """Make the layers of other shards count the tokens that this shard has seen."""
        nothing = torch.zeros(1, 1, positions_BS.shape[1], 1, device=positions_BS.device)
        for layer in self._counting.values():
            if hasattr(layer, "get_seq_length"):
                layer.update(nothing, nothing)
            if isinstance(seen := getattr(layer, "has_previous_state", None), dict):
                layer.has_previous_state = dict.fromkeys(seen, True)
            elif seen is not None:
                layer.has_previous_state = True


class Decoder:
    """One stage's part in continuing texts, in one pass."""

    def __init__(self, shard: Shard, decoding: Decoding) -> None:
        self._shard, self._decoding = shard, decoding
        self._caches: dict[int, ShardCache] = {}  # by the places of groups

    def cache(self, inputs: Inputs) -> ShardCache | None:
        """The cache of the group that the inputs belong to, if it is continued with one."""
        if not self._decoding.cached:
            return None
        slot, *rows = _numbers(inputs[names.GROUP])
        if _numbers(inputs["positions"])[0] == 0:
            self._caches[slot] = ShardCache(self._shard.config, self._shard.range)
        elif rows:
            self._caches[slot].select(inputs[names.GROUP][1:])
        return self._caches[slot]

    def named(self, inputs: Inputs, received: Bundle) -> dict[str, Tensor]:
        """On the last stage: each row's next token with its log-probability, and the
        log-probabilities of the prompt where they are wanted."""
        cache, of_prompt = self.cache(inputs), dict[str, Tensor]()
        choice = _numbers(inputs[names.DRAWS])
        if choice[3]:
            hidden_BSD = self._shard.forward(inputs, received, cache)[0]
            of_prompt[names.PROMPT_LOGPROBS] = self._of_prompt(hidden_BSD, inputs["labels"])
            logits_BV = self._shard.chunk_logits({}, hidden_BSD[:, -1:].contiguous(), 0)[:, -1]
        else:
            logits_BV = self._shard.next_logits(inputs, received, cache)
        tokens_B, logprobs_B = next_tokens(logits_BV, choice)
        return {names.TOKENS: tokens_B, names.LOGPROBS: logprobs_B, **of_prompt}

    def _of_prompt(self, hidden_1SD: Tensor, ids_1S: Tensor) -> Tensor:
        """The log-probability of each token of a prompt but the first, [S-1] float32."""
        at_once = max(1, _LOGITS // int(self._shard.config.get_text_config().vocab_size))
        found = [torch.zeros(0, device=hidden_1SD.device)]
        for first in range(0, ids_1S.shape[1] - 1, at_once):
            after_T = ids_1S[0, first + 1 : first + 1 + at_once]
            part_1TD = hidden_1SD[:, first : first + len(after_T)].contiguous()
            logits_TV = self._shard.chunk_logits({}, part_1TD, 0)[0]
            found.append(_logprobs(logits_TV, after_T))
        return torch.cat(found)


def _numbers(tensor: Tensor) -> list[Any]:
    """The numbers of an input, from its CPU tensor where it has one."""
    numbers: list[Any] = getattr(tensor, "_hetero_host", tensor).reshape(-1).tolist()
    return numbers


def _logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """The natural log-probabilities of tokens, [T] float32."""
    found: Tensor = logits_TV.float().log_softmax(-1).gather(-1, tokens_T[:, None])[:, 0]
    return found


def next_tokens(logits_BV: Tensor, choice: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The next token of each text, [N] int64, and its log-probability, [N] float32. The logits have
    a row for each text, or one for all of them. `choice` is DRAWS.

    A draw is a place in the sum of the probabilities, in the order of the token ids. So it is the
    same token where logits differ in their last bits, unless it falls on an edge.
    """
    temperature, top_k, top_p, _, *draws = choice
    logits_BV = logits_BV.detach().float()
    places_N = torch.tensor(names.draws_of(draws), dtype=torch.float64)
    if temperature == 0:
        tokens_N = logits_BV.argmax(-1).expand(len(places_N))
    else:
        choose = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            choose.append(TopKLogitsWarper(int(top_k)))
        if top_p < 1:
            choose.append(TopPLogitsWarper(top_p))
        scores_BV: Any = logits_BV if logits_BV.is_cuda else logits_BV.cpu()  # some lack float64
        sums_BV = choose(None, scores_BV).double().softmax(-1).cumsum(-1)  # type: ignore[arg-type]
        sums_NV = sums_BV.expand(len(places_N), -1).contiguous()
        places_N1 = places_N.to(sums_NV.device)[:, None] * sums_NV[:, -1:]
        tokens_N = torch.searchsorted(sums_NV, places_N1, right=True)[:, 0].to(logits_BV.device)
    last = logits_BV.shape[-1] - 1  # of logits that are not numbers, whose log-probability tells
    logprobs_N = _logprobs(logits_BV.expand(len(places_N), -1), tokens_N.clamp(max=last))
    return tokens_N.clamp(max=last), logprobs_N
