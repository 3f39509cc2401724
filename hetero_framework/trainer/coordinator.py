"""The training loop. Read `train` first, then `Coordinator.train_step`.

The coordinator owns the data, the schedule, the decision on every step, checkpoints and metrics.
Its own stages run through the same class as a worker's. Recovery from the loss of a worker is in
cluster/recovery.py, for which a `Coordinator` is the `RunLoop`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

from torch import Tensor

from hetero_framework import control, errors, log, registry
from hetero_framework.cluster.cluster import Cluster, Gradients
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.roles import (
    Unnamed,
    check_coordinator,
    decide_role,
    with_own_devices,
)
from hetero_framework.config import PLAN_FILE, Config, interval
from hetero_framework.config.asked_extras import absent_extras, asked, chosen
from hetero_framework.config.optimizers import check_optimizer
from hetero_framework.core import failpoints, timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.data.batches import LazyBatches, MicroBatch, padded_count, token_count
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.grad_clip import clip_factor
from hetero_framework.engine.hosts import ReplicasChanged, StagesLost, StopWanted, WorkerLeaving
from hetero_framework.engine.loading import BuildStages, load_stages
from hetero_framework.engine.loss_scale import LossScale
from hetero_framework.engine.optimizer import LearningRate
from hetero_framework.engine.stage_api import GradientReport, StepInfo
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.security.access import Access, access_of, island_access, key_directory
from hetero_framework.trainer import outputs, setup, skipped_step
from hetero_framework.trainer.checkpoint import CheckpointReader, CheckpointStore
from hetero_framework.trainer.memory_probe import advised, probe_longest_batch
from hetero_framework.trainer.metrics import METRICS_FILE, SPEED, StepReport, metric_name
from hetero_framework.trainer.observers import (
    Due,
    EventLog,
    MetricsFile,
    Observer,
    Observers,
    Placement,
    RunStart,
    Screen,
    Watched,
    extra_observers,
)
from hetero_framework.trainer.outputs import RunDirectories
from hetero_framework.trainer.plans import PlanChange, Plans, planned
from hetero_framework.trainer.progress import Progress, display
from hetero_framework.trainer.python_data import (
    COMPUTE,
    PREPROCESS,
    ComputedMetrics,
    Given,
    with_objects,
)
from hetero_framework.trainer.replica_group import ReplicaGroup, Single, StepPart
from hetero_framework.trainer.run_checkpoint import (
    RunCheckpoints,
    newest_state,
    plan_in_force,
    same_run,
    warn_of_a_small_disk,
)
from hetero_framework.trainer.signals import StopRequest
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState
from hetero_framework.units import plural

_MARKS = ("log", "evaluate", "sample", "save")
"""Fields of `Due` that a checkpoint keeps. "stop" is kept too, unless the step is the last."""
_MAX_FAILED_SAVES = 3
_MAX_DEATHS = 3
"""Maximum deaths of one worker at one step."""
_MAX_RESTARTS = 5
"""Maximum deaths of all workers at one step."""
_EXPORT_PAUSES_S = (1.0, 5.0, 15.0, 30.0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """The result of a finished run.

    `steps` is the last step, `losses` has the loss of each step done here, and `metrics` has the
    numbers of the last step and the last evaluation. `files` maps labels to what the run left.
    """

    steps: int
    losses: tuple[float, ...]
    files: dict[str, Path] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best_checkpoint: Path | None = None
    output_dir: Path = Path()

    def load(self, **settings: Any) -> Any:
        """The trained model: a PeftModel, or a model of the library's class. `settings` go to
        from_pretrained."""
        return outputs.load_result(self.files, **settings)


def train(
    config: Config,
    *,
    resume: int | str | None = None,
    fresh: bool = False,
    debug: bool = False,
    replan: bool = False,
    progress: Progress | None = None,
    workers: LocalWorkers | None = None,
    access: Access | None = None,
    islands: Access | None = None,
    build: BuildStages = load_stages,
    **given: Unpack[Given],
) -> RunSummary:
    """Train as the coordinator, from start to finish. No worker outlives the call. Without `access`
    the call is refused on a machine that the configuration names as a worker's. Raises the
    HeteroError that fits the failure.

    Args:
        resume: A step number or "latest"; overrides `resume_step`. Without it an interrupted run of
            this `output_dir` continues from its newest state, unless `fresh`.
        replan: Go on without workers that stay away, and take them back when they return.
        workers: The workers of this machine, if they were started before the call.
        access: For the links to workers; `islands` is for the links to other islands. Default: by
            the keys beside the configuration.
        build: Builds the stages of this process.
        given: train_dataset, eval_dataset, processing_class, callbacks, compute_metrics and
            preprocess_logits_for_metrics, see `Given`. Data and tokenizer replace the
            configuration's and are saved in output_dir. Callbacks of imported files come last.
    """
    return _Call(
        config=config,
        given=given,
        show=progress or display(),
        resume=resume,
        fresh=fresh,
        replan=replan,
        debug=debug,
        workers=workers,
        access=access,
        islands=islands,
        build=build,
    ).run()


@dataclass
class _Call:
    """One call of `train`, with its arguments: opens what a run needs, and closes it again."""

    config: Config
    given: Given
    show: Progress
    resume: int | str | None
    fresh: bool
    replan: bool
    debug: bool
    workers: LocalWorkers | None
    access: Access | None
    islands: Access | None
    build: BuildStages

    def __post_init__(self) -> None:
        """Check what was given, before anything is opened."""
        given = with_own_devices(self.config)
        if self.access is None:
            with suppress(Unnamed):
                role = decide_role(given, keys=key_directory(given).processes())
                check_coordinator(role, "train")
        config = with_objects(given, self.given)
        config.require("model", "data")
        self._objects = objects = _objects(config, self.given, self.replan)
        self._absent = list(absent_extras(config, objects))
        if config.training.page is None and registry.has("observers", "training.page"):
            config = config.with_changes(training={"page": self.show.has_terminal})
        config.check_metric(objective_of(config.training).evaluated, computes=COMPUTE in objects)
        self.access = access = self.access or access_of(config, "local")
        self.config = config = planned(config, access, resume=self.resume, fresh=self.fresh)
        if config.setting("island") is not None:
            self.islands = self.islands or island_access(config)
        check_optimizer(config.training)
        for check in asked("run_checks", config):
            check(config)
        self._events = log.Events(config.output_dir / log.EVENTS_FILE, "coordinator")
        self._store = CheckpointStore(config.checkpoints, config.training.save_total_limit)
        self._directories = RunDirectories(config, self._store)
        self._stop = StopRequest(before_question=self.show.close)

    def run(self) -> RunSummary:
        """Do the run, after a line on each thing that is left out as its extra is not installed."""
        log_of_run = _log_of_run(self.config, self.show, self._events)
        armed = failpoints.armed("coordinator")
        preprocess = control.having(PREPROCESS, self.given.get(PREPROCESS))
        with self._stop, self._directories, log_of_run, armed, preprocess:
            for line in self._absent:
                _log.info("%s", line)
            try:
                return self._prepared()
            except KeyboardInterrupt:
                raise errors.StoppedEarly(
                    f"stopped at once by {self._stop.requested or 'Ctrl-C'}",
                    hint="the same command or call goes on after the newest state that was saved,"
                    " if there is any; --fresh, or fresh=True, begins anew",
                ) from None
            finally:
                self.show.close()

    def _prepared(self) -> RunSummary:
        """Find the state to begin with, read model and data, and do the run."""
        config, store = self.config, self._store
        resume = config.resume_step if self.resume is None else self.resume
        is_cut_short = self._directories.is_unfinished and not self.fresh
        goes_on = is_cut_short and resume is None
        checkpoint = newest_state(config, store, "latest" if goes_on else resume, goes_on)
        kept = None
        if checkpoint is None:
            self._directories.check_fresh()
        elif self.replan:
            kept = plan_in_force(checkpoint, config)
        prepared = setup.prepare(config, kept)
        make = chosen("metrics", config, self._objects)
        computed = make(self.given, prepared) if make else None
        if checkpoint is not None:
            checkpoint = same_run(checkpoint, prepared, must=not goes_on)
        with self._cluster(prepared) as cluster, Observers() as observers:
            coordinator = self._coordinator(prepared, cluster, observers, computed)
            return coordinator.run(checkpoint, goes_on)

    def _cluster(self, prepared: setup.Prepared) -> Cluster:
        """The run's cluster, with the workers and threads of the plan that was given."""
        structure = introspect(prepared.model_config)
        longest_s = min(self.config.training.longest_outage_s, timeouts.REPLAN_S)
        return Cluster(
            prepared.resolved.given,
            max_frame_bytes=prepared.max_frame_bytes,
            max_boundary_bytes=prepared.max_boundary_bytes,
            build=self.build,
            debug=self.debug,
            run_id=self._directories.run_id,
            workers=self.workers,
            access=self.access,
            should_stop=lambda: self._stop.requested is not None,
            absence_s=longest_s if self.replan else None,
            id_layers=structure.id_readers,
            statistics=structure.statistics,
            show_away=self.show.away,
        )

    def _coordinator(
        self,
        prepared: setup.Prepared,
        cluster: Cluster,
        observers: Observers,
        computed: ComputedMetrics | None,
    ) -> Coordinator:
        """Start the workers and what watches the run."""
        config, objects = self.config, self._objects
        facts = cluster.start(prepared.config.plan.owners)
        prepared = setup.fit_devices(prepared, facts)
        read = chosen("predictions", config, objects)
        prediction = read(prepared.config) if read else None
        times = prediction.pipeline if prediction is not None else None
        cluster.assemble(prepared.config, prepared.memory_limits, times)
        checkpoints = RunCheckpoints(self._store, cluster, prepared)
        screen = Screen(self.show)
        observers.watch([MetricsFile(config.output_dir), EventLog(self._events), screen])
        callbacks = control.as_list(self.given.get("callbacks") or ())
        watched = Watched(
            Placement(prepared, facts, cluster.direct),
            self._store,
            lambda: self._stop.requested is not None,
            [*callbacks, *control.imported_callbacks()],
            self._stop.ask,
            self._directories.at_end,
            self.show,
        )
        observers.watch(extra_observers(watched, objects))
        make = chosen("plans", config, objects)
        plans = make(prepared, facts, survivors=self.replan) if make else Plans(prepared, facts)
        make = chosen("replicas", prepared.config)
        about = prepared, cluster, checkpoints, self._stop, self.islands
        replicas: ReplicaGroup = make(*about) if make else Single()
        plans.planned_s = prediction.step_s if prediction is not None else None
        return Coordinator(
            cluster,
            checkpoints,
            self._directories,
            observers,
            self._stop,
            replicas,
            plans,
            computed,
        )


