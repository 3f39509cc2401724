"""Texts that are continued through the pipeline, in groups. Pure bookkeeping.

A group is the samples of one prompt, which begin equally long, so that its rows need no padding.
Its first micro-batch is the prompt, once; the stages then repeat what they keep of it. Each further
one has the newest token of every text, or, where the model has no cache, the whole texts. A group's
next micro-batch can begin when its tokens have come, so other groups keep the stages busy.

A request alone decides the contents of its micro-batches, and so their bits; other groups do not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero_framework.engine.stage_api import Outcome, Tensors
from hetero_framework.errors import NumericError, ProtocolError
from hetero_framework.extras.talking.sampling import SampledText, SampleRequest, SampleResult
from hetero_framework.models.rng import derive_seed

TOKENS, LOGPROBS, PROMPT_LOGPROBS = "tokens", "logprobs", "prompt_logprobs"
GROUP = "group"
"""An input of each stage: the place of the group among those under way, and, where the rows change,
the rows so far that the new rows are."""
DRAWS = "draws"
"""An input of each stage, float32, which also devices without float64 have: temperature, top_k,
top_p, whether the log-probabilities of the prompt, which are then its labels, are wanted, and the
draw of each row: all first halves, then all second ones."""
MOST_ROWS = 32
"""The most texts of a group; more samples of a prompt are several groups."""
_FOUR = 4
"""Rows come in fours: a product of four rows or more has the same bits in each four of its rows,
but not in one to three rows that are left over, so texts that leave change none of the others'."""
_HALF = 1 << 24


@dataclass
class _Text:
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""


@dataclass
class _Group:
    request: int
    texts: list[_Text]
    in_fours: bool
    slot: int = -1
    seen: int = 0  # tokens that the caches know
    new: int = 0  # tokens of each text; more may be known from before a loss
    rows: list[int] = field(default_factory=list)  # the text of each row; empty: the prompt

    def living(self) -> list[int]:
        """The texts that go on here, in fours unless samples go one by one."""
        new, texts = self.new, enumerate(self.texts)
        alive = [k for k, text in texts if not text.stop_reason or len(text.tokens) > new]
        return alive + alive[-1:] * (-len(alive) % _FOUR if self.in_fours else 0)


