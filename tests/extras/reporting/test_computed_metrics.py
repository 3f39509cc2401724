"""compute_metrics in a run of one process, beside the Trainer's with the same functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.engine.stage_api import Outcome
from hetero_framework.errors import ConfigError, ProtocolError
from hetero_framework.extras.reporting.computed_metrics import UserMetrics
from hetero_framework.trainer.coordinator import train
from tests.alone import Alone
from tests.cases import seldom
from tests.extras.reporting.test_callbacks import (
    Recorder,
    assert_same_best,
    compare,
    steps_of,
    theirs,
)
from tests.samples import save_texts


def evaluating(alone: Alone, tmp_path: Path, *, sets: bool = False, **training: Any) -> Config:
    texts = str(save_texts(tmp_path / "uneven.jsonl", 11))
    others = {"one": texts, "two": str(save_texts(tmp_path / "two.jsonl", 4, seed=2))}
    data = {"train": texts, "max_length": 32, "eval": others if sets else texts}
    return alone(training={"eval_strategy": "steps", "eval_steps": 2, **training}, data=data)


class Accuracy:
    """Counts the labels that the predictions hit; keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[EvalPrediction] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, Any]:
        self.seen.append(prediction)
        made, labels = prediction.predictions, prediction.label_ids
        made = made[0] if isinstance(made, tuple) else made
        known = labels[:, 1:] != -100
        hits = (made[:, :-1] == labels[:, 1:]) & known
        return {"accuracy": hits.sum() / known.sum(), "labels": int(known.sum())}


def argmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def several(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The likeliest token, its logit, and a number for each row."""
    best = logits.max(-1)
    return best.indices, best.values, (labels != -100).sum(-1)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "by_default": (None, {"eval_on_start": True, "per_device_eval_batch_size": 3}),
    "in_chunks": (None, {"loss_chunk_tokens": 7}),
    "of_sets": (None, {"sets": True, "per_device_eval_batch_size": 3}),
    "preprocessed": (argmax, {"loss_chunk_tokens": 7}),
    "several": (several, {"per_device_eval_batch_size": 3}),
    "smoothed": (None, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.parametrize("case", seldom(CASES, "in_chunks", "smoothed"))
def test_metrics_and_what_they_are_computed_of_are_the_trainers(case, alone, tmp_path):
    preprocess, settings = CASES[case]
    config = evaluating(alone, tmp_path, **settings)
    recorder, ours, others = Recorder(), Accuracy(), Accuracy()
    summary = train(
        config, callbacks=[recorder], compute_metrics=ours, preprocess_logits_for_metrics=preprocess
    )
    functions = {"preprocess_logits_for_metrics": preprocess or argmax, "compute_metrics": others}
    compare(recorder.state, theirs(config, tmp_path / "trainer", **functions).state)
    assert any("accuracy" in name for name in summary.metrics)
    seen = ours.seen[1:]  # one micro-batch comes before the run
    assert len(seen) == len(others.seen) > 1
    for one, two in zip(seen, others.seen, strict=True):
        np.testing.assert_array_equal(one.label_ids, two.label_ids)
        pairs = [(one.predictions, two.predictions)]
        if isinstance(two.predictions, tuple):
            pairs = list(zip(one.predictions, two.predictions, strict=True))
        for made, other in pairs:
            assert made.dtype == other.dtype
            np.testing.assert_allclose(made, other, rtol=1e-4, atol=1e-5)


def test_the_best_model_is_that_of_the_trainer(alone, tmp_path):
    training = {
        **{"eval_steps": 1, "save_steps": 1, "save_strategy": "steps", "max_steps": 6},
        **{"learning_rate": 0.3, "warmup_steps": 1, "save_total_limit": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
    }
    config, recorder = evaluating(alone, tmp_path, **training), Recorder()
    train(config, callbacks=[recorder], compute_metrics=Accuracy())
    functions = {"preprocess_logits_for_metrics": argmax, "compute_metrics": Accuracy()}
    state = theirs(config, tmp_path / "trainer", **functions).state
    assert_same_best(config, recorder.state, state)
    assert recorder.state.best_metric == pytest.approx(state.best_metric, rel=1e-9)
    assert steps_of(config) == {state.best_global_step}


def test_an_imported_file_brings_the_functions(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_functions", {})
    monkeypatch.setattr(control, "_imported", [])
    file = tmp_path / "mine.py"
    file.write_text(
        "def preprocess_logits_for_metrics(logits, labels):\n    return logits[..., 0]\n"
        "def compute_metrics(given):\n    return {'eval_shape': list(given.predictions.shape)}\n"
    )
    control.import_file(file)
    config = evaluating(alone, tmp_path, max_steps=1, eval_steps=1)
    train(config)
    line = (config.output_dir / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["eval_shape"][0] == 11


def failing(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    raise LookupError("no such column")


WRONG: dict[str, tuple[Any, str]] = {
    "fails": (failing, "failed on the last stage: LookupError: no such column"),
    "gives_a_number": (lambda logits, labels: 5, "it gave a int, not a tensor or a tuple"),
    "gives_too_much": (
        lambda logits, labels: torch.zeros(1).expand(1 << 25),
        "it gave 128 MiB for a micro-batch of an evaluation, and at most 64 MiB",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_predictions_that_cannot_be_made_end_a_run_before_its_first_step(case, alone, tmp_path):
    preprocess, said = WRONG[case]
    config = evaluating(alone, tmp_path)
    with pytest.raises(ConfigError, match=said):
        train(config, compute_metrics=Accuracy(), preprocess_logits_for_metrics=preprocess)
    assert not (config.output_dir / "metrics.jsonl").exists()
    assert control.function("preprocess_logits_for_metrics") is None


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda given: {"a": given.no_such_field}, "compute_metrics failed: AttributeError"),
        (lambda given: 0.5, "it gave a float, not metrics by name"),
        (lambda given: {"a": object()}, "not JSON serializable"),
        (lambda given: {"perplexity": 1.0}, "gives 'perplexity', as every evaluation does"),
        (lambda given: {"runtime": 1.0}, "gives 'runtime', as every evaluation does"),
        (lambda given: {"a": "high"}, "is eval_a, which compute_metrics gives as 'high', not as a"),
        (lambda given: {"b": 1.0}, "is eval_a, which no evaluation gives; they give eval_loss"),
    ],
)
def test_a_function_that_fails_ends_a_run_before_its_first_step(compute, said, alone, tmp_path):
    config = evaluating(alone, tmp_path, metric_for_best_model="a")
    with pytest.raises(ConfigError, match=said):
        train(config, compute_metrics=compute)
    assert not (config.output_dir / "metrics.jsonl").exists()


def test_a_function_that_needs_more_than_one_micro_batch_is_given_all(alone, tmp_path):
    def of_many(given: EvalPrediction) -> dict[str, Any]:
        if len(given.label_ids) < 11:
            raise ValueError("only one class is present")
        return {"many": 1.0}

    training = {"per_device_eval_batch_size": 3, "metric_for_best_model": "many"}
    config = evaluating(alone, tmp_path, **training)
    assert train(config, compute_metrics=of_many).metrics["eval_many"] == 1.0


def test_a_metric_that_is_not_computed_is_named_with_those_that_are(alone, tmp_path):
    config = evaluating(alone, tmp_path, metric_for_best_model="f1")
    with pytest.raises(ConfigError, match='is "f1", which no evaluation gives') as raised:
        train(config)
    assert "compute_metrics any" in str(raised.value)
    with pytest.raises(ConfigError, match="is eval_f1, which no evaluation gives") as failed:
        train(config, compute_metrics=Accuracy())
    assert "eval_accuracy" in failed.value.message


def test_a_function_for_another_process_is_refused_before_it_starts(alone, tmp_path):
    worker = {"id": 1, "ip": "127.0.0.1", "port": 1}
    plan = [{"id": "local", "start": 0, "end": 0}, {"id": 1, "start": 0, "end": 1}]
    config = evaluating(alone, tmp_path).with_changes(workers=[worker], shard_plan=plan)
    with pytest.raises(ConfigError, match="in another process, that of worker 1") as raised:
        train(config, compute_metrics=Accuracy(), preprocess_logits_for_metrics=argmax)
    assert "--import" in str(raised.value)


def test_an_objective_without_predictions_is_refused(alone, tmp_path):
    rows = [{"prompt": "a model", "chosen": " of words", "rejected": " of layers"}] * 4
    config = alone(training={"objective": "dpo", "eval_strategy": "epoch"}, data=None)
    with pytest.raises(ConfigError, match='"dpo", which makes no predictions'):
        train(config, train_dataset=rows, eval_dataset=rows, compute_metrics=Accuracy())


def test_what_train_does_not_take_is_refused(alone):
    with pytest.raises(TypeError, match="unexpected keyword argument 'compute_loss_func'"):
        train(alone(), compute_loss_func=print)  # type: ignore[call-arg]


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (0, 4), ()])
@pytest.mark.parametrize("name", ["argmax", "logits"])
def test_predictions_of_other_rows_are_no_fault_of_the_users_function(shape, name):
    metrics, labels = UserMetrics(lambda prediction: {}, cast(Any, None)), [torch.zeros(2, 4)]
    assert metrics.of_set([Outcome(0.0, {name: torch.zeros(2, 4)})], labels, "", ()) == {}
    with pytest.raises(ProtocolError, match="predictions of other rows"):
        metrics.of_set([Outcome(0.0, {name: torch.zeros(shape)})], labels, "", ())
