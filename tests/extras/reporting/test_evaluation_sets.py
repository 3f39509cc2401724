"""Several evaluation sets in a run of one process, beside those of the Trainer."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError, ConfigError, DataError, StoppedEarly
from hetero_framework.extras.observe.curves import draw, read_run
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.metrics import by_set
from tests.alone import Alone
from tests.extras.reporting.test_callbacks import (
    Recorder,
    assert_same_best,
    compare,
    lines,
    logged,
    theirs,
)
from tests.samples import save_texts

SETS = {"math": 5, "math_hard": 3, "chat": 7}


def with_sets(alone: Alone, tmp_path: Path, **training: Any) -> Config:
    files = {
        name: str(save_texts(tmp_path / f"{name}.jsonl", count, seed=count))
        for name, count in SETS.items()
    }
    texts = save_texts(tmp_path / "uneven.jsonl", 11)
    data = {"train": str(texts), "max_length": 32, "eval": files}
    return alone(training={"eval_strategy": "steps", "eval_steps": 2, **training}, data=data)


@pytest.mark.long
def test_each_set_is_logged_and_told_as_by_the_trainer(alone, tmp_path):
    config = with_sets(alone, tmp_path, eval_on_start=True, per_device_eval_batch_size=2)
    ours, other = Recorder(), Recorder()
    summary = train(config, callbacks=[ours])
    trainer = theirs(config, tmp_path / "trainer", other)
    assert ours.events == other.events
    compare(ours.state, trainer.state)
    told = [[key for key in e if key.endswith("_loss")] for e in ours.state.log_history]
    assert [keys for keys in told if keys][:3] == [[f"eval_{name}_loss"] for name in SETS]
    assert {f"eval_{name}_token_loss" for name in SETS} <= summary.metrics.keys()


@pytest.mark.parametrize(
    ("strategy", "metric"),
    [
        ("best", "eval_math_hard_loss"),
        pytest.param("steps", "eval_math_hard_loss", marks=pytest.mark.long),
        pytest.param("best", "math_loss", marks=pytest.mark.long),
        pytest.param("steps", "math_loss", marks=pytest.mark.long),
    ],
)
def test_the_best_model_by_one_set_is_that_of_the_trainer(metric, strategy, alone, tmp_path):
    training = {
        **{"metric_for_best_model": metric, "load_best_model_at_end": True, "warmup_steps": 1},
        **{"save_strategy": strategy, "eval_steps": 1, "save_steps": 1, "max_steps": 8},
        **{"learning_rate": 0.3, "early_stopping_patience": 2, "save_total_limit": 2},
    }
    config, ours = with_sets(alone, tmp_path, **training), Recorder()
    train(config, callbacks=[ours])
    trainer = theirs(config, tmp_path / "trainer", EarlyStoppingCallback(2))
    assert_same_best(config, ours.state, trainer.state)


class FailingInASet(TrainerCallback):
    """Ends the run once, when the second set of an evaluation is told."""

    def __init__(self, place: Path) -> None:
        self.mark = place / "failed"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        if "eval_math_hard_loss" in metrics and state.global_step == 2 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("once")


@pytest.mark.long
def test_a_run_that_ends_between_two_sets_goes_on_as_if_it_had_not(alone, tmp_path):
    training = {"metric_for_best_model": "chat_loss", "token_metrics": True}
    whole = with_sets(partial(alone, "whole"), tmp_path, **training)
    train(whole)
    config = with_sets(alone, tmp_path, **training)
    failing = FailingInASet(tmp_path)
    with pytest.raises(CallbackError):
        train(config, callbacks=[failing])
    train(config, callbacks=[failing])
    one, other = (logged(c.output_dir / "log_history.jsonl") for c in (config, whole))
    assert one == other
    assert sum("eval_math_hard_entropy" in entry for entry in one) == 2


@pytest.mark.long
def test_the_sets_are_in_the_records_of_the_run(alone, tmp_path):
    config = with_sets(alone, tmp_path)
    train(config)
    metrics = lines(config.output_dir / "metrics.jsonl")
    evaluations = [line for line in metrics if "loss" not in line]
    assert [line["sets"] for line in evaluations] == [list(SETS)] * 2
    found = by_set(evaluations[0])
    assert {name: metrics["eval_samples"] for name, metrics in found.items()} == SETS
    assert found["math"]["eval_loss"] == evaluations[0]["eval_math_loss"]
    assert found["math_hard"]["eval_loss"] == evaluations[0]["eval_math_hard_loss"]
    events = (config.output_dir / "events.jsonl").read_text()
    assert events.count('"eval_chat_loss"') == 2
    run = read_run(config.output_dir, "run")
    assert set(run.evaluations.values()) == {f"evaluation {name}" for name in SETS}
    assert "last evaluation math_hard" in run.summary
    draw([run], tmp_path / "curves.png")
    card = (config.result_dir / "README.md").read_text()
    assert "eval math hard loss" in card


def test_sets_come_from_python(alone):
    rows = [{"text": "a model of words"}, {"text": "the stage holds its layers"}]
    config = alone(training={"eval_strategy": "epoch"}, data=None)
    summary = train(config, train_dataset=rows, eval_dataset={"one": rows, "two": rows[:1]})
    assert {"eval_one_loss", "eval_two_loss"} <= summary.metrics.keys()
    with pytest.raises(DataError, match=r"eval_dataset\['two'\]: this int holds"):
        train(alone("other"), eval_dataset={"one": rows, "two": 5})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({}, "names no data"),
        ({"a": []}, "names no data"),
        ({"": "a"}, "the name of an evaluation set has 1 to 64"),
        ({"math": "a", "math_token": "b"}, "eval_math_token_loss would be a metric of"),
        ({"token": "a"}, "eval_token_loss would be a metric of an only set too"),
    ],
)
def test_names_that_clash_or_say_nothing_are_refused(sets, said, alone, tmp_path):
    with pytest.raises(ConfigError, match=said):
        alone(data={"train": "a.jsonl", "eval": sets})


def test_a_metric_of_no_set_is_refused_before_the_run(alone, tmp_path):
    config = with_sets(alone, tmp_path, metric_for_best_model="loss")
    with pytest.raises(ConfigError, match='"loss", which no evaluation gives') as raised:
        train(config)
    assert "math_loss, math_token_loss" in str(raised.value)
    assert not config.output_dir.exists()


def test_an_evaluation_cut_short_between_sets_leaves_no_line(alone, tmp_path, monkeypatch):
    from hetero_framework.trainer import coordinator

    real = coordinator.Coordinator._evaluated

    def cut(self: Any, name: str) -> Any:
        if name == "chat" and self._state.step == 2:
            raise coordinator._Interrupted
        return real(self, name)

    monkeypatch.setattr(coordinator.Coordinator, "_evaluated", cut)
    config = with_sets(alone, tmp_path)
    for steps in ([], [2, 4]):
        with contextlib.nullcontext() if steps else pytest.raises(StoppedEarly):
            train(config)
        found = lines(config.output_dir / "metrics.jsonl")
        assert [line["step"] for line in found if "sets" in line] == steps
        monkeypatch.undo()
