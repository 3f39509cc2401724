"""The calls of a step to a group of replicas, and the effect of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.hosts import ReplicasChanged
from hetero_framework.engine.stage_api import GradientPart, Tensors
from hetero_framework.trainer import coordinator
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.replica_group import CountItems, Single, StepPart
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState
from tests.alone import Alone
from tests.samples import read_jsonl


class Recorded(Single):
    """A group of one that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ready(self, state: TrainState) -> TrainState:
        self.calls.append("ready")
        return super().ready(state)

    def part(self, state: TrainState, data: TrainData, count_items: CountItems) -> StepPart:
        self.calls.append("part")
        return super().part(state, data, count_items)

    def losses(self, own: list[float]) -> list[float]:
        self.calls.append("losses")
        return super().losses(own)

    def decide(self, outcome: StepOutcome, norm: torch.Tensor) -> tuple[StepOutcome, torch.Tensor]:
        self.calls.append("decide")
        return super().decide(outcome, norm)

    def after_step(self, before: TrainState, state: TrainState) -> TrainState:
        self.calls.append("after_step")
        return replace(super().after_step(before, state), group={"step": state.step})

    def metrics(self) -> Mapping[str, Any]:
        self.calls.append("metrics")
        return {"island": {"members": ["attic"]}}

    def close(self, reason: str) -> None:
        self.calls.append("close")


class Doubled:
    """As if another replica had the same gradients, which come when they are asked for twice."""

    def __init__(self) -> None:
        self.given: Tensors = {}
        self.ended = self.asked = 0

    def give(self, found: GradientPart) -> None:
        self.given.update({name: t.clone() for name, t in found.part.tensors.items()})

    def end(self) -> None:
        self.ended += 1

    def sums(self, names: Sequence[str]) -> Tensors | None:
        assert self.ended == 1
        self.asked += 1
        if self.asked == 1:
            return None
        return {name: 2 * self.given[name] for name in names}


class TwoAlike(Recorded):
    def part(self, state: TrainState, data: TrainData, count_items: CountItems) -> StepPart:
        return replace(super().part(state, data, count_items), group=Doubled())

    def losses(self, own: list[float]) -> list[float]:
        return [*own, *own]


class OthersRefuse(Recorded):
    """Another replica's second step is not finite."""

    def decide(self, outcome: StepOutcome, norm: torch.Tensor) -> tuple[StepOutcome, torch.Tensor]:
        outcome, norm = super().decide(outcome, norm)
        return StepOutcome("non-finite") if self.calls.count("decide") == 2 else outcome, norm


class OneLeaves(Recorded):
    """Another replica is gone when the second step has been computed."""

    def losses(self, own: list[float]) -> list[float]:
        if self.calls.count("losses") == 1:
            self.calls.append("losses")
            raise ReplicasChanged("island garage: it left")
        return super().losses(own)


def run(
    group: Single, name: str, alone: Alone, monkeypatch: pytest.MonkeyPatch, **training: Any
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run in this group."""
    monkeypatch.setattr(coordinator, "Single", lambda: group)
    config = alone(name, training=training)
    train(config)
    return read_jsonl(config.output_dir / "metrics.jsonl")


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def test_a_step_asks_the_group_in_the_order_of_its_methods(alone, monkeypatch):
    group = Recorded()
    lines = run(group, "run", alone, monkeypatch, max_steps=2)
    names = ["ready", "part", "losses", "decide", "after_step", "metrics"]
    assert group.calls == [*names * 2, "close", "close"]  # after the steps, and at the end
    assert [line["island"] for line in lines] == [{"members": ["attic"]}] * 2
    assert not any("skipped" in line for line in lines)


def test_norms_and_steps_are_of_the_sums(alone, monkeypatch, tmp_path):
    settings = {"optim": "sgd", "max_grad_norm": 0, "max_steps": 1}
    one = run(Single(), "one", alone, monkeypatch, **settings)
    two = run(TwoAlike(), "two", alone, monkeypatch, **settings)
    assert two[0]["loss"] == 2 * one[0]["loss"]
    assert two[0]["grad_norm"] == 2 * one[0]["grad_norm"]
    run(Single(), "fast", alone, monkeypatch, **settings, learning_rate=2e-2)
    fast, doubled = weights(tmp_path / "fast"), weights(tmp_path / "two")
    assert all(torch.equal(fast[key], doubled[key]) for key in fast)


def test_a_step_that_the_group_refuses_changes_no_weight_and_holds_the_schedule(
    alone, monkeypatch, tmp_path
):
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 2}
    lines = run(OthersRefuse(), "refused", alone, monkeypatch, max_steps=2, **settings)
    run(Single(), "one", alone, monkeypatch, max_steps=1, **settings)
    assert [line.get("skipped") for line in lines] == [None, "non-finite"]
    after, before = weights(tmp_path / "refused"), weights(tmp_path / "one")
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_step_in_which_a_replica_leaves_is_done_again(alone, monkeypatch, tmp_path):
    group = OneLeaves()
    left = run(group, "left", alone, monkeypatch, max_steps=3)
    assert group.calls.count("ready") == 4
    calm = run(Single(), "calm", alone, monkeypatch, max_steps=3)
    assert [line["loss"] for line in left] == [line["loss"] for line in calm]
    one, other = weights(tmp_path / "left"), weights(tmp_path / "calm")
    assert all(torch.equal(one[key], other[key]) for key in one)
