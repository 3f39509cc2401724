"""transformers' callbacks, called during a run as transformers' Trainer calls them.

Each callback gets real TrainingArguments, a TrainerState and a TrainerControl, whose flags are
obeyed. The model that they see is on the device "meta": configuration and shapes, no values, since
no process holds the weights. `log_history`, and the state of callbacks that have a state, are kept
in log_history.jsonl, with which a resumed run goes on.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hetero_framework import control
from hetero_framework.config import Config, TrainingConfig, interval
from hetero_framework.core.files import write_file
from hetero_framework.errors import CallbackError, ConfigError
from hetero_framework.extras.reporting.computed_metrics import check_best
from hetero_framework.extras.reporting.reporters import (
    mlflow_run,
    remote_run,
    report_samples,
    reporters,
)
from hetero_framework.extras.reporting.settings import ReportSettings
from hetero_framework.models.cut.language import meta_model
from hetero_framework.models.cut.objective import COUNT
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.metrics import (
    METRICS_FILE,
    SPEED,
    StepLines,
    by_set,
    is_evaluation,
    metric_name,
)
from hetero_framework.trainer.observers import Due, Observer, RunStart, Watched
from hetero_framework.trainer.setup import Prepared, Sample
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

_STATES, _STOPPED, _TOLD = "stateful_callbacks", "stopped", "evaluated"  # keys of own lines
_EPOCH, _BEST = "epoch_end", "best_saved"
_RUN, _MLFLOW_RUN = "remote_run", "mlflow_run"
_OWN = {"loss", "token_loss", "perplexity", "samples", "batches", "tokens", "seconds"}
"""An evaluation's metrics that the user does not compute."""
_FLAGS = {
    "should_log": "log",
    "should_evaluate": "evaluate",
    "should_save": "save",
    "should_epoch_stop": "stop_epoch",
    "should_training_stop": "stop",
}
HISTORY_FILE, TRAINER_STATE_FILE = "log_history.jsonl", "trainer_state.json"
_log = logging.getLogger(__name__)


