"""Accuracy, entropy and tokens of a run of one process, beside those of TRL's SFTTrainer."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState
from trl import SFTConfig, SFTTrainer

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError
from hetero_framework.trainer.coordinator import train
from tests.alone import Alone
from tests.cases import seldom
from tests.extras.reporting.test_callbacks import (
    Failing,
    Recorder,
    compare,
    lines,
    model_of,
    steps_of,
)
from tests.integration.oracles import read_rows
from tests.samples import save_texts

NAMES = {"entropy", "mean_token_accuracy", "num_tokens"}


def measured(alone: Alone, tmp_path: Path, training: dict[str, Any], **data: Any) -> Config:
    texts = save_texts(tmp_path / "uneven.jsonl", 11)
    data = {"train": str(texts), "max_length": 32, **data}
    if "eval_strategy" in training:
        data["eval"] = str(texts)
    return alone(training={"token_metrics": True, **training}, data=data)


def sft_state(config: Config, output: Path) -> TrainerState:
    """The state of TRL's run with the same settings, and what it evaluates last."""
    known = {field.name for field in fields(SFTConfig)}
    given = config.training.model_dump(exclude_unset=True)
    given |= config.data.model_dump(include={"max_length", "padding_free"})
    given |= {"output_dir": str(output), "logging_steps": config.training.logging_steps}
    given |= {"eval_strategy": config.training.evaluation, "optim": "adamw_torch"}
    given |= {"report_to": "none", "bf16": False, "dataloader_pin_memory": False}
    off = "activation_checkpointing"  # the name since transformers 5.20
    given[off if off in known else "gradient_checkpointing"] = False
    rows = datasets.Dataset.from_list(read_rows(Path(str(config.data.train))))
    model = str(config.model.name_or_path)
    told = {name: value for name, value in given.items() if name in known}
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        SFTConfig(**told, use_cpu=True, disable_tqdm=True),
        train_dataset=rows,
        eval_dataset=rows if config.data.eval else None,
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return trainer.state


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "each_step": ({}, {}),
    "an_odd_rest": ({"logging_steps": 3}, {}),
    "evaluated": (
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {},
    ),
    "evaluated_last": ({"logging_steps": 3, "eval_strategy": "epoch", "max_steps": 5}, {}),
    "uneven_steps": ({"gradient_accumulation_steps": 4, "logging_steps": 2}, {}),
    "not_logged": ({"logging_strategy": "no"}, {}),
    "in_chunks": ({"loss_chunk_tokens": 7, "eval_strategy": "epoch"}, {}),
    "without_padding": ({"eval_strategy": "epoch"}, {"padding_free": True, "max_length": None}),
    "smoothed": ({"label_smoothing_factor": 0.1, "loss_chunk_tokens": 7}, {}),
}


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", seldom(CASES, "an_odd_rest", "smoothed"))
def test_metrics_are_those_of_sft_trainer(case, alone, tmp_path):
    training, data = CASES[case]
    config, ours = measured(alone, tmp_path, training, **data), Recorder()
    train(config, callbacks=[ours])
    other = sft_state(config, tmp_path / "trl")
    logged = {name for entry in ours.state.log_history for name in entry}
    assert logged >= NAMES
    compare(ours.state, other)


def test_the_best_model_is_that_of_sft_trainer(alone, tmp_path):
    training = {
        **{"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"},
        **{"max_steps": 6, "learning_rate": 0.3, "warmup_steps": 1, "save_total_limit": 1},
        **{"load_best_model_at_end": True, "metric_for_best_model": "mean_token_accuracy"},
    }
    config, ours = measured(alone, tmp_path, training), Recorder()
    train(config, callbacks=[ours])
    other = sft_state(config, tmp_path / "trl")
    assert ours.state.best_metric == pytest.approx(other.best_metric, rel=1e-6)
    assert ours.state.best_global_step == other.best_global_step
    assert steps_of(config) == {other.best_global_step}


def test_nothing_else_changes_and_nothing_is_measured_unasked(alone, tmp_path):
    training = {"loss_chunk_tokens": 16, "eval_strategy": "epoch"}
    config, plain = (
        measured(partial(alone, name), tmp_path, {**training, **more})
        for name, more in (("measured", {}), ("plain", {"token_metrics": False}))
    )
    for each in (config, plain):
        train(each)
    written = (lines(c.output_dir / "metrics.jsonl") for c in (config, plain))
    for one, two in zip(*written, strict=True):
        assert {name.removeprefix("eval_") for name in one.keys() - two.keys()} == NAMES
        for name in ("loss", "grad_norm", "eval_loss"):
            assert one.get(name) == two.get(name)
    assert model_of(config) == model_of(plain)


def test_a_resumed_run_logs_what_an_uninterrupted_one_does(alone, tmp_path):
    training = {"logging_steps": 3}
    config, ours, whole = measured(alone, tmp_path, training), Recorder(), Recorder()
    with contextlib.suppress(CallbackError):
        train(config, callbacks=[Failing])
    train(config, callbacks=[ours])
    in_one = measured(partial(alone, "whole"), tmp_path, training)
    train(in_one, callbacks=[whole])
    (first, last), (one, two) = ours.state.log_history, whole.state.log_history
    assert first == one
    assert {name: last[name] for name in NAMES} == {name: two[name] for name in NAMES}
