"""GRPO by calls gives the losses and norms of TRL's GRPOTrainer, which gets the same texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hetero_framework.extras.tinker.called_model import CalledModel, Lora
from hetero_framework.extras.tinker.datums import call_of, logprobs_of
from tests.extras.tinker.calling import ADAM, called, request
from tests.samples import machines_here, save_llama

pytest.importorskip("tinker")
GROUP, QUESTIONS, LONGEST = 4, 2, 8
PROMPTS = ["the model trains", "every layer keeps its own"]
Text = tuple[list[int], list[int]]  # a prompt and an answer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), layers=2)


def reward(answer: list[int]) -> float:
    return float(sum(answer) % 7)


class Trainer(GRPOTrainer):
    """Notes its losses."""

    losses: list[float]

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        loss = super().compute_loss(*args, **more)
        self.losses.append(float(loss.detach()))
        return loss


def by_trl(
    folder: Any, model: Any, kind: str, inner: int
) -> tuple[list[list[Text]], list[float], list[float]]:
    """The texts of two steps, and the losses and norms of their inner iterations."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    draw, rolled = np.random.default_rng(4), []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        texts = [draw.integers(3, 320, draw.integers(2, LONGEST + 1)).tolist() for _ in prompts]
        rolled.append(list(zip(ids, texts, strict=True)))
        # TRL computes the log-probabilities of the old policy by itself.
        logprobs = [[0.0] * len(text) for text in texts]
        return {"prompt_ids": ids, "completion_ids": texts, "logprobs": logprobs}

    settings = {"loss_type": kind, "num_iterations": inner, "max_steps": 2 * inner, "beta": 0.0}
    settings |= {"scale_rewards": "group" if kind == "grpo" else "none", "max_grad_norm": 0.5}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    settings |= {"adam_beta2": 0.95, "adam_epsilon": 1e-12, "optim": "adamw_torch"}
    settings |= {"bf16": False, "activation_checkpointing": False, "use_cpu": True}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    settings |= {"per_device_train_batch_size": GROUP * QUESTIONS, "num_generations": GROUP}
    settings |= {"max_completion_length": LONGEST, "gradient_accumulation_steps": 1}
    trainer = Trainer(
        PeftModel.from_pretrained(base, folder / "before", is_trainable=True),
        lambda completion_ids, **more: [reward(ids) for ids in completion_ids],
        GRPOConfig(str(folder / "trl"), disable_tqdm=True, **settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 2]),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.losses = []
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return rolled, trainer.losses, norms


def by_calls(
    made: CalledModel, rolled: list[list[Text]], kind: str, inner: int
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for texts in rolled:
        rewards = torch.tensor([reward(answer) for _, answer in texts]).view(-1, GROUP)
        advantages = rewards - rewards.mean(1, True)
        if kind == "grpo":
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
        examples = []
        for (prompt, answer), advantage in zip(texts, advantages.flatten().tolist(), strict=True):
            tokens, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
            length = len(answer) if kind == "grpo" else LONGEST
            worth = advantage / (length * len(texts))
            example = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
            given = {
                "weights": [1.0] * (len(tokens) - 1),
                "advantages": before + [worth] * len(answer),
            }
            examples.append({**example, **given})

        def call(names: tuple[str, ...], loss: str, examples: Any = examples) -> Any:
            told = [{n: e[n] for n in ("tokens", "target_tokens", *names)} for e in examples]
            return call_of(request(told, loss), made.rows, made.limits)

        asked = call(("weights",), "cross_entropy")
        for example, found in zip(
            examples, logprobs_of(asked, made.forward(asked)[1]), strict=True
        ):
            example["logprobs"] = found
        for _ in range(inner):
            asked = call(("logprobs", "advantages"), "ppo")
            losses.append(sum(made.forward_backward(asked)[0]))
            norms.append(made.optim_step(ADAM, len(norms) + 1)["grad_norm"])
    return losses, norms


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_losses_and_norms_are_those_of_trl(kind, inner, model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    training = {"per_device_train_batch_size": 3, "optim": "adamw_torch"}
    training["output_dir"] = str(tmp_path)
    whole = {"name_or_path": str(model)}
    raw = {**machines_here(("local", 2)), "model": whole, "training": training}
    with called(raw) as made:
        made.make(Lora(4, seed=1, train_unembed=False))  # TRL refuses an adapter there
        made.export(tmp_path / "before")
        rolled, *expected = by_trl(tmp_path, model, kind, inner)
        found = by_calls(made, rolled, kind, inner)
    assert len(rolled) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) == 2 * inner
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
