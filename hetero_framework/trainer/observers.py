"""Observers of a run: the display, the files of metrics, and those that the registry has.

Its table "observers" has them by the settings that ask for them, "reporters" by the names of
training.report_to.

The training loop names events, and no observer. A step that is repeated after a loss is told again,
after `went_back`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from hetero_framework import log, registry
from hetero_framework.config.asked_extras import asked
from hetero_framework.core.spans import Span
from hetero_framework.data.sources import shorten
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.memory_checks import Facts
from hetero_framework.trainer.metrics import (
    METRICS_FILE,
    StepLines,
    by_set,
    is_evaluation,
    metric_name,
)
from hetero_framework.trainer.progress import Progress, StageRow
from hetero_framework.trainer.setup import Prepared, Sample
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

P = ParamSpec("P")
_SHOWN = 200  # letters of a prompt and of a sample on the screen
_log = logging.getLogger(__name__)


@dataclass
class Due:
    """What follows a step, or was left of it by an earlier process. Observers may change the first
    six in every event that has it, in `begin` `done`, and in `between` `is_held`."""

    log: bool = False
    evaluate: bool = False
    sample: bool = False
    save: bool = False
    stop_epoch: bool = False
    stop: bool = False
    done: set[str] = field(default_factory=set)  # names of those, and "epoch": what is not left
    was_evaluate: bool = False  # `evaluate` before the evaluation that is told
    is_epoch_over: bool = False
    is_epoch_told: bool = False
    is_given_up: bool = False  # a callback ended the step between two micro-batches
    is_open: bool = False  # not everything that follows the step is done
    is_over: bool = False  # the training, since it was stopped
    is_held: bool = False  # between two steps: an observer wants to be asked again before the next
    is_saver: bool = True  # of several islands, the one that saves; known when all steps are done

    def mark(self, name: str, wanted: bool) -> None:
        """Note that something is wanted, unless it is done."""
        if wanted and name not in self.done:
            setattr(self, name, True)


@dataclass(frozen=True)
class Placement:
    """The stages under the plan in force: `prepared` has it, `facts` are those of the processes,
    `direct` the boundaries with a link from worker to worker."""

    prepared: Prepared
    facts: Facts
    direct: frozenset[int] = frozenset()

    @property
    def rows(self) -> list[StageRow]:
        """The stages as the display shows them."""
        stages = self.prepared.config.plan.stages
        return [StageRow(s.process, s.start, s.end, self.facts[s.owner].device) for s in stages]


@dataclass(frozen=True)
class RunStart:
    """A run as it begins or goes on: its stages, its number, all its steps, how often it logs, in
    what its speed is counted, and the metrics that are shown. `is_continued`: it was cut short, and
    the same command goes on."""

    placed: Placement
    run_id: str
    total_steps: int
    logging_steps: int
    is_resumed: bool
    is_continued: bool = False
    unit: str = "tokens"
    measures: tuple[str, ...] = ()


class Observer:
    """Told of the events of one run, in the coordinator's thread. Each does nothing by itself."""

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        """The stages have the state that the run begins or goes on with. `due` is told what was
        done after that step already."""

    def went_back(self, state: TrainState) -> None:
        """The stages have an earlier state again; the steps after it are repeated."""

    def replanned(self, placed: Placement) -> None:
        """Other stages run the steps from now on."""

    def between(self, state: TrainState, due: Due) -> None:
        """Another step would begin. A checkpoint that is marked is written at once; while the run
        `is_held` this is told again and again."""

    def step_begin(self, state: TrainState, due: Due) -> None:
        """A step begins."""

    def substep_end(self, state: TrainState, due: Due) -> None:
        """A micro-batch of a step is done, and not the last."""

    def given_up(self, line: Mapping[str, Any]) -> None:
        """The step ends without a decision, as a callback wants it; `line` has what was done."""

    def before_commit(self, state: TrainState, due: Due) -> None:
        """The gradients of a step are complete, and it is decided whether weights will change."""

    def after_commit(self, state: TrainState, outcome: StepOutcome, due: Due) -> None:
        """All stages were told to change their weights, or that the step is skipped."""

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        """A step is done; `line` is that of metrics.jsonl."""

    def epoch_end(self, state: TrainState, due: Due) -> None:
        """The last step of an epoch, or of the run, is done, and what was due after it."""

    def log(self, state: TrainState, due: Due) -> None:
        """It is time to log."""

    def predicted(self, state: TrainState, due: Due) -> None:
        """A micro-batch of an evaluation is done."""

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        """An evaluation is done; `metrics` are its line of metrics.jsonl."""

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        """The model has continued the sample_prompts."""

    def saved(self, state: TrainState, due: Due) -> None:
        """A checkpoint was written."""

    def spans(self, owner: int | str, spans: Sequence[Span], offset_s: float) -> None:
        """Spans that a process recorded; `offset_s` is its clock minus the coordinator's."""

    def trained(self, state: TrainState, due: Due) -> None:
        """All steps are done; the result is not made yet."""

    def exported(self, state: TrainState) -> None:
        """The result is written, and all processes have told what they recorded."""

    def finished(self, state: TrainState, files: Mapping[str, str | Path]) -> None:
        """The result is written. `files` are lines for the user: a label and a path or text."""

    def leaves(self) -> Mapping[str, str | Path]:
        """Lines for `files`: a label, and the path of a file or a command for it. A path where
        there is nothing is left out."""
        return {}

    def close(self, failed: bool) -> None:
        """The run has ended, with an error or without. What it raises ends the run."""


