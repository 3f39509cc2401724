"""All processes of a run as one: starts local workers, connects, loads all stages, runs steps.

`Cluster` owns the processes and their links. It builds a `Pipeline` once all stages of a plan are
loaded. What happens after a loss is in recovery.py.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from hetero_framework import control
from hetero_framework.cluster.child import PROGRAM
from hetero_framework.cluster.direct_links import Boundaries
from hetero_framework.cluster.loaded_stages import LoadedStages, planned
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.membership import Event, WorkerState
from hetero_framework.cluster.recovery import Recovery
from hetero_framework.cluster.roles import local_worker_ids, machine_of, threads_for
from hetero_framework.cluster.worker_links import ShowAway, WorkerLinks
from hetero_framework.config import Config
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.devices import open_device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.core.threads import in_background
from hetero_framework.engine.boundary_io import meter_of, unpack
from hetero_framework.engine.hosts import LinkLost, StepResults, StopWanted
from hetero_framework.engine.loading import BuildStages, load_stages, report_of, take_apart
from hetero_framework.engine.pipeline import Pipeline, StageStatistics
from hetero_framework.engine.remote_host import RemoteHost
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.schedule.tuner import StageSeconds, Tuner, make_profile
from hetero_framework.engine.schedule.tuning import TunedSchedule
from hetero_framework.engine.stage_api import (
    GradientReport,
    GradientSum,
    StageInterface,
    StepInfo,
    Tensors,
)
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.engine.ties import Ties
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerLostError,
    ProtocolError,
    StoppedEarly,
    UserError,
)
from hetero_framework.log import event
from hetero_framework.models.cut.objectives import objective_of
from hetero_framework.models.files import fingerprint
from hetero_framework.repository import resolve_model_path
from hetero_framework.security.access import Access, access_of

_log = logging.getLogger(__name__)
_LOADED_BEFORE = (WorkerState.READY, WorkerState.LEAVING, WorkerState.LOST, WorkerState.JOINING)
"""States of workers that load the stages of the next plan, whatever it gives them."""
T = TypeVar("T")
Gradients = tuple[list[float], list[GradientReport], dict[int, StageStatistics]]
"""The losses of a step's micro-batches, the gradients' norms by stage, and the stages' times."""


@dataclass(frozen=True)
class MachineFacts:
    """A process's device: name, label, total and free bytes of memory, why it has no 4-bit types
    (None: it has them), and free bytes of host memory (None: host and device share one memory)."""

    device: str
    label: str
    memory_total: int
    memory_free: int
    no_four_bit: str | None = None
    host_free: int | None = None

    @classmethod
    def of(cls, welcome: m.Welcome) -> MachineFacts:
        """The facts of a worker's device."""
        memory = welcome.memory_total, welcome.memory_free
        more = welcome.no_four_bit, welcome.host_free
        return cls(welcome.device, welcome.device_label, *memory, *more)


def free_bytes(config: Config, facts: Mapping[WorkerId, MachineFacts]) -> dict[WorkerId, float]:
    """Bytes of memory that each process may fill; processes on one device share them."""
    places = {id: (machine_of(config, config.machine(id)), facts[id].device) for id in facts}
    sharers = Counter(places.values())
    return {id: facts[id].memory_free / sharers[places[id]] for id in facts}


class _CoordinatorSink(StepResults):
    """Output of this process's stages: results stay here, tensors go to their workers."""

    def __init__(self, links: WorkerLinks) -> None:
        super().__init__()
        self.post, self.failed = links.post, links.fail