class TextGeneration:
    """The continuation of some prompts, in at most `micro_batches` micro-batches."""

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_positions: int | None,
        ends: Collection[int],
        vocabulary: int,
        at_once: int,
        cached: bool,
        rows: Callable[[SampleRequest], int] = lambda request: MOST_ROWS,
        decode: Callable[[Sequence[int]], str] = lambda tokens: "",
        take_token: Callable[[int, int, int], None] = lambda request, sample, token: None,
        seen: Sequence[Tensors] = (),
    ) -> None:
        """
        Args:
            requests: Whose prompts have fewer tokens than `max_positions`.
            max_positions: The longest text that the model can hold.
            ends: Tokens that end a text of any request.
            vocabulary: The number of token ids.
            at_once: Groups under way, at most.
            cached: Whether stages keep what they computed of earlier tokens.
            rows: The most texts of a group of this request.
            decode: The text of tokens, for strings that end a text.
            take_token: Called with the numbers of request and sample, and the next token.
            seen: What the model gets of pictures in each prompt; needs `cached`.
        """
        self._seen = seen or [{} for _ in requests]
        self._requests, self._ends = requests, frozenset(ends)
        self._vocabulary, self._cached = vocabulary, cached
        self._decode, self._take_token = decode, take_token
        room = [(max_positions or math.inf) - len(request.prompt) for request in requests]
        self._most = [int(min(r.max_tokens, left)) for r, left in zip(requests, room, strict=True)]
        self._seeds = [derive_seed("sample", r.seed, *r.prompt) for r in requests]
        self._strings = [[s for s in r.stop if isinstance(s, str)] for r in requests]
        self._texts = [[_Text(k) for k in range(r.num_samples)] for r in requests]
        self._of_prompts: list[tuple[float | None, ...] | None] = [None for _ in requests]
        self._at_once = at_once
        self._groups: list[_Group] = []
        for number, (request, texts) in enumerate(zip(requests, self._texts, strict=True)):
            size = min(rows(request), MOST_ROWS)
            parts = (texts[k : k + size] for k in range(0, len(texts), size))
            self._groups += [_Group(number, part, len(texts) > 1 < size) for part in parts]
        self.restart()

    def restart(self) -> None:
        """Begin the groups that are not done at their prompts again: the stages have lost what they
        kept. The tokens that are known come again, and are not told again."""
        self._free = deque(range(self._at_once))
        self._ready: deque[_Group] = deque()
        self._under_way: deque[_Group] = deque()
        self._waiting = deque(g for g in self._groups if not all(t.stop_reason for t in g.texts))
        self.micro_batches = sum(self._most[group.request] for group in self._waiting)

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._ready or self._under_way)

    @property
    def results(self) -> list[SampleResult]:
        """The result of each request, once all are done."""
        samples = [
            tuple(SampledText(tuple(t.tokens), tuple(t.logprobs), t.stop_reason) for t in texts)  # type: ignore[arg-type]
            for texts in self._texts
        ]
        return list(map(SampleResult, samples, self._of_prompts))

    def next(self) -> Tensors | None:
        """The tensors of the next micro-batch; None while no micro-batch can begin."""
        if not self._ready and self._waiting and self._free:
            group = self._waiting.popleft()
            group.slot, group.seen, group.new, group.rows = self._free.popleft(), 0, 0, []
            self._ready.append(group)
        if not self._ready:
            return None
        group = self._ready.popleft()
        self._under_way.append(group)
        request, select = self._requests[group.request], list[int]()
        if group.new:
            living = group.living()
            if not group.rows:
                group.rows, select = living, [0] * len(living) if len(living) > 1 else []
            elif 3 * len(living) <= 2 * len(group.rows):
                select = [group.rows.index(k) for k in living]
                group.rows = living
        end = len(request.prompt) + group.new
        first = group.seen if self._cached else 0
        group.seen = end
        tokens = [self._tokens(group, k) for k in group.rows] or [[]]
        ids = torch.tensor([[*request.prompt, *new][first:end] for new in tokens])
        batch = {
            "input_ids": ids,
            "positions": torch.arange(first, end).expand(ids.shape),
            GROUP: torch.tensor([group.slot, *select]),
            DRAWS: torch.tensor(self._draws(group)),
        }
        if not first:
            batch |= self._seen[group.request]
        elif (before := self._seen[group.request].get("position_ids")) is not None:
            # A picture has more tokens than positions; all axes go on behind the largest.
            following = batch["positions"] - before.shape[-1] + before.max() + 1
            batch["position_ids"] = following.expand(*before.shape[:-2], *ids.shape)
        return {**batch, "labels": ids} if batch[DRAWS][3] else batch

    def take(self, outcome: Outcome) -> None:
        """Take the outcome of the oldest micro-batch that is under way."""
        group = self._under_way[0]
        texts = [group.texts[k] for k in group.rows] or group.texts
        tokens, logprobs = self._checked(outcome, len(texts))
        request, taken = group.request, group.new
        if self._requests[request].prompt_logprobs and not group.rows:
            found = outcome.named.get(PROMPT_LOGPROBS)
            if found is None or found.shape != (len(self._requests[request].prompt) - 1,):
                raise ProtocolError("the last stage gave no log-probabilities of the prompt")
            self._of_prompts[request] = (None, *found.tolist())
        self._under_way.popleft()
        group.new += 1
        for text, token, logprob in zip(texts, tokens, logprobs, strict=True):
            if text.stop_reason or len(text.tokens) > taken:
                continue  # it has ended, or the token is known
            text.tokens.append(token)
            text.logprobs.append(logprob)
            if self._stops(request, text.tokens):
                text.stop_reason = "stop"
            elif len(text.tokens) >= self._most[request]:
                text.stop_reason = "length"
            self._take_token(request, text.number, token)
        if group.living():
            self._ready.append(group)
        else:
            self._free.append(group.slot)

    def _checked(self, outcome: Outcome, rows: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities that can be right."""
        found: list[list[Any]] = []
        for name, dtype in ((TOKENS, torch.int64), (LOGPROBS, torch.float32)):
            tensor = outcome.named.get(name)
            if tensor is None or tensor.shape != (rows,) or tensor.dtype != dtype:
                raise ProtocolError("the last stage gave no token for a text that it continues")
            found.append(tensor.tolist())
        for token, logprob in zip(*found, strict=True):
            if not 0 <= token < self._vocabulary:
                most = self._vocabulary - 1
                raise ProtocolError(f"the last stage gave token {token} of 0 to {most}")
            if not math.isfinite(logprob):
                raise NumericError("the model's logits are not finite", hint="try its base model")
        return found[0], found[1]

    def _tokens(self, group: _Group, text: int) -> list[int]:
        """The tokens of a row so far; a text that has ended repeats its last."""
        tokens = group.texts[text].tokens[: group.new]
        return tokens + tokens[-1:] * (group.new - len(tokens))

    def _draws(self, group: _Group) -> list[float]:
        request, seed = self._requests[group.request], self._seeds[group.request]
        texts = [group.texts[k].number for k in group.rows] or [t.number for t in group.texts]
        draws = [(0, 0)] * len(texts)
        if request.temperature:
            draws = [divmod(derive_seed(seed, k, group.new) >> 15, _HALF) for k in texts]
        choice = request.temperature, max(request.top_k, 0), request.top_p
        wanted = request.prompt_logprobs and not group.new
        return [*map(float, (*choice, wanted, *(a for a, _ in draws), *(b for _, b in draws)))]

    def _stops(self, request: int, tokens: list[int]) -> bool:
        """Whether the last token ends the text."""
        if tokens[-1] in self._ends or tokens[-1] in self._requests[request].stop:
            return True
        strings = self._strings[request]
        # A token has a byte at least, but for some, and the first ones may be parts of letters.
        tail = max((len(s.encode()) for s in strings), default=0) + 8
        return bool(strings) and any(s in self._decode(tokens[-tail:]) for s in strings)


def draws_of(numbers: Sequence[float]) -> list[float]:
    """The numbers in [0, 1) of all rows, from what stands behind the first four of DRAWS."""
    half = len(numbers) // 2
    pairs = zip(numbers[:half], numbers[half:], strict=True)
    return [first / _HALF + second / _HALF**2 for first, second in pairs]
