"""The coordinator's behaviour when the disk, a signal or a person interferes: real runs."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from hetero_framework.cli import main
from hetero_framework.commands.check_report import check, text
from hetero_framework.config import Config
from hetero_framework.core import files
from hetero_framework.data.batches import LazyBatches
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.hosts import StagesLost
from hetero_framework.errors import CheckpointError, PeerLostError, ResourceError, StoppedEarly
from hetero_framework.trainer import (
    coordinator,
    metrics,
    outputs,
    run_checkpoint,
    signals,
)
from hetero_framework.trainer.coordinator import Coordinator, sample_mean, train
from hetero_framework.trainer.replica_group import StepPart
from hetero_framework.trainer.train_state import TrainState
from tests.alone import Alone
from tests.installed import needs
from tests.pools import Notes
from tests.samples import read_jsonl, save_texts


def lines_of(config: Config) -> list[dict[str, Any]]:
    return read_jsonl(config.output_dir / "metrics.jsonl")


def steps_saved(config: Config) -> list[str]:
    return sorted(path.name for path in config.checkpoints.glob("step_*"))


class Failing:
    """An operation that fails so many times, then works; only below `directory`."""

    def __init__(self, real: Any, times: int, code: int, directory: Path) -> None:
        self.real, self.times, self.code, self.directory = real, times, code, directory

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self.times and Path(path).is_relative_to(self.directory):
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code), str(path))
        return self.real(path, *args, **kwargs)


def fail_mkdir(monkeypatch: pytest.MonkeyPatch, config: Config, times: int, code: int) -> None:
    """Have the first `times` attempts to make a directory below the checkpoints fail."""
    failing = Failing(Path.mkdir, times, code, config.checkpoints)
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: failing(*a, **k))


SAVING = {"save_strategy": "steps", "save_steps": 1}
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
OFTEN = [("mkdir", errno.EROFS), ("rename", errno.ENOSPC)]


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        pytest.param(operation, code, marks=() if (operation, code) in OFTEN else pytest.mark.long)
        for operation in ("mkdir", "rename")
        for code in CODES
    ],
)
def test_a_save_that_fails_twice_does_not_end_the_run(alone, monkeypatch, operation, code):
    config, notes = alone(training=SAVING), Notes()
    if operation == "mkdir":
        fail_mkdir(monkeypatch, config, 2, code)
    else:
        monkeypatch.setattr(files.os, "replace", Failing(os.replace, 2, code, config.checkpoints))
    assert train(config, progress=notes).steps == 4
    assert steps_saved(config) == ["step_3", "step_4"]
    assert sum("could not be written" in line for line in notes.lines) == 2


def test_the_third_failed_save_in_a_row_ends_the_run_with_code_6(alone, monkeypatch):
    config = alone(training=SAVING)
    fail_mkdir(monkeypatch, config, 100, errno.EIO)
    with pytest.raises(ResourceError, match="cannot write a checkpoint") as raised:
        train(config)
    assert raised.value.exit_code == 6
    assert "set another checkpoint_dir. Then continue after step 3 with" in str(raised.value)
    assert [line["step"] for line in lines_of(config)] == [1, 2, 3]


def test_metrics_that_cannot_be_written_do_not_end_the_run(alone, monkeypatch):
    config = alone()
    real = metrics.StepLines._append

    def append(writer: metrics.StepLines, data: bytes) -> None:
        if json.loads(data)["step"] in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(writer, data)

    monkeypatch.setattr(metrics.StepLines, "_append", append)
    assert train(config).steps == 4
    assert [line["step"] for line in lines_of(config)] == [1, 4]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The directory of temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(run_checkpoint.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def advised(config: Config, error: Exception) -> tuple[Config, str]:
    """What to run next, taken from the error's text word for word."""
    found = re.search(r"--resume (\w+)(?: --set checkpoint_dir=(\S+))?", str(error))
    assert found, str(error)
    changes = {"checkpoint_dir": found[2]} if found[2] else {}
    return config.with_changes(**changes), found[1]


@pytest.mark.parametrize("checkpoints_fail", [False, True])
def test_an_export_that_fails_leaves_a_checkpoint_and_the_advice_works(
    alone, monkeypatch, temporary, checkpoints_fail
):
    config = alone()

    def refuse(*args: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "export", refuse)
        if checkpoints_fail:
            fail_mkdir(patch, config, 100, errno.ENOSPC)
        with pytest.raises(ResourceError, match="the result could not be written") as raised:
            train(config)
    assert len(list(temporary.glob("*/step_4"))) == checkpoints_fail
    again, resume = advised(config, raised.value)
    assert (train(again, resume=resume).files["model"] / "model.safetensors").is_file()


