"""transformers' callbacks in a run of one process, beside the Trainer's with the same ones."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hetero_framework import control
from hetero_framework.config import Config
from hetero_framework.errors import CallbackError, ConfigError, StoppedEarly
from hetero_framework.extras.reporting import callbacks, reporters
from hetero_framework.trainer import coordinator
from hetero_framework.trainer.coordinator import train
from tests.alone import Alone
from tests.cases import seldom
from tests.integration.oracles import tokenized
from tests.samples import save_llama, save_texts

TIMES = ("runtime", "per_second")
"""Parts of the names of what differs from run to run."""
STATE = "trainer_state.json"


class Recorder(TrainerCallback):
    """What a callback is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.state: Any = None
        self.kinds: set[tuple[type, ...]] = set()

    def note(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flags = {name: value for name, value in vars(control).items() if value is True}
        place = (state.global_step, round(state.epoch or 0, 6), state.total_flos)
        self.events.append((event, *place, flags))
        self.state = state
        self.kinds.add((type(args), type(state), type(control)))


EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
    *("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_step_end", "on_log", "on_prediction_step", "on_evaluate", "on_save"),
)
"""Of a training; on_predict and on_push_begin are others'."""
for _event in EVENTS:
    setattr(Recorder, _event, partialmethod(Recorder.note, _event))


