"""Unit tests for extras/talking/text_generation.py, with a stage that counts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hetero_framework.engine.stage_api import Outcome, Tensors
from hetero_framework.errors import DataError, NumericError, ProtocolError
from hetero_framework.extras.talking.sampling import SampleRequest
from hetero_framework.extras.talking.text_generation import (
    DRAWS,
    GROUP,
    LOGPROBS,
    PROMPT_LOGPROBS,
    TOKENS,
    TextGeneration,
    draws_of,
)

Token = Callable[[int, list[int]], int]


def count(number: int, row: list[int]) -> int:
    return len(row)


class Counting:
    """Gives each row `token(number, tokens)`, by default the number of its tokens. Keeps the tokens
    of each slot's rows as caches do, and checks the positions of each micro-batch."""

    def __init__(self, texts: TextGeneration, token: Token = count) -> None:
        self.texts, self.token = texts, token
        self.fed: list[Tensors] = []
        self.most = 0
        self.slots: dict[int, list[list[int]]] = {}

    def run(self, micro_batches: float = math.inf) -> list[list[list[int]]]:
        waiting: deque[Tensors] = deque()
        while not self.texts.is_done and len(self.fed) < micro_batches:
            while (batch := self.texts.next()) is not None:
                waiting.append(batch)
                self.fed.append(batch)
            self.most = max(self.most, len(waiting))
            self.texts.take(self._outcome(waiting.popleft()))
        return [[list(s.tokens) for s in result.samples] for result in self.texts.results]

    def _outcome(self, batch: Tensors) -> Outcome:
        slot, *select = batch[GROUP].tolist()
        first = int(batch["positions"][0, 0])
        if first == 0:
            self.slots[slot] = [[]]
        elif select:
            self.slots[slot] = [self.slots[slot][row] for row in select]
        kept = self.slots[slot]
        assert {len(row) for row in kept} == {first}
        kept[:] = [[*row, *ids] for row, ids in zip(kept, batch["input_ids"].tolist(), strict=True)]
        rows = (len(batch[DRAWS]) - 4) // 2
        each = kept * (rows if len(kept) == 1 else 1)
        found = torch.tensor([self.token(k, row) for k, row in enumerate(each)])
        named = {TOKENS: found, LOGPROBS: torch.full((rows,), -1.0)}
        if "labels" in batch:
            named[PROMPT_LOGPROBS] = torch.arange(-1.0, -len(batch["labels"][0]), -1.0)
        return Outcome(0.0, named)


def generation(requests: Sequence[Any], **settings: Any) -> TextGeneration:
    """Requests are given as such, or as prompts."""
    requests = [
        r if isinstance(r, SampleRequest) else SampleRequest(tuple(r), max_tokens=3, temperature=0)
        for r in requests
    ]
    kwargs = {"max_positions": None, "ends": (), "vocabulary": 64, "at_once": 2, "cached": True}
    return TextGeneration(requests, **{**kwargs, **settings})


def group(count: int, **settings: Any) -> SampleRequest:
    return SampleRequest((5, 6), **{"num_samples": count, "max_tokens": 3, **settings})


def test_groups_go_on_side_by_side_and_take_the_places_of_those_that_ended():
    stage = Counting(generation([[5], [6, 7], [8] * 4]))
    assert stage.run() == [[[1, 2, 3]], [[2, 3, 4]], [[4, 5, 6]]]
    assert stage.most == 2
    assert {int(batch[GROUP][0]) for batch in stage.fed} == {0, 1}
    assert stage.texts.micro_batches == len(stage.fed) == 9


