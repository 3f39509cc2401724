"""All processes of a run as one: starts local workers, connects, has every stage loaded, recovers.

`Cluster` owns the processes and their links. An `Assembly` is built once all stages are loaded and
replaced when the plan or a worker changes. What is to be done about what happens to a worker is
membership.py's table.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from hetero_framework import control, errors
from hetero_framework.cluster import link_probe
from hetero_framework.cluster.child import PROGRAM
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.membership import MAX_RECOVERIES, Action, Event, Membership, State
from hetero_framework.cluster.roles import local_worker_ids, threads_for
from hetero_framework.cluster.worker_links import ShowAway, WorkerLinks
from hetero_framework.config import Config, StageSpec
from hetero_framework.core import addresses, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.dial import DROPS_LARGE, MTU_ADVICE
from hetero_framework.core.messages import Message
from hetero_framework.core.spans import Recorder
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.engine.boundary_io import ArrivalMeter, unpack
from hetero_framework.engine.hosts import (
    DirectLost,
    LinkLost,
    StagesLost,
    Stalled,
    StepResults,
    StopWanted,
    WorkerId,
    WorkerLeaving,
)
from hetero_framework.engine.loading import BuildStages, load_stages, take_apart
from hetero_framework.engine.out_of_memory import Attempt, StepOutOfMemory
from hetero_framework.engine.pipeline import Pipeline, StageStatistics
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.stage_api import (
    GradientSum,
    Loss,
    StageInterface,
    StepInfo,
)
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.engine.ties import Ties
from hetero_framework.errors import HeteroError, NetworkError, PeerLostError
from hetero_framework.log import event
from hetero_framework.models.cut.objective import objective_of
from hetero_framework.models.files import fingerprint
from hetero_framework.planner.schedule.simulator import Profile
from hetero_framework.planner.schedule.tuner import StageSeconds, Tuner, make_profile
from hetero_framework.planner.schedule.tuning import TunedSchedule
from hetero_framework.repository import resolve_model_path
from hetero_framework.security.access import Access, access_of

_log = logging.getLogger(__name__)
_SUSPICIOUS_LOSSES = 2
_MOST_STALLS = 3
"""How often one action may stand still."""
"""Of one link before a step is done: then its network is suspected, see `dial.connect`."""

Trainable = list[list[tuple[str, tuple[int, ...]]]]
T = TypeVar("T")


@dataclass(frozen=True)
class _CoordinatorSink:
    """What leaves this process's stages: results stay here, tensors go to their workers."""

    results: StepResults
    links: WorkerLinks

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        self.links.post(message, done)

    def loss(self, info: StepInfo, micro_batch: int, loss: Loss) -> None:
        self.results.loss(info, micro_batch, loss)

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        self.results.finished(info, micro_batch)

    def failed(self, error: Exception) -> None:
        self.links.fail(error)


@dataclass(frozen=True)
class MachineFacts:
    """What a process said of its device: name, label, bytes of memory in all and free now, and why
    it has no 4 bits (None: it has)."""

    device: str
    label: str
    memory_total: int
    memory_free: int
    no_four_bit: str | None = None

    @classmethod
    def of(cls, said: m.Welcome) -> MachineFacts:
        """What a worker says of its own."""
        memory = said.memory_total, said.memory_free
        return cls(said.device, said.device_label, *memory, said.no_four_bit)


@dataclass(frozen=True)
class Loaded:
    """The stages here, the trained parameters of all stages, the weights' fingerprint, and what of
    each stage is tied to an earlier one."""

    local: Sequence[StageInterface]
    trainable: Trainable
    fingerprint: str
    ties: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


