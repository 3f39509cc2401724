"""`LoadedPipeline`: a pipeline whose stages are all loaded, and how its steps are run.

It is built when all stages of a plan are loaded, and replaced when the plan changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise

from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.config import Config, StageSpec
from hetero_framework.core import timeouts
from hetero_framework.core.devices import Device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.core.threads import wait_for
from hetero_framework.engine.boundary_io import ArrivalMeter
from hetero_framework.engine.hosts import StepResults
from hetero_framework.engine.pipeline import Pipeline, StageStatistics
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.schedule.tuner import StageSeconds, Tuner, make_profile
from hetero_framework.engine.schedule.tuning import TunedSchedule
from hetero_framework.engine.stage_api import (
    GradientReport,
    GradientSum,
    Outcome,
    StageInterface,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.engine.ties import Ties
from hetero_framework.errors import ProtocolError, UserError
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.files import fingerprint

_log = logging.getLogger(__name__)
Trainable = list[list[tuple[str, tuple[int, ...]]]]
Gradients = tuple[list[float], list[GradientReport], dict[int, StageStatistics]]
"""The losses of a step's micro-batches, the gradients' norms by stage, and the stages' times."""


@dataclass(frozen=True)
class _CoordinatorSink:
    """Output of this process's stages: results stay here, tensors go to their workers."""

    results: StepResults
    links: WorkerLinks

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        self.links.post(message, done)

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        self.results.outcome(info, micro_batch, outcome)

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self.results.finished(info, micro_batch)

    def failed(self, error: Exception) -> None:
        self.links.fail(error)