def test_an_export_is_tried_again_while_nothing_can_be_written(alone, monkeypatch, temporary):
    config, notes, real, tries = alone(), Notes(), outputs.export, []

    def refuse(*args: Any) -> Path:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(outputs, "export", refuse)
    monkeypatch.setattr(coordinator, "_EXPORT_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(
        run_checkpoint.CheckpointStore,
        "begin",
        lambda *args: (_ for _ in ()).throw(ResourceError("full", hint="free some")),
    )
    assert train(config, progress=notes).files["model"].is_dir()
    assert len(tries) == 3
    assert sum("next try in" in line for line in notes.lines) == 2


def test_a_failed_last_checkpoint_does_not_keep_the_result_from_being_written(alone, monkeypatch):
    config = alone(training={"save_strategy": "epoch", "max_steps": 2})
    fail_mkdir(monkeypatch, config, 100, errno.ENOSPC)
    assert train(config).files["model"].is_dir()


EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1}


def with_evaluation(alone: Alone, tmp_path: Path, **training: Any) -> Config:
    texts = str(save_texts(tmp_path / "eval.jsonl", 6, seed=1))
    data = {"train": str(tmp_path / "texts.jsonl"), "eval": texts, "max_length": 32}
    return alone(data=data, training={**EVALUATING, **training})


def test_evaluation_by_steps_comes_at_the_end_too(alone, tmp_path):
    config = with_evaluation(alone, tmp_path)
    train(config)
    assert [line["step"] for line in lines_of(config) if "eval_loss" in line] == [3, 4]


def watch_evaluation(monkeypatch: pytest.MonkeyPatch, asked: Callable[[int], None]) -> None:
    """Have `asked(index)` called when a micro-batch of the evaluation is about to be made."""
    real = TrainData.eval_batches

    def watched(data: TrainData, name: str = "") -> LazyBatches:
        batches = real(data, name)

        def make(index: int) -> Any:
            asked(index)
            return batches[index]

        return LazyBatches(len(batches), make)

    monkeypatch.setattr(TrainData, "eval_batches", watched)


def test_evaluation_keeps_no_batch_that_is_done(alone, tmp_path, monkeypatch):
    made: list[int] = []
    finished: list[int] = []
    watch_evaluation(monkeypatch, made.append)
    run = Coordinator.evaluate

    def evaluate(self: Coordinator) -> None:
        feed = self._cluster.pipeline._feed  # the oracle: when a batch is made, how many went in

        def feeding(index: int, inputs: Any) -> None:
            finished.append(len(made))
            feed(index, inputs)

        monkeypatch.setattr(self._cluster.pipeline, "_feed", feeding)
        run(self)

    monkeypatch.setattr(Coordinator, "evaluate", evaluate)
    train(with_evaluation(alone, tmp_path, max_steps=1))
    assert made == list(range(6))
    assert finished == [1, 2, 3, 4, 5, 6]


def test_a_stop_is_heard_between_evaluation_batches_and_saves(alone, tmp_path, monkeypatch):
    made: list[int] = []

    def asked(index: int) -> None:
        made.append(index)
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    watch_evaluation(monkeypatch, asked)
    config = with_evaluation(alone, tmp_path)
    with pytest.raises(StoppedEarly, match="SIGTERM after step 3") as raised:
        train(config)
    assert "--resume latest" in str(raised.value)
    assert made == [0, 1, 2]
    assert steps_saved(config) == ["step_3"]
    log = (config.output_dir / "logs" / "coordinator.log").read_text()
    assert "evaluation is cut short; the run does it again when it goes on" in log
    assert not any("eval_loss" in line for line in lines_of(config))
    monkeypatch.undo()
    train(config)
    assert [line["step"] for line in lines_of(config) if "eval_loss" in line] == [3, 4]


def test_a_stop_with_a_full_disk_saves_elsewhere_and_the_advice_works(
    alone, monkeypatch, temporary
):
    real = Coordinator.train_step

    def step(self: Coordinator) -> metrics.StepReport | None:
        report = real(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return report

    monkeypatch.setattr(Coordinator, "train_step", step)
    config = alone()
    with monkeypatch.context() as patch:
        fail_mkdir(patch, config, 100, errno.ENOSPC)
        with pytest.raises(StoppedEarly, match="SIGTERM after step 1") as raised:
            train(config)
    monkeypatch.undo()
    again, resume = advised(config, raised.value)
    assert train(again, resume=resume).steps == 4


def test_a_stop_before_anything_is_saved_says_so(alone, tmp_path, monkeypatch):
    def evaluate(self: Coordinator) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Coordinator, "evaluate", evaluate)
    with pytest.raises(StoppedEarly, match="nothing has been saved yet"):
        train(with_evaluation(alone, tmp_path, eval_on_start=True))