class Callbacks(Observer):
    """Calls transformers' callbacks in their order.

    Args:
        callbacks: Instances or classes.
    """

    def __init__(
        self,
        prepared: Prepared,
        store: CheckpointStore,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        reporters: Sequence[type[TrainerCallback]] = (),
    ) -> None:
        self._prepared, self._store = prepared, store
        training = prepared.config.training
        if (patience := training.early_stopping_patience) is not None:
            early = EarlyStoppingCallback(patience, training.early_stopping_threshold)
            callbacks = [early, *callbacks]
        self._reporters = [made(reporter) for reporter in reporters]
        self._callbacks = [*(made(callback) for callback in callbacks), *self._reporters]
        metric = training.metric
        self._metric = metric and f"eval_{metric.removeprefix('eval_')}"
        self._history = StepLines(prepared.config.output_dir / HISTORY_FILE)
        self._arguments = training_arguments(prepared.config)
        self._control = TrainerControl()
        self._run: str | None = None
        self._mlflow_run: str | None = None
        self._states: dict[str, Any] | None = None  # the states in the file
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self._model = _shown_model(prepared)
        self._handler = CallbackHandler(
            [DefaultFlowCallback], self._model, prepared.tokenizer, optimizer, scheduler
        )
        self._epoch: int | None = None
        self._line: Mapping[str, Any] = {}
        self._losses: list[tuple[int, float]] = []  # (step, loss), not logged yet
        counted = training.include_num_input_tokens_seen
        self._counted = None if counted in (False, "no") else "tokens"
        if counted in (True, "all"):
            self._counted = "padded_tokens"
        self._first_tokens = self._padded_tokens = 0
        self._means = _Means(training)
        self._stopped_at: int | None = None
        self._is_epoch_told = False
        self._untold: Mapping[str, Any] | None = None  # an evaluation that callbacks do not know
        self._is_evaluated = False
        self._began_s = 0.0
        self._logged: list[tuple[int, float]] = []  # number and sum of the losses of each log
        self._first_step = 0
        self.state = TrainerState()

    def _store_flos(self) -> None:
        """Count operations as the Trainer does: 6 for each token (padding counts) and each
        parameter of the model (with its adapter, without embeddings)."""
        parameters = self._model.num_parameters(exclude_embeddings=True)
        self.state.total_flos = float(6 * self._padded_tokens * parameters)

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        training = self._prepared.config.training
        total, data = run.total_steps, self._prepared.data
        self._began_s, self._first_step = time.monotonic(), state.step
        self.state = TrainerState(
            max_steps=total,
            num_train_epochs=math.ceil(total / data.steps_per_epoch),
            logging_steps=interval(training.logging_steps, total),
            save_steps=interval(training.save_steps, total),
            eval_steps=interval(self._arguments.eval_steps or 500, total),  # its default
            train_batch_size=training.per_device_train_batch_size,
        )
        self._read(state)
        if self._run is None:
            self._run = uuid.uuid4().hex[:12]  # of the remote run; a resumed run goes on with it
            self._history.write({"step": 0, _RUN: self._run})
        output = self._prepared.config.output_dir.name
        named = ReportSettings.of(training).run_name
        self._arguments.run_name = named or f"{output}-{self._run}"
        self._call("on_init_end")
        self._control.should_training_stop = False
        self._first_tokens = self.state.num_input_tokens_seen
        if run.is_continued:
            self._take_up(state, due)
        with remote_run(self._run, training, self._mlflow_run):
            self._call("on_train_begin")
        if run.is_continued:
            due.stop |= self._control.should_training_stop
        else:
            self._tell_flags(due)
        if self._reporters and (begun := mlflow_run()) not in (None, self._mlflow_run):
            self._mlflow_run = begun
            self._history.write({"step": 0, _MLFLOW_RUN: begun})
        if self._untold is not None:
            self.evaluated(state, self._untold, due)
            self._note_best(state)

    def _take_up(self, state: TrainState, due: Due) -> None:
        """Note what was done already after the last step of a run that was cut short."""
        due.stop |= self._stopped_at == state.step
        due.done |= {"log"} if not self._losses else set()
        due.done |= {"epoch"} if self._is_epoch_told else set()
        if self._arguments.save_strategy == SaveStrategy.BEST:
            due.mark("save", self._store.best_steps[-1:] == [state.step])

    def went_back(self, state: TrainState) -> None:
        self._read(state)
        self._control = TrainerControl()

    def step_begin(self, state: TrainState, due: Due) -> None:
        epoch = state.position // self._prepared.data.steps_per_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._control.should_epoch_stop = False
            self._call("on_epoch_begin")
        control = self._control
        control.should_log = control.should_evaluate = control.should_save = False
        self._call("on_step_begin")
        self._tell_flags(due)

    def substep_end(self, state: TrainState, due: Due) -> None:
        self._decide("on_substep_end", due)

    def given_up(self, line: Mapping[str, Any]) -> None:
        self._losses.append((line["step"], line["loss"]))
        self._count(line)

    def before_commit(self, state: TrainState, due: Due) -> None:
        self._decide("on_pre_optimizer_step", due)

    def after_commit(self, state: TrainState, outcome: StepOutcome, due: Due) -> None:
        self._decide("on_optimizer_step", due)

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        self._line, self._is_evaluated = line, False
        self._note(line)
        self._count(line)
        self.state.global_step, self.state.epoch = state.step, line["epoch"]
        self._handler.optimizer.param_groups[0]["lr"] = line["learning_rate"]
        self._handler.lr_scheduler._last_lr = [line["learning_rate"]]
        self._decide("on_step_end", due)

    def epoch_end(self, state: TrainState, due: Due) -> None:
        self._decide("on_epoch_end", due)
        self._write_states()
        self._history.write({"step": state.step, _EPOCH: True})
        if noted := self._noted_stop(state, due):
            self._history.write({"step": state.step, **noted})

    def _noted_stop(self, state: TrainState, due: Due) -> dict[str, bool]:
        """The fields to write, once, if callbacks have ended the run after this step."""
        if not due.stop or state.position >= self.state.max_steps or self._stopped_at == state.step:
            return {}
        self._stopped_at = state.step
        return {_STOPPED: True}

    def log(self, state: TrainState, due: Due) -> None:
        count = state.step - self._losses[0][0] + 1 if self._losses else 0
        if count < 1:  # the step was logged already
            return
        mean = self._take_losses() / count
        self._store_flos()
        names = ("grad_norm", "learning_rate")
        logs = {"loss": mean, **{name: self._line[name] for name in names}}
        self._report(logs | self._means.take(), due, speed=True)

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        self._is_evaluated = True
        due.evaluate = due.was_evaluate  # until on_evaluate
        for of_set, found in by_set(metrics).items():
            for _ in range(found["eval_batches"]):
                self._decide("on_prediction_step", due)
            seconds = found["eval_seconds"]
            beside = {key.removeprefix("eval_"): value for key, value in found.items()}
            measured = {n: beside[n] for n in self._means.of_evaluations if n in beside}
            computed = beside.keys() - measured.keys() - _OWN
            speed = seconds, found["eval_samples"] / seconds, found["eval_batches"] / seconds
            told = {
                "loss": found["eval_loss"],
                **{n: x for n, x in beside.items() if n in computed and not n.startswith(COUNT)},
                **{name: round(x, d) for name, x, d in zip(SPEED, speed, (4, 3, 3), strict=True)},
                **measured,
            }
            logs, every = (
                {metric_name(of_set, name): value for name, value in part.items()}
                for part in (told, {**beside, **told})
            )
            self._report(logs, due)
            due.evaluate = False
            self._decide("on_evaluate", due, metrics={**every, "epoch": self.state.epoch})
        # A value that was read from the file is None if it was not finite.
        if self._metric is not None and metrics.get(self._metric, 0) is not None:
            check_best(self._metric, metrics)
        # An evaluation before the first step decides nothing, as in the Trainer.
        is_best = state.step > 0 and self._judge(metrics, state.step)
        if self._arguments.save_strategy == SaveStrategy.BEST:
            due.save = is_best
        self._write_states()
        self._history.write({"step": state.step, _TOLD: True, **self._noted_stop(state, due)})

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for reporter in self._reporters:
            if reporter in self._callbacks:
                with self._attempt(reporter, "samples"):
                    report_samples(reporter, state.step, samples)

    def saved(self, state: TrainState, due: Due) -> None:
        self._store_flos()
        self._note_best(state)
        own = ReportSettings.of(self._prepared.config.training)
        if own.push_to_hub and own.hub_strategy != "end":
            self._decide("on_push_begin", due)
        self._decide("on_save", due)
        self._write_states()
        self._write_state()

    def trained(self, state: TrainState, due: Due) -> None:
        self._store_flos()
        seconds, steps = time.monotonic() - self._began_s, state.step - self._first_step
        self._take_losses()
        num_losses = sum(number for number, _ in self._logged)
        training = self._prepared.config.training
        samples = steps * training.per_device_train_batch_size
        samples *= training.gradient_accumulation_steps
        # After an evaluation TRL looks for the means of evaluations, which were logged.
        means = {} if self._is_evaluated else self._means.take()
        self._report(
            {
                "train_runtime": round(seconds, 4),
                "train_samples_per_second": round(samples / seconds, 3),
                "train_steps_per_second": round(steps / seconds, 3),
                "total_flos": self.state.total_flos,
                "train_loss": sum(total for _, total in self._logged) / max(num_losses, 0.001),
                **means,
            },
            due,
        )

    def exported(self, state: TrainState) -> None:
        self._name_best()
        if self._store.save_total_limit == 1 and self._store.has(best := self._store.best_step):
            for step in self._store.complete_steps():
                if step != best:
                    self._store.delete(step)

    def finished(self, state: TrainState, files: Mapping[str, str | Path]) -> None:
        try:
            self._call("on_train_end")
        finally:
            self._write_state()

    def _judge(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Whether an evaluation is better than all before it. If so, it is remembered."""
        value, best = metrics.get(self._metric or ""), self.state.best_metric
        sign = 1 if self._arguments.greater_is_better else -1
        # None was read from the file: not finite, or absent in an earlier part.
        if value is None or not sign * value > (-math.inf if best is None else sign * best):
            return False
        self.state.best_metric = value
        if self._arguments.save_strategy != SaveStrategy.NO:
            self.state.best_global_step = step
            self._store.best_steps.append(step)
            self._store.saved |= {step} if self._store.has(step) else set()
        return True

    def _name_best(self) -> None:
        """Name the checkpoint of the best saved step in the state."""
        step, root = self._store.best_step, self._store.root
        self.state.best_model_checkpoint = None if step is None else str(root / f"step_{step}")

    def _note_best(self, state: TrainState) -> None:
        """Name the best saved step; record a new one, whose checkpoint a person may delete."""
        before = self.state.best_model_checkpoint
        self._name_best()
        if self.state.best_model_checkpoint != before:
            self._history.write({"step": state.step, _BEST: self._store.best_step})

    def _decide(self, event: str, due: Due, **details: Any) -> None:
        """Call the callbacks with the flags of `due`, which they may change."""
        for flag, name in _FLAGS.items():
            setattr(self._control, flag, getattr(due, name))
        self._call(event, **details)
        self._tell_flags(due)

    def _tell_flags(self, due: Due) -> None:
        for flag, name in _FLAGS.items():
            setattr(due, name, getattr(self._control, flag))

    def _take_losses(self) -> float:
        """The sum of the losses that were not logged. They count as logged from now on."""
        losses, self._losses = self._losses, []
        is_filtered, total = self._prepared.config.training.logging_nan_inf_filter, 0.0
        for number, (_, loss) in enumerate(losses):
            # The Trainer's filter counts a loss that is not finite as the sum of the losses before
            # it, divided by its place (from 1).
            is_kept = math.isfinite(loss) or not is_filtered
            total += loss if is_kept else total / (1 + number)
        steps = {step for step, _ in losses if step <= self.state.global_step}  # not given up
        self._logged.append((len(steps), total))
        return total

    def _report(self, logs: dict[str, Any], due: Due, *, speed: bool = False) -> None:
        logs["epoch"] = self.state.epoch
        if self._counted is not None:
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if speed:
                seconds = time.monotonic() - self._began_s
                logs["train_runtime"] = round(seconds, 4)
                tokens = self.state.num_input_tokens_seen - self._first_tokens
                logs["train_tokens_per_second"] = round(tokens / seconds, 3)
        entry = {**logs, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self._history.write(entry)
        due.log = False
        self._decide("on_log", due, logs=logs)

    def _call(self, event: str, **details: Any) -> None:
        for callback in self._callbacks:
            self._handler.callbacks = [callback]  # so that a failure has its name
            with self._attempt(callback, event):
                self._control = self._handler.call_event(
                    event, self._arguments, self.state, self._control, **details
                )

    @contextmanager
    def _attempt(self, callback: TrainerCallback, event: str) -> Iterator[None]:
        """Within the block, a callback is called. A reporter that fails is called no more. The
        failure of another callback is raised as a CallbackError."""
        name = type(callback).__name__
        try:
            with control.users_code(f"the callback {name} failed in {event}"):
                yield
        except CallbackError as error:
            if callback not in self._reporters:
                raise
            _log.warning("%s reports no more: %s", name, control.failure(error.__cause__ or error))
            self._callbacks = [c for c in self._callbacks if c is not callback]

    def _note(self, line: Mapping[str, Any]) -> None:
        """Take the loss and the metrics of a step that was not logged."""
        self._losses.append((line["step"], line["loss"]))
        self._means.add(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        """Count the tokens of a step."""
        self._padded_tokens += line["padded_tokens"]
        if self._counted is not None:
            self.state.num_input_tokens_seen += line[self._counted]

    def _read(self, state: TrainState) -> None:
        """Read what was recorded up to the step of `state`, and go on with it."""
        run = StepLines(self._prepared.config.output_dir / METRICS_FILE).resume(state.step)
        evaluations = {line["step"]: line for line in run if is_evaluation(line)}
        # The line of the run's end is written again, after perhaps more steps.
        lines = self._history.resume(state.step, lambda line: "train_loss" not in line)
        told = {line["step"] for line in lines if _TOLD in line}
        self._untold = evaluations.get(state.step) if state.step not in told else None
        if self._untold is not None:
            lines = self._history.resume(state.step, partial(_precedes_evaluation, state.step))
        own = {_STATES, _STOPPED, _EPOCH, _BEST, _TOLD, _RUN, _MLFLOW_RUN}
        history = [line for line in lines if own.isdisjoint(line)]
        self._run, self._mlflow_run = _first(lines, _RUN), _first(lines, _MLFLOW_RUN)
        self._store.saved = {line[_BEST] for line in lines if _BEST in line}
        self._judge_again([evaluations[step] for step in sorted(told & evaluations.keys())])
        self._stopped_at = next((line["step"] for line in lines if _STOPPED in line), None)
        self._is_epoch_told = any(_EPOCH in line and line["step"] == state.step for line in lines)
        self.state.log_history = history
        self.state.global_step = state.step
        self.state.epoch = self._prepared.data.epoch_of(state.position - 1) if state.step else 0
        self._epoch = None
        self._count_again(run, {line["step"] for line in history if "loss" in line})
        self._states = _first(reversed(lines), _STATES)
        for callback in self._callbacks:
            kept = (self._states or {}).get(type(callback).__name__)
            if isinstance(callback, ExportableState) and kept is not None:
                for name, value in kept["attributes"].items():
                    setattr(callback, name, value)

    def _judge_again(self, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Find the best step anew, by the evaluations that callbacks were told."""
        self.state.best_metric = self.state.best_global_step = None
        self._store.best_steps.clear()
        for line in evaluations:
            self._judge(line, line["step"])
        if (best := self._store.best_step) is not None and not self._store.has(best):
            _log.warning("the best checkpoint, of step %d, is gone; no other replaces it", best)
            self._store.best_steps.clear()
        self._name_best()

    def _count_again(self, run: Sequence[Mapping[str, Any]], logged: Collection[int]) -> None:
        """Add up losses, tokens and operations anew, by the lines of the run's steps. `logged` are
        the steps after which losses were logged."""
        self.state.num_input_tokens_seen = self._padded_tokens = 0
        self._means.take()
        self._losses, self._logged = [], []
        for line in (line for line in run if not is_evaluation(line)):
            # A loss that is not finite is null in the file.
            self._line = {**line, "loss": math.nan if line["loss"] is None else line["loss"]}
            self._count(self._line)
            self._note(self._line)
            if line["step"] in logged:
                self._take_losses()
                self._means.take()
        self._store_flos()

    def _write_states(self) -> None:
        """Keep the state of the callbacks that have one, where it has changed."""
        exportable = [c for c in self._callbacks if isinstance(c, ExportableState)]
        states = {type(callback).__name__: callback.state() for callback in exportable}
        if states and states != self._states:
            self._states = states
            self._history.write({"step": self.state.global_step, _STATES: states})

    def _write_state(self) -> None:
        """Write trainer_state.json, as the Trainer does into each checkpoint."""
        stateful = {**(self._states or {}), "TrainerControl": self._control.state()}
        content = {**asdict(self.state), _STATES: stateful}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        path = self._prepared.config.output_dir / TRAINER_STATE_FILE
        try:
            write_file(path, text.encode())
        except OSError as error:
            _log.warning("cannot write %s: %s", path, error.strerror)


def make(run: Watched) -> Callbacks | None:
    """The observer that calls callbacks and reporters; None if there is nothing for it to do."""
    prepared = run.placed.prepared
    callbacks, reporting = [*run.callbacks], reporters(prepared.config)
    if callbacks or reporting or prepared.config.training.metric is not None:
        return Callbacks(prepared, run.store, callbacks, reporting)
    return None


def _shown_model(prepared: Prepared) -> PreTrainedModel:
    """The model that callbacks see, with its adapter."""
    if prepared.adapter_plan is None:
        return meta_model(prepared.model_config)
    from hetero_framework.models.adapters.lora import meta_adapted

    return meta_adapted(prepared.model_config, prepared.adapter_plan)


class _Means:
    """The metrics of the steps since the last log, as means over their micro-batches, and the
    tokens so far."""

    def __init__(self, training: TrainingConfig) -> None:
        self._names = objective_of(training).metric_names
        self.of_evaluations = (*self._names, "num_tokens") if self._names else ()
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._tokens = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of a step in metrics.jsonl."""
        for name in self._names:
            if name in line:  # an earlier part of the run may lack it
                value = math.nan if line[name] is None else line[name]
                count = line.get(COUNT + name, line["micro_batches"])
                self._sums[name] = self._sums.get(name, 0.0) + value * count
                self._counts[name] += count
        self._tokens = line.get("num_tokens", 0)

    def take(self) -> dict[str, float]:
        """The means since the last call; empty where there were no steps."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._counts.clear()
        self._sums.clear()
        return means | {"num_tokens": self._tokens} if means else {}


def _first(lines: Iterable[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in lines if key in line), None)


def _precedes_evaluation(step: int, line: Mapping[str, Any]) -> bool:
    """Whether a line of the history was written before the evaluation after `step` was told."""
    is_of_it = _STATES in line or any(name.startswith("eval_") for name in line)
    return bool(line["step"] < step or not is_of_it)


def made(callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback:
    """The callback as an instance. Raises ConfigError if it is no callback."""
    if inspect.isclass(callback) and issubclass(callback, TrainerCallback):
        name = callback.__name__
        hint = f"give an instance in place of the class, as in callbacks = [{name}(...)]"
        with control.users_code(f"the callback {name} cannot be made", ConfigError, hint=hint):
            return callback()
    if not isinstance(callback, TrainerCallback):
        raise ConfigError(
            f"{callback!r} is no callback", hint="derive it from transformers.TrainerCallback"
        )
    return callback


def training_arguments(config: Config) -> TrainingArguments:
    """The settings of a run that transformers knows, in the form of transformers."""
    own = ReportSettings.of(config.training)
    arguments = TrainingArguments(str(config.output_dir), report_to="none", use_cpu=True)
    for name in ReportSettings.model_fields:
        if hasattr(arguments, name):
            value, former = getattr(own, name), getattr(arguments, name)
            is_named = isinstance(former, Enum) and value is not None
            setattr(arguments, name, type(former)(value) if is_named else value)
    arguments.output_dir, arguments.report_to = str(config.output_dir), []
    arguments.run_name = None
    arguments.eval_strategy = IntervalStrategy(config.training.evaluation)
    metric = arguments.metric_for_best_model = config.training.metric
    if arguments.greater_is_better is None and metric is not None:
        arguments.greater_is_better = not metric.endswith(("loss", "perplexity"))
    if config.training.evaluation == "steps" and arguments.eval_steps is None:
        arguments.eval_steps = arguments.logging_steps
    return arguments