@dataclass(frozen=True)
class Watched:
    """The run that an observer is made for, which begins as `placed`. `should_stop`: whether it is
    not to wait any more; `callbacks`: those that `train` was given; `stop` requests a stop by the
    one that it names; `at_end` has something done after the run's last event."""

    placed: Placement
    store: CheckpointStore
    should_stop: Callable[[], bool]
    callbacks: Sequence[Any] = ()
    stop: Callable[[str], None] = lambda by: None
    at_end: Callable[[Callable[[], object]], None] = lambda do: None


def extra_observers(run: Watched, objects: Collection[str]) -> Iterator[Observer]:
    """The observers that the run's settings and `objects` ask for, and its reporters."""
    config = run.placed.prepared.config
    wanted = config.training.report_to
    known = registry.installed("reporters") if wanted else []
    reporters = [registry.find("reporters", n) for n in known if n in wanted or "all" in wanted]
    for make in dict.fromkeys([*asked("observers", config, objects), *reporters]):
        if (made := make(run)) is not None:
            yield made


class Observers:
    """Tells each event to all observers, in their order. A context manager: it closes them, the
    last one first. Within, threads of reporters that cannot write say so in a line."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._hook = threading.excepthook

    def watch(self, observers: Iterable[Observer]) -> None:
        """Take further ones, one after the other, as they are made."""
        for observer in observers:
            self._observers.append(observer)

    def __enter__(self) -> Observers:
        self._hook, threading.excepthook = threading.excepthook, self._on_thread
        return self

    def _on_thread(self, failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):
            self._hook(failure)
            return
        name = failure.thread.name if failure.thread is not None else "a thread"
        _log.warning("a reporter (%s) cannot write: %s; the run goes on", name, failure.exc_value)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with ExitStack() as closing:
            closing.callback(setattr, threading, "excepthook", self._hook)
            for observer in self._observers:
                closing.callback(observer.close, kind is not None)

    def leave(self) -> dict[str, str | Path]:
        """What all of them leave."""
        lines = (line for observer in self._observers for line in observer.leaves().items())
        return {k: v for k, v in lines if not isinstance(v, Path) or v.exists()}

    def tell(
        self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """`event` is a method of `Observer`."""
        for observer in self._observers:
            getattr(observer, event.__name__)(*args, **kwargs)


class Screen(Observer):
    """The progress display."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        shown = run.logging_steps, run.unit, run.measures
        self._progress.start(run.total_steps, run.placed.rows, state.step, *shown)

    def replanned(self, placed: Placement) -> None:
        self._progress.replanned(placed.rows)

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        self._progress.step(line)

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        for name, found in by_set(metrics).items():
            self._progress.evaluation({"step": state.step, **found}, name)

    def sampled(self, state: TrainState, samples: Sequence[Sample]) -> None:
        for sample in samples:
            told = (shorten(text, _SHOWN) or "(empty)" for text in (sample.prompt, sample.text))
            self._progress.message("step {}: {} -> {}".format(state.step, *told))

    def finished(self, state: TrainState, files: Mapping[str, str | Path]) -> None:
        self._progress.close(files)


class MetricsFile(Observer):
    """metrics.jsonl."""

    def __init__(self, output_dir: Path) -> None:
        self._lines = StepLines(output_dir / METRICS_FILE)

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        lines = self._lines.resume(state.step)
        if any(line["step"] == state.step and is_evaluation(line) for line in lines):
            due.done.add("evaluate")

    def went_back(self, state: TrainState) -> None:
        self._lines.resume(state.step)

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        self._lines.write(line)

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        self._lines.write(metrics)


class EventLog(Observer):
    """events.jsonl. Other code puts its events there through the log."""

    def __init__(self, events: log.Events) -> None:
        self._events = events

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        self._events.open()
        what = "run resumed" if run.is_resumed else "run started"
        fields: dict[str, Any] = {"run_id": run.run_id, "total_steps": run.total_steps}
        _log.info("", extra=log.event(what, step=state.step, **fields))

    def evaluated(self, state: TrainState, metrics: Mapping[str, Any], due: Due) -> None:
        losses = {
            metric_name(name, "loss"): found["eval_loss"] for name, found in by_set(metrics).items()
        }
        _log.info("", extra=log.event("evaluation", step=state.step, **losses))

    def finished(self, state: TrainState, files: Mapping[str, str | Path]) -> None:
        _log.info("", extra=log.event("run finished", step=state.step))
