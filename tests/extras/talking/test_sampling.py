"""Samples in groups: transformers' own generate, other cuts, neighbours, and a worker that dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetero_framework.config import Config
from hetero_framework.extras.talking.decoding import next_tokens
from hetero_framework.extras.talking.result_model import Talk
from hetero_framework.extras.talking.sampling import SampleRequest, SampleResult
from hetero_framework.security.access import LOOPBACK_ONLY
from tests.cases import seldom
from tests.samples import free_ports, save_tiny

pytestmark = pytest.mark.xdist_group("pool")

PROMPT = tuple(range(10, 30))
GREEDY = SampleRequest(PROMPT, num_samples=3, max_tokens=12, temperature=0.0)
DRAWN = SampleRequest(PROMPT, num_samples=8, max_tokens=12, seed=3, prompt_logprobs=True)
OTHERS = [replace(DRAWN, prompt=PROMPT[k:], num_samples=k, top_p=0.9) for k in range(1, 6)]
# A sliding window, attention with states, a state-space model, experts, and one without a cache.
SELDOM = ("gemma2", "qwen3_next", "mamba", "qwen3_moe", "openai-gpt")
ARCHITECTURES = seldom(("llama", "qwen3", "gemma3_text", *SELDOM), *SELDOM)


@pytest.fixture
def sampled(pool, tmp_path, verdicts):
    """The results of requests, by a model that is cut, in processes."""

    def results(
        cuts: list[int], requests: list[SampleRequest], model_type: str = "llama", **settings: Any
    ) -> list[SampleResult]:
        if not (tmp_path / model_type).exists():
            save_tiny(model_type, tmp_path / model_type)
        sections = {"model": {"name_or_path": str(tmp_path / model_type)}}
        layers = AutoModelForCausalLM.from_pretrained(tmp_path / model_type).config
        raw = pool.config(tmp_path / "run", cuts, layers.num_hidden_layers, **sections)
        talk = Talk(Config.from_dict(raw))
        with talk.loaded(LOOPBACK_ONLY, "generation") as cluster:
            return talk.generator.sample(cluster, requests, **settings)

    return results


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_and_their_log_probabilities_are_those_of_transformers(
    model_type, sampled, tmp_path
):
    [found, drawn] = sampled([1], [GREEDY, DRAWN], model_type)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / model_type)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    settings |= {"output_scores": True, "return_dict_in_generate": True}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    expected = whole.sequences[0, len(PROMPT) :].tolist()
    scores = torch.cat(whole.scores).log_softmax(-1)
    for sample in found.samples:
        count = len(sample.tokens)
        assert list(sample.tokens) == expected[:count]
        assert count == 12 or sample.stop_reason == "stop"
        own = scores[range(count), list(sample.tokens)]
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for sample in drawn.samples:
            text = torch.tensor([[*PROMPT, *sample.tokens]])
            logprobs = model(text).logits[0, :-1].log_softmax(-1)
            own = logprobs.gather(-1, text[0, 1:, None])[:, 0]
            told = torch.tensor([*(drawn.prompt_logprobs or ())[1:], *sample.logprobs])
            torch.testing.assert_close(told, own, rtol=1e-5, atol=1e-5)


def test_samples_depend_on_the_request_alone(sampled):
    """Whatever the cut and the other requests, to the last bit; and of eight samples the first
    three are those of three."""
    expected = sampled([], [DRAWN])[0]
    assert len({sample.tokens for sample in expected.samples}) == 8
    for cuts in ([], [2], [1, 3]):
        assert sampled(cuts, [*OTHERS, DRAWN])[-1] == expected
    plain, fewer = sampled(
        [1, 3], [replace(DRAWN, prompt_logprobs=False), replace(DRAWN, num_samples=3)]
    )
    assert plain.samples == expected.samples
    assert fewer.samples == expected.samples[:3]
    assert sampled([2], [replace(DRAWN, seed=4)])[0].samples != expected.samples


def test_texts_that_end_change_none_of_the_others(sampled):
    """A token that ends some of the texts early, so that they leave."""
    expected = sampled([], [DRAWN])[0].samples
    stop = expected[0].tokens[2]
    found = sampled([2], [replace(DRAWN, stop=(stop,))])[0].samples
    ended = 0
    for sample, whole in zip(found, expected, strict=True):
        end = whole.tokens.index(stop) + 1 if stop in whole.tokens else len(whole.tokens)
        assert (sample.tokens, sample.logprobs) == (whole.tokens[:end], whole.logprobs[:end])
        ended += sample.stop_reason == "stop"
    assert ended > 0


@pytest.mark.long
def test_a_worker_that_is_killed_while_texts_are_sampled_changes_no_token(pool, tmp_path, sampled):
    expected = sampled([1, 3], [DRAWN, *OTHERS])
    raw = pool.config(tmp_path / "run", [1, 3])
    ports = free_ports(3)
    for entry, port in zip((raw["coordinator"], *raw["workers"]), ports, strict=True):
        entry["port"] = port
    talk = Talk(Config.from_dict({**raw, "model": {"name_or_path": str(tmp_path / "llama")}}))
    before, told = set(psutil.Process().children()), list[tuple[int, int, int]]()
    with talk.loaded(LOOPBACK_ONLY, "generation") as cluster:
        workers = [p for p in psutil.Process().children() if p not in before]

        def take(*token: int) -> None:
            told.append(token)  # type: ignore[arg-type]
            if len(told) == 40:
                os.kill(workers[-1].pid, signal.SIGKILL)

        restore = lambda: cluster.retrying(talk._restore)  # noqa: E731
        requests = [DRAWN, *OTHERS]
        found = talk.generator.sample(cluster, requests, take_token=take, restore=restore)
    assert not psutil.pid_exists(workers[-1].pid)
    assert found == expected
    assert len(told) == sum(len(s.tokens) for result in expected for s in result.samples)


CHOICES = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.6), (0.8, 9, 0.9)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CHOICES)
def test_draws_are_as_frequent_as_the_library_says(temperature, top_k, top_p):
    """20,000 draws that are spread evenly give each token its probability, after the warpers of
    `generate`."""
    logits_1V = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected_V = warpers(None, logits_1V).softmax(-1)[0]
    count = 20_000
    halves = [divmod(k * 2**48 // count, 2**24) for k in range(count)]
    draws = [*(float(a) for a, _ in halves), *(float(b) for _, b in halves)]
    tokens, logprobs = next_tokens(logits_1V, [temperature, top_k, top_p, 0, *draws])
    share_V = torch.bincount(tokens, minlength=50) / count
    torch.testing.assert_close(share_V, expected_V, rtol=0, atol=1.01 / count)
    assert torch.equal(logprobs, logits_1V[0].log_softmax(-1)[tokens])


def test_a_draw_does_not_take_tokens_without_probability():
    logits_1V = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    last = [2.0**24 - 1] * 2
    tokens, _ = next_tokens(logits_1V, [1.0, 0, 1.0, 0, 0.0, last[0], 0.0, last[1]])
    assert tokens.tolist() == [1, 3]
