"""Observers of a run: the display, the files of metrics, and those that the registry has.

The registry's table "observers" has them by the settings that ask for them, its table "reporters"
by their names in training.report_to.

The training loop knows events, but no observer. After the loss of a worker, `went_back` comes first
and then the events of the repeated steps.
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
    """What is due after a step, or was left over by an earlier process. Observers may change the
    first six fields in every event that gets a `Due`, `done` in `begin`, `is_held` in `between`."""

    log: bool = False
    evaluate: bool = False
    sample: bool = False
    save: bool = False
    stop_epoch: bool = False
    stop: bool = False
    done: set[str] = field(default_factory=set)  # names of fields above, and "epoch": already done
    was_evaluate: bool = False  # the value of `evaluate` before the evaluation
    is_epoch_over: bool = False
    is_epoch_told: bool = False
    is_given_up: bool = False  # a callback ended the step between two micro-batches
    is_open: bool = False  # not everything that follows the step is done
    is_over: bool = False  # the training ends after this step
    is_held: bool = False  # between two steps: an observer wants to be asked again before the next
    is_saver: bool = True  # this island is the one that saves; set when all steps are done

    def mark(self, name: str, wanted: bool) -> None:
        """Note that something is wanted, unless it is done."""
        if wanted and name not in self.done:
            setattr(self, name, True)


@dataclass(frozen=True)
class Placement:
    """The stages under the plan in force. `prepared` has the plan, `facts` describe the processes,
    and `direct` are the boundaries with a link from worker to worker."""

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
    """A run as it begins or goes on. It logs every `logging_steps` steps, counts its speed in
    `unit`s and shows the metrics in `measures`. `is_continued`: the same command goes on with a run
    that was cut short."""

    placed: Placement
    run_id: str
    total_steps: int
    logging_steps: int
    is_resumed: bool
    is_continued: bool = False
    unit: str = "tokens"
    measures: tuple[str, ...] = ()


class Observer:
    """Hears the events of one run, in the coordinator's thread. Each method here does nothing."""

    def begin(self, state: TrainState, run: RunStart, due: Due) -> None:
        """The stages have the state that the run begins or goes on with. An observer adds to
        `due.done` what was done after that step already."""

    def went_back(self, state: TrainState) -> None:
        """The stages have an earlier state again; the steps after it are repeated."""

    def replanned(self, placed: Placement) -> None:
        """Other stages run the steps from now on."""

    def between(self, state: TrainState, due: Due) -> None:
        """The next step is about to begin. A checkpoint that is marked is written at once. While
        the run `is_held`, this event is repeated."""

    def step_begin(self, state: TrainState, due: Due) -> None:
        """A step begins."""

    def substep_end(self, state: TrainState, due: Due) -> None:
        """A micro-batch of a step is done, other than the last."""

    def given_up(self, line: Mapping[str, Any]) -> None:
        """A callback ends the step, which changes no weight; `line` has what was done."""

    def before_commit(self, state: TrainState, due: Due) -> None:
        """The gradients of a step are complete, and it is decided whether weights will change."""

    def after_commit(self, state: TrainState, outcome: StepOutcome, due: Due) -> None:
        """All stages were told to change their weights, or that the step is skipped."""

    def step_end(self, state: TrainState, line: Mapping[str, Any], due: Due) -> None:
        """A step is done; `line` is its line of metrics.jsonl."""

    def epoch_end(self, state: TrainState, due: Due) -> None:
        """The last step of an epoch or of the run is done, as is what was due after the step."""

    def log(self, state: TrainState, due: Due) -> None:
        """It is time to log."""

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
        """Lines for the `files` of `finished`: a label, and the path of a file or a command. A path
        that does not exist is left out."""
        return {}

    def close(self, failed: bool) -> None:
        """The run has ended, with an error if `failed`. An error raised here ends the run."""


@dataclass(frozen=True)
class Watched:
    """The run that an observer is made for; `placed` is how it begins. `should_stop()` says whether
    to wait no longer. `callbacks` were given to `train` or imported. `stop(by)` requests a stop in
    the name of `by`. `at_end(do)` has `do` called after the run's last event. `screen` shows the
    run."""

    placed: Placement
    store: CheckpointStore
    should_stop: Callable[[], bool]
    callbacks: Sequence[Any] = ()
    stop: Callable[[str], None] = lambda by: None
    at_end: Callable[[Callable[[], object]], None] = lambda do: None
    screen: Progress | None = None


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
    """Tells each event to all observers, in their order. As a context manager it closes them, the
    last one first, and logs one line when a reporter's thread cannot write."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._hook = threading.excepthook

    def watch(self, observers: Iterable[Observer]) -> None:
        """Add observers one by one, as `observers` makes them."""
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
        """The lines that all observers leave, without paths that do not exist."""
        lines = (line for observer in self._observers for line in observer.leaves().items())
        return {k: v for k, v in lines if not isinstance(v, Path) or v.exists()}

    def tell(
        self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call `event`, a method of `Observer`, on all observers."""
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
    """Writes metrics.jsonl."""

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
    """Opens events.jsonl and logs events; other code's events get there through the log too."""

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
