"""What a group of replicas is asked in a step, and what its answers do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetero_framework.engine.stage_api import StageInterface, StepInfo
from hetero_framework.trainer import coordinator
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.replica_group import Single
from tests.unit.trainer.conftest import Alone


class Recorded(Single):
    """A group of one that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def num_items(self, local: int) -> int:
        self.calls.append(("num_items", local))
        return super().num_items(local)

    def reduce(self, info: StepInfo, stages: Sequence[StageInterface]) -> bool:
        self.calls.append(("reduce", info.step))
        return super().reduce(info, stages)

    def should_commit(self, finite: bool) -> bool:
        self.calls.append(("should_commit", finite))
        return super().should_commit(finite)

    def after_commit(self, step: int) -> None:
        self.calls.append(("after_commit", step))


class TwiceTheItems(Recorded):
    """As if another replica had as many items, all of them with gradient zero."""

    def num_items(self, local: int) -> int:
        return 2 * super().num_items(local)


class TwoAlike(Recorded):
    """As if another replica had the same gradients, which come when they are asked for twice."""

    def reduce(self, info: StepInfo, stages: Sequence[StageInterface]) -> bool:
        super().reduce(info, stages)
        if sum(call == ("reduce", info.step) for call in self.calls) < 2:
            return False
        for stage in stages:
            for _, parameter in stage._parameters:  # type: ignore[attr-defined]
                parameter.grad.mul_(2)
        return True


class OthersRefuse(Recorded):
    """Another replica's second step is not finite."""

    def should_commit(self, finite: bool) -> bool:
        asked = sum(name == "should_commit" for name, _ in self.calls)
        return super().should_commit(finite) and asked != 1


def run(
    group: Single, name: str, alone: Alone, monkeypatch: pytest.MonkeyPatch, **training: Any
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run in this group."""
    monkeypatch.setattr(coordinator, "Single", lambda: group)
    config = alone(name, training=training)
    train(config)
    text = (config.output_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def test_a_step_asks_the_group_in_the_order_of_its_methods(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Recorded()
    lines = run(group, "run", alone, monkeypatch, max_steps=2)
    names = ["num_items", "reduce", "should_commit", "after_commit"]
    assert [name for name, _ in group.calls] == names * 2
    assert [value for name, value in group.calls if name == "after_commit"] == [1, 2]
    assert [value for name, value in group.calls if name == "should_commit"] == [True, True]
    assert [value > 0 for name, value in group.calls if name == "num_items"] == [True, True]
    assert not any("skipped" in line for line in lines)


def test_items_of_other_replicas_divide_the_loss(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(Single(), "whole", alone, monkeypatch, max_steps=1)
    half = run(TwiceTheItems(), "half", alone, monkeypatch, max_steps=1)
    assert half[0]["loss"] == whole[0]["loss"] / 2
    assert half[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"] / 2, rel=1e-6)


def test_norms_are_of_the_reduced_gradients(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run(Single(), "one", alone, monkeypatch, max_steps=1)
    two = run(TwoAlike(), "two", alone, monkeypatch, max_steps=1)
    assert two[0]["loss"] == one[0]["loss"]
    assert two[0]["grad_norm"] == 2 * one[0]["grad_norm"]


def test_a_step_that_the_group_refuses_changes_no_weight_and_holds_the_schedule(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = OthersRefuse()
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 2}
    lines = run(group, "refused", alone, monkeypatch, max_steps=2, **settings)
    run(Single(), "one", alone, monkeypatch, max_steps=1, **settings)
    assert [line.get("skipped", False) for line in lines] == [False, True]
    assert [value for name, value in group.calls if name == "after_commit"] == [1]
    after, before = weights(tmp_path / "refused"), weights(tmp_path / "one")
    assert all(torch.equal(after[key], before[key]) for key in before)
