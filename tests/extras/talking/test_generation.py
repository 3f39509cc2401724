"""A last stage that gives no tokens costs a run its samples only, and `hetero chat` an answer;
answers as they are shown, and a result that gives none."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import Outcome
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.extras.talking.commands.chat import _answer
from hetero_framework.extras.talking.result_model import Talk, with_result
from hetero_framework.extras.talking.text_generation import LOGPROBS, TOKENS
from hetero_framework.security.access import LOOPBACK_ONLY
from hetero_framework.trainer.coordinator import train
from tests.samples import machines_here


def token(number: int, logprob: float = -1.0) -> dict[str, torch.Tensor]:
    return {TOKENS: torch.tensor([number]), LOGPROBS: torch.tensor([logprob])}


def give(named: dict[str, torch.Tensor] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second token of a text is this one, or computing it fails."""
    evaluate = Stage.evaluate

    def other(stage: Stage, micro_batch: int, *args: Any) -> Outcome:
        if stage._info.decoding is None or micro_batch == 0:
            return evaluate(stage, micro_batch, *args)
        if named is None:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return Outcome(0.0, named)

    monkeypatch.setattr(Stage, "evaluate", other)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (token(10**6), "the coordinator: the last stage gave token 1000000 of 0"),
        ({TOKENS: torch.tensor([1.5])}, "the coordinator: the last stage gave no token"),
        (token(1, math.nan), "the coordinator: the model's logits are not finite"),
        (None, "probability tensor contains"),
    ],
)
def test_samples_that_fail_are_given_up_and_the_run_goes_on(named, said, alone, monkeypatch):
    give(named, monkeypatch)
    training = {"sample_prompts": ["red"], "sample_steps": 1, "sample_max_new_tokens": 3}
    config = alone(training={"max_steps": 2, **training})
    assert train(config).steps == 2
    log = (config.output_dir / "logs" / "coordinator.log").read_text()
    [told] = [line for line in log.splitlines() if "no samples any more" in line]
    assert said in told


def test_an_answer_that_fails_is_one_error(alone, monkeypatch):
    give(token(-1), monkeypatch)
    talk = Talk(alone())
    with talk.loaded(LOOPBACK_ONLY, "chat") as cluster:
        [prompt] = talk.reader.read(["red"], alone().base_dir, "prompts")
        with pytest.raises(ProtocolError, match=r"^the coordinator: .* gave token -1 of 0 to"):
            talk.answer(cluster, [prompt], talk.choice(temperature=0.0, max_tokens=3))


@pytest.mark.parametrize("text", ["", "yes"])
def test_an_empty_answer_is_said_to_be_empty(text, capsys):
    nothing: Any = SimpleNamespace(prompt_of=lambda said, seen: said, pipeline=SimpleNamespace())
    tokenizer = SimpleNamespace(decode=lambda tokens, **settings: text)
    ways = {"check": lambda prompts: None, "answer": lambda *asked: []}
    talk = SimpleNamespace(tokenizer=tokenizer, reader=nothing, **ways)
    assert _answer(talk, nothing, [], [], None) == text
    assert ("the answer is empty" in capsys.readouterr().out) == (text == "")


@pytest.mark.parametrize("objective", ["classification", "image-classification"])
def test_a_classifier_answers_no_prompts(objective, tmp_path):
    raw = {**machines_here(("local", 2)), "training": {"objective": objective}}
    raw["model"] = {"from_config": {"model_type": "llama"}}
    with pytest.raises(UserError, match=f'the objective "{objective}" answers no prompts'):
        with_result(Config.from_dict(raw, tmp_path), None, base=False, local=False)