def theirs(config: Config, output: Path, *told: TrainerCallback, **functions: Any) -> Trainer:
    """The Trainer's run with the same settings, and these functions for metrics."""
    model = str(config.model.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = tokenized(Path(str(config.data.train)), tokenizer, 32)
    sets = config.data.eval_sets.items()
    evaluated = {name: tokenized(Path(str(spec)), tokenizer, 32) for name, spec in sets}
    names = set(TrainingArguments.__dataclass_fields__)
    given = {k: v for k, v in config.training.model_dump(exclude_unset=True).items() if k in names}
    given |= {"output_dir": str(output), "logging_steps": config.training.logging_steps}
    given |= {"eval_strategy": config.training.evaluation, "optim": "adamw_torch"}
    given |= {"report_to": "none"}
    whole: Any = AutoModelForCausalLM.from_pretrained(model)
    if config.adapter is not None:
        adapter = config.adapter.model_dump(include=config.adapter.model_fields_set)
        whole = get_peft_model(whole, LoraConfig(task_type="CAUSAL_LM", **adapter))
    trainer = Trainer(
        whole,
        TrainingArguments(**given, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False),
        train_dataset=rows,
        eval_dataset=evaluated.get("", evaluated or None),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[*told],
        **functions,
    )
    trainer.train()
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "an_odd_rest": {
        **{"logging_first_step": True, "logging_steps": 3, "save_strategy": "steps"},
        **{"save_steps": 3, "include_num_input_tokens_seen": "all"},
    },
    "a_share": {
        **{"logging_steps": 0.5, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2},
        "include_num_input_tokens_seen": "non_padding",
    },
    "epochs": {
        **{"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"},
        **{"eval_strategy": "epoch", "per_device_eval_batch_size": 3},
    },
    "part_of_an_epoch": {
        **{"max_steps": 5, "logging_strategy": "no", "eval_strategy": "epoch"},
        "save_strategy": "epoch",
    },
    "evaluated_first_and_last": {
        **{"max_steps": 5, "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 3},
        **{"logging_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
    },
    "one_at_a_time": {"gradient_accumulation_steps": 1, "warmup_steps": 2, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("case", seldom(CASES, "a_share", "part_of_an_epoch", "one_at_a_time"))
def test_callbacks_are_told_what_the_trainer_tells_them(case, alone, tmp_path):
    config = told_about(alone, tmp_path, CASES[case])
    ours, other = Recorder(), Recorder()
    train(config, callbacks=[ours])
    trainer = theirs(config, tmp_path / "trainer", other)
    assert ours.events == other.events
    assert ours.kinds == {(TrainingArguments, TrainerState, TrainerControl)}
    compare(ours.state, trainer.state)


def told_about(alone: Alone, tmp_path: Path, training: dict[str, Any]) -> Config:
    texts = save_texts(tmp_path / "uneven.jsonl", 11)
    data = {"train": str(texts), "max_length": 32}
    if "eval_strategy" in training:
        data["eval"] = str(texts)
    return alone(training=training, data=data)


def compare(ours: TrainerState, other: TrainerState) -> None:
    assert [*map(list, ours.log_history)] == [*map(list, other.log_history)]
    for one, two in zip(ours.log_history, other.log_history, strict=True):
        for name, value in two.items():
            if not any(part in name for part in TIMES):
                assert one[name] == pytest.approx(value, rel=1e-6), (one, two, name)
    for name in (
        *("num_input_tokens_seen", "total_flos", "global_step", "epoch", "max_steps"),
        *("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "train_batch_size"),
    ):
        assert getattr(ours, name) == pytest.approx(getattr(other, name)), name


def assert_same_best(config: Config, ours: TrainerState, other: TrainerState) -> None:
    """Also the same checkpoints are left, where `other` is of a run beside this one's folder."""
    compare(ours, other)
    assert ours.best_metric == pytest.approx(other.best_metric, rel=1e-6)
    assert ours.best_global_step == other.best_global_step
    kept = config.output_dir.with_name("trainer").glob("checkpoint-*")
    assert steps_of(config) == set(map(number, kept))


LORA: dict[str, Any] = {"r": 2, "target_modules": ("q_proj", "v_proj")}
# An adapter, and whether weights are tied.
COUNTED: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "tied": (None, True),
    "adapter": (LORA, False),
    "adapted_embedding": ({**LORA, "target_modules": ("embed_tokens", "up_proj")}, False),
    "saved_head": ({**LORA, "modules_to_save": ("lm_head",)}, False),
    "saved_embedding": ({**LORA, "modules_to_save": ("embed_tokens",)}, True),
    "dora": ({**LORA, "use_dora": True}, True),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", seldom(COUNTED, *(set(COUNTED) - {"saved_head", "dora"})))
def test_operations_are_counted_as_by_the_trainer(case, alone, tmp_path):
    adapter, tied = COUNTED[case]
    model = save_llama(tmp_path / "model", layers=1, tie_word_embeddings=tied)
    training = {"logging_steps": 2, "save_strategy": "steps", "save_steps": 3}
    sections = {"model": {"name_or_path": str(model)}, "adapter": adapter}
    config = told_about(partial(alone, **sections), tmp_path, training)
    ours, other = Recorder(), Recorder()
    train(config, callbacks=[ours])
    trainer = theirs(config, tmp_path / "trainer", other)
    assert ours.events == other.events
    assert ours.state.total_flos == trainer.state.total_flos > 0
    last = ours.state.log_history[-1]
    assert last["total_flos"] == trainer.state.log_history[-1]["total_flos"]


class At(TrainerCallback):
    """Sets a flag of the control at an event of a step."""

    def __init__(self, event: str, step: int, **flags: bool) -> None:
        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step != step:
                return None
            changed = copy.copy(control)
            vars(changed).update(flags)
            return changed

        setattr(self, event, act)


Acts = list[tuple[str, int, bool]]  # an event, the step, and the flag's new value
FEW: dict[str, Acts] = {
    "training_stop on_train_begin": [("on_train_begin", 0, True)],
    "training_stop on_epoch_begin": [("on_epoch_begin", 2, True)],
    "training_stop on_evaluate": [("on_evaluate", 2, True)],
    "epoch_stop": [("on_step_begin", 1, True), ("on_substep_end", 2, True)],
    "evaluate": [("on_optimizer_step", 1, True), ("on_evaluate", 2, True), ("on_save", 4, True)],
    "save": [
        ("on_pre_optimizer_step", 1, True),
        ("on_log", 2, True),
        ("on_prediction_step", 3, True),
    ],
    "log": [("on_step_end", 1, True), ("on_step_end", 2, False), ("on_epoch_end", 3, True)],
}
"""Acts of several kinds in one run, by their flag."""
EVERY: dict[str, Acts] = {
    f"{flag.name.removeprefix('should_')} alone {event}": [
        (event, 0 if event in ("on_init_end", "on_train_begin") else 2, True)
    ]
    for event in EVENTS
    for flag in fields(TrainerControl)
}
RARE = ("training_stop on_train_begin", "training_stop on_epoch_begin", "log")


@pytest.mark.parametrize("case", seldom([*FEW, *EVERY], *EVERY, *RARE))
def test_every_event_may_set_every_flag_as_for_the_trainer(case, alone, tmp_path):
    flag = case.split()[0]
    # Two micro-batches a step, and one: the Trainer looks at some flags between two alone.
    accumulated, strategy = (2, "steps") if flag != "save" else (1, "epoch")
    training = {
        **{"logging_steps": 2, "max_steps": -1, "num_train_epochs": 2, "eval_on_start": True},
        **{"gradient_accumulation_steps": accumulated, "save_total_limit": 2},
        **{"eval_strategy": strategy, "save_strategy": strategy},
        **({"eval_steps": 2, "save_steps": 2} if strategy == "steps" else {}),
    }
    config = told_about(alone, tmp_path, training)

    def acts() -> list[TrainerCallback]:
        wanted = (FEW | EVERY)[case]
        return [At(event, step, **{f"should_{flag}": value}) for event, step, value in wanted]

    ours, other = Recorder(), Recorder()
    train(config, callbacks=[*acts(), ours])
    trainer = theirs(config, tmp_path / "trainer", *acts(), other)
    assert ours.events == other.events
    compare(ours.state, trainer.state)
    kept = {number(path) for path in (tmp_path / "trainer").glob("checkpoint-*")}
    assert steps_of(config) == kept


class _Killed(BaseException):
    """Nothing is done any more, as after a kill."""


@pytest.mark.parametrize(
    ("method", "stops"), [("evaluate", False), ("sample", False), ("save", False), ("save", True)]
)
def test_what_was_due_when_a_run_was_killed_is_done_when_it_goes_on(
    method, stops, alone, tmp_path, monkeypatch
):
    """As settings and callbacks want it after step 2; nothing is done twice."""
    training = {
        **{"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4},
        **{"logging_steps": 2, "max_steps": 4, "replicate_steps": 1},
        **{"sample_prompts": ["a"], "sample_steps": 2, "sample_max_new_tokens": 2},
    }
    flags = {"should_evaluate": True, "should_save": True, "should_log": False}
    asking = [At("on_step_end", 2, **flags), At("on_evaluate", 2, should_training_stop=stops)]
    adapter = {"r": 2, "target_modules": "all-linear"}
    whole, again = (
        told_about(partial(alone, name, adapter=adapter), tmp_path, training)
        for name in ("whole", "again")
    )
    train(whole, callbacks=asking)
    usual = getattr(coordinator.Coordinator, method)

    def die(self: Any) -> None:
        if self._state.step == 2:
            self._checkpoints.hold(self._state)
            raise _Killed
        usual(self)

    with monkeypatch.context() as patch:
        patch.setattr(coordinator.Coordinator, method, die)
        with pytest.raises(_Killed):
            train(again, callbacks=asking)
    train(again, callbacks=[TrainerCallback()])
    for file in ("log_history.jsonl", "samples.jsonl"):
        assert logged(again.output_dir / file) == logged(whole.output_dir / file)
    assert steps_of(again) == steps_of(whole) == ({2} if stops else {2, 4})


EACH = {"eval_steps": 1, "save_steps": 1}
BEST: dict[str, dict[str, Any]] = {
    "saved_less_often": {"eval_steps": 1, "save_steps": 3, "save_total_limit": 2},
    "one_is_kept": {**EACH, "save_total_limit": 1},
    "by_epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2},
    "only_the_best": {"eval_steps": 1, "save_strategy": "best", "save_total_limit": 1},
    "stopped_by_a_threshold": {
        **EACH,
        **{"early_stopping_patience": 1, "early_stopping_threshold": 0.2},
    },
    "the_worst_after_the_third": {**EACH, "eval_delay": 3, "greater_is_better": True},
    "not_saved": {**EACH, "greater_is_better": True, "save_total_limit": 2},
}


@pytest.mark.parametrize("case", seldom(BEST, "by_epoch", "saved_less_often", "not_saved"))
def test_the_best_model_is_that_of_the_trainer(case, alone, tmp_path):
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    # So large a rate that the loss goes up and down.
    training = {**steps, "max_steps": 8, "learning_rate": 0.3, "warmup_steps": 1, **BEST[case]}
    config, ours = told_about(alone, tmp_path, training), Recorder()
    unsaved = [At("on_step_end", 2, should_save=False)] * (case == "not_saved")
    train(config, callbacks=[*unsaved, ours])
    patience = config.training.early_stopping_patience
    threshold = config.training.early_stopping_threshold
    early = [EarlyStoppingCallback(patience, threshold)] if patience else []
    trainer = theirs(config, tmp_path / "trainer", *early, *unsaved)
    assert_same_best(config, ours.state, trainer.state)
    best, other = ours.state.best_model_checkpoint, trainer.state.best_model_checkpoint
    assert number(best) == number(other)
    assert (number(best) == ours.state.best_global_step) != case.startswith("not_saved")
    result = load_file(config.result_dir / "model.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-4, atol=1e-5)
    if (step := ours.state.best_global_step) == number(best):
        figures = f"- eval loss {ours.state.best_metric:.4g} (step {step})"
        assert figures in (config.result_dir / "README.md").read_text()


class Acting(TrainerCallback):
    """Does something at an event after step 4, the last."""

    def __init__(self, event: str, act: Callable[..., None]) -> None:
        def told(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4 and (event != "on_log" or "train_loss" in kwargs["logs"]):
                act()

        setattr(self, event, told)


LAST: dict[str, Any] = {
    **{"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2},
    **{"load_best_model_at_end": False, "logging_steps": 2},
}


@pytest.mark.parametrize(
    "event",
    seldom(
        ("on_step_end", "on_evaluate", "on_save", "on_epoch_end", "on_log", "on_train_end"),
        *("on_step_end", "on_epoch_end"),
    ),
)
def test_a_callback_that_fails_after_the_last_step_costs_no_result(event, alone, tmp_path):
    def fail() -> None:
        raise KeyError("no such dial")

    config, whole = (told_about(partial(alone, n), tmp_path, LAST) for n in ("run", "whole"))
    train(whole)
    with pytest.raises(CallbackError, match=f"failed in {event}") as raised:
        train(config, callbacks=[Acting(event, fail)])
    assert str(config.result_dir) in str(raised.value)
    assert model_of(config) == model_of(whole)
    if event != "on_train_end":  # the same command does what is missing
        train(config, callbacks=[TrainerCallback()])
    assert not (config.output_dir / ".unfinished").exists()
    assert steps_of(config) == {2, 4}


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate", "on_save", "on_log"])
def test_a_stop_after_the_last_step_leaves_nothing_out(event, alone, tmp_path):
    """Before the last evaluation, after it, and before the result is written."""
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    config, whole = (told_about(partial(alone, n), tmp_path, LAST) for n in ("run", "whole"))
    train(whole, callbacks=[TrainerCallback()])
    stopped = pytest.raises(StoppedEarly) if event == "on_step_end" else contextlib.nullcontext()
    with stopped:
        train(config, callbacks=[Acting(event, stop)])
    if event == "on_step_end":
        again = Recorder()
        train(config, callbacks=[again])
        told = [name for name, *_ in again.events if name not in ("on_init_end", "on_train_begin")]
        evaluated = ["on_prediction_step"] * 2 + ["on_log", "on_evaluate"]
        assert told == [*evaluated, "on_save", "on_epoch_end", "on_log", "on_train_end"]
    for file in ("log_history.jsonl", "metrics.jsonl"):
        ours, other = logged(config.output_dir / file), logged(whole.output_dir / file)
        assert [timeless(line) for line in ours] == [timeless(line) for line in other]
    assert steps_of(config) == steps_of(whole) == {2, 4}
    assert model_of(config) == model_of(whole)


def model_of(config: Config) -> bytes:
    return (config.result_dir / "model.safetensors").read_bytes()


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    own = ("loss", "grad", "rate", "epoch", "step", "total_flos")
    return {k: v for k, v in line.items() if k.endswith(own)}


def to_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("in the way")


@pytest.mark.parametrize(
    ("damage", "limit", "resumed"),
    [
        (shutil.rmtree, None, False),
        (shutil.rmtree, 1, True),
        (lambda path: next(path.glob("s*")).unlink(), 2, True),
        (lambda path: next(path.glob("s*")).write_bytes(b"x"), None, False),
        (lambda path: next(path.glob("s*")).write_bytes(b"x"), 1, True),
        (to_file, 2, False),
    ],
    ids=["deleted", "one kept", "half", "damaged", "damaged before", "a file"],
)
def test_a_best_checkpoint_that_is_gone_leaves_the_last_state(
    damage, limit, resumed, alone, tmp_path
):
    training = {**LAST, "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    training |= {"max_steps": 6, "greater_is_better": True, "save_total_limit": limit}
    training |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}  # so that step 1 is best
    config = told_about(alone, tmp_path, training)
    gone = config.checkpoints / "step_1"
    if resumed:
        with pytest.raises(CallbackError):
            train(config, callbacks=[Acting("on_evaluate", lambda: 1 / 0)])
        damage(gone)
    acting = Acting("on_evaluate", (lambda: None) if resumed else lambda: damage(gone))
    summary = train(config, callbacks=[acting])
    result = load_file(config.result_dir / "model.safetensors")
    last = load_file(next((config.checkpoints / "step_6").glob("*.safetensors")))
    for name, tensor in result.items():
        assert torch.equal(tensor, last[f"weights/{name}"])
    texts = [path.read_text() for path in config.output_dir.glob("logs/*.log")]
    assert "the last state is the result" in "".join(texts)
    state = json.loads((config.output_dir / STATE).read_text())
    assert state["best_global_step"] == 1
    named = state["best_model_checkpoint"]
    assert named == str(gone) or (resumed and named is None)
    assert summary.best_checkpoint is None


def number(path: str | Path | None) -> int:
    return int(str(path).replace("_", "-").rpartition("-")[2])


@pytest.mark.long
def test_a_run_that_is_stopped_again_and_again_has_the_same_best_model(
    alone, tmp_path, monkeypatch
):
    training = {
        **{"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True},
        **{"eval_steps": 1, "save_steps": 1, "max_steps": 8, "learning_rate": 0.3},
        **{"warmup_steps": 1, "early_stopping_patience": 3, "save_total_limit": 2},
    }
    whole = told_about(alone, tmp_path, training)
    train(whole)
    config = told_about(partial(alone, "again"), tmp_path, training)
    for _ in range(12):
        with contextlib.suppress(CallbackError):
            train(config, callbacks=[FailingOnce(config.output_dir)])
            break
    assert config.output_dir.joinpath("failed").read_text() == "1234"
    history = "log_history.jsonl"
    assert logged(config.output_dir / history) == logged(whole.output_dir / history)
    assert model_of(config) == model_of(whole)
    assert steps_of(config) == steps_of(whole)
    one, two = (json.loads((c.output_dir / STATE).read_text()) for c in (config, whole))
    assert one["total_flos"] == two["total_flos"] > 0


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def logged(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if not any(t in name for t in TIMES)}
        for entry in lines(path)
        if "remote_run" not in entry
    ]


def steps_of(config: Config) -> set[int]:
    return {number(path) for path in config.checkpoints.glob("step_*")}


class FailingOnce(TrainerCallback):
    """Ends the run in the evaluation of each of the steps 1 to 4, once."""

    def __init__(self, place: Path) -> None:
        self.file = place / "failed"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = self.file.read_text() if self.file.exists() else ""
        if state.global_step <= 4 and str(state.global_step) not in done:
            self.file.write_text(done + str(state.global_step))
            raise RuntimeError("once")


class Failing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("no such dial")


def test_a_callback_that_raises_ends_the_run_with_its_name_and_the_work_saved(alone):
    config = alone()
    with pytest.raises(CallbackError, match="the callback Failing failed in on_step_end") as error:
        train(config, callbacks=[Failing])
    assert "KeyError: 'no such dial'" in error.value.message
    assert "continue after step 2" in str(error.value)
    assert (config.checkpoints / "step_2" / "manifest.json").exists()
    recorder, whole = Recorder(), Recorder()
    train(config, callbacks=[recorder])
    train(alone("whole"), callbacks=[whole])
    assert losses(recorder.state) == losses(whole.state)


def losses(state: TrainerState) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in state.log_history if "loss" in entry]


def test_a_state_that_the_trainer_can_read_is_written(alone):
    config, recorder = alone(training={"logging_steps": 2}), Recorder()
    train(config, callbacks=[recorder])
    read = TrainerState.load_from_json(str(config.output_dir / STATE))
    assert read.log_history == recorder.state.log_history
    control = read.stateful_callbacks["TrainerControl"]
    assert TrainerControl(**control["args"]).should_training_stop
    assert asdict(read)["global_step"] == 4


def test_what_is_no_callback_is_refused(alone):
    with pytest.raises(ConfigError, match="is no callback"):
        train(alone(), callbacks=[print])


def test_a_run_without_callbacks_leaves_no_history(alone):
    config = alone()
    train(config)
    assert not (config.output_dir / "log_history.jsonl").exists()
    assert all(math.isfinite(line["loss"]) for line in lines(config.output_dir / "metrics.jsonl"))


class Down(TrainerCallback):
    """A reporter whose server is away."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to the server")


def test_a_reporter_that_fails_is_told_once_and_the_run_goes_on(alone, monkeypatch):
    monkeypatch.setattr(callbacks, "reporters", lambda config: [Down])
    config = alone(training={"report_to": "all"})
    assert train(config).steps == 4
    log = (config.output_dir / "logs" / "coordinator.log").read_text()
    assert log.count("Down reports no more: ConnectionError: no route to the server") == 1


def test_a_reporter_that_is_not_installed_is_named_before_the_run(alone):
    config = alone(training={"report_to": ["clearml"]})
    with pytest.raises(ConfigError, match="asks for clearml, which is not installed") as raised:
        train(config)
    assert "pip install clearml" in str(raised.value)
    assert not config.output_dir.joinpath("metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("written", "read"),
    [("none", ()), ("wandb", ("wandb",)), (["trackio", "tensorboard"], ("trackio", "tensorboard"))],
)
def test_reporters_are_a_name_or_a_list(written, read, alone):
    assert alone(training={"report_to": written}).training.report_to == read


def needs_package(name: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed")


SAMPLED = {"sample_prompts": ["red green"], "sample_steps": 1, "sample_max_new_tokens": 5}


@pytest.mark.long
@needs_package("wandb")
def test_wandb_offline_gets_the_history_and_a_resumed_run_goes_on_with_its_run(alone, tmp_path):
    config = alone(training={"report_to": "wandb", "run_name": "mine", "project": "cut", **SAMPLED})
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    fail_and_go_on(config, tmp_path, environment)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    assert len(folders) == 2
    (run,) = {run for line in histories(config) if (run := line.get("remote_run"))}
    assert folders[0].name.endswith(run)
    tables = [*folders[0].glob("files/media/table/*"), *folders[1].glob("files/media/table/*")]
    tables.sort(key=lambda path: json.loads(path.read_text())["data"][0][0])
    rows = [row for path in tables for row in json.loads(path.read_text())["data"]]
    assert rows == [[line["step"], line["prompt"], line["text"]] for line in sampled_by(config)]


@pytest.mark.long
@needs_package("trackio")
def test_trackio_gets_every_value_of_the_history(alone, tmp_path):
    config = alone(training={"report_to": "trackio", "project": "cut", **SAMPLED})
    fail_and_go_on(config, tmp_path, {"TRACKIO_DIR": str(tmp_path / "trackio")})
    database = sqlite3.connect(next((tmp_path / "trackio").glob("*.db")))
    with contextlib.closing(database):
        rows = database.execute("select run_name, metrics from metrics").fetchall()
    assert len({name for name, _ in rows}) == 1
    values = [json.loads(text) for _, text in rows]
    losses = [found["train/loss"] for found in values if "train/loss" in found]
    assert losses == [line["loss"] for line in histories(config) if "loss" in line]
    told = [row for found in values if "samples" in found for row in found["samples"]["_value"]]
    assert [row["text"] for row in told] == [line["text"] for line in sampled_by(config)]


@needs_package("mlflow")
def test_a_resumed_run_goes_on_with_its_run_of_mlflow(alone, tmp_path):
    config = alone(training={"report_to": "mlflow", "run_name": "mine"})
    store = tmp_path / "mlruns"
    environment = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    fail_and_go_on(config, tmp_path, environment)
    (losses,) = store.glob("*/*/metrics/loss")
    steps = [int(line.split()[-1]) for line in losses.read_text().splitlines()]
    assert steps == [line["step"] for line in histories(config) if "loss" in line]


def test_reporters_are_told_the_run_that_goes_on(alone, monkeypatch):
    """By the environment, as the callbacks of wandb, Comet and SwanLab read it."""
    names = ("WANDB_RUN_ID", "COMET_EXPERIMENT_KEY", "SWANLAB_RUN_ID", "SWANLAB_RESUME")
    told: list[dict[str, str]] = []

    class Reader(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            told.append({name: os.environ[name] for name in names})

    monkeypatch.setattr(callbacks, "reporters", lambda config: [Reader])
    monkeypatch.setattr(reporters, "check", lambda config: None)
    config = alone(training={"report_to": ["wandb", "comet_ml", "swanlab"]})
    with pytest.raises(CallbackError):
        train(config, callbacks=[Failing])
    train(config)
    assert told[0] == told[1]
    assert 32 <= len(told[0]["COMET_EXPERIMENT_KEY"]) <= 50
    assert not set(names) & os.environ.keys()


def sampled_by(config: Config) -> list[dict[str, Any]]:
    return lines(config.output_dir / "samples.jsonl")


def histories(config: Config) -> list[dict[str, Any]]:
    return lines(config.output_dir / "log_history.jsonl")


def fail_and_go_on(config: Config, place: Path, environment: dict[str, str]) -> None:
    """A callback ends the run after its second step, and the same command goes on, each in a
    process of its own: reporters hold global state."""
    file = place / "run.json"
    file.write_text(json.dumps(config.to_dict()))
    program = f"""
import sys
from pathlib import Path
from hetero_framework.config import load_config
from hetero_framework.errors import CallbackError
from hetero_framework.trainer import coordinator
from hetero_framework.trainer.coordinator import train
from tests.extras.reporting.test_callbacks import Failing
try:
    train(load_config(Path({str(file)!r})), callbacks=[Failing] if sys.argv[1:] else [])
except CallbackError:
    sys.exit(7)
"""
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    for words, code in ((["fails"], 7), ([], 0)):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr[-3000:]


def test_the_examples_of_the_page_run(alone, tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs" / "python.md"
    blocks = page.read_text(encoding="utf-8").split("```python\n")[1:]
    _, _, first, second, third = (block.partition("```")[0] for block in blocks)
    config = alone()
    (tmp_path / "hetero_config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.chdir(tmp_path)
    Path("first.py").write_text(first)
    model = runpy.run_path("first.py")["model"]
    assert isinstance(model, PreTrainedModel)
    Path("second.py").write_text(second.replace("10.0) < 1.0", "10.0) < 5.7"))
    runpy.run_path("second.py")
    metrics = config.output_dir / "metrics.jsonl"
    assert len(lines(metrics)) == 2  # of four steps
    data = {"eval": config.data.train}
    evaluating = config.with_changes(data=data, training={"eval_strategy": "epoch", "seed": 1})
    (tmp_path / "hetero_config.json").write_text(json.dumps(evaluating.to_dict()))
    fresh = third.replace(", compute_metrics=", ", fresh=True, compute_metrics=")
    Path("third.py").write_text(fresh)
    runpy.run_path("third.py")
    assert 0 <= lines(metrics)[-1]["eval_accuracy"] <= 1


def test_a_file_on_the_command_line_brings_callbacks(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(control, "_callbacks", [])
    monkeypatch.setattr(control, "_imported", [])
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.extras.reporting.test_callbacks import Failing\ncallbacks = [Failing]\n"
    )
    control.import_file(file)
    with pytest.raises(CallbackError, match="Failing failed"):
        train(alone())
