"""Values that are not finite: the step counts for nothing, the stage and the samples are named, and
too many of them end the run. Real runs in one process."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero_framework.config import Config, TrainingConfig
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.loss_scale import LossScale
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import GradientReport, StepInfo
from hetero_framework.errors import NumericError
from hetero_framework.trainer import skipped_step
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState
from tests.samples import plan_of, read_jsonl

STAGES = Config.from_dict(
    {
        "coordinator": {"hostname": "a", "ip": "127.0.0.1", "device": "cpu"},
        "workers": [{"id": 1, "hostname": "b", "ip": "127.0.0.1", "port": 5, "device": "cpu"}],
        "shard_plan": plan_of(("local", 2), (1, 4)),
    }
).plan.stages
SAMPLES = [[4, 0], [7, 2], [3]]


def report(*nonfinite: int, norm: float = 1.0) -> GradientReport:
    return GradientReport(torch.tensor([1.0, norm]), nonfinite)


@pytest.mark.parametrize(
    ("losses", "reports", "stage", "micro_batch", "samples"),
    [
        ([1.0, 2.0, math.nan], [report(), report()], 1, 2, (3,)),
        ([1.0, math.inf, 2.0], [report(1), report(1)], 0, 1, (7, 2)),
        ([math.nan, math.nan, 1.0], [report(1), report(0, 1)], 1, 0, (4, 0)),
        ([1.0] * 3, [report(norm=math.nan), report(norm=math.inf)], 1, None, (4, 0, 7, 2, 3)),
        ([1.0] * 3, [report(norm=math.nan), report()], 0, None, (4, 0, 7, 2, 3)),
    ],
)
def test_the_first_value_that_is_not_finite_is_found(losses, reports, stage, micro_batch, samples):
    found = skipped_step.find(STAGES, losses, reports, SAMPLES)
    assert found == skipped_step.NonFinite(STAGES[stage], micro_batch, samples)
    owner = ("the coordinator", "worker 1")[stage]
    assert f"stage {stage} ({owner}, layers " in str(found)
    assert str(found).endswith(f"samples {', '.join(map(str, samples))}")


def test_no_stage_is_blamed_for_what_none_of_them_has():
    """Norms that overflow only together, and values of another island."""
    found = skipped_step.find(STAGES, [1.0] * 3, [report(), report()], SAMPLES)
    assert found == skipped_step.NonFinite(None, None, (4, 0, 7, 2, 3))
    assert str(found) == "the norm of all gradients together is not finite, samples 4, 0, 7, 2, 3"
    assert (found.fields["stage"], found.fields["owner"]) == (None, None)
    summed = [report(norm=math.nan), report()]
    found = skipped_step.find(STAGES, [1.0] * 3, summed, SAMPLES, elsewhere=("attic",))
    assert str(found) == "non-finite losses or gradients of island attic"
    assert (found.fields["samples"], found.fields["islands"]) == ([], ["attic"])
    found = skipped_step.find(STAGES, [math.nan] * 3, summed, SAMPLES, elsewhere=("attic",))
    assert found == skipped_step.NonFinite(STAGES[1], 0, (4, 0))


def test_many_samples_are_counted():
    many = skipped_step.NonFinite(STAGES[0], None, tuple(range(40)))
    assert str(many).endswith("14, 15 and 24 more")
    assert len(many.fields["samples"]) == 40


def after(kinds: str) -> TrainState:
    """The state after steps: c committed, s skipped, o only an overflow of the loss scale, r by a
    rule."""
    state, skips = TrainState(loss_scale=LossScale(1024.0)), {"s": "non-finite", "o": "overflow"}
    for kind in kinds:
        state = state.after(StepOutcome(None if kind == "c" else skips.get(kind, "rule")), 1)
    return state


@pytest.mark.parametrize(
    ("kinds", "total", "stops"),
    [
        ("s" * 5, 1000, None),
        ("s" * 6, 1000, "6 steps in a row"),
        ("os" * 5 + "o" * 20, 1000, None),
        ("sc" * 10, 1000, None),
        ("sc" * 11, 1000, "11 of the run's 1,000 steps"),
        ("sc" * 11, 1100, None),
        ("sc" * 5, 100, None),
        ("sc" * 6, 100, "6 of the run's 100 steps"),
        ("o" * 500, 1000, None),
        ("sr" * 5 + "r" * 500, 1000, None),
    ],
)
def test_too_many_in_a_row_or_in_all_end_the_run(kinds, total, stops):
    where = str(skipped_step.NonFinite(STAGES[0], 0, (1,)))
    ended = nullcontext() if stops is None else pytest.raises(NumericError, match=stops)
    with ended as raised:
        skipped_step.check_not_too_many(after(kinds), total, TrainingConfig(), where)
    assert raised is None or raised.value.exit_code == 5


def metrics(config: Config) -> list[dict[str, Any]]:
    return read_jsonl(config.output_dir / "metrics.jsonl")


def skips(config: Config) -> list[dict[str, Any]]:
    lines = read_jsonl(config.output_dir / "events.jsonl")
    return [line for line in lines if line["what"] == "step skipped"]


def norms_of(stage: Stage) -> list[float]:
    return [float(p.detach().norm()) for _, p in stage._parameters]


def test_f29_inf_in_a_stage_skips_the_step_and_names_its_samples(alone, monkeypatch, logged):
    outcome, weights = Stage._outcome, []

    def infinite(self: Stage, micro_batch: int, *args: Any) -> Any:
        value = outcome(self, micro_batch, *args)
        if micro_batch == 0:
            weights.append(norms_of(self))
        is_hit = (self._info.step, micro_batch) == (1, 1)
        return replace(value, loss=value.loss * math.inf) if is_hit else value

    monkeypatch.setattr(Stage, "_outcome", infinite)
    config = alone(training={"train_sampling_strategy": "sequential", "probe_longest_batch": False})
    assert train(config).steps == 4
    assert [line.get("skipped") for line in metrics(config)] == [None, "non-finite", None, None]
    assert weights[1] == weights[2]  # before and after the skipped step
    assert weights[0] != weights[1]
    assert weights[2] != weights[3]
    (event,) = skips(config)
    assert (event["stage"], event["owner"], event["micro_batch"]) == (0, "local", 1)
    assert event["samples"] == [6, 7]
    said = "step 2: non-finite values in micro-batch 1, first out of stage 0 (the coordinator, "
    log = (config.output_dir / "logs" / "coordinator.log").read_text()
    assert said in log
    assert "samples 6, 7; step skipped" in log


@pytest.mark.parametrize("everything", [True, False])
def test_a_batch_without_a_label_adds_nothing_and_skips_no_step(alone, monkeypatch, everything):
    """The loss of no tokens is 0, as in TRL, with micro-batches beside it or without."""
    make = TrainData.step_batches

    def without_labels(self: TrainData, step: int) -> list[Any]:
        batches = make(self, step)
        for batch in batches[: None if everything else 1]:
            if step == 1:
                batch["labels"].fill_(-100)
        return batches

    monkeypatch.setattr(TrainData, "step_batches", without_labels)
    config = alone(training={"train_sampling_strategy": "sequential"})
    assert train(config).steps == 4
    assert skips(config) == []
    assert [line.get("skipped") for line in metrics(config)] == [None] * 4
    zero = [line["step"] for line in metrics(config) if line["loss"] == line["grad_norm"] == 0]
    assert zero == [2] * everything


def test_f29_a_run_that_only_overflows_its_loss_scale_goes_on(alone, monkeypatch, tmp_path):
    """With fp16 the first steps overflow until the scale fits; nothing is wrong then."""
    scaled = Stage._scaled_backward

    def overflow(self: Stage, value: Any) -> None:
        scaled(self, value)
        if self._info.loss_scale > 512:
            self._parameters[0][1].grad.fill_(math.inf)

    monkeypatch.setattr(Stage, "_scaled_backward", overflow)
    config = alone(training={"fp16": True, "max_steps": 9, "max_skipped_steps": 0})
    assert train(config).steps == 9
    skipped = [line.get("skipped") for line in metrics(config)]
    assert skipped == ["overflow"] * 7 + [None] * 2  # 65536 is halved seven times


def test_f29_a_gradient_that_is_not_finite_names_its_stage(alone, monkeypatch):
    reported = Stage.report_gradients

    def infinite(self: Stage, *args: Any) -> GradientReport:
        self._parameters[0][1].grad.fill_(math.nan)
        return reported(self, *args)

    monkeypatch.setattr(Stage, "report_gradients", infinite)
    config = alone(training={"max_skipped_steps": 1})
    with pytest.raises(NumericError, match="non-finite gradients first in stage 0") as raised:
        train(config)
    assert raised.value.exit_code == 5
    assert all(event["stage"] == 0 and event["micro_batch"] is None for event in skips(config))


def small_steps_are_skipped(state: TrainState, norm: float, training: TrainingConfig) -> str | None:
    """The second step's norm is too small."""
    return f"norm {norm:g} is below 1e9" if state.step == 1 and norm < 1e9 else None


