"""Continuing a text on a shard: its cache of earlier tokens, and the choice of the next token.

The model's own code keeps keys, values and states in the library's cache. It asks the cache how
many tokens came before, to place and mask new tokens. So a shard's cache has the layers of the
whole model; the layers of other shards only count.

Shapes: S tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PretrainedConfig,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from hetero_framework.core.messages import Decoding
from hetero_framework.extras.talking.text_generation import SEQUENCE, TOKEN
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import Inputs, Shard
from hetero_framework.models.rng import derive_seed


class ShardCache:
    """The keys, values and states that one shard keeps of one text; `library` is the cache that
    the model gets."""

    def __init__(self, config: PretrainedConfig, rng: ShardRange) -> None:
        self.library = DynamicCache(config=config)
        self._counting: dict[Any, Any] = {}
        layers = self.library.layers
        for index, layer in enumerate(layers):
            if not rng.start <= index < rng.end:
                kind = type(layer), getattr(layer, "sliding_window", None)
                layers[index] = self._counting.setdefault(kind, layer)

    def advance(self, positions_1S: Tensor) -> None:
        """Make the layers of other shards count the tokens that this shard has seen."""
        nothing = torch.zeros(1, 1, positions_1S.shape[1], 1, device=positions_1S.device)
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
        self._caches: dict[int, ShardCache] = {}  # by the places of texts

    def cache(self, inputs: Inputs) -> ShardCache | None:
        """The cache of the text that the inputs belong to, if it is continued with one."""
        if not self._decoding.cached:
            return None
        slot = _numbers(inputs[SEQUENCE])[0]
        if _numbers(inputs["positions"])[0] == 0:
            self._caches[slot] = ShardCache(self._shard.config, self._shard.range)
        return self._caches[slot]

    def named(self, inputs: Inputs, logits_V: Tensor) -> dict[str, Tensor]:
        """The next token of the text."""
        text, position = _numbers(inputs[SEQUENCE])[1], _numbers(inputs["positions"])[-1] + 1
        return {TOKEN: next_token(logits_V, self._decoding, text, position)}


def _numbers(tensor: Tensor) -> list[int]:
    """The numbers of an input, from its CPU tensor where it has one."""
    numbers: list[int] = getattr(tensor, "_hetero_host", tensor).reshape(-1).tolist()
    return numbers


def next_token(logits_V: Tensor, decoding: Decoding, text: int, position: int) -> Tensor:
    """The token at `position` of text number `text`, [1] int64. The draw depends on these two and
    the seed alone, not on the other texts under way."""
    if decoding.temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    choose = LogitsProcessorList([TemperatureLogitsWarper(decoding.temperature)])
    if decoding.top_p < 1:
        choose.append(TopPLogitsWarper(decoding.top_p))
    scores_1V: Any = logits_V.detach().float().cpu().reshape(1, -1)
    before: Any = torch.zeros(1, 0, dtype=torch.int64)
    probabilities_V = choose(before, scores_1V).softmax(dim=-1)[0]
    seed = derive_seed(decoding.seed, f"token {position} of text {text}")
    return torch.multinomial(probabilities_V, 1, generator=torch.Generator().manual_seed(seed))