class Cluster:
    """The processes of one run; a context manager that ends them. `start`, then `assemble`.

    `members` knows which workers are present. `fingerprint` is that of the model's weights, as last
    loaded. `forecast` predicts the step that began last; None while no times are known.

    Args:
        max_boundary_bytes: Limit of a boundary's tensors; None: the limit of any frame.
        build: Builds the stages of this process.
        run_id: A run's lasting id; None: a new one.
        session: What the workers are wanted for.
        workers: The workers of this machine, if they have been started before.
        access: Who may connect; None: by the keys beside the configuration.
        should_stop: Ends the wait for a lost worker.
        absence_s: Seconds after which an absent worker is given up; None: as configured.
        id_layers: Layers of the model that read token ids.
        statistics: Names of what training changes besides the weights.
        show_away: See `WorkerLinks`.
    """

    def __init__(
        self,
        config: Config,
        *,
        max_frame_bytes: int,
        max_boundary_bytes: int | None = None,
        build: BuildStages = load_stages,
        debug: bool = False,
        run_id: str | None = None,
        session: m.SessionKind = "training",
        workers: LocalWorkers | None = None,
        access: Access | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        absence_s: float | None = None,
        id_layers: frozenset[int] = frozenset(),
        statistics: Sequence[str] = (),
        show_away: ShowAway = lambda worker, away: None,
    ) -> None:
        self._config, self._build, self._should_stop = config, build, should_stop
        self._id_layers, self._statistics = id_layers, statistics
        self.run_id = run_id or secrets.token_hex(8)
        self.device = open_device(config.coordinator.device)
        torch.set_num_threads(threads_for(config, "local"))
        ids = local_worker_ids(config)
        access = access or access_of(config, "local")
        self._local = workers or LocalWorkers(
            config, ids, debug=debug, run_id=self.run_id, program=(*PROGRAM, *access.arguments(ids))
        )
        self._meter = meter_of(config)
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
            session=session,
        )
        self.members = self._peers.members
        self.recovery = Recovery(config, self._peers, self._local, self._load_workers, absence_s)
        self._attempts = itertools.count(1)
        self._max_boundary_bytes = max_boundary_bytes or max_frame_bytes
        self._local_stages: Sequence[StageInterface] = []
        self._was_ready = False
        self.forecast: TunedSchedule | None = None
        self.fingerprint = ""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        at_once = isinstance(error, (KeyboardInterrupt, PeerLostError))
        end_s = timeouts.STOP_S if at_once else timeouts.EXIT_S
        try:
            if self.recovery.pipeline is not None:
                self.recovery.pipeline.close()
            self._peers.close(Message(_goodbye(error)), end_s)
        finally:
            self._local.stop(end_s)

    # -- start ----------------------------------------------------------------------------------

    def start(self, needed: Collection[WorkerId] | None = None) -> dict[WorkerId, MachineFacts]:
        """Start this machine's workers and connect to the `needed` workers (default: all); return
        each process's device. Other workers need not be there yet, see `returned`. The calling
        thread is the computing thread from now on."""
        self.device.use()
        self._peers.listen()
        self._local.start()
        self._local.report()
        wanted = [w for w in self._peers.workers if needed is None or w in needed]
        for worker in self._peers.workers:
            if worker in wanted:
                self.members.on(worker, Event.DIAL)
            else:
                self._peers.await_in_background(worker)
        welcomes = self._peers.connect_all(wanted)
        device, memory = self.device, self.device.memory()
        facts: dict[WorkerId, MachineFacts] = {}
        facts["local"] = MachineFacts(
            *(device.name, device.label, memory.total, memory.free),
            *(device.no_four_bit, device.host_free),
        )
        for worker, welcome in welcomes.items():
            self.members.on(worker, Event.FRESH)
            facts[worker] = MachineFacts.of(welcome)
            if welcome.torch.split("+")[0] != torch.__version__.split("+")[0]:
                _log.warning(
                    f"worker {worker} has torch {welcome.torch}, the coordinator "
                    f"{torch.__version__}: equal to the last bit only with equal versions"
                )
            connected = event("worker connected", worker=worker, device=welcome.device_label)
            _log.info("", extra=connected)
        return facts

    def assemble(
        self,
        config: Config,
        memory_limits: tuple[int, ...] | None = None,
        plan_times: Profile | None = None,
    ) -> None:
        """Have all processes load their stages of `config`, also in place of other stages. Workers
        without stages free their memory and stay as spare workers. `memory_limits` are the numbers
        of forwards that the stages have memory for, `plan_times` the times that the plan was made
        with. Raises PeerLostError for a worker that is gone or exceeds `load_timeout_s`, and
        UserError if reading this machine's files exceeds it."""
        if self.recovery.pipeline is not None:
            self.recovery.pipeline.close()
            for worker in self._peers.workers:
                self._peers.direct.forget(worker)  # SETUP has a worker close its links
        self.recovery.pipeline = None
        self._config = self.recovery.config = config
        self._end_loading()
        spare = planned(config, self.members.those(WorkerState.SPARE))
        for worker in [*self.members.those(*_LOADED_BEFORE), *spare]:
            self.recovery.on(worker, Event.PLANNED)
        expected = in_background(self._expected_weights, "fingerprint")
        remains, self._local_stages = take_apart(self._local_stages, config), []
        specs = config.plan.of("local")
        self._local_stages = local = self._build(config, specs, self.device, remains)
        self.loaded = LoadedStages(config, expected, self._statistics)
        for stage in local:
            self.loaded.note("the coordinator", report_of(stage))
        self._load_workers()
        for stage in local:
            stage.input_requires_grad = self.loaded.needs[stage.index]
        self._boundaries = Boundaries(config)
        self._tuner = Tuner(
            config.plan.stages,
            max_in_flight=config.training.max_in_flight,
            memory_limits=memory_limits,
            planned=plan_times,
        )
        self.fingerprint = self.loaded.fingerprint
        self.recovery.pipeline = pipeline = self._new_pipeline()
        self.recovery.outlive(lambda: self.retrying(pipeline.share_tied_weights))
        self._was_ready = True

    def _new_pipeline(self) -> Pipeline:
        """The pipeline over all hosts, whose stages are loaded."""
        config, trained, links = self._config, self.loaded.trained, self._peers
        specs, states = config.plan.stages, self.loaded.state_names
        results, ties = _CoordinatorSink(links), Ties(self.loaded.ties, trained)
        host = StageHost(self._local_stages, config, self.device, self._meter, results)
        host.expectation.max_boundary_bytes = self._max_boundary_bytes
        links.route(specs, host.expectation)
        remotes = []
        for worker in self.workers:
            targets = {s.index: ties.targets.get(s.index, {}) for s in config.plan.of(worker)}
            about = links, results, host.data
            remotes.append(RemoteHost(worker, targets, *about, trained=trained, states=states))
        return Pipeline(
            specs,
            host,
            remotes,
            links,
            results,
            objective=objective_of(config.training, self._id_layers),
            step_timeout_s=config.training.step_timeout_s,
            trained=trained,
            ties=ties,
            has_stages=self.members.has_stages,
        )

    def _load_workers(self) -> None:
        """Have all workers without stages load theirs; link them with each other and start them.
        Raises PeerLostError for a worker with other weights of the model than before."""
        started: set[WorkerId] = set()

        def load() -> list[WorkerId]:
            for worker in self.members.those(WorkerState.JOINING):
                self.recovery.on(worker, Event.PLANNED)
            loading = self.members.those(WorkerState.LOADING)
            deadline = self._await_ready(loading)
            for worker in loading:
                wanted = [s.index for s in self._config.plan.of(worker)]
                loaded = self._peers.ready[worker].stages
                if sorted(entry.index for entry in loaded) != wanted:
                    text = f"worker {worker} has loaded other stages than {wanted}"
                    raise ProtocolError(text)
                for entry in loaded:
                    self.loaded.note(f"worker {worker}", entry)
            self.loaded.check(deadline)
            self._connect_workers()
            started.intersection_update(self._peers.ready)
            for worker in planned(self._config, [w for w in loading if w not in started]):
                stages, needs = self._config.plan.of(worker), self.loaded.needs
                needing = tuple(s.index for s in stages if needs[s.index])
                start = m.Start(needing, self._max_boundary_bytes)
                self._peers.send(worker, Message(start))
                started.add(worker)
            return loading

        loaded = self.recovery.while_loading(load)
        for worker in loaded:
            is_planned = worker in self._config.plan.owners
            self.members.on(worker, Event.LOADED if is_planned else Event.SPARED)
            if self.recovery.pipeline is not None:
                self.pipeline.renew(worker)
        if self.recovery.pipeline is not None and self.loaded.fingerprint != self.fingerprint:
            raise PeerLostError(
                f"worker {', '.join(map(str, loaded))} came back with other weights of the model",
                hint="put the model's files there back as they were",
            )

    def _end_loading(self) -> None:
        """Wait for workers that still load an earlier plan's stages: they obey only after that."""

        def load() -> list[WorkerId]:
            loading = self.members.those(WorkerState.LOADING)
            self._await_ready(loading)
            return loading

        for worker in self.recovery.while_loading(load):
            self.members.on(worker, Event.LOADED)

    def _expected_weights(self) -> fingerprint.Fingerprint | None:
        """Fingerprint of this machine's files of the model; None unless it has them all."""
        model = self._config.model
        if not self._peers.workers or model is None or model.name_or_path is None:
            return None
        source = resolve_model_path(model.name_or_path, self._config.base_dir)
        return fingerprint.whole_fingerprint(source, model.revision)

    def _await_ready(self, loading: Collection[WorkerId]) -> float:
        """Wait until these workers have sent READY; return the deadline of loading."""
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
            elif now - told > timeouts.TELL_LOADING_S:
                told = now
                _log.info("still loading: worker %s", ", ".join(waiting))
        return deadline

    def _connect_workers(self) -> None:
        """Open the plan's links between workers. If a required link fails, raises NetworkError at
        the start of a run; later its tensors are relayed, as for a lost link."""
        boundaries = Boundaries(self._config)
        pairs = [(before.owner, after.owner) for before, after in boundaries.between_workers]
        problems = self._peers.direct.connect(pairs, timeouts.DIRECT_DIAL_S) if pairs else {}
        for pair in self._peers.direct.open.intersection(map(frozenset, pairs)):
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

    # -- steps ----------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the plan in force."""
        assert self.recovery.pipeline is not None, "assemble comes first"
        return self.recovery.pipeline

    @property
    def direct(self) -> frozenset[int]:
        """Boundaries with a link from worker to worker, by the number of the stage before each."""
        return self._boundaries.direct(self._peers.direct.open)

    def attempt(
        self, info: StepInfo, batches: Sequence[Tensors], group: GradientSum | None = None
    ) -> Gradients:
        """Do a training step up to the commit. It changes no weight, so it may be repeated."""
        self.begin(info, group)
        losses = self.pipeline.run(batches)
        self.pipeline.sum_gradients()
        return losses, *self.pipeline.report_gradients()

    def run(self, info: StepInfo, batches: Sequence[Tensors]) -> list[float]:
        """Run micro-batches in a pass that commits nothing, as `retrying` does; return their
        losses."""

        def attempt() -> list[float]:
            self.begin(info)
            return self.pipeline.run(batches)

        return self.retrying(attempt)

    def begin(self, info: StepInfo, group: GradientSum | None = None) -> None:
        """Announce an attempt at a step to every stage, with the best schedule known so far; its
        number is set here. `group` gets the gradients of a step that is summed."""
        info = replace(info, attempt=next(self._attempts), summed=group is not None)
        text = "step %d, attempt %d: %d micro-batches"
        _log.debug(text, info.step + 1, info.attempt, info.micro_batches)
        self._peers.direct.dial_again(timeouts.DIRECT_DIAL_S)
        count = max(1, info.micro_batches)  # other replicas may have all of a short step
        choice = self._tuner.choice(count, self.direct)
        self.forecast = None if choice.assumed else choice
        self.pipeline.begin(info, choice.schedule if info.train else choice.unordered, group)

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
                    self._peers.clock(owner).round_trip_s or 0.0
                    for owner in {before.owner, after.owner} - {"local"}
                )
            latency_s[before.index] = round_trip_s / 2
        self._tuner.observe(seconds, latency_s)
        return make_profile(self._config.plan.stages, seconds, latency_s, direct)

    @property
    def idle_s(self) -> float:
        """Seconds since anything moved in the stages; inf without stages. From any thread."""
        pipeline = self.recovery.pipeline
        return pipeline.idle_s if pipeline is not None else math.inf

    @property
    def workers(self) -> list[WorkerId]:
        """The workers that have layers in the plan in force."""
        return planned(self._config, self._peers.workers)

    def retrying(self, action: Callable[[], T]) -> T:
        """Run `action` as `Recovery.retrying` does."""
        return self.recovery.retrying(action)

    def returned(self) -> dict[WorkerId, MachineFacts | None]:
        """The awaited workers that have come since the last call, with their devices; they are
        spare now. The device is None for a worker with stages, whose memory is not free."""
        machines: dict[WorkerId, MachineFacts | None] = {}
        for worker, welcome in self._peers.returned().items():
            has_stages = welcome.run_id == self.run_id
            self.members.on(worker, Event.BACK if has_stages else Event.FRESH)
            _log.info("worker %s is back", worker, extra=event("worker back", worker=worker))
            machines[worker] = None if has_stages else MachineFacts.of(welcome)
        return machines

    def clock_offsets(self) -> dict[WorkerId, float]:
        """Each worker's time.perf_counter() minus ours, in seconds, where it is known."""
        offsets = {worker: self._peers.clock(worker).offset_s for worker in self.workers}
        return {worker: offset for worker, offset in offsets.items() if offset is not None}

    def control(self, worker: WorkerId, name: str, data: Any = None) -> Any:
        """Between steps: the result of a worker's handler for `name`. Raises its UserError."""
        if worker not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise UserError(f"there is no worker {worker!r} to ask (workers: {known})")

        def asked() -> Any:
            number = next(self.recovery.requests)
            message = self.ask(worker, control.request(number, name, data))
            message.release()
            return control.result(message)

        return self.retrying(asked)

    def link_workers(
        self, pairs: Iterable[tuple[WorkerId, WorkerId]]
    ) -> dict[frozenset[WorkerId], str]:
        """Between steps: have these pairs open links; return each failed pair's reason. Raises
        LinkLost."""
        return self._peers.direct.connect(pairs, timeouts.DIRECT_DIAL_S)

    def ask(self, worker: WorkerId, question: Message, then: Message | None = None) -> Message:
        """A worker's answer to a CONTROL request, which the caller releases. `then` is sent right
        behind the question. Raises LinkLost."""
        pipeline = self.pipeline
        if then is not None:
            pipeline.answer(worker, question)  # sends it
            self._peers.send(worker, then)
        ask = partial(pipeline.answer, worker, question)
        return pipeline.until(ask, f"an answer of worker {worker}")

    def traffic(self) -> dict[WorkerId, tuple[int, int, float, int]]:
        """Per worker: bytes received, bytes sent and seconds spent writing on all its links with
        the coordinator, and bytes sent on its direct links."""
        direct = self.pipeline.direct_bytes
        return {
            worker: (of.bytes_in, of.bytes_out, of.write_s, direct.get(worker, 0))
            for worker, of in self._peers.stats.items()
        }

    def why(self, lost: LinkLost) -> str:
        """How the worker of a lost link ended, if this process started it; else why the link
        broke."""
        return self._local.exit_text(lost.worker, timeouts.STOP_S) or lost.reason


def _goodbye(error: BaseException | None) -> m.Body:
    """The last message to the workers; after a failure they stay for the next run."""
    if error is None:
        return m.Bye("the run is over")
    if isinstance(error, StoppedEarly):
        return m.Bye(f"the run ended: {error.message}"[:2000])
    if isinstance(error, KeyboardInterrupt):
        return m.Bye("the run was stopped")
    known = error if isinstance(error, HeteroError) else HeteroError(type(error).__name__)
    return m.Error(type(known).__name__, known.message[:2000], known.hint)