def test_a_rule_skips_a_step_with_its_reason_and_leaves_the_loss_scale(alone, monkeypatch):
    monkeypatch.setattr(skipped_step, "RULES", [small_steps_are_skipped])
    scales, begin = [], Stage.begin

    def noted(self: Stage, info: StepInfo, *args: Any) -> None:
        scales.append(info.loss_scale)
        begin(self, info, *args)

    monkeypatch.setattr(Stage, "begin", noted)
    training = {"fp16": True, "max_skipped_steps": 0, "probe_longest_batch": False, "max_steps": 3}
    monkeypatch.setattr(LossScale, "for_training", lambda fp16: LossScale(1024.0))
    config = alone(training=training)
    assert train(config).steps == 3
    lines = metrics(config)
    assert [line.get("skipped") for line in lines] == [None, "rule", None]
    reason = f"norm {lines[1]['grad_norm']:g} is below 1e9"
    assert lines[1]["reason"] == reason
    [event] = skips(config)
    assert (event["step"], event["kind"], event["reason"]) == (2, "rule", reason)
    log = (config.output_dir / "logs" / "coordinator.log").read_text()
    assert f"step 2: {reason}; step skipped" in log
    assert scales == [1024.0] * 3
    assert lines[1]["learning_rate"] == lines[2]["learning_rate"]