def test_without_a_cache_each_micro_batch_is_the_whole_texts():
    stage = Counting(generation([group(2)], cached=False))
    stage._outcome = (
        lambda batch: Outcome(  # type: ignore[method-assign]
            0.0,
            {TOKENS: torch.tensor([7, 8, 8, 8])[: (len(batch[DRAWS]) - 4) // 2]}
            | {LOGPROBS: torch.zeros((len(batch[DRAWS]) - 4) // 2)},
        )
    )
    assert stage.run() == [[[7, 7, 7], [8, 8, 8]]]
    rows = [batch["input_ids"].tolist() for batch in stage.fed]
    assert rows[:2] == [[[5, 6]], [[5, 6, 7], *[[5, 6, 8]] * 3]]
    assert [len(row[0]) for row in rows] == [2, 3, 4]


def test_a_prompt_is_computed_once_and_its_rows_come_in_fours():
    stage = Counting(generation([group(6)]))
    assert stage.run() == [[[2, 3, 4]] * 6]
    assert [len(batch["input_ids"]) for batch in stage.fed] == [1, 8, 8]
    assert [batch[GROUP].tolist()[1:] for batch in stage.fed] == [[], [0] * 8, []]


def test_texts_that_have_ended_leave_when_that_saves_a_third():
    """Text k ends after k + 1 tokens: of eight rows, four leave when four texts are left."""

    def token(number: int, row: list[int]) -> int:
        text = row[2] - 10 if len(row) > 2 else number
        return 63 if len(row) - 2 >= text else 10 + text

    stage = Counting(generation([group(8, max_tokens=99)], ends={63}), token)
    assert stage.run() == [[[10 + k] * k + [63] for k in range(8)]]
    assert [len(batch["input_ids"]) for batch in stage.fed] == [1, 8, 8, 8, 4, 4, 4, 4]
    assert {sample.stop_reason for sample in stage.texts.results[0].samples} == {"stop"}


def test_many_samples_are_several_groups():
    stage = Counting(generation([group(70)]))
    assert stage.run() == [[[2, 3, 4]] * 70]
    assert [len(b["input_ids"]) for b in stage.fed if b["positions"][0, 0] == 2] == [32, 32, 8]
    stage = Counting(generation([group(3)], rows=lambda request: 1))
    assert stage.run() == [[[2, 3, 4]] * 3]
    assert {len(batch["input_ids"]) for batch in stage.fed} == {1}


def test_a_text_ends_with_a_stop_token_a_text_and_at_the_end_of_the_positions():
    assert Counting(generation([[5], [6] * 4], ends={2})).run() == [[[1, 2]], [[4, 5, 6]]]
    assert Counting(generation([group(1, stop=(3,))])).run() == [[[2, 3]]]
    limited = Counting(generation([[5], [6] * 4], max_positions=6))
    assert limited.run() == [[[1, 2, 3]], [[4, 5]]]
    assert {r.samples[0].stop_reason for r in limited.texts.results} == {"length"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)

    asked = group(1, max_tokens=40, stop=("xyz", "jkl"))
    assert Counting(generation([asked], decode=decode)).run() == [[list(range(2, 12))]]


def test_tokens_are_told_as_they_come():
    told: list[tuple[int, ...]] = []
    Counting(generation([[5], group(2)], take_token=lambda *token: told.append(token))).run()
    first = [(0, 0, 1), (1, 0, 2), (1, 1, 2)]
    assert told[:3] == first
    assert len(told) == 9


@pytest.mark.parametrize("lost", range(1, 8))
def test_after_a_loss_known_tokens_come_again_in_the_same_batches_and_are_not_told_again(lost):
    def token(number: int, row: list[int]) -> int:
        text = row[2] - 10 if len(row) > 2 else number
        return 63 if len(row) - 2 >= text else 10 + text

    def started(**settings: Any) -> TextGeneration:
        return generation([group(8, max_tokens=7), [7, 7]], ends={63}, **settings)

    def of_first(stage: Counting) -> list[list[list[int]]]:
        batches = [b for b in stage.fed if b[GROUP][0] == 0]
        return [[b["input_ids"].tolist(), b[GROUP].tolist(), b[DRAWS].tolist()] for b in batches]

    whole = Counting(started(), token)
    expected, told = whole.run(), list[tuple[int, ...]]()
    texts = started(take_token=lambda *one: told.append(one))
    Counting(texts, token).run(lost)
    texts.restart()
    again = Counting(texts, token)
    assert again.run() == expected
    assert of_first(again) == of_first(whole)
    assert len(told) == sum(len(text) for samples in expected for text in samples)


def test_a_draw_depends_on_seed_prompt_sample_and_position_alone():
    def draws(texts: TextGeneration) -> dict[tuple[int, int], float]:
        stage, found = Counting(texts), {}
        stage.run()
        for batch in stage.fed:
            for row, number in enumerate(draws_of(batch[DRAWS][4:].tolist())):
                found[row, int(batch["positions"][0, -1])] = number
        return found

    drawn = draws(generation([group(8)]))
    fewer = draws(generation([group(4)]))
    assert len(set(drawn.values())) == len(drawn) == 24
    assert fewer.items() <= drawn.items()
    assert all(0 <= number < 1 for number in drawn.values())
    other = draws(generation([group(8, seed=1)]))
    assert not set(drawn.values()) & set(other.values())


def test_log_probabilities_of_the_prompt_begin_with_none():
    texts = generation([group(2, prompt_logprobs=True), [7, 8]])
    Counting(texts).run()
    first, second = texts.results
    assert first.prompt_logprobs == (None, -1.0)
    assert second.prompt_logprobs is None
    assert first.samples[0].logprobs == (-1.0, -1.0, -1.0)


@pytest.mark.parametrize(
    "named", [{}, {TOKENS: torch.zeros(2)}, {TOKENS: torch.tensor([1]), LOGPROBS: torch.zeros(2)}]
)
def test_an_outcome_without_one_token_is_refused(named):
    texts = generation([[5]])
    texts.next()
    with pytest.raises(ProtocolError, match="gave no token"):
        texts.take(Outcome(0.0, named))


@pytest.mark.parametrize("token", [64, -1, 2**31, 2**62, -(2**63)])
def test_a_token_that_there_is_not_is_refused(token):
    texts = generation([[1, 2]])
    texts.next()
    with pytest.raises(ProtocolError, match=f"the last stage gave token {token} of 0 to 63"):
        texts.take(Outcome(0.0, {TOKENS: torch.tensor([token]), LOGPROBS: torch.zeros(1)}))
    assert texts.results[0].samples[0].tokens == ()


def test_logits_that_are_not_finite_and_prompts_that_are_not_told_are_refused():
    texts = generation([[1, 2], group(1, prompt_logprobs=True)])
    texts.next(), texts.next()
    with pytest.raises(NumericError, match="not finite"):
        texts.take(Outcome(0.0, {TOKENS: torch.tensor([1]), LOGPROBS: torch.tensor([math.nan])}))
    named = {TOKENS: torch.tensor([1]), LOGPROBS: torch.zeros(1)}
    texts.take(Outcome(0.0, named))
    with pytest.raises(ProtocolError, match="no log-probabilities of the prompt"):
        texts.take(Outcome(0.0, named))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": ()}, "prompt: 0 tokens is not from 1 to 7"),
        ({"prompt": (1,) * 8}, "prompt: 8 tokens is not from 1 to 7"),
        ({"prompt": (64,)}, "token of the prompt: 64 is not from 0 to 63"),
        ({"prompt": (-1, 3)}, "token of the prompt, the least: -1 is not"),
        ({"num_samples": 0}, "num_samples: 0 is not"),
        ({"max_tokens": 0}, "max_tokens: 0 is not"),
        ({"temperature": math.nan}, "temperature: nan is not"),
        ({"top_p": 0.0}, "top_p: 0 is not"),
        ({"top_k": -2}, "top_k: -2 is not"),
        ({"stop": ("",)}, "stop: an empty text"),
    ],
)
def test_a_request_that_cannot_be_is_refused(changes, said):
    fields = {"prompt": (1,), **changes}
    with pytest.raises(DataError, match=said):
        SampleRequest(**fields).check(64, 8)
    SampleRequest((1,), top_k=-1, stop=("a", 3)).check(64, 8)
