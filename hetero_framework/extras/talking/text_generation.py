"""Texts that are continued through the pipeline, several at a time. Pure bookkeeping.

A micro-batch holds one text: all of it at first, then its newest token, or, where the model has no
cache, all of it again. A text's next micro-batch can begin when its token has come, so other texts
keep the stages busy. Each text is alone in its micro-batch: neither padding nor other texts change
its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from hetero_framework.engine.stage_api import Outcome, Tensors
from hetero_framework.errors import ProtocolError

TOKEN = "token"
SEQUENCE = "sequence"
"""An input of each stage: the place of the text among those under way, and its number."""


@dataclass
class _Text:
    number: int
    slot: int
    ids: list[int]
    seen: int = 0  # tokens that the caches know
    new: list[int] = field(default_factory=list)


class TextGeneration:
    """The continuation of some prompts, in at most `micro_batches` micro-batches."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        max_positions: int | None,
        stop: Collection[int],
        vocabulary: int,
        at_once: int,
        cached: bool,
        take_token: Callable[[int, int], None] = lambda text, token: None,
    ) -> None:
        """
        Args:
            prompts: Token ids, at least one each, fewer than `max_positions`.
            max_positions: The longest text that the model can hold.
            stop: Tokens that end a text, and are its last.
            vocabulary: The number of token ids.
            at_once: Texts under way, at most.
            cached: Whether stages keep what they computed of earlier tokens.
            take_token: Called with the number of a text and its next token.
        """
        self._most = [
            max_new_tokens if max_positions is None else min(max_new_tokens, max_positions - len(p))
            for p in prompts
        ]
        self.micro_batches = sum(self._most)
        self._stop, self._vocabulary = frozenset(stop), vocabulary
        self._cached = cached
        self._take_token = take_token
        self._waiting = deque(enumerate(list(p) for p in prompts))
        self._free = deque(range(at_once))
        self._ready: deque[_Text] = deque()
        self._under_way: deque[_Text] = deque()
        self.texts: list[list[int]] = [[] for _ in prompts]
        """The new tokens of each prompt so far."""

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._ready or self._under_way)

    def next(self) -> Tensors | None:
        """The tensors of the next micro-batch; None while no micro-batch can begin."""
        if not self._ready and self._waiting and self._free:
            number, ids = self._waiting.popleft()
            self._ready.append(_Text(number, self._free.popleft(), ids))
        if not self._ready:
            return None
        text = self._ready.popleft()
        self._under_way.append(text)
        first = text.seen if self._cached else 0
        ids = [*text.ids, *text.new][first:]
        text.seen += len(ids)
        return {
            "input_ids": torch.tensor([ids]),
            "positions": torch.arange(first, first + len(ids))[None],
            SEQUENCE: torch.tensor([text.slot, text.number]),
        }

    def take(self, outcome: Outcome) -> None:
        """Take the outcome of the oldest micro-batch that is under way."""
        token = outcome.named.get(TOKEN)
        if token is None or token.numel() != 1 or token.dtype != torch.int64:
            raise ProtocolError("the last stage gave no token for a text that it was to continue")
        if not 0 <= token < self._vocabulary:
            most = self._vocabulary - 1
            raise ProtocolError(f"the last stage gave token {int(token)} of 0 to {most}")
        text = self._under_way.popleft()
        text.new.append(int(token))
        self.texts[text.number] = text.new
        self._take_token(text.number, text.new[-1])
        if text.new[-1] in self._stop or len(text.new) >= self._most[text.number]:
            self._free.append(text.slot)
        else:
            self._ready.append(text)