def test_a_stop_without_a_checkpoint_names_the_step_to_continue_after(alone, monkeypatch):
    """Ctrl-C, and "n" to the question: the durable step is still there."""
    config = alone(adapter={"r": 4, "target_modules": "all-linear"})

    def stop(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(signals.StopRequest, "wants_checkpoint", lambda *_: False)
    with pytest.raises(StoppedEarly, match=r"--fresh begins anew") as stopped:
        train(config, progress=Notes(stop))
    found = re.search(r"continue after step (\d) with the same command", str(stopped.value))
    assert steps_saved(config) == []
    train(config, progress=(notes := Notes()))
    assert any(f"goes on after step {found[1]} (--fresh" in line for line in notes.lines)
    assert [line["step"] for line in lines_of(config)] == [1, 2, 3, 4]


@needs("observe")
@pytest.mark.parametrize("adapter", [None, {"r": 4, "target_modules": "all-linear"}])
def test_a_run_lists_working_commands_for_its_result(alone, adapter, capfd):
    """The commands work as they are printed."""
    config = alone(adapter=adapter, training={**SAVING, "max_steps": 2})
    train(config)
    said = dict(re.findall(r"^(\S+(?: \S+)*) {2,}(.*)$", capfd.readouterr().out, re.MULTILINE))
    commands = [said["an earlier step"].replace("step_N", "step_1"), said["where time went"]]
    names = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "PeftModel": peft.PeftModel}
    loader = re.findall(r"(\w+)\.from_pretrained", said["to load it"])
    assert [names[name] for name in loader] == list(names.values())[::-1][adapter is None :]
    if adapter is not None:
        commands.append(said["to merge it"])
    for command in commands:
        program, *words = shlex.split(command)
        assert (program, main(words)) == ("hetero", 0), command
    assert (config.output_dir / "step_1").is_dir()
    assert (config.output_dir / "merged").is_dir() is (adapter is not None)


@pytest.mark.parametrize("reads", [False, True])
def test_a_finished_run_started_again_keeps_its_result(alone, reads):
    """It is moved aside, unless the new run begins with it."""
    settings = {"r": 4, "target_modules": "all-linear"}
    train(alone(adapter=settings, training={"max_steps": 1}))
    result = alone().output_dir / "adapter"
    weights = (result / "adapter_model.safetensors").read_bytes()
    if reads:
        settings = {"init_from": str(result)}
        assert 'Decided: adapter = {"r": 4' in text(check(alone(adapter=settings)))
    train(alone(adapter=settings, training={"max_steps": 2}))
    kept = result.parent / "previous-1" / "adapter" / "adapter_model.safetensors"
    assert kept.exists() is not reads
    assert reads or kept.read_bytes() == weights
    assert (result / "adapter_model.safetensors").read_bytes() != weights


@pytest.mark.parametrize("changed", ["data", "adapter"])
def test_a_changed_run_is_refused_before_anything_is_loaded(alone, tmp_path, monkeypatch, changed):
    saving, adapter = {**SAVING, "max_steps": 1}, {"r": 4, "target_modules": "all-linear"}
    train(alone(training=saving, adapter=adapter))
    if changed == "data":
        save_texts(tmp_path / "texts.jsonl", 9)
    else:
        adapter["r"] = 8
    monkeypatch.setattr(coordinator, "Cluster", None)
    with pytest.raises(CheckpointError, match=r"other training data|adapter\.r was 4"):
        train(alone(training=saving, adapter=adapter), resume="latest")


def test_logging_dir_may_be_output_dir(alone):
    config = alone()
    training = {"logging_dir": str(config.output_dir), "report_to": "tensorboard", "max_steps": 1}
    for _ in range(2):
        train(alone(training=training))
    assert (config.output_dir / "previous-1" / "metrics.jsonl").is_file()
    assert len(list(config.output_dir.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("under_way", [True, False])
def test_a_step_that_ends_its_worker_is_told_with_the_samples_of_this_part(under_way):
    run = object.__new__(Coordinator)
    run._state, run._deaths = TrainState(step=4, jumped=2), Counter({(1, 4): 2})
    run._part = StepPart(9, [], [[14, 15], [3]], 1) if under_way else None
    with pytest.raises(PeerLostError, match="step 5 has ended a worker 3 times") as raised:
        run._note_death(StagesLost(1, "killed"))
    assert ("the samples of the step: 14, 15, 3 (" in raised.value.hint) == under_way


def test_a_mean_of_infinities_of_both_signs_is_no_number():
    inf = math.inf
    for sums in ([inf, -inf], [1e308, 1e308], [inf, math.nan]):
        assert not math.isfinite(sample_mean(sums, [1, 1], [1, 1], 0.0, [0.0, 0.0]))