class LoadedStages:
    """The reports of a plan's loaded stages, and the check that they make one model."""

    def __init__(self, config: Config, expected: Future[fingerprint.Fingerprint | None]) -> None:
        """`expected` is the fingerprint of the model's files on this machine."""
        self._config = config
        self._expected = expected
        self._fingerprints: dict[int, tuple[str, Mapping[str, str]]] = {}
        self._trainable: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.ties: dict[int, Mapping[str, str]] = {}
        """For each stage, {target: source} of parameters that are tied to an earlier stage."""

    def note(
        self,
        process: str,
        stage: int,
        weights: Mapping[str, str],
        trainable: list[tuple[str, tuple[int, ...]]],
        ties: Mapping[str, str],
    ) -> None:
        """Take a stage's report: hashes of the weights that it read, trained parameters, ties."""
        self._fingerprints[stage], self._trainable[stage] = (process, weights), trainable
        self.ties[stage] = ties

    def check(self, deadline: float) -> None:
        """Raise UserError if the stages are not of this machine's model, or the model is not read
        by the deadline. Raises ProtocolError if the stages do not make one model."""
        trained = [name for stage in self._trainable.values() for name, _ in stage]
        sources = {source for tied in self.ties.values() for source in tied.values()}
        if len({*trained}) < len(trained) or not sources.issubset(trained):
            raise ProtocolError("what the workers say of their stages does not make one model")
        if not wait_for([self._expected], deadline - time.monotonic()):
            raise UserError(
                "this machine has not read the model's files in "
                f"{self._config.training.load_timeout_s:.0f} s",
                hint="their disk is slow or hangs; training.load_timeout_s sets this limit",
            )
        fingerprint.check_same_model(list(self._fingerprints.values()), self._expected.result())

    @property
    def trainable(self) -> Trainable:
        """The trained parameters of each stage, with their places in the whole model."""
        return [self._trainable[spec.index] for spec in self._config.plan.stages]

    @property
    def needs(self) -> list[bool]:
        """Whether the input of each stage needs a gradient."""
        return gradient_needs(self.trainable)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all weights."""
        return fingerprint.summary(weights for _, weights in self._fingerprints.values())


class LoadedPipeline:
    """A pipeline and its schedule: which process sends tensors to which, and how steps are run."""

    def __init__(
        self,
        config: Config,
        links: WorkerLinks,
        loaded: LoadedStages,
        local: Sequence[StageInterface],
        device: Device,
        meter: ArrivalMeter,
        *,
        memory_limits: tuple[int, ...] | None,
        plan_times: Profile | None,
        id_layers: frozenset[int],
        statistics: Sequence[str],
        max_boundary_bytes: int,
        attempts: Iterator[int],
    ) -> None:
        """
        Args:
            local: The stages of this process.
            memory_limits: Number of forwards that each stage has memory for.
            plan_times: The times that the plan was made with.
            id_layers: Layers that read token ids.
            statistics: What training changes besides the weights (`ModelStructure.statistics`).
            attempts: The numbers of attempts at steps, each once in a run.
        """
        specs = config.plan.stages
        self.trainable, self.fingerprint = loaded.trainable, loaded.fingerprint
        self._statistics = statistics
        self._boundaries = Boundaries(config)
        self._links = links
        self._attempts = attempts
        self._stages = specs
        self._tuner = Tuner(
            specs,
            max_in_flight=config.training.max_in_flight,
            memory_limits=memory_limits,
            planned=plan_times,
        )
        self.forecast: TunedSchedule | None = None
        """The prediction for the step that began last; None while no times are known."""
        results = StepResults()
        host = StageHost(local, config, device, meter, _CoordinatorSink(results, links))
        host.expectation.max_boundary_bytes = max_boundary_bytes
        trained = {k: [name for name, _ in stage] for k, stage in enumerate(loaded.trainable)}
        ties = Ties(loaded.ties, trained)
        self.remotes: dict[WorkerId, RemoteHost] = {}
        for worker in planned(config, links.workers):
            indexes = [s.index for s in specs if s.owner == worker]
            targets = [ties.targets.get(index, {}) for index in indexes]
            about = worker, indexes, links, results, host.data, targets
            remote = RemoteHost(*about, trained=trained, states=self.state_names)
            self.remotes[worker] = remote
        links.route(specs, host.expectation)
        self.pipeline = Pipeline(
            specs,
            [host, *self.remotes.values()],
            links,
            results,
            objective=objective_of(config.training, id_layers),
            step_timeout_s=config.training.step_timeout_s,
            trained=trained,
            ties=ties,
            has_stages=links.members.has_stages,
        )

    @property
    def trained_names(self) -> list[str]:
        """All trained parameters, in the order of the whole model."""
        everything = [parameter for stage in self.trainable for parameter in stage]
        return [name for name, _ in sorted(everything, key=lambda parameter: parameter[1])]

    @property
    def state_names(self) -> list[list[str]]:
        """For each stage, the names of trained parameters and of what else training changes."""
        names = [[name for name, _ in stage] for stage in self.trainable]
        for name in self._statistics:
            layer = int(name.split(".")[1])
            owner = next(s.index for s in self._stages if s.start <= layer < s.end)
            names[owner].append(name)
        return names

    @property
    def direct(self) -> frozenset[int]:
        """Boundaries with a link from worker to worker, by the number of the stage before each."""
        return self._boundaries.direct(self._links.direct.open)

    def attempt(
        self, info: StepInfo, batches: Sequence[Tensors], group: GradientSum | None = None
    ) -> Gradients:
        """Do a training step up to the commit. It changes no weight, so it may be repeated."""
        self.begin(info, group)
        losses = self.pipeline.run(batches)
        self.pipeline.sum_gradients()
        return losses, *self.pipeline.report_gradients()

    def begin(self, info: StepInfo, group: GradientSum | None = None) -> None:
        """Announce an attempt at a step to every stage, with the best schedule known so far; its
        number is set here. `group` gets the gradients of a step that is summed."""
        info = replace(info, attempt=next(self._attempts), summed=group is not None)
        text = "step %d, attempt %d: %d micro-batches"
        _log.debug(text, info.step + 1, info.attempt, info.micro_batches)
        self._links.direct.dial_again(timeouts.DIRECT_DIAL_S)
        direct = self.direct
        count = max(1, info.micro_batches)  # other replicas may have all of a short step
        choice = self._tuner.choice(count, direct)
        self.forecast = self._tuner.forecast(count, direct)
        schedule = choice.schedule if info.train else choice.unordered
        self.pipeline.begin(info, schedule, group)

    def observe(self, micro_batches: int, statistics: Mapping[int, StageStatistics]) -> Profile:
        """Tune the next steps to the times of this step; return the times of stages and edges."""
        n = micro_batches
        seconds = {
            index: StageSeconds(
                s.forward_s / n, s.backward_s / n, s.arrive_forward_s, s.arrive_backward_s
            )
            for index, s in statistics.items()
        }
        direct, latency_s = self.direct, {}
        for before, after in self._boundaries.all:
            if before.index in direct:
                pair = frozenset((before.owner, after.owner))
                round_trip_s = self.pipeline.round_trips.get(pair, 0.0)
            else:
                round_trip_s = sum(
                    self._links.clock(owner).round_trip_s or 0.0
                    for owner in {before.owner, after.owner} - {"local"}
                )
            latency_s[before.index] = round_trip_s / 2
        self._tuner.observe(seconds, latency_s)
        return make_profile(self._stages, seconds, latency_s, direct)


def planned(config: Config, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """The members of `workers` to which the plan gives layers."""
    return [worker for worker in workers if worker in config.plan.owners]


class Boundaries:
    """The boundaries between a plan's stages, and which of them a direct link may serve."""

    def __init__(self, config: Config) -> None:
        self.all = list(pairwise(config.plan.stages))
        self._config = config

    def mode(self, after: StageSpec) -> str:
        """The setting of the boundary in front of a stage: "auto", "direct" or "relay"."""
        return self._config.shard_plan[after.index].links or self._config.links

    @property
    def between_workers(self) -> list[tuple[StageSpec, StageSpec]]:
        """Boundaries that a direct link may serve."""
        return [
            (before, after)
            for before, after in self.all
            if "local" not in (before.owner, after.owner)
            and before.owner != after.owner
            and self.mode(after) != "relay"
        ]

    def direct(self, links: Collection[frozenset[WorkerId]]) -> frozenset[int]:
        """The boundaries that one of these links serves, by the number of the stage before."""
        return frozenset(
            before.index
            for before, after in self.between_workers
            if frozenset((before.owner, after.owner)) in links
        )


def gradient_needs(trainable: Trainable) -> list[bool]:
    """For each stage whether anything trainable lies before it: its input then needs a gradient."""
    return [any(trainable[:stage]) for stage in range(len(trainable))]
