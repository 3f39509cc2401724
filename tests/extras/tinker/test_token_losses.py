"""The losses against the formulas that the client documents, by PyTorch on the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_framework.config.schema import StageSpec
from hetero_framework.errors import ConfigError
from hetero_framework.extras.tinker.token_losses import (
    LOGPROBS,
    LOSSES,
    RATIO_MASK,
    RECIPE,
    TokenLosses,
    no_data,
    recipe,
    spans,
)
from tests.unit.config.test_idle import config_of

ROWS, TOKENS, VOCABULARY = 3, 7, 19


def documented(name: str, lp: torch.Tensor, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """https://tinker-docs.thinkingmachines.ai/losses, with the group ratio of GSPO's paper."""
    if name == "cross_entropy":
        return (-lp * x["weights"]).sum()
    ratio = torch.exp(lp - x["logprobs"])
    if name == "importance_sampling":
        return -(ratio * x["advantages"]).sum()
    if name == "ppo":
        clipped = torch.clamp(ratio, 0.8, 1.2)
        return -torch.min(ratio * x["advantages"], clipped * x["advantages"]).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, 0.8, 1.2).detach() * lp * x["advantages"]).sum()
    if name == "dro":
        return -(lp * x["advantages"] - 0.5 * 0.05 * (lp - x["logprobs"]) ** 2).sum()
    mask = x[RATIO_MASK]
    rows = []
    for row in range(ROWS):
        told = mask[row] > 0
        of_row = (lp[row, told] - x["logprobs"][row, told]).mean().exp()
        advantages = x["advantages"][row, told]
        token = of_row.detach() * torch.exp(lp[row, told] - lp[row, told].detach())
        rows.append(torch.min(token * advantages, token.clamp(0.8, 1.2) * advantages).sum())
    return -torch.stack(rows).sum()


@pytest.fixture(scope="module")
def asked() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    shape = ROWS, TOKENS
    ids = torch.randint(0, VOCABULARY, shape, generator=drawn)
    mask = (torch.arange(TOKENS) > 2).float().expand(shape).clone()
    return {
        "input_ids": ids,
        "labels": torch.randint(0, VOCABULARY, shape, generator=drawn),
        "weights": torch.rand(shape, generator=drawn),
        "logprobs": -3 + 0.4 * torch.randn(shape, generator=drawn),
        "advantages": torch.randn(shape, generator=drawn) * mask,
        RATIO_MASK: mask,
    }


class Whole:
    """A model in one piece, as the last shard."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        self.config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
        self.model = LlamaForCausalLM(self.config)

    def logits(self, inputs: Any, received: Any) -> torch.Tensor:
        return self.model(input_ids=inputs["input_ids"]).logits

    def forward(self, inputs: Any, received: Any) -> tuple[torch.Tensor]:
        return (self.model.model(input_ids=inputs["input_ids"]).last_hidden_state,)

    def chunk_logits(self, inputs: Any, hidden: torch.Tensor, number: int) -> torch.Tensor:
        return self.model.lm_head(hidden)

    def parameters_outside_blocks(self) -> list[Any]:
        return [self.model.lm_head.weight]


@pytest.mark.parametrize("limit", [None, 14, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_the_documented_one(name, limit, asked):
    mine, other = Whole(), Whole()
    training = config_of(training={"objective": "calls", "loss_chunk_tokens": limit}).training
    inputs = {**asked, RECIPE: recipe(name, {})}
    loss, named = TokenLosses(training).loss(
        *(mine, inputs, (), torch.ones(())),
        running=torch.enable_grad,
        backward=torch.Tensor.backward,
    )
    logits = other.logits(asked, ()).log_softmax(-1)
    logprobs = logits.gather(-1, asked["labels"][..., None])[..., 0]
    expected = documented(name, logprobs, asked)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(named[LOGPROBS], logprobs, rtol=1e-6, atol=1e-6)
    pairs = zip(mine.model.named_parameters(), other.model.parameters(), strict=True)
    for (label, parameter), reference in pairs:
        assert torch.allclose(parameter.grad, reference.grad, rtol=1e-5, atol=1e-6), label


def test_settings_of_a_call_are_used(asked):
    wide = TokenLosses(config_of(training={"objective": "calls"}).training)
    losses = set()
    for settings in ({}, {"clip_low_threshold": 0.99}, {"clip_high_threshold": 1.01}):
        inputs = {**asked, RECIPE: recipe("ppo", settings)}
        about = (Whole(), inputs, (), torch.ones(()))
        losses.add(float(wide.loss(*about, running=torch.no_grad, backward=None)[0]))
    assert len(losses) == 3


def test_only_the_last_stage_gets_targets_and_their_tensors(asked):
    objective = TokenLosses(config_of(training={"objective": "calls"}).training)
    names = [*asked, RECIPE, "attention_mask"]
    first = StageSpec(0, "local", 0, 1, is_first=True, is_last=False)
    last = StageSpec(1, 1, 1, 2, is_first=False, is_last=True)
    assert objective.stage_inputs(first, names) == ["input_ids", "attention_mask"]
    assert set(objective.stage_inputs(last, names)) == set(names) - {"input_ids"}


@pytest.mark.parametrize(("shape", "limit"), [((3, 7), 21), ((3, 7), 14), ((3, 7), 4), ((1, 5), 2)])
def test_chunks_cover_each_token_once(shape, limit):
    seen = torch.zeros(shape)
    for span in spans(torch.Size(shape), limit):
        assert 0 < seen[span].numel() <= limit
        seen[span] += 1
    assert seen.unique().tolist() == ([0] if limit >= 21 else [1])


def test_a_run_from_files_is_refused():
    with pytest.raises(ConfigError, match="trained by the calls of a client"):
        no_data()
