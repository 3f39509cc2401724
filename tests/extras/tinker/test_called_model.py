"""Calls over real processes: the same bits under every cut, and those of PEFT in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.errors import UserError
from hetero_framework.extras.talking.sampling import SampleRequest
from hetero_framework.extras.tinker.called_model import CalledModel, Lora
from hetero_framework.extras.tinker.datums import Limits, call_of, logprobs_of
from hetero_framework.trainer.durable import DurableSteps
from tests.cases import seldom
from tests.extras.tinker.calling import ADAM, called, drawn, request
from tests.samples import machines_here, save_llama

pytest.importorskip("tinker")
pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("verdicts")]

SFT = [drawn(1, 3, "weights"), drawn(2, 5, "weights")]
POLICY = drawn(3, 4, "logprobs", "advantages")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"))


def sections(model: Any) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(model)},
        "training": {"per_device_train_batch_size": 2, "optim": "adamw_torch"},
    }


class Trace:
    """What clients would see of a model's calls."""

    def __init__(self, model: CalledModel) -> None:
        self._model, self._number = model, 0
        self.seen: list[Any] = []
        self.calls: list[tuple[int, Any]] = []
        model.repeat = self._repeat

    def _repeat(self, after: int, up_to: int) -> None:
        for number, do in self.calls:
            if after < number <= up_to:
                do(number)

    def _note(self, do: Any) -> Any:
        self._number += 1
        self.calls.append((self._number, do))
        return do(self._number)

    def add(self, examples: Any, loss: str) -> None:
        call = call_of(request(examples, loss), self._model.rows, self._model.limits)
        losses, named = self._note(lambda number: self._model.forward_backward(call))
        self.seen += [losses, *(row.tobytes() for row in logprobs_of(call, named))]

    def step(self) -> None:
        metrics = self._note(lambda number: self._model.optim_step(ADAM, number))
        self.seen.append(metrics)


def train(model: CalledModel, folder: Any, between: Any = lambda: None) -> Trace:
    model.make(Lora(4, seed=1))
    trace = Trace(model)
    model.export(folder / "before")
    for examples in SFT:
        trace.add(examples, "cross_entropy")
    trace.step()
    trace.add(POLICY, "ppo")
    between()
    trace.add(POLICY, "importance_sampling")
    trace.step()
    asked = SampleRequest((5, 6, 7), num_samples=3, max_tokens=4, seed=1, prompt_logprobs=True)
    trace.seen.append(model.sample([asked, replace(asked, prompt=(9, 8))], None, True))
    model.export(folder / "after")
    trace.seen.append(load_file(folder / "after/adapter_model.safetensors"))
    return trace


def equal(one: list[Any], other: list[Any]) -> None:
    assert one[:-1] == other[:-1]
    assert one[-1].keys() == other[-1].keys()
    assert all(torch.equal(tensor, other[-1][name]) for name, tensor in one[-1].items())


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """One process: the folder, and what a client sees."""
    folder = tmp_path_factory.mktemp("whole")
    raw = {**machines_here(("local", 6)), **sections(model)}
    raw["training"] = {**raw["training"], "output_dir": str(folder)}
    with called(raw) as made:
        return folder, train(made, folder).seen


@pytest.mark.parametrize("cuts", [[3], [2, 4]])
def test_every_cut_gives_the_same_bits(cuts, pool, whole, model, tmp_path):
    raw = pool.config(tmp_path / "run", cuts, **sections(model))
    with called(raw) as made:
        found = train(made, tmp_path / "run").seen
    equal(found, whole[1])


@pytest.mark.parametrize("also", seldom([False, True], True), ids=["one", "the other meanwhile"])
def test_a_killed_worker_changes_nothing(also, whole, model, tmp_path, monkeypatch):
    raw = {**machines_here(("local", 2), (1, 4), (2, 6)), **sections(model)}
    raw["training"] = {**raw["training"], "output_dir": str(tmp_path)}
    killed, before = [], psutil.Process().children()  # those of the pool among them
    rewind = DurableSteps.rewind

    def kill() -> None:
        worker = next(child for child in psutil.Process().children() if child not in before)
        killed.append(worker.pid)
        worker.kill()

    def rewound(steps: DurableSteps) -> Any:
        if also and len(killed) == 1:
            kill()
        return rewind(steps)

    monkeypatch.setattr(DurableSteps, "rewind", rewound)
    with called(raw) as made:
        found = train(made, tmp_path, kill).seen
    assert len(killed) == 1 + also
    equal(found, whole[1])


