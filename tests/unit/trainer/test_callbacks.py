"""transformers' callbacks in a run of one process, beside the Trainer's with the same ones."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hetero_framework.config import Config
from hetero_framework.errors import CallbackError, ConfigError
from hetero_framework.trainer.coordinator import train
from tests.integration.oracles import tokenized
from tests.samples import save_texts
from tests.unit.trainer.conftest import Alone

TIMES = ("runtime", "per_second", "total_flos")


class Recorder(TrainerCallback):
    """What a callback is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.state: TrainerState | None = None
        self.kinds: set[tuple[type, ...]] = set()

    def note(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flags = {name: value for name, value in vars(control).items() if value is True}
        self.events.append((event, state.global_step, round(state.epoch or 0, 6), flags))
        self.state = state
        self.kinds.add((type(args), type(state), type(control)))


EVENTS = (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_step_end", "on_pre_optimizer_step", "on_optimizer_step", "on_log", "on_evaluate"),
    "on_save",
)
for _event in EVENTS:
    setattr(
        Recorder,
        _event,
        lambda self, args, state, control, event=_event, **kwargs: self.note(
            event, args, state, control, **kwargs
        ),
    )


def theirs(config: Config, callback: TrainerCallback, output: Path, *more: Any) -> Trainer:
    """The Trainer's run with the same settings."""
    assert config.model is not None
    assert config.data is not None
    model = str(config.model.name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = tokenized(Path(str(config.data.train)), tokenizer, 32)
    names = set(TrainingArguments.__dataclass_fields__)
    given = {k: v for k, v in config.training.model_dump(exclude_unset=True).items() if k in names}
    given |= {"output_dir": str(output), "logging_steps": config.training.logging_steps}
    given |= {"eval_strategy": config.training.evaluation, "optim": "adamw_torch"}
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model),
        TrainingArguments(**given, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False),
        train_dataset=rows,
        eval_dataset=rows if config.data.eval else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[callback, *more],
    )
    trainer.train()
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "logged_in_twos": {"logging_steps": 2},
    "an_odd_rest": {"logging_steps": 3, "save_strategy": "steps", "save_steps": 3},
    "a_share": {"logging_steps": 0.5, "max_steps": 6},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
    "part_of_an_epoch": {"max_steps": 5, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "evaluated_in_twos": {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 4},
    "evaluated_at_the_end": {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 3},
    "evaluated_first": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4},
    "saved": {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
    "uneven_batches": {"per_device_eval_batch_size": 3, "eval_strategy": "epoch"},
    "one_at_a_time": {"gradient_accumulation_steps": 1, "warmup_steps": 2, "max_grad_norm": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_callbacks_are_told_what_the_trainer_tells_them(
    case: str, alone: Alone, tmp_path: Path
) -> None:
    config = told_about(alone, tmp_path, CASES[case])
    ours, other = Recorder(), Recorder()
    train(config, callbacks=[ours])
    trainer = theirs(config, other, tmp_path / "trainer")
    assert ours.events == other.events
    assert ours.kinds == {(TrainingArguments, TrainerState, TrainerControl)}
    assert ours.state is not None
    compare(ours.state, trainer.state)


def told_about(alone: Alone, tmp_path: Path, training: dict[str, Any]) -> Config:
    texts = save_texts(tmp_path / "uneven.jsonl", 11)
    data = {"train": str(texts), "max_length": 32}
    if "eval_strategy" in training:
        data["eval"] = str(texts)
    return alone(training=training, data=data)


def compare(ours: TrainerState, other: TrainerState) -> None:
    assert [list(entry) for entry in ours.log_history] == [
        list(entry) for entry in other.log_history
    ]
    for one, two in zip(ours.log_history, other.log_history, strict=True):
        for name, value in two.items():
            if not any(part in name for part in TIMES):
                assert one[name] == pytest.approx(value, rel=1e-6), (one, two, name)
    fields = ("global_step", "epoch", "max_steps", "num_train_epochs", "logging_steps")
    for name in (*fields, "save_steps", "eval_steps", "train_batch_size"):
        assert getattr(ours, name) == pytest.approx(getattr(other, name)), name


class At(TrainerCallback):
    """Sets a flag of the control at an event of a step."""

    def __init__(self, event: str, step: int, **flags: bool) -> None:
        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == step:
                changed = copy.copy(control)
                for name, value in flags.items():
                    setattr(changed, name, value)
                return changed
            return None

        setattr(self, event, act)


FLAGS: dict[str, tuple[str, int, dict[str, bool]]] = {
    "stop": ("on_step_end", 2, {"should_training_stop": True}),
    "stop_after_a_log": ("on_log", 3, {"should_training_stop": True}),
    "log": ("on_step_end", 3, {"should_log": True}),
    "no_log": ("on_step_end", 2, {"should_log": False}),
    "save": ("on_step_end", 1, {"should_save": True}),
    "evaluate": ("on_step_end", 3, {"should_evaluate": True}),
    "leave_an_epoch": ("on_step_end", 1, {"should_epoch_stop": True}),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_the_control_are_obeyed_as_by_the_trainer(
    flag: str, alone: Alone, tmp_path: Path
) -> None:
    training = {"logging_steps": 2, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 4}
    config = told_about(alone, tmp_path, {**training, "gradient_accumulation_steps": 1})
    event, step, flags = FLAGS[flag]
    ours, other = Recorder(), Recorder()
    train(config, callbacks=[At(event, step, **flags), ours])
    trainer = theirs(config, At(event, step, **flags), tmp_path / "trainer", other)
    assert ours.events == other.events
    assert ours.state is not None
    compare(ours.state, trainer.state)


class Failing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("no such dial")


def test_a_callback_that_raises_ends_the_run_with_its_name_and_the_work_saved(
    alone: Alone,
) -> None:
    config = alone()
    with pytest.raises(CallbackError, match="the callback Failing failed in on_step_end") as error:
        train(config, callbacks=[Failing])
    assert "KeyError: 'no such dial'" in error.value.message
    assert "continue after step 2" in str(error.value)
    assert (config.checkpoints / "step_2" / "manifest.json").exists()
    recorder = Recorder()
    train(config, callbacks=[recorder])
    whole = Recorder()
    train(alone("whole"), callbacks=[whole])
    assert recorder.state is not None
    assert whole.state is not None
    assert losses(recorder.state) == losses(whole.state)


def losses(state: TrainerState) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in state.log_history if "loss" in entry]


def test_a_state_that_the_trainer_can_read_is_written(alone: Alone) -> None:
    config, recorder = alone(training={"logging_steps": 2}), Recorder()
    train(config, callbacks=[recorder])
    read = TrainerState.load_from_json(str(config.output_dir / "trainer_state.json"))
    assert recorder.state is not None
    assert read.log_history == recorder.state.log_history
    control = read.stateful_callbacks["TrainerControl"]
    assert TrainerControl(**control["args"]).should_training_stop
    assert asdict(read)["global_step"] == 4


def test_what_is_no_callback_is_refused(alone: Alone) -> None:
    with pytest.raises(ConfigError, match="is no callback"):
        train(alone(), callbacks=[print])


def test_a_run_without_callbacks_leaves_no_history(alone: Alone) -> None:
    config = alone()
    train(config)
    assert not (config.output_dir / "log_history.jsonl").exists()
    assert all(math.isfinite(json.loads(line)["loss"]) for line in lines(config))


def lines(config: Config) -> list[str]:
    return (config.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
