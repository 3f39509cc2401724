"""Unit tests for extras/talking/text_generation.py, with a stage that counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetero_framework.engine.stage_api import Outcome, Tensors
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.talking.text_generation import SEQUENCE, TOKEN, TextGeneration


class Counting:
    """Answers each micro-batch with the number of tokens that the text has, and checks that each
    slot has one text at a time."""

    def __init__(self, texts: TextGeneration, *, behind: int = 1) -> None:
        self.texts, self.behind = texts, behind
        self.fed: list[Tensors] = []
        self.most = 0
        self.slots: dict[int, tuple[int, int]] = {}  # the text and its tokens so far

    def run(self) -> list[list[int]]:
        waiting: deque[Tensors] = deque()
        while not self.texts.is_done:
            while (batch := self.texts.next()) is not None:
                waiting.append(batch)
                self.fed.append(batch)
            self.most = max(self.most, len(waiting))
            self.texts.take(Outcome(0.0, {TOKEN: torch.tensor([self._seen(waiting.popleft())])}))
        return self.texts.texts

    def _seen(self, batch: Tensors) -> int:
        slot, text = batch[SEQUENCE].tolist()
        (first, *_, last) = [*batch["positions"][0].tolist(), int(batch["positions"][0, -1])]
        if first:
            assert self.slots[slot] == (text, first)
        self.slots[slot] = text, last + 1
        return last + 1


def generation(prompts: Sequence[Sequence[int]], **settings: Any) -> TextGeneration:
    kwargs = {"max_new_tokens": 3, "max_positions": None, "stop": (), "vocabulary": 64}
    kwargs |= {"at_once": 2, "cached": True}
    return TextGeneration(prompts, **{**kwargs, **settings})


def test_texts_go_on_side_by_side_and_take_the_places_of_those_that_ended():
    stage = Counting(generation([[5], [6, 7], [8] * 4]))
    assert stage.run() == [[1, 2, 3], [2, 3, 4], [4, 5, 6]]
    assert stage.most == 2
    assert {int(batch[SEQUENCE][0]) for batch in stage.fed} == {0, 1}
    assert stage.texts.micro_batches == len(stage.fed) == 9


def test_without_a_cache_each_micro_batch_is_the_whole_text():
    stage = Counting(generation([[5, 6]], cached=False))
    assert stage.run() == [[2, 3, 4]]
    assert [batch["input_ids"].tolist() for batch in stage.fed] == [
        [[5, 6]],
        [[5, 6, 2]],
        [[5, 6, 2, 3]],
    ]


def test_a_text_ends_with_a_stop_token_and_at_the_end_of_the_positions():
    assert Counting(generation([[5], [6] * 4], stop={2})).run() == [[1, 2], [4, 5, 6]]
    assert Counting(generation([[5], [6] * 4], max_positions=6)).run() == [[1, 2, 3], [4, 5]]


def test_tokens_are_told_as_they_come():
    told: list[tuple[int, int]] = []
    texts = generation([[5], [6, 7]], take_token=lambda *token: told.append(token))
    Counting(texts).run()
    assert told == [(0, 1), (1, 2), (0, 2), (1, 3), (0, 3), (1, 4)]


@pytest.mark.parametrize("named", [{}, {TOKEN: torch.zeros(2)}, {TOKEN: torch.tensor([0.5])}])
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
        texts.take(Outcome(0.0, {TOKEN: torch.tensor([token])}))
    assert texts.texts == [[]]