@pytest.mark.long
def test_what_a_mistake_left_half_done_is_undone(whole, model, tmp_path, monkeypatch):
    raw = {**machines_here(("local", 2), (1, 6)), **sections(model)}
    raw["training"] = {**raw["training"], "output_dir": str(tmp_path)}
    commit, failed = Pipeline.commit, []

    def committed(*given: Any) -> None:
        commit(*given)
        failed.append(len(failed))
        if failed[-1] in (0, 2):
            raise RuntimeError("a mistake")

    monkeypatch.setattr(Pipeline, "commit", committed)
    with called(raw) as made:
        step = made.optim_step

        def again(*given: Any) -> Any:
            try:
                return step(*given)
            except RuntimeError:
                return step(*given)

        monkeypatch.setattr(made, "optim_step", again)
        found = train(made, tmp_path).seen
    assert len(failed) >= 4
    equal(found, whole[1])


def test_the_numbers_are_those_of_peft_in_one_process(whole, model):
    folder, seen = whole
    base = AutoModelForCausalLM.from_pretrained(model)
    peft = PeftModel.from_pretrained(base, folder / "before", is_trainable=True)
    peft.train(False)
    parameters = [p for p in peft.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    told = iter(seen)

    def loss_of(example: Any, name: str) -> torch.Tensor:
        tokens, targets = (torch.tensor(example[k]) for k in ("tokens", "target_tokens"))
        logits = peft(input_ids=tokens[None]).logits[0].log_softmax(-1)
        logprobs = logits.gather(1, targets[:, None])[:, 0]
        found.append(logprobs.detach().numpy())
        x = {k: torch.tensor(np.float32(v)) for k, v in example.items()}
        if name == "cross_entropy":
            return -(logprobs * x["weights"]).sum()
        ratio, advantages = torch.exp(logprobs - x["logprobs"]), x["advantages"]
        if name == "ppo":
            return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        return -(ratio * advantages).sum()

    calls = [(*SFT,), (POLICY, POLICY)]
    names = [("cross_entropy", "cross_entropy"), ("ppo", "importance_sampling")]
    for step, of_step in zip(calls, names, strict=True):
        for examples, name in zip(step, of_step, strict=True):
            found: list[Any] = []
            loss = torch.stack([loss_of(example, name) for example in examples]).sum()
            loss.backward()
            assert sum(next(told)) == pytest.approx(float(loss.detach()), rel=1e-6)
            for logprobs in found:
                assert np.allclose(np.frombuffer(next(told), np.float32), logprobs, atol=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        assert next(told)["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        adam.step()
        adam.zero_grad()
    _, saved = told  # the samples before the weights
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            mine = saved[name.replace(".default", "")]
            assert torch.allclose(mine, parameter, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_tokens": [999] * 4}, "has the token 999; the model has 0 to 319"),
        ({"tokens": [-1, 3, 3, 3]}, "has the token -1"),
        ({"tokens": [3] * 200, "target_tokens": [3] * 200}, "has 200 tokens, the model takes 128"),
        ({"advantages": [1.0] * 3}, r"advantages has the shape \[3\] for 4 tokens"),
        ({"advantages": [float("nan")] * 4}, "advantages has values that are not finite"),
        ({"surprise": [1.0] * 4}, "has 'surprise', which the loss does not read"),
        ({"target_tokens": [[3, 4]] * 4}, r"target_tokens has the shape \[4, 2\]"),
    ],
)
def test_what_is_wrong_with_an_example_is_said(change, said):
    example = {"tokens": [3] * 4, "target_tokens": [4] * 4, "logprobs": [-1.0] * 4}
    example |= {"advantages": [1.0] * 4, **change}
    with pytest.raises(UserError, match=said):
        call_of(request([example], "ppo"), 2, Limits(320, 128))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"loss": "stable_reinforce"}, "there is no loss 'stable_reinforce' here; there are cross"),
        ({"loss_fn_config": {"clip": 1.0}}, "has no setting 'clip'"),
        ({"loss_fn_config": {"clip_low_threshold": float("nan")}}, "is not finite"),
        ({"examples": []}, "has no examples"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(more, said):
    told = {"examples": POLICY, "loss": "ppo", **more}
    with pytest.raises(UserError, match=said):
        call_of(request(told.pop("examples"), told.pop("loss"), **told), 2, Limits(320, 128))


def test_pictures_are_refused_by_name():
    asked = request(POLICY[:1], "ppo")
    asked.data[0].model_input.add().image.data = b"x"
    with pytest.raises(UserError, match="a chunk of kind 'image' is not supported"):
        call_of(asked, 2, Limits(320, 128))