class Assembly:
    """What follows from a plan and from its workers: who talks to whom, and how steps are run."""

    def __init__(
        self,
        config: Config,
        links: WorkerLinks,
        loaded: Loaded,
        device: Device,
        meter: ArrivalMeter,
        memory_limits: tuple[int, ...] | None,
        plan_times: Profile | None,
        id_layers: frozenset[int],
        max_boundary_bytes: int,
    ) -> None:
        """`memory_limits` is how many forwards each stage has memory for, `plan_times` what the
        plan was made with."""
        specs = config.plan.stages
        self.trainable, self.fingerprint = loaded.trainable, loaded.fingerprint
        self._boundaries = Boundaries(config)
        self._links = links
        self._stages = specs
        self._tuner = Tuner(
            specs,
            max_in_flight=config.training.max_in_flight,
            memory_limits=memory_limits,
            planned=plan_times,
            run=self._tune,
        )
        self._tuning: Future[None] | None = None
        self.forecast: TunedSchedule | None = None
        """What the step that began last was predicted to be; None while no times are known."""
        results = StepResults()
        sink = _CoordinatorSink(results, links)
        host = StageHost(loaded.local, config, device, meter, sink)
        host.expectation.max_boundary_bytes = max_boundary_bytes
        trained = {k: [name for name, _ in own] for k, own in enumerate(loaded.trainable)}
        ties = Ties(loaded.ties, trained)
        self.remotes: dict[WorkerId, RemoteHost] = {}
        for worker in planned(config, links.workers):
            own = [s.index for s in specs if s.owner == worker]
            targets = [ties.targets.get(index, {}) for index in own]
            remote = RemoteHost(worker, own, links, results, host.data, targets=targets)
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
        )

    @property
    def trained_names(self) -> list[str]:
        """All that is trained, in the order of the whole model."""
        everything = [parameter for own in self.trainable for parameter in own]
        return [name for name, _ in sorted(everything, key=lambda parameter: parameter[1])]

    @property
    def direct(self) -> frozenset[int]:
        """Boundaries (numbers of the stage before each) with a link from worker to worker."""
        return self._boundaries.direct(self._links.direct)

    def _tune(self, job: Callable[[], None]) -> None:
        """Steps need not wait for it; the next ones take what has been found by then."""
        self._tuning = in_background(job, "tune")

    def begin(self, info: StepInfo, group: GradientSum | None = None) -> None:
        """Announce a step to every stage, to be run as well as is known by now; `group` gets the
        gradients of one that is summed. Raises what went wrong in the tuning after an earlier
        step."""
        if self._tuning is not None and self._tuning.done():
            self._tuning.result()
        direct = self.direct
        count = max(1, info.micro_batches)  # other replicas may have all of a short step
        choice = self._tuner.choice(count, direct)
        self.forecast = self._tuner.forecast(count, direct)
        schedule = choice.schedule if info.train else choice.unordered
        self.pipeline.begin(info, schedule, group)

    def observe(self, micro_batches: int, statistics: Mapping[int, StageStatistics]) -> Profile:
        """Learn from a step's times how to run the next ones; the times of stages and edges."""
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
    """Those of `workers` that the plan gives layers."""
    return [worker for worker in workers if worker in config.plan.owners]


class Boundaries:
    """Where the stages of a plan meet, and which of these a link between workers may serve."""

    def __init__(self, config: Config) -> None:
        self.all = list(pairwise(config.plan.stages))
        self._config = config

    def mode(self, after: StageSpec) -> str:
        """ "auto", "direct" or "relay", of the boundary in front of a stage."""
        return self._config.shard_plan[after.index].links or self._config.links

    @property
    def between_workers(self) -> list[tuple[StageSpec, StageSpec]]:
        """Those that a direct link may serve."""
        return [
            (before, after)
            for before, after in self.all
            if "local" not in (before.owner, after.owner)
            and before.owner != after.owner
            and self.mode(after) != "relay"
        ]

    def direct(self, links: Collection[frozenset[WorkerId]]) -> frozenset[int]:
        """Numbers of the stages before the boundaries that one of these links serves."""
        return frozenset(
            before.index
            for before, after in self.between_workers
            if frozenset((before.owner, after.owner)) in links
        )


class _LoadedStages:
    """What every stage said of itself when it was loaded, to be checked as one model."""

    def __init__(self, config: Config, expected: Future[fingerprint.Fingerprint | None]) -> None:
        self._config = config
        self._expected = expected
        self._fingerprints: dict[int, tuple[str, Mapping[str, str]]] = {}
        self._trainable: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.ties: dict[int, Mapping[str, str]] = {}

    def note(
        self,
        process: str,
        stage: int,
        found: Mapping[str, str],
        trainable: list[tuple[str, tuple[int, ...]]],
        ties: Mapping[str, str],
    ) -> None:
        """What a stage has read, what is trained in it, and what of that is tied elsewhere."""
        self._fingerprints[stage], self._trainable[stage] = (process, found), trainable
        self.ties[stage] = ties

    def check(self, deadline: float) -> None:
        """Raise UserError where the stages are not of the model that this machine has."""
        if not wait_for([self._expected], deadline - time.monotonic()):
            raise errors.UserError(
                "this machine has not read the model's files in "
                f"{self._config.training.load_timeout_s:.0f} s",
                hint="their disk is slow or hangs; training.load_timeout_s sets this limit",
            )
        fingerprint.check_same_model(list(self._fingerprints.values()), self._expected.result())

    @property
    def trainable(self) -> Trainable:
        return [self._trainable[spec.index] for spec in self._config.plan.stages]

    @property
    def needs(self) -> list[bool]:
        """For each stage whether its input needs a gradient."""
        return gradient_needs(self.trainable)

    @property
    def fingerprint(self) -> str:
        return fingerprint.summary(found for _, found in self._fingerprints.values())


