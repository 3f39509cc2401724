"""Answers as they are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.extras.talking.commands.chat import _answer


@pytest.mark.parametrize("text", ["", "yes"])
def test_an_empty_answer_is_said_to_be_empty(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing: Any = SimpleNamespace(prompt_of=lambda said: said, pipeline=SimpleNamespace())
    tokenizer = SimpleNamespace(decode=lambda tokens, **settings: text)
    ways = {"check": lambda prompts: None, "answer": lambda *asked: []}
    talk = SimpleNamespace(tokenizer=tokenizer, reader=nothing, **ways)
    assert _answer(talk, nothing, [], None) == text
    assert ("the answer is empty" in capsys.readouterr().out) == (text == "")