class Coordinator:
    """A run, from its first step to its files."""

    def __init__(
        self,
        cluster: Cluster,
        checkpoints: RunCheckpoints,
        directories: RunDirectories,
        observers: Observers,
        stop: StopRequest,
        replicas: ReplicaGroup,
        plans: Plans,
        computed: ComputedMetrics | None = None,
    ) -> None:
        """`plans` has the plan in force; `computed` are the user's metrics, if there are any."""
        prepared = plans.prepared
        self._plans, self._computed = plans, computed
        self._config = config = prepared.config
        self._data: TrainData = prepared.data
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._directories = directories
        self._observers = observers
        self._stop = stop
        self._replicas = replicas
        self._schedule = LearningRate(config.training, self._data.total_steps)
        self._objective = objective_of(config.training)
        self._count_items = self._objective.item_counter(prepared.model_config)
        self._reference: Any = None
        if self._objective.has_reference:
            labels = {owner: fact.label for owner, fact in plans.facts.items()}
            self._reference = registry.find("references", "log_probs")(prepared, labels)
        self._state = TrainState()
        self._has_begun = False
        self._epoch = 0.0
        self._part: StepPart | None = None  # of the step under way
        self._losses: list[tuple[int, float]] = []  # steps and losses
        self._metrics: dict[str, float] = {}
        self._due = Due()
        self._result: Path | None = None
        self._deaths: Counter[tuple[WorkerId, int]] = Counter()  # by worker and step
        self._may_last_s = math.inf

    def run(self, checkpoint: CheckpointReader | None, continued: bool = False) -> RunSummary:
        """Do the whole run, from a checkpoint or from the beginning. `continued`: the same command
        goes on with a run that was cut short."""
        self._cluster.recovery.note_death = self._note_death
        try:
            self.start(checkpoint, continued)
            commands = {"checkpoint": self._save_after_step}
            with self._stop.waiting(), control.coordinating(commands):
                return self._cluster.recovery.run(self)
        except (StopWanted, _Interrupted) as cut:
            self._checkpoints.keep_newest()
            what = "a worker did not answer"
            if isinstance(cut, StopWanted):
                what = f"{str(cut) or 'a worker'} was waited for"
            where = f"stopped by {self._stop.requested} while {what}"
            raise errors.StoppedEarly(where, hint=self._checkpoints.advice()) from None
        except errors.CallbackError as error:
            raise errors.CallbackError(error.message, hint=self._rescued(error)) from error
        except errors.PeerLostError as error:
            # How to go on depends on what has been saved.
            self._checkpoints.keep_newest()
            hint = self._checkpoints.advice(error)
            raise type(error)(error.message, hint=hint) from error
        finally:
            stopped = self._stop.requested
            self._replicas.close(f"it was stopped by {stopped}" if stopped else "it ends")
            self._checkpoints.close()
            self._data.close()

    def start(self, checkpoint: CheckpointReader | None, continued: bool) -> None:
        """Load a checkpoint or begin afresh, and show the placement of stages."""
        if checkpoint is not None:
            self._directories.own_checkpoints()
            self._directories.set_later_aside(checkpoint.step)
        else:
            self._directories.tidy()
            self._directories.set_aside()
        self._directories.mark_unfinished()
        self._state = self._take_up(checkpoint)
        if checkpoint is not None:
            self._directories.tidy()
        warn_of_a_small_disk(self._plans.prepared, self._directories.store, self._state.step)
        total = self._data.total_steps
        training = self._config.training
        logging_steps = {
            "no": total + 1,
            "steps": interval(training.logging_steps, total),
            "epoch": self._data.steps_per_epoch,
        }[training.logging_strategy]
        is_resumed = checkpoint is not None
        goes_on = is_resumed and continued
        measures = self._objective.shown
        if self._data.mixture is not None:
            measures = (*measures, *self._data.mixture.metric_names)
        run = RunStart(
            *(self._placed, self._cluster.run_id, total, logging_steps, is_resumed, goes_on),
            unit=self._objective.unit,
            measures=measures,
        )
        self._epoch = self._epoch_before(self._state)
        self._observers.tell(Observer.begin, self._state, run, self._due)
        if goes_on and self._state.step > 0:
            self._note_what_is_left()

    @property
    def _placed(self) -> Placement:
        return Placement(self._plans.prepared, self._plans.facts, self._cluster.direct)

    def _take_up(self, checkpoint: CheckpointReader | None) -> TrainState:
        """Give all stages the state that the run begins with."""

        def take_up() -> TrainState:
            if checkpoint is not None:
                state = self._checkpoints.restore(checkpoint)
            else:
                prepared, pipeline = self._plans.prepared, self._cluster.pipeline
                about = prepared.adapter_plan, prepared.model_config, self._config.plan.stages
                self._cluster.retrying(lambda: setup.load_initial_adapter(*about, pipeline))
                state = TrainState(loss_scale=LossScale.for_training(self._config.training.fp16))
            self._checkpoints.begin(state)
            return state

        return self._cluster.recovery.outlive(take_up)

    # -- what recovery asks for (`RunLoop`) -----------------------------------------------------

    def hand_over(self) -> None:
        self._checkpoints.hold(self._state)

    def rewind(self, trouble: StagesLost | WorkerLeaving) -> None:
        reached = self._state.step
        state = self._checkpoints.rewind()
        if state is None:  # nothing is kept, so all stages begin again
            self._cluster.assemble(self._config, self._plans.prepared.memory_limits)
            state = self._take_up(None)
        self._replicas.went_back(state)
        self._return_to(state)
        back = log.event("went back", worker=trouble.worker, to_step=state.step, from_step=reached)
        text = "training goes on after step %d with worker %s (repeats %s)"
        repeated = plural(reached - state.step, "step")
        _log.info(text, state.step, trouble.worker, repeated, extra=back)

    def without(self, lost: errors.PeerLostError) -> Callable[[], None]:
        change = self._plans.after_loss(lost, self._cluster.members.away)
        return partial(self._take_plan, change)

    def _note_death(self, lost: StagesLost) -> None:
        """Raise PeerLostError when the step under way has killed workers too often."""
        step = self._state.step
        self._deaths[lost.worker, step] += 1
        of_step = sum(n for (_, at), n in self._deaths.items() if at == step)
        if self._deaths[lost.worker, step] < _MAX_DEATHS and of_step < _MAX_RESTARTS:
            return
        hint = "look at that worker's log"
        if self._part is not None:
            samples = ", ".join(str(int(k)) for batch in self._part.samples for k in batch)
            hint += f", and at the samples of the step: {samples[:500]}"
            hint += " (numbers from 0 in the training data)"
        raise errors.PeerLostError(
            f"step {step + 1} has ended a worker {of_step} times, the last time worker "
            f"{lost.worker}: {lost.reason}",
            hint=hint,
        )

    def _return_to(self, state: TrainState) -> None:
        """Go on from `state`, which all stages have, and drop the records of later steps."""
        if state.step < self._state.step:  # the repeated steps note it again
            self._due = Due()
        self._state, self._epoch = state, self._epoch_before(state)
        self._losses = [entry for entry in self._losses if entry[0] <= state.step]
        self._observers.tell(Observer.went_back, state)
        log.set_step(state.step)

    def _take_plan_now(self, change: PlanChange) -> None:
        """Take a plan between two steps. The state is kept first, so that no step is repeated."""
        if self._checkpoints.hold(self._state):
            self._take_plan(change)
        else:
            _log.warning("the plan stays as it is: the state could not be kept")

    def _take_plan(self, change: PlanChange) -> None:
        """Have all processes load their stages of another plan, with the newest kept state. They
        load again if a worker is lost meanwhile. Raises PeerLostError if a worker stays away."""
        reached = self._state.step

        def take() -> TrainState:
            self._cluster.recovery.forget_step()
            self._plans.taken(change)
            self._config = change.prepared.config
            self._checkpoints.replanned(change.prepared)
            self._cluster.assemble(change.prepared.config, change.prepared.memory_limits)
            return self._checkpoints.rewind() or self._take_up(None)

        state = self._cluster.recovery.outlive(take, loads=True)
        self._replicas.went_back(state)
        self._return_to(state)
        self._observers.tell(Observer.replanned, self._placed)
        repeated = plural(reached - state.step, "step")
        fields: dict[str, Any] = {"to_step": state.step, "from_step": reached}
        changed = log.event("plan changed", reason=change.reason, plan=change.layers, **fields)
        text = "%s: the run goes on after step %d with %s (repeats %s)"
        _log.warning(text, change.reason, state.step, change.layers, repeated, extra=changed)

    def steps(self) -> RunSummary:
        """Do all steps that are left and what comes between them, then finish the run."""
        training, total = self._config.training, self._data.total_steps
        if self._reference is not None:
            self._reference.prepare(self._cluster, self._data, self._state.step)
        if not self._has_begun:  # else the run went back to its beginning
            if self._computed is not None:
                self._computed.try_out(self._cluster, self._state.step, self._evaluated)
            model = self._plans.prepared.model_config
            probe_longest_batch(self._cluster, self._data, training, model, self._state)
            if self._data.eval_sets and training.eval_on_start and self._state.step == 0:
                self.evaluate()
            self._has_begun = True
        self._do_what_is_due()
        while self._state.position < total and not self._due.is_over:
            self._heed_observers()
            self._cluster.pipeline.check = self._heed_stop
            if self._stop.requested is not None:
                self._stop_early()
            try:
                state = self._replicas.ready(self._state)
                if state.step != self._state.step:
                    self._return_to(state)
                self._state = state
                if state.position >= total:
                    break
                if (report := self.train_step()) is not None:
                    self._record(report)
            except ReplicasChanged as changed:
                _log.info("%s; the step is done again", changed, extra=changed.told)
                self._cluster.retrying(self._cluster.pipeline.abort)
                continue
            except _Interrupted:
                self._cluster.retrying(self._cluster.pipeline.abort)
                _log.warning("the step under way was given up; it is repeated when the run goes on")
                self._stop_early()
            if not self._due.is_given_up:
                control.step_done(self._state.step, self._cluster)
            try:
                self._do_what_is_due()
            except errors.PeerLostError as lost:
                if self._state.position < total:
                    raise
                return self.finish(lost)
            if self._state.position < total and not self._due.is_over:
                for change in self._plans.changes(self._cluster):
                    self._take_plan_now(change)
        self._state = self._replicas.finished(self._state)
        return self.finish()

    def _heed_observers(self) -> None:
        """Before a step, do what observers want: hold the run, or write a checkpoint."""
        while self._stop.requested is None:
            # A checkpoint that callbacks asked for as training began is no observer's wish.
            asked, self._due.save, self._due.is_held = self._due.save, False, False
            self._observers.tell(Observer.between, self._state, self._due)
            if self._due.save and self._saves:
                self.save()
            self._due.save = asked
            if not self._due.is_held:
                return

    def _save_after_step(self, data: object) -> None:
        self._due.save = True

    def _note_what_is_due(self, before: TrainState) -> None:
        """Note what is due after the steps since `before`. As in the Trainer, evaluation and
        checkpoints by steps are also due after the last step. A lost worker only delays them."""
        training, due, state = self._config.training, self._due, self._state
        total, every = self._data.total_steps, self._data.steps_per_epoch

        def due_after(steps: float) -> bool:
            """Whether a multiple of `steps` is reached; with islands by several steps at once."""
            steps = interval(steps, total)
            return bool(state.step // steps > before.step // steps)

        due.is_open = True
        due.is_epoch_over = state.position // every > before.position // every
        due.stop |= (ends := state.step >= total)  # the data may end earlier, as in the Trainer
        if training.logging_strategy == "steps":
            due.mark("log", due_after(training.logging_steps))
        due.mark("log", training.logging_first_step and state.step == 1)
        if training.evaluation == "steps" and state.step >= training.eval_delay:
            steps = training.eval_steps or training.logging_steps
            due.mark("evaluate", due_after(steps) or ends)
        if training.save_strategy == "steps":
            due.mark("save", due_after(training.save_steps) or ends)
        if self._plans.prepared.sampler is not None:
            due.mark(
                "sample",
                due_after(self._config.setting("training.sample_steps")) or state.position >= total,
            )

    def _note_what_is_left(self) -> None:
        """Note what a run that was cut short has not done after its last step, including what
        callbacks asked for. A checkpoint comes last: it counts as done if nothing else is left."""
        state, due = self._state, self._due
        self._note_what_is_due(replace(state, step=state.step - 1))
        if state.due is not None:
            due.stop |= "stop" in state.due
            for mark in _MARKS:
                setattr(due, mark, mark in state.due and mark not in due.done)
        of_epoch = self._is_evaluated_by_epoch and (due.is_epoch_over or due.stop)
        is_left = due.evaluate or due.sample or (of_epoch and "evaluate" not in due.done)
        if not is_left and state.step in self._directories.store.complete_steps():
            due.done.add("save")
            due.save = False

    def _do_what_is_due(self) -> None:
        """Do what is due after a step, then after its epoch, and is not done yet."""
        due = self._due
        if not due.is_open:
            return
        if not due.is_given_up:
            self._do_marked()
        if due.is_epoch_over or due.stop or due.stop_epoch:
            if not due.is_epoch_told:
                due.mark("log", self._config.training.logging_strategy == "epoch")
                due.mark("evaluate", self._is_evaluated_by_epoch)
                due.mark("save", self._config.training.save_strategy == "epoch")
                due.is_epoch_told = True
                if "epoch" not in due.done:
                    self._observers.tell(Observer.epoch_end, self._state, due)
            self._do_marked()
        if due.stop_epoch:
            self._leave_epoch()
        due.is_open, due.is_over = False, due.stop

    @property
    def _is_evaluated_by_epoch(self) -> bool:
        training = self._config.training
        return training.evaluation == "epoch" and self._epoch >= training.eval_delay

    def _do_marked(self) -> None:
        due = self._due
        if due.log:
            due.log = False
            self._observers.tell(Observer.log, self._state, due)
        if due.evaluate and self._data.eval_sets:
            self.evaluate()
        else:
            due.evaluate = False
        if due.sample:
            self.sample()
        due.sample = False
        if due.save and self._saves:
            self.save()

    def _leave_epoch(self) -> None:
        """Go on with the next epoch, because a callback asked for it."""
        if not self._replicas.is_alone:
            _log.warning("an island cannot leave an epoch early: all train on one order of data")
            return
        due, every = self._due, self._data.steps_per_epoch
        if rest := -self._state.position % every or every * due.is_given_up:
            due.is_given_up = False
            self._state = replace(self._state, jumped=self._state.jumped + rest)
            self._checkpoints.begin(self._state)

    def _epoch_before(self, state: TrainState) -> float:
        """The epoch that the Trainer logs for the last step that `state` has done."""
        return self._data.epoch_of(state.position - 1) if state.step else 0.0

    def train_step(self) -> StepReport | None:
        """Do one step: all micro-batches through all stages, one decision, one commit."""
        state, started, traffic = self._state, time.perf_counter(), self._cluster.traffic()
        log.set_step(state.step + 1)
        due = Due()
        self._observers.tell(Observer.step_begin, state, due)
        part = self._part = self._replicas.part(state, self._data, self._count_items)
        batches = part.batches
        tokens = sum(map(token_count, batches))
        losses, reports, stages = self._computed_part(part)
        if (count := self._count_of_substeps(due, len(batches))) < len(batches):
            self._give_up(due, batches[:count], losses[:count])
            return None  # a callback ends it between two micro-batches
        measured = self._measured(self._data.order.gathered(part.number))
        everywhere = self._replicas.losses(losses)
        loss = _total(everywhere)
        norm = self._cluster.loaded.order.global_norm(reports)
        rate = self._schedule.rate(state.committed_steps)

        # The decision. After a commit the step counts, whatever breaks from here on.
        outcome = skipped_step.judged(state, everywhere, loss, norm, self._config)
        outcome, norm = self._replicas.decide(outcome, norm)
        self._observers.tell(Observer.before_commit, state, due)
        if commits := outcome.commits:
            factor = clip_factor(norm, self._config.training.max_grad_norm)
            self._cluster.pipeline.commit(rate, factor, self._cluster.recovery.recover)
        else:
            self._cluster.retrying(self._cluster.pipeline.abort)
        self._state = state.after(outcome, tokens)
        if not commits:
            outcome = self._note_skip(outcome, losses, reports, part)
        self._part = None
        self._state = self._replicas.after_step(state, self._state)
        self._epoch = self._data.epoch_of(state.position)
        self._due = due
        self._observers.tell(Observer.after_commit, self._state, outcome, due)
        self._note_what_is_due(state)
        return StepReport(
            step=self._state.step,
            epoch=self._epoch,
            loss=loss,
            grad_norm=float(norm),
            learning_rate=rate,
            outcome=outcome,
            seconds=time.perf_counter() - started,
            batches=batches,
            stages=stages,
            traffic=(traffic, self._cluster.traffic()),
            measured={**measured, **self._tokens(), **self._replicas.metrics()},
        )

    def _record(self, report: StepReport) -> None:
        """Tell the observers of a step, tune the next steps to it, and keep its state if due."""
        self._losses.append((report.step, report.loss))
        if report.batches:
            seen = self._cluster.observe(len(report.batches), report.stages)
            self._plans.after_step(seen)
        self._keep_spans()
        forecast = self._cluster.forecast
        line = report.line(
            self._config.plan.stages,
            self._plans.memory,
            planned_s=self._plans.planned_s,
            predicted_s=forecast.forecast.seconds if forecast else None,
        )
        self._metrics |= _numbers(line)
        self._observers.tell(Observer.step_end, self._state, line, self._due)
        if self._due.stop_epoch:
            self._leave_epoch()
        self._state = self._with_due()
        self._checkpoints.after_step(self._state, report.seconds)

    def _computed_part(self, part: StepPart) -> Gradients:
        """Send this replica's part of a step through all stages; no weight changes yet."""
        state = self._state
        info = StepInfo(
            step=part.number,
            attempt=0,
            train=True,
            micro_batches=len(part.batches),
            num_items=part.num_items,
            loss_scale=state.loss_scale.value,
            first_micro_batch=part.first_micro_batch,
        )
        with self._ending_within(timeouts.STEP_END_S):
            try:
                batches = part.batches
                if self._reference is not None:
                    batches = self._reference.added(self._cluster, batches, part.samples)
                attempt = partial(self._cluster.attempt, info, batches, part.group)
                return self._cluster.recovery.retrying(attempt)
            except errors.OutOfMemory as error:
                largest = max(part.batches, key=padded_count)
                what = f"step {state.step + 1}, whose largest micro-batch has"
                raise advised(error, largest, self._config.training, what) from error

    def _with_due(self) -> TrainState:
        """The state, with what is due after its step."""
        marks = _MARKS if self._state.position >= self._data.total_steps else (*_MARKS, "stop")
        return replace(self._state, due=tuple(m for m in marks if getattr(self._due, m)))

    def _count_of_substeps(self, due: Due, count: int) -> int:
        """How many micro-batches of a step count: fewer than `count` if a callback ends the
        training or the epoch between two of them. Callbacks are asked once all are computed."""
        for number in range(1, count):
            self._observers.tell(Observer.substep_end, self._state, due)
            if (due.stop or due.stop_epoch) and self._replicas.is_alone:
                return number
        return count

    def _give_up(self, due: Due, batches: Sequence[MicroBatch], losses: Sequence[float]) -> None:
        """End the step under way after these micro-batches, without a change of the weights."""
        self._cluster.retrying(self._cluster.pipeline.abort)
        self._due, due.is_open, due.is_given_up = due, True, True
        line = {"step": self._state.step + 1, "loss": math.fsum(losses)}
        line["padded_tokens"] = sum(map(padded_count, batches))
        self._observers.tell(Observer.given_up, {**line, "tokens": sum(map(token_count, batches))})

    def evaluate(self) -> None:
        """Compute losses over each evaluation set, through the same pipeline. Training's random
        numbers are functions of the step, so an evaluation does not affect them. A request to stop
        ends the evaluation without a result."""
        sets = self._data.eval_sets
        line: dict[str, Any] = {"step": self._state.step, "epoch": self._epoch}
        if "" not in sets:
            line["sets"] = list(sets)
        try:
            for name in sets:
                found = self._evaluated(name).items()
                line |= {metric_name(name, metric): value for metric, value in found}
        except _Interrupted:
            self._cluster.retrying(self._cluster.pipeline.abort)
            _log.warning("the evaluation is cut short; the run does it again when it goes on")
            self._stop_early()
        self._metrics |= _numbers(line)
        self._due.was_evaluate, self._due.evaluate = self._due.evaluate, False
        self._observers.tell(Observer.evaluated, self._state, line, self._due)

    def _evaluated(self, name: str) -> dict[str, float]:
        """The metrics of an evaluation set.

        `loss` is the Trainer's: each batch's mean over tokens, averaged over all samples.
        `token_loss` is the mean over tokens, and `perplexity` its exponential.
        """
        training, pipeline = self._config.training, self._cluster.pipeline
        computed, labels = self._computed, dict[int, Tensor]()
        batches: Sequence[MicroBatch] = self._data.eval_batches(name)
        items = [0] * len(batches)
        count_predictions = self._objective.prediction_counter(self._plans.prepared.model_config)
        started = time.perf_counter()
        count, size = len(self._data.eval_sets[name]), training.per_device_eval_batch_size
        samples = [range(first, min(first + size, count)) for first in range(0, count, size)]
        if self._reference is not None:
            batches = self._reference.added(self._cluster, batches, samples, f"eval {name}")

        def batch(index: int) -> MicroBatch:
            made = batches[index]
            items[index] = count_predictions([made])
            if computed is not None:
                labels[index] = made[self._objective.label_name]
            return made

        info = StepInfo(
            step=self._state.step,
            attempt=0,
            train=False,
            micro_batches=len(batches),
            num_items=1,
            predicts=None if computed is None else True,
        )
        with self._ending_within(0.0):
            sums = self._cluster.run(info, LazyBatches(len(batches), batch))
        with pipeline.judging_outcomes():
            routing = [self._objective.routing(each.named) for each in pipeline.outcomes]
        metrics = {
            **self._losses_of_set(sums, items, [*map(len, samples)], routing),
            "samples": count,
            "batches": len(batches),
            "seconds": time.perf_counter() - started,
            **self._measured(),
            **self._tokens(),
        }
        if computed is not None:
            told = [labels[index] for index in range(len(batches))]
            about = told, metric_name(name, ""), {*metrics, *SPEED}
            with pipeline.judging_outcomes():
                metrics |= computed.of_set(pipeline.outcomes, *about)
        return metrics

    def _losses_of_set(
        self,
        sums: Sequence[float],
        items: Sequence[int],
        sizes: Sequence[int],
        routing: Sequence[float],
    ) -> dict[str, float]:
        """`loss`, `token_loss` and `perplexity` of an evaluation set; arguments as for
        `sample_mean`."""
        mean = _total(sums) / sum(items)
        of_tokens = {
            "token_loss": mean,
            "perplexity": math.inf if mean >= 700 else math.exp(mean),
            "tokens": sum(items),
        }
        # For a batch without labels TRL's own loss is 0; with label smoothing the loss is NaN.
        of_none = math.nan if self._config.training.label_smoothing_factor else 0.0
        return {
            "loss": sample_mean(sums, items, sizes, of_none, routing),
            **(of_tokens if self._objective.counts_tokens else {}),
        }

    def sample(self) -> None:
        """Have the model continue the sample_prompts, through the same pipeline. A request to stop
        ends the sampling without a result."""
        sampler = self._plans.prepared.sampler
        assert sampler is not None
        try:
            with self._ending_within(0.0):
                samples = sampler.run(self._cluster, self._config, self._state.step)
        except _Interrupted:
            self._cluster.retrying(self._cluster.pipeline.abort)
            self._stop_early()
        self._observers.tell(Observer.sampled, self._state, samples)

    def _measured(self, most: int | None = None) -> dict[str, float]:
        """Metrics of the micro-batches computed last: the objective's, and losses by data source.
        Some objectives take only the first `most` examples of each micro-batch (None: all)."""
        pipeline = self._cluster.pipeline
        with pipeline.judging_outcomes():
            named: Sequence[Mapping[str, Tensor]] = [each.named for each in pipeline.outcomes]
            mixture = self._data.mixture
            of_sources = mixture.losses(named) if mixture is not None else {}
            if most is not None:
                named = self._objective.gathered(named, most)
            return {**self._objective.metrics(named), **of_sources}

    def _tokens(self) -> dict[str, int]:
        """The number of tokens trained on so far, if the objective logs it."""
        return {"num_tokens": self._state.tokens} if self._objective.logs_num_tokens else {}

    def save(self) -> None:
        """Write a checkpoint of this step. _MAX_FAILED_SAVES failures in a row end the run."""
        self._directories.keep()
        error = self._checkpoints.save(self._state)
        if error is not None and self._checkpoints.failures >= _MAX_FAILED_SAVES:
            raise errors.ResourceError(error.message, hint=self._rescued(error))
        self._due.save = False
        if self._checkpoints.has(self._state) and self._replicas.saves:
            self._observers.tell(Observer.saved, self._state, self._due)

    @property
    def _saves(self) -> bool:
        """Whether this process keeps a state that is to be saved. The best one becomes the result
        of every replica, so each keeps its own."""
        replicas, training = self._replicas, self._config.training
        return replicas.saves or (replicas.agrees and training.load_best_model_at_end)

    def finish(self, lost: errors.PeerLostError | None = None) -> RunSummary:
        """Gather and write the result, and show the paths of all files. With a worker `lost` after
        the last step, the last checkpoint becomes the result."""
        self._cluster.pipeline.check = self._heed_stop
        self._due.is_saver = self._replicas.saves
        self._replicas.close("its training is done")
        self._observers.tell(Observer.trained, self._state, self._due)
        if lost is None:
            self._save_at_the_end()
        self._result = result = self._make_result(lost)
        self._checkpoints.finished()
        self._directories.mark_finished()
        self._keep_spans()
        self._observers.tell(Observer.exported, self._state)
        output = self._config.output_dir
        found = {result.name: result, "metrics": output / METRICS_FILE}
        found["checkpoints"] = self._config.checkpoints
        files = {label: path for label, path in found.items() if path.exists()}
        told = {**outputs.what_next(self._plans.prepared, files), **self._observers.leave()}
        files |= {label: path for label, path in told.items() if isinstance(path, Path)}
        shown: dict[str, str | Path] = {**files, **told}
        self._observers.tell(Observer.finished, self._state, shown)
        losses = tuple(loss for _, loss in self._losses)
        store = self._directories.store
        best = store.root / f"step_{store.best_step}" if store.has(store.best_step) else None
        return RunSummary(self._state.step, losses, files, self._metrics, best, output)

    def _save_at_the_end(self) -> None:
        """Save the last state if that is due and not done. Without it the result is still made."""
        strategy, ends = self._config.training.save_strategy, not self._replicas.is_alone
        ends |= self._state.step >= self._data.total_steps
        is_due = strategy == "epoch" or (strategy == "steps" and ends)
        if is_due and self._due.is_saver and not self._checkpoints.has(self._state):
            self._checkpoints.save(self._state)
            if self._checkpoints.has(self._state):
                self._observers.tell(Observer.saved, self._state, self._due)

    def _make_result(self, lost: errors.PeerLostError | None = None) -> Path:
        """Write the result and return its directory. It has the best checkpoint's state if that is
        wanted and exists, else the last state; with a worker `lost`, a checkpoint's state."""
        best, wanted = None, self._config.training.load_best_model_at_end
        if wanted and (best := self._checkpoints.best()) is None:
            _log.warning("there is no checkpoint of a best model: the last state is the result")
        try:
            if lost is not None:
                raise lost
            with self._ending_within(timeouts.STEP_END_S):
                if best is not None and best.step != self._state.step:
                    self._checkpoints.take(best)
                result = self._export(None if best is None else best.step)
        except _Interrupted:
            self._stop_early()
        except errors.PeerLostError as error:
            self._checkpoints.keep_newest()
            for name in registry.installed("rescues"):
                rescue, prepared = registry.find("rescues", name), self._plans.prepared
                made: Path = rescue(prepared, self._checkpoints, self._state, error, best)
                return made
            raise
        with suppress(errors.PeerLostError):  # the result is complete
            self._cluster.retrying(self._cluster.pipeline.drain_commits)
        return result

    def _rescued(self, error: errors.HeteroError) -> str:
        """Keep the state in spite of an error and, after the last step, make the result from it.
        Returns the hint of the error, and where to find what was kept."""
        if self._result is not None:
            return ". ".join(filter(None, [error.hint, f"the result is complete: {self._result}"]))
        self._cluster.retrying(self._cluster.pipeline.abort)
        self._checkpoints.keep(self._state)
        advice = self._checkpoints.advice(error)
        if self._due.stop or self._state.position >= self._data.total_steps:
            return f"the result is in {self._make_result()}. {advice}"
        return advice

    def _export(self, step: int | None) -> Path:
        """Write the result, of this `step`. If that fails, a checkpoint keeps the work. While
        neither can be written, both are tried again, since the work exists in memory only."""
        for pause_s in (*_EXPORT_PAUSES_S, None):
            try:
                write = partial(outputs.export, self._plans.prepared, self._cluster.pipeline, step)
                return self._cluster.retrying(write)
            except (OSError, errors.UserError, errors.ResourceError) as error:
                known = errors.as_hetero_error(error)
                problem = known or errors.ResourceError(f"cannot write: {errors.in_words(error)}")
            if self._checkpoints.keep(self._state) or self._stop.requested or pause_s is None:
                break
            _log.warning("%s. Free space; next try in %.0f s", problem.message, pause_s)
            self._stop.wait(pause_s)
        message = f"the result could not be written: {problem.message}"
        raise type(problem)(message, hint=self._checkpoints.advice(problem))

    def _keep_spans(self) -> None:
        """Tell the observers the recorded spans. A worker's spans of a step come with its next
        answer, so the spans of the last step come at the end."""
        taken = self._cluster.pipeline.take_spans()
        offsets = self._cluster.clock_offsets() if len(taken) > 1 else {}
        for owner, spans in taken.items():
            self._observers.tell(Observer.spans, owner, spans, offsets.get(owner, 0.0))

    def _note_skip(
        self,
        outcome: StepOutcome,
        losses: list[float],
        reports: list[GradientReport],
        part: StepPart,
    ) -> StepOutcome:
        """Report why a step is skipped, and return the outcome with the reason in words. `part` is
        this replica's part of the step. Raises NumericError if non-finite values keep coming."""
        fields: dict[str, Any] = {}
        action = ""
        if outcome.skip == "overflow":
            action = f"loss scale lowered to {self._state.loss_scale.value:g}"
            outcome = replace(outcome, reason="gradients overflow")
        elif outcome.skip == "non-finite":
            stages, elsewhere = self._config.plan.stages, self._replicas.elsewhere()
            where = skipped_step.find(stages, losses, reports, part.samples, elsewhere)
            outcome, fields = replace(outcome, reason=str(where)), where.fields
        skipped = log.event(
            "step skipped", action, kind=outcome.skip, reason=outcome.reason, **fields
        )
        text = ", ".join(filter(None, ["step %d: %s; step skipped", action]))
        _log.warning(text, self._state.step, outcome.reason, extra=skipped)
        if outcome.skip == "non-finite":
            about = self._state, self._data.total_steps, self._config.training
            skipped_step.check_not_too_many(*about, outcome.reason)
        return outcome

    @contextmanager
    def _ending_within(self, seconds: float) -> Iterator[None]:
        """Interrupt the block this many seconds after a request to stop."""
        self._may_last_s = seconds
        try:
            yield
        finally:
            self._may_last_s = math.inf

    def _heed_stop(self) -> None:
        """The pipeline's `check`: after a request to stop, interrupt work that exceeds its time or
        waits for silent workers. Interrupted work has changed no weight."""
        if self._stop.requested is None:
            return
        waited_s, idle_s = self._stop.waited_s, self._cluster.pipeline.idle_s
        is_silent = idle_s > timeouts.STOP_PATIENCE_S < waited_s and math.isinf(self._may_last_s)
        if waited_s >= self._may_last_s or is_silent:
            raise _Interrupted

    def _stop_early(self) -> NoReturn:
        """Save, unless the user at the terminal says no, and raise StoppedEarly."""
        where = f"stopped by {self._stop.requested} after step {self._state.step}"
        if self._due.is_open and not self._due.is_given_up:
            self._state = self._with_due()
        is_open = self._state.step > 0 and not self._checkpoints.has(self._state)
        if is_open and self._stop.wants_checkpoint(f"{where}. Save a checkpoint?"):
            self._checkpoints.keep(self._state)
        raise errors.StoppedEarly(where, hint=self._checkpoints.advice())


def _objects(config: Config, given: Given, replan: bool) -> set[str]:
    """Names of the arguments, functions and saved plan for which a run may need an extra."""
    found = {
        "callbacks": given.get("callbacks") or control.imported_callbacks(),
        COMPUTE: given.get(COMPUTE) or control.function(COMPUTE),
        "replan": replan,
        "saved_plan": (config.output_dir / PLAN_FILE).exists(),
    }
    return {name for name, value in found.items() if value}


@contextmanager
def _log_of_run(config: Config, progress: Progress, events: log.Events) -> Iterator[None]:
    """Log the run above the display and to logs/coordinator.log; log its failure as an event."""
    screen = log.Lines(lambda level, text: progress.message(log.with_level(level, text)))
    file = log.FileLines(config.output_dir / "logs" / "coordinator.log")
    with log.log_to(config.training.log_level, screen, file, events):
        try:
            yield
        except BaseException as error:
            reason = error.message if isinstance(error, errors.HeteroError) else repr(error)
            _log.info("", extra=log.event("run stopped", kind=type(error).__name__, reason=reason))
            raise
        finally:
            log.set_step(None)


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if type(value) in (int, float)}


def sample_mean(
    sums: Sequence[float],
    items: Sequence[int],
    sizes: Sequence[int],
    of_none: float,
    routing: Sequence[float],
) -> float:
    """The loss of an evaluation as the Trainer has it: batches' mean losses, averaged over samples.

    Args:
        sums: Each batch's loss, summed over its `items`; `sizes` are the numbers of samples.
            Batches without a finite loss are left out, unless no batch has one.
        of_none: The loss of a batch without items.
        routing: What routers add to each batch's mean loss.
    """
    parts = zip(sums, items, routing, strict=True)
    means = [(total / n if n else of_none) + more for total, n, more in parts]
    weighted = list(zip(means, sizes, strict=True))
    finite = [(mean, n) for mean, n in weighted if math.isfinite(mean)] or weighted
    return _total(mean * n for mean, n in finite) / sum(n for _, n in finite)


def _total(numbers: Iterable[float]) -> float:
    """The exact sum of the numbers; NaN if there is none."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond any float, or infinities of both signs
        return math.nan


class _Interrupted(Exception):
    """A request to stop has interrupted the work under way."""


__all__ = ["Coordinator", "RunSummary", "train"]