class Cluster:
    """The processes of one run; a context manager that ends them. `start`, then `assemble`."""

    def __init__(
        self,
        config: Config,
        *,
        max_frame_bytes: int,
        max_boundary_bytes: int | None = None,
        build: BuildStages = load_stages,
        debug: bool = False,
        run_id: str | None = None,
        workers: LocalWorkers | None = None,
        access: Access | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        absence_s: float | None = None,
        id_layers: frozenset[int] = frozenset(),
        show_away: ShowAway = lambda worker, away: None,
    ) -> None:
        """`max_boundary_bytes` are those of a boundary's tensors (None: as of any frame).
        `build` is for the stages here; `id_layers` are the model's that read token
        ids; `run_id` is a lasting one. `workers` are
        those of this machine where they were started before. `access` is for the links;
        `should_stop` ends the wait for a lost worker. `absence_s`: a worker that is away for so
        long is given up, also one that was paused (None: as the configuration says). `show_away`
        is WorkerLinks'."""
        self._config = config
        self._build = build
        self._should_stop = should_stop
        self._absence_s = absence_s
        self._id_layers = id_layers
        self.run_id = run_id or secrets.token_hex(8)
        self.device = open_device(config.coordinator.device)
        torch.set_num_threads(threads_for(config, "local"))
        ids = local_worker_ids(config)
        access = access or access_of(config, "local")
        self._local = workers or LocalWorkers(
            config,
            ids,
            debug=debug,
            run_id=self.run_id,
            program=(*PROGRAM, *access.arguments(ids)),
        )
        self._meter = ArrivalMeter(Recorder(config.training.timeline_steps))
        self._peers = WorkerLinks(
            config,
            self.run_id,
            max_frame_bytes,
            buffers=self.device.buffers,
            local=self._local,
            unpack=lambda message: unpack(message, self.device),
            watch=self._meter.watch,
            access=access,
            should_stop=should_stop,
            show_away=show_away,
        )
        self._members = Membership(self._peers.workers)
        self._reasons: dict[WorkerId, str] = {}  # why workers left, as they said
        self._attempt = 0
        self._max_boundary_bytes = max_boundary_bytes or max_frame_bytes
        self._own: Sequence[StageInterface] = []  # the stages here
        self._current: Assembly | None = None
        self._was_ready = False
        self.fingerprint = ""
        """Of the model's weights, as the last assembly has read them."""
        self._requests = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        at_once = isinstance(error, (KeyboardInterrupt, PeerLostError))
        end_s = timeouts.STOP_S if at_once else timeouts.EXIT_S
        try:
            if self._current is not None:
                self._current.pipeline.close()
            self._peers.close(Message(_goodbye(error)), end_s)
        finally:
            self._local.stop(end_s)

    # -- start ----------------------------------------------------------------------------------

    def start(self, awaited: Collection[WorkerId] = ()) -> dict[str | int, MachineFacts]:
        """Start this machine's workers and reach all of them; what each process runs on. The
        `awaited` ones need not be there yet, see `returned`."""
        self._peers.listen()
        self._local.start()
        self._local.report()
        for worker in awaited:
            self.await_in_background(worker)
        needed = [worker for worker in self.known_workers if worker not in awaited]
        for worker in needed:
            self._members.on(worker, Event.DIAL)
        welcomes = self._peers.connect_all(needed)
        own, memory = self.device, self.device.memory()
        facts: dict[str | int, MachineFacts] = {}
        facts["local"] = MachineFacts(
            own.name, own.label, memory.total, memory.free, own.no_four_bit
        )
        for worker, said in welcomes.items():
            self._members.on(worker, Event.FRESH)
            facts[worker] = MachineFacts.of(said)
            if said.torch.split("+")[0] != torch.__version__.split("+")[0]:
                _log.warning(
                    f"worker {worker} has torch {said.torch}, the coordinator {torch.__version__}: "
                    "equal to the last bit only with equal versions"
                )
            connected = event("worker connected", worker=worker, device=said.device_label)
            _log.info("", extra=connected)
        return facts

    def assemble(
        self,
        config: Config,
        memory_limits: tuple[int, ...] | None = None,
        plan_times: Profile | None = None,
    ) -> Assembly:
        """Have all processes load their stages of `config`, also when they have others. Workers
        without stages free what they have, and stay as spare ones. `plan_times` are those that the
        plan was made with. Raises PeerLostError for a worker that is gone or exceeds
        `load_timeout_s`, and UserError where the files here do."""
        again = self._current is not None
        if self._current is not None:
            self._current.pipeline.close()
            self._current = None
        self._config, specs = config, config.plan.stages
        for worker in self.known_workers if again else ():
            self._peers.forget_direct(worker)  # whoever is set up closes those that it has
        self._end_loading()
        for worker in self._members.those(State.READY, State.LEAVING, State.LOST):
            self._guard(worker, Event.PLANNED)
        for worker in planned(config, self._members.those(State.SPARE)):
            self._guard(worker, Event.PLANNED)
        for worker in self._members.those(State.JOINING):
            self._guard(worker, Event.PLANNED)
        expected = in_background(self._expected_weights, "fingerprint")
        remains, self._own = take_apart(self._own, config), []
        own = [s for s in specs if s.owner == "local"]
        self._own = local = self._build(config, own, self.device, remains)
        self._loaded = _LoadedStages(config, expected)
        for stage in local:
            said = stage.fingerprint, stage.trainable(), stage.ties
            self._loaded.note("the coordinator", stage.index, *said)
        self._load_workers()
        for stage in local:
            stage.input_requires_grad = self._loaded.needs[stage.index]
        loaded = self._loaded
        parts = Loaded(local, loaded.trainable, loaded.fingerprint, loaded.ties)
        self.fingerprint = parts.fingerprint
        self._current = Assembly(
            config,
            self._peers,
            parts,
            self.device,
            self._meter,
            memory_limits,
            plan_times,
            self._id_layers,
            self._max_boundary_bytes,
        )
        is_whole = True
        while True:
            try:
                if not is_whole:  # what a leaver has here is not of the run yet
                    self.part_with_leavers()
                    self.rejoin()
                self.retrying(self.pipeline.share_tied_weights)
                self._was_ready = True
                return self._current
            except (StagesLost, WorkerLeaving):
                is_whole = False

    def forget_step(self) -> None:
        """Have whoever is here forget the step under way: the run goes back, or to another plan.
        Raises PeerLostError for one more that does not come back."""
        if self._current is None:
            return  # another plan was being taken
        for worker in planned(self._config, self._members.those(State.LEFT)):
            self.pipeline.lose(worker)
        while True:
            with suppress(StagesLost):
                self.retrying(self.pipeline.abort)
                break

    def rejoin(self) -> None:
        """After StagesLost: have whoever lost its stages load them again, in as many processes as
        it takes, while the others wait with theirs. The state is then as each of them has it:
        `Pipeline.rewind` follows. Raises PeerLostError for one that does not come back."""
        self.forget_step()
        absent = self._members.those(State.JOINING)
        self._load_workers()
        if self._loaded.fingerprint != self.assembly.fingerprint:
            raise PeerLostError(
                f"worker {', '.join(map(str, absent))} came back with other weights of the model",
                hint="put the model's files there back as they were",
            )
        self._members.settled()

    def part_with_leavers(self) -> None:
        """Let the workers go that leave, their state being saved, and wait for them to come back;
        then `rejoin`. One that its owner has paused is waited for without end. Raises
        PeerAwayError, PeerLostError and StopWanted."""
        leavers = self._members.those(State.LEAVING)
        for worker in leavers:
            if self._current is not None:
                self.pipeline.lose(worker)
            self._peers.let_go(worker, Message(m.Bye("what was here is saved")))
            self._members.on(worker, Event.DIAL)
            why = self._reasons[worker]
            then = ""
            if WorkerLeaving(worker, why).is_paused:
                then = f", which is back after: hetero resume {worker} (on its machine)"
            text = "worker %s left (%s); the run waits for it%s. Ctrl-C stops with all that is done"
            _log.warning(text, worker, why, then)
        for worker in leavers:
            self._await_return(worker, self._reasons[worker])

    def _await_return(self, worker: WorkerId, why: str) -> None:
        """Dial a worker until it is back, and do what follows."""
        try:
            has_stages = self._peers.reconnect(worker, self._absence_s)
        except PeerLostError as gone:
            self._members.on(worker, Event.GONE)
            raise type(gone)(gone.message, hint=self._advice(worker)) from gone
        text = "is back" if has_stages else "is back in a new process"
        _log.info("worker %s %s", worker, text, extra=event("worker back", worker=worker))
        self._on(worker, Event.BACK if has_stages else Event.FRESH, why)

    def _load_workers(self) -> None:
        """Have all workers without stages load them, linked with each other and started."""
        started: set[WorkerId] = set()

        def load() -> list[WorkerId]:
            for worker in self._members.those(State.JOINING):
                self._on(worker, Event.PLANNED, "")
            loading = self._members.those(State.LOADING)
            deadline = self._await_ready(loading)
            for worker in loading:
                for entry in self._peers.ready[worker].stages:
                    trainable = [(p.name, p.index) for p in entry.trainable]
                    said = entry.fingerprint, trainable, entry.ties
                    self._loaded.note(f"worker {worker}", entry.index, *said)
            self._loaded.check(deadline)
            self._connect_workers()
            started.intersection_update(self._peers.ready)
            for worker in planned(self._config, [w for w in loading if w not in started]):
                own = (s.index for s in self._config.plan.stages if s.owner == worker)
                needing = tuple(k for k in own if self._loaded.needs[k])
                start = m.Start(needing, self._max_boundary_bytes)
                self._peers.send(worker, Message(start))
                started.add(worker)
            return loading

        for worker in self._while_loading(load):
            is_planned = worker in self._config.plan.owners
            self._members.on(worker, Event.LOADED if is_planned else Event.SPARED)
            if self._current is not None:
                self.pipeline.regain(worker)

    def _end_loading(self) -> None:
        """Wait for those that still load what an earlier plan gave them: no other one is obeyed
        before."""

        def load() -> list[WorkerId]:
            loading = self._members.those(State.LOADING)
            self._await_ready(loading)
            return loading

        for worker in self._while_loading(load):
            self._members.on(worker, Event.LOADED)

    def _while_loading(self, action: Callable[[], T]) -> T:
        """Run `action` until nothing happens in it: what does is mended. Raises WorkerLeaving for
        one with stages that are to be handed over, and PeerLostError."""
        while True:
            try:
                return action()
            except LinkLost as lost:
                with suppress(StagesLost):  # one more that loads
                    self.recover(lost)
            except DirectLost as lost_pair:
                self._lose_direct(lost_pair)
            except WorkerLeaving as leaving:
                with suppress(StagesLost):
                    self._part(leaving)

    def _expected_weights(self) -> fingerprint.Fingerprint | None:
        """Of all weights, from this machine's files; None where it has not all of them."""
        model = self._config.model
        if not self._peers.workers or model is None or model.name_or_path is None:
            return None
        source = resolve_model_path(model.name_or_path, self._config.base_dir)
        return fingerprint.whole_fingerprint(source, model.revision)

    def _await_ready(self, loading: Collection[WorkerId]) -> float:
        """Wait until these workers have said READY; until when more may be waited for."""
        told = time.monotonic()
        deadline = told + self._config.training.load_timeout_s
        while waiting := [str(worker) for worker in loading if worker not in self._peers.ready]:
            if self._was_ready and self._should_stop():
                raise StopWanted
            event = self._peers.receive(timeouts.TICK_S)
            now = time.monotonic()
            if event is not None and event.message is not None:
                event.message.release()
            elif now > deadline:
                raise PeerLostError(
                    f"worker {', '.join(waiting)} has not loaded its stages in "
                    f"{self._config.training.load_timeout_s:.0f} s",
                    hint="look at its screen or log: a download may hang; "
                    "training.load_timeout_s sets this limit",
                )
            elif now - told > 60:
                told = now
                _log.info("still loading: worker %s", ", ".join(waiting))
        return deadline

    def _connect_workers(self) -> None:
        """Open the plan's links between workers. Where one fails that must be: NetworkError at the
        start of a run; later its tensors are relayed, as those of one that is lost."""
        boundaries = Boundaries(self._config)
        pairs = [(before.owner, after.owner) for before, after in boundaries.between_workers]
        problems = self._peers.connect_workers(pairs, timeouts.DIRECT_DIAL_S) if pairs else {}
        for pair in self._peers.direct.intersection(map(frozenset, pairs)):
            workers = ", ".join(sorted(map(str, pair)))
            _log.info("", extra=event("direct link opened", workers=workers))
        for before, after in boundaries.between_workers:
            problem = problems.pop(frozenset((before.owner, after.owner)), None)  # once for a pair
            if problem is None:
                continue
            if boundaries.mode(after) == "direct" and not self._was_ready:
                raise NetworkError(
                    f"no direct link between {before.layers} and {after.layers}: {problem}",
                    hint='open the port in the firewall, or set links to "auto" or "relay"',
                )
            none = event("no direct link", "relay", workers=f"{before.owner}, {after.owner}")
            _log.warning("%s; their tensors go through the coordinator", problem, extra=none)

    def _setup_message(self, worker: WorkerId) -> Message:
        own = (spec.index for spec in self._config.plan.stages if spec.owner == worker)
        return Message(m.Setup(self._config.to_dict(), tuple(own)))

    # -- steps ----------------------------------------------------------------------------------

    @property
    def assembly(self) -> Assembly:
        """The present one."""
        assert self._current is not None, "assemble comes first"
        return self._current

    @property
    def pipeline(self) -> Pipeline:
        return self.assembly.pipeline

    @property
    def idle_s(self) -> float:
        """How long nothing has moved in the stages; inf while there are none. From any thread."""
        current = self._current
        return current.pipeline.idle_s if current is not None else math.inf

    @property
    def workers(self) -> list[WorkerId]:
        """Ids of the workers that take part."""
        return planned(self._config, self._peers.workers)

    @property
    def known_workers(self) -> list[WorkerId]:
        """Ids of all workers of the run, those among them that hold no layers or are away."""
        return self._peers.workers

    @property
    def away(self) -> list[WorkerId]:
        """The known workers that are not here."""
        return [*self._members.those(State.ABSENT), *self._members.those(State.LEFT)]

    @property
    def gone(self) -> list[WorkerId]:
        """Those of `workers` that have been given up."""
        return planned(self._config, self._members.those(State.LEFT))

    @property
    def spare(self) -> list[WorkerId]:
        """Workers that are here and have no layers."""
        return self._members.those(State.SPARE)

    def await_in_background(self, worker: WorkerId) -> None:
        """Have a worker that is away dialled while the run goes on, for as long as that lasts."""
        self._peers.await_in_background(worker)

    def returned(self) -> dict[WorkerId, MachineFacts | None]:
        """The awaited workers that have come since the last call; they are spare ones now. With
        what they run on, unless they still have stages, whose memory is not free."""
        found: dict[WorkerId, MachineFacts | None] = {}
        for worker, has_stages in self._peers.returned().items():
            self._members.on(worker, Event.BACK if has_stages else Event.FRESH)
            _log.info("worker %s is back", worker, extra=event("worker back", worker=worker))
            said = None if has_stages else self._peers.welcome(worker)
            found[worker] = MachineFacts.of(said) if said is not None else None
        return found

    def begin(
        self,
        step: int,
        micro_batches: int,
        *,
        train: bool,
        num_items: int,
        loss_scale: float = 1.0,
        group: GradientSum | None = None,
        first_micro_batch: int = 0,
    ) -> None:
        """Announce a step to every stage, at first or again after a lost link. `group`: its
        gradients are summed with those of other replicas, whose micro-batches, so many of them,
        come first."""
        self._attempt += 1
        _log.debug("step %d, attempt %d: %d micro-batches", step + 1, self._attempt, micro_batches)
        self._peers.dial_again(timeouts.DIRECT_DIAL_S)
        info = StepInfo(
            step,
            self._attempt,
            train,
            micro_batches,
            num_items,
            loss_scale,
            summed=group is not None,
            first_micro_batch=first_micro_batch,
        )
        self.assembly.begin(info, group)

    def clock_offsets(self) -> dict[WorkerId, float]:
        """Each worker's time.perf_counter() minus ours, seconds; without those not known yet."""
        offsets = {worker: self._peers.clock(worker).offset_s for worker in self.workers}
        return {worker: offset for worker, offset in offsets.items() if offset is not None}

    def control(self, worker: WorkerId, name: str, data: Any = None) -> Any:
        """Between steps: what a worker's handler for `name` says to `data`, or its UserError."""
        if worker not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise errors.UserError(f"there is no worker {worker!r} to ask (workers: {known})")

        def asked() -> Any:
            self._requests += 1
            message = self.ask(worker, control.request(self._requests, name, data))
            message.release()
            return control.result(message)

        return self.retrying(asked)

    def link_workers(
        self, pairs: Iterable[tuple[WorkerId, WorkerId]]
    ) -> dict[frozenset[WorkerId], str]:
        """Between steps: have these pairs open a link, the plan's own apart; why not, where none
        came about. Raises LinkLost."""
        return self._peers.connect_workers(pairs, timeouts.DIRECT_DIAL_S)

    def ask(self, worker: WorkerId, question: Message, then: Message | None = None) -> Message:
        """A worker's answer to a CONTROL request, which the caller releases. `then` is sent right
        behind the question. Raises LinkLost."""
        host = self.assembly.remotes[worker]
        if then is not None:
            host.answer(question)  # sends it
            self._peers.send(worker, then)
        return self.pipeline.until(lambda: host.answer(question), f"an answer of worker {worker}")

    def traffic(self) -> dict[WorkerId, tuple[int, int, float, int]]:
        """Per worker: bytes received, bytes sent and seconds spent writing on all its links with
        the coordinator, and bytes that it sent straight to other workers."""
        direct = self.pipeline.direct_bytes
        return {w: (*counts, direct.get(w, 0)) for w, counts in self._peers.traffic().items()}

    # -- recovery -------------------------------------------------------------------------------

    def retrying(self, action: Callable[[], T]) -> T:
        """Run `action`; when a link breaks in it, mend it, forget the attempt, do it again. For a
        link between workers nobody waits. After a lack of memory it is done again once. Whatever
        happens to another worker while one thing is mended is mended next. What
        `action` did before must do no harm when it is done again: weights and optimizer must not
        have stepped. Raises PeerLostError when a worker is gone, StagesLost when it is back in a
        new process, OutOfMemory when memory runs out again, and WorkerLeaving, with the attempt
        forgotten, when one will end."""
        trouble: Exception | None = None
        stalls = 0
        short: set[Attempt | None] = set()  # attempts in which memory ran out, in any process
        while True:
            try:
                if trouble is not None:
                    mended, trouble = trouble, None
                    self._mend(mended)
                    del mended  # its traceback holds the tensors of the attempt
                    _log.info("", extra=event("step repeated"))
                    self.pipeline.abort()
                result = action()
            except WorkerLeaving as leaving:
                if leaving.is_noted:
                    raise
                trouble = leaving
            except StepOutOfMemory as error:
                short.add(error.attempt)
                if len(short) > 1:
                    raise
                trouble = error
            except (LinkLost, DirectLost) as found:
                trouble = found
            except Stalled as stalled:
                stalls += 1
                if stalls > _MOST_STALLS:
                    raise PeerLostError(f"{stalled}; that was attempt {stalls}") from None
                trouble = stalled
            else:
                self._members.settled()
                return result

    def _mend(self, trouble: Exception) -> None:
        """Do what is to be done before an attempt that `trouble` ended is made again. Raises what
        `retrying` does, and trouble of its own, which is mended next."""
        if isinstance(trouble, LinkLost):
            self.recover(trouble)
        elif isinstance(trouble, WorkerLeaving):
            self._part(trouble)
        elif isinstance(trouble, Stalled):
            self._end_hanging(str(trouble))
        elif isinstance(trouble, DirectLost):
            self._lose_direct(trouble)
        elif isinstance(trouble, StepOutOfMemory):
            text = "%s; the step is given up everywhere and done again, once"
            lack = event("memory ran out", "step repeated", worker=trouble.worker)
            _log.warning(text, trouble.message, extra=lack)

    def _lose_direct(self, lost: DirectLost) -> None:
        """The coordinator relays for this pair until their link is back."""
        self._peers.drop_direct(lost.pair)
        one, other = sorted(map(str, lost.pair))
        _log.warning(
            f"lost the link between workers {one} and {other} ({lost.reason}); their "
            "tensors go through the coordinator until it is back",
            extra=event("direct link lost", "relay", workers=f"{one}, {other}"),
        )

    def _end_hanging(self, stalled: str) -> None:
        """End the workers whose main thread answers nothing; others start them again. Raises
        PeerLostError where all of them answer, or where the same happens again."""
        questions = {}
        for worker in self.workers:
            self._requests += 1
            questions[worker] = control.request(self._requests, link_probe.ALIVE, None)
        try:
            answering = self.pipeline.answering(questions, timeouts.ALIVE_S)
        except DirectLost as lost:  # why nothing has moved, perhaps; so the step is tried again
            self._lose_direct(lost)
            return
        except LinkLost:  # what `retrying` does next finds it again
            return
        hanging = [worker for worker in self.workers if worker not in answering]
        if not hanging:
            raise PeerLostError(
                f"{stalled}; every worker answers",
                hint="it may be far slower than planned: training.step_timeout_s sets this limit",
            )
        for worker in hanging:
            gone = event("worker hangs", "ended", worker=worker, reason=stalled)
            text = "%s; worker %s answers nothing and is ended"
            _log.warning(text, stalled, worker, extra=gone)
            if not self._local.kill(worker):
                # One that does not even read this is met again when its link is made anew.
                self._peers.let_go(worker, Message(m.Quit(stalled)))

    def recover(self, lost: LinkLost) -> None:
        """Have a worker take part again whose link broke. Raises PeerLostError."""
        self._guard(lost.worker, Event.LINK_LOST, lost.reason)

    def _part(self, leaving: WorkerLeaving) -> None:
        """A worker said that it will end soon. Raises `leaving` where there is one that is to hand
        over first."""
        worker = leaving.worker
        left = event("worker left", worker=worker, reason=leaving.message)
        _log.info("", extra=left)
        self._guard(worker, Event.LEAVING, leaving.reason)
        if self._members.those(State.LEAVING):
            leaving.hint, leaving.is_noted = self._advice(worker), True
            raise leaving

    def _guard(self, worker: WorkerId, happened: Event, why: str = "") -> None:
        """Do what is to be done about an event, also when another one happens over it."""
        while True:
            try:
                self._on(worker, happened, why)
                return
            except LinkLost as lost:
                worker, happened, why = lost.worker, Event.LINK_LOST, lost.reason
            except WorkerLeaving as leaving:
                worker, happened, why = leaving.worker, Event.LEAVING, leaving.reason

    def _on(self, worker: WorkerId, happened: Event, why: str) -> None:
        """The one place that reacts: note an event, and do what the table says of it."""
        pipeline = self._current.pipeline if self._current is not None else None
        if happened is Event.LEAVING:
            self._reasons[worker] = why
        for action in self._members.on(worker, happened):
            if action is Action.DIAL:
                self._dial(worker, why)
            elif action is Action.SET_UP:
                self._peers.send(worker, self._setup_message(worker))
            elif action is Action.REPEAT_COMMIT:
                if pipeline is not None:
                    pipeline.repeat_commit(worker)
            elif action is Action.REJOIN:
                if pipeline is not None:
                    pipeline.lose(worker)
                self._peers.forget_direct(worker)
                raise StagesLost(worker, why)
            elif action is Action.HAND_OVER:
                if pipeline is not None:
                    pipeline.abort()
            elif action is Action.AWAIT:
                _log.info("worker %s, which has no layers, is away (%s)", worker, why)
                self._peers.let_go(worker, Message(m.Bye("it has no layers")))
                self.await_in_background(worker)
            else:
                assert action is Action.GIVE_UP
                self._give_up(worker, happened, why)

    def _dial(self, worker: WorkerId, why: str) -> None:
        ended = self._local.exit_text(worker)
        lost = event("worker lost", "connecting again", worker=worker, reason=ended or why)
        _log.warning("lost the link to worker %s (%s); connecting again", worker, why, extra=lost)
        self._suspect_large_packets(worker)
        self._await_return(worker, ended or why)

    def _suspect_large_packets(self, worker: WorkerId) -> None:
        """A network that drops large packets breaks a link whenever much is sent, and lets it come
        about again."""
        used, entry = self._peers.small_packets, self._config.worker(worker)
        if self._members.losses(worker) < _SUSPICIOUS_LOSSES or worker in used or entry.dials:
            return
        if not addresses.is_local_address(entry.ip):
            used.add(worker)
            said = "worker %s is reached with small packets from now on: its link broke %d times"
            said += " before a step was done, as where %s. hetero doctor --config tells; if so, %s"
            losses = self._members.losses(worker)
            _log.warning(said, worker, losses, DROPS_LARGE, MTU_ADVICE)

    def _give_up(self, worker: WorkerId, happened: Event, why: str) -> None:
        """Say that it is gone. `train` ends the run, or goes on without it."""
        if happened is Event.LINK_LOST and self._members.losses(worker) > MAX_RECOVERIES:
            raise PeerLostError(
                f"the link to worker {worker} broke {self._members.losses(worker)} times in one "
                f"step: {why}",
                hint="check the network: hetero doctor --config looks at it from this machine",
            )
        raise PeerLostError(why, hint=self._advice(worker))

    def _advice(self, worker: WorkerId) -> str | None:
        """What to do about a worker that is gone; those of this machine start by themselves."""
        own = self._local.starts(worker)
        return None if own else f"start worker {worker} again on its machine"

    def why(self, lost: LinkLost) -> str:
        """How the worker of a lost link ended, if it was started here; else what broke the link."""
        return self._local.exit_text(lost.worker, timeouts.STOP_S) or lost.reason


def _goodbye(error: BaseException | None) -> m.Body:
    """What workers are told at the end; those of a run that failed stay for the next one."""
    if error is None:
        return m.Bye("the run is over")
    if isinstance(error, errors.StoppedEarly):
        return m.Bye(f"the run ended: {error.message}"[:2000])
    if isinstance(error, KeyboardInterrupt):
        return m.Bye("the run was stopped")
    known = error if isinstance(error, HeteroError) else HeteroError(type(error).__name__)
    return m.Error(type(known).__name__, known.message[:2000], known.hint)


def gradient_needs(trainable: Trainable) -> list[bool]:
    """For each stage whether anything trainable lies before it: its input then needs a gradient."""
    needs, below = [], False
    for stage in trainable:
        needs.append(below)
        below = below or bool(stage)
    return needs
