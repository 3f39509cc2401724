"""All processes of a run as one: starts local workers, connects, has every stage loaded, recovers.

`Cluster` owns the processes and links. What it gives to the training loop is a `Pipeline`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeVar

import torch

from hetero_framework import control
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.roles import local_worker_ids, threads_for
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.config import Config, StageSpec
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.messages import Bye, Error, Message, Ready, Setup, Start
from hetero_framework.core.trace import Recorder
from hetero_framework.engine.boundary_io import ArrivalMeter, unpack
from hetero_framework.engine.hosts import DirectLost, LinkLost, StepResults, WorkerId
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.pipeline import Pipeline, StageStatistics
from hetero_framework.engine.remote_host import RemoteHost, RemoteInbox
from hetero_framework.engine.stage_api import Loss, StageInterface, StepInfo, StepSchedule
from hetero_framework.engine.stage_host import StageHost
from hetero_framework.errors import (
    HeteroError,
    NetworkError,
    PeerLostError,
    StoppedEarly,
    UserError,
)
from hetero_framework.log import event
from hetero_framework.models.fingerprint import (
    Fingerprint,
    check_same_model,
    summary,
    whole_fingerprint,
)
from hetero_framework.models.objective import objective_of
from hetero_framework.models.weights import resolve_model_path
from hetero_framework.planner.simulator import Profile
from hetero_framework.planner.tuner import StageSeconds, Tuner

_log = logging.getLogger(__name__)
_MAX_RECOVERIES = 5
_LOAD_POLL_S = 0.5
_IN_ORDER_S = 10.0
_AT_ONCE_S = 2.0
_PEER_S = 5.0

Trainable = list[list[tuple[str, tuple[int, ...]]]]
BuildStages = Callable[[Config, Sequence[StageSpec], Device], Sequence[StageInterface]]
T = TypeVar("T")


@dataclass(frozen=True)
class _Outlet:
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
    """What a process said of its device: name, label, bytes of memory in all and free now."""

    device: str
    label: str
    memory_total: int
    memory_free: int


class Cluster:
    """The processes of one run; a context manager that leaves none behind."""

    def __init__(
        self,
        config: Config,
        *,
        max_frame_bytes: int,
        build: BuildStages = load_stages,
        debug: bool = False,
        run_id: str | None = None,
        workers: LocalWorkers | None = None,
    ) -> None:
        """`build` makes this process's stages; `run_id` is a lasting one. `workers` are those
        of this machine where they are on their way already.
        """
        self._config = config
        self._build = build
        self.run_id = run_id or secrets.token_hex(8)
        self.device = open_device(config.coordinator.device)
        self.device.use()
        torch.set_num_threads(threads_for(config, "local"))
        self._local = workers or LocalWorkers(config, local_worker_ids(config), debug=debug)
        self._meter = ArrivalMeter(Recorder(config.training.timeline_steps))
        self._peers = WorkerLinks(
            config,
            self.run_id,
            max_frame_bytes,
            allocate=self.device.allocate_host,
            exit_text=self._exit_text,
            unpack=lambda message: unpack(message, self.device),
            watch=self._meter.watch,
        )
        self._recoveries: Counter[WorkerId] = Counter()
        self._attempt = 0
        self._requests = 0
        self._remotes: dict[WorkerId, RemoteHost] = {}
        self._tuner: Tuner
        self.pipeline: Pipeline
        self.trainable: Trainable
        # Of the weights that all stages were read from, under any cut.
        self.fingerprint: str

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        goodbye = Message(Bye("the run is over"))
        if isinstance(error, (KeyboardInterrupt, StoppedEarly)):
            goodbye = Message(Bye(f"the run was stopped: {error}"[:2000]))
        elif error is not None:
            goodbye = _failure(error)
        at_once = isinstance(error, (KeyboardInterrupt, PeerLostError))
        try:
            if hasattr(self, "pipeline"):
                self.pipeline.close()
            self._peers.close(goodbye, _AT_ONCE_S if at_once else _IN_ORDER_S)
        finally:
            self._local.stop(_AT_ONCE_S if at_once else _IN_ORDER_S)

    # -- start ----------------------------------------------------------------------------------

    def connect(self) -> dict[str | int, MachineFacts]:
        """Start this machine's workers and reach all of them; what each process runs on."""
        self._local.start()
        self._local.report()
        welcomes = self._peers.connect_all()
        memory = self.device.memory()
        facts: dict[str | int, MachineFacts] = {
            "local": MachineFacts(self.device.name, self.device.label, memory.total, memory.free)
        }
        for worker, said in welcomes.items():
            facts[worker] = MachineFacts(
                said.device, said.device_label, said.memory_total, said.memory_free
            )
            if said.torch.split("+")[0] != torch.__version__.split("+")[0]:
                _log.warning(
                    "worker %s has torch %s, the coordinator %s: equal to the last bit only with "
                    "equal versions",
                    worker,
                    said.torch,
                    torch.__version__,
                )
            connected = event("worker connected", worker=worker, device=said.device_label)
            _log.info("", extra=connected)
        return facts

    def load(
        self, config: Config | None = None, memory_limits: tuple[int, ...] | None = None
    ) -> None:
        """Have every process load its stages, all at once, and build the pipeline.

        `config` replaces the one of the start where facts of the machines decided something in it;
        `memory_limits` is how many forwards each stage has memory for.
        """
        if config is not None:
            self._config = config
        self._tuner = Tuner(
            self._config.stages(),
            max_in_flight=self._config.training.max_in_flight,
            memory_limits=memory_limits,
            # Steps need not wait for it; the next ones take what has been found by then.
            run=lambda job: threading.Thread(target=job, name="tune", daemon=True).start(),
        )
        try:
            self._load()
        except LinkLost as lost:
            raise PeerLostError(
                f"worker {lost.worker} went away while it loaded: {self.why(lost)}",
                hint="look at its screen or log, then start again",
            ) from lost
        self.retrying(self.pipeline.share_tied_weight)

    def _load(self) -> None:
        config, specs = self._config, self._config.stages()
        for worker in self._peers.workers:
            self._peers.send(worker, self._setup_message(worker, specs))
        expected = _in_background(self._expected_weights)
        local = list(self._build(config, [s for s in specs if s.owner == "local"], self.device))
        ready_messages = self._ready_messages()
        loaded = [("the coordinator", stage.fingerprint) for stage in local]
        for worker, ready in ready_messages.items():
            loaded += [(f"worker {worker}", stage.fingerprint) for stage in ready.stages]
        check_same_model(loaded, expected.result())
        self.fingerprint = summary(fingerprint for _, fingerprint in loaded)
        trainable = {stage.index: stage.trainable() for stage in local}
        for ready in ready_messages.values():
            for entry in ready.stages:
                trainable[entry.index] = [(p.name, p.index) for p in entry.trainable]
        self.trainable = [trainable[spec.index] for spec in specs]
        self._connect_workers(specs)
        needs = gradient_needs(self.trainable)
        for stage in local:
            stage.input_requires_grad = needs[stage.index]
        for worker in self._peers.workers:
            own = (spec.index for spec in specs if spec.owner == worker)
            self._peers.send(worker, Message(Start(tuple(k for k in own if needs[k]))))
        results = StepResults()
        outlet = _Outlet(results, self._peers)
        host = StageHost(local, config, self.device, self._meter, outlet)
        self._remotes = {
            worker: RemoteHost(
                worker,
                [spec.index for spec in specs if spec.owner == worker],
                self._peers,
                results,
                host.data,
                holds_head=specs[-1].owner == worker,
            )
            for worker in self._peers.workers
        }
        self._peers.route(specs)
        self.pipeline = Pipeline(
            specs,
            [host, *self._remotes.values()],
            RemoteInbox(self._peers, self._remotes),
            results,
            objective=objective_of(config.training),
            step_timeout_s=config.training.step_timeout_s,
        )

    def _expected_weights(self) -> Fingerprint | None:
        """Of all weights, from this machine's files; None where it has not all of them."""
        model = self._config.model
        if not self._peers.workers or model is None or model.name_or_path is None:
            return None
        source = resolve_model_path(model.name_or_path, self._config.base_dir)
        return whole_fingerprint(source, model.revision)

    def _connect_workers(self, specs: Sequence[StageSpec]) -> None:
        """Open the links between workers that the plan has use for.

        Raises NetworkError where the configuration insists on one that cannot be had.
        """
        pairs = [
            (before.owner, after.owner)
            for before, after in pairwise(specs)
            if self._may_be_direct(before, after)
        ]
        problems = self._peers.connect_workers(pairs, _PEER_S) if pairs else {}
        for one, other in {pair for pair in pairs if frozenset(pair) in self._peers.direct}:
            _log.info("", extra=event("direct link opened", workers=f"{one}, {other}"))
        told = set()
        for before, after in pairwise(specs):
            pair = frozenset((before.owner, after.owner))
            if not self._may_be_direct(before, after) or pair not in problems:
                continue
            if self._links(after) == "direct":
                raise NetworkError(
                    f"no direct link between {before.layers} and {after.layers}: {problems[pair]}",
                    hint='open the port in the firewall, or set links to "auto" or "relay"',
                )
            if pair not in told:
                told.add(pair)
                _log.warning(
                    "%s; their tensors go through the coordinator",
                    problems[pair],
                    extra=event(
                        "no direct link", "relay", workers=", ".join(sorted(map(str, pair)))
                    ),
                )

    def _links(self, after: StageSpec) -> str:
        """The mode of the boundary in front of a stage."""
        return self._config.shard_plan[after.index].links or self._config.links

    def _may_be_direct(self, before: StageSpec, after: StageSpec) -> bool:
        between_workers = "local" not in (before.owner, after.owner)
        return between_workers and before.owner != after.owner and self._links(after) != "relay"

    @property
    def direct(self) -> frozenset[int]:
        """Boundaries (numbers of the stage before each) with a link from worker to worker."""
        specs, connected = self._config.stages(), self._peers.direct
        return frozenset(
            before.index
            for before, after in pairwise(specs)
            if self._may_be_direct(before, after)
            and frozenset((before.owner, after.owner)) in connected
        )

    def _setup_message(self, worker: WorkerId, specs: Sequence[StageSpec]) -> Message:
        own = tuple(spec.index for spec in specs if spec.owner == worker)
        return Message(Setup(self._config.to_dict(), own))

    def _ready_messages(self) -> dict[WorkerId, Ready]:
        """READY of every worker. Loading may take long; heartbeats show that a worker lives."""
        ready: dict[WorkerId, Ready] = {}
        told = time.monotonic()
        while len(ready) < len(self._peers.workers):
            event = self._peers.receive(_LOAD_POLL_S)
            if event is not None and event.message is not None:
                if isinstance(event.message.body, Ready):
                    ready[event.worker] = event.message.body
            elif time.monotonic() - told > 60:
                told = time.monotonic()
                absent = [str(w) for w in self._peers.workers if w not in ready]
                _log.info("still loading: worker %s", ", ".join(absent))
        return ready

    # -- steps ----------------------------------------------------------------------------------

    def begin(
        self, step: int, micro_batches: int, *, train: bool, num_items: int, loss_scale: float = 1.0
    ) -> None:
        """Announce a step, or announce it again after a lost link, to every stage."""
        self._attempt += 1
        _log.debug("step %d, attempt %d: %d micro-batches", step + 1, self._attempt, micro_batches)
        self._peers.dial_again(_PEER_S)
        info = StepInfo(step, self._attempt, train, micro_batches, num_items, loss_scale)
        direct = self.direct
        choice = self._tuner.choice(micro_batches, direct)
        self.pipeline.begin(
            info, StepSchedule(choice.in_flight_limits, choice.policy, direct), choice.max_in_flight
        )

    def observe(self, micro_batches: int, statistics: Mapping[int, StageStatistics]) -> None:
        """Learn from a step's times how to run the next ones."""
        seconds = {
            index: StageSeconds(
                found.forward_s / micro_batches,
                found.backward_s / micro_batches,
                found.arrive_forward_s,
                found.arrive_backward_s,
            )
            for index, found in statistics.items()
        }
        specs, direct = self._config.stages(), self.direct
        latency_s = {}
        for before, after in pairwise(specs):
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

    def profile(self) -> Profile:
        """What the steps have shown of stages and boundaries."""
        return self._tuner.profile(self.direct)

    def clock_offsets(self) -> dict[WorkerId, float]:
        """Each worker's time.perf_counter() minus ours, seconds; without those not known yet."""
        offsets = {worker: self._peers.clock(worker).offset_s for worker in self.workers}
        return {worker: offset for worker, offset in offsets.items() if offset is not None}

    # -- recovery -------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerId]:
        """Ids of the workers that take part."""
        return self._peers.workers

    def control(self, worker: WorkerId, name: str, data: Any = None) -> Any:
        """Between steps: what the handler for `name` in a worker says to `data`.

        Raises UserError when it failed or is not registered there.
        """
        if worker not in self.workers:
            known = ", ".join(map(str, self.workers)) or "none"
            raise UserError(f"there is no worker {worker!r} to ask (workers: {known})")

        def asked() -> Any:
            self._requests += 1
            message = self.ask(worker, control.request(self._requests, name, data))
            message.release()
            return control.result(message)

        return self.retrying(asked)

    def ask(self, worker: WorkerId, question: Message) -> Message:
        """A worker's answer to a CONTROL request, which the caller releases."""
        host = self._remotes[worker]
        return self.pipeline.until(lambda: host.answer(question), f"an answer of worker {worker}")

    def traffic(self) -> dict[WorkerId, tuple[int, int, float, int]]:
        """Per worker, over all its links: bytes received, bytes sent and seconds spent writing
        on its link with the coordinator, and bytes that it sent straight to other workers."""
        direct = self.pipeline.direct_bytes
        return {
            worker: (*counts, direct.get(worker, 0))
            for worker, counts in self._peers.traffic().items()
        }

    def retrying(self, action: Callable[[], T]) -> T:
        """Run `action`; when a link breaks in it, mend it, forget the attempt, do it again. For a
        link between workers nobody waits: what it carried goes through the coordinator until they
        have opened another one.

        Nothing in `action` may have changed a weight before the break. Raises PeerLostError when
        the worker or its state is gone.
        """
        broken = False
        while True:
            try:
                if broken:
                    _log.info("", extra=event("step repeated"))
                    self.pipeline.abort()
                    broken = False
                result = action()
            except LinkLost as lost:
                broken = True
                self.recover(lost)
            except DirectLost as lost:
                broken = True
                self._peers.drop_direct(lost.pair)
                one, other = sorted(lost.pair, key=str)
                _log.warning(
                    "lost the link between workers %s and %s (%s); their tensors go through the "
                    "coordinator until it is back",
                    one,
                    other,
                    lost.reason,
                    extra=event("direct link lost", "relay", workers=f"{one}, {other}"),
                )
            else:
                self._recoveries.clear()
                return result

    def recover(self, lost: LinkLost) -> None:
        """Open the link to a lost worker again; it has its stages still. Raises PeerLostError."""
        self._recoveries[lost.worker] += 1
        times = self._recoveries[lost.worker]
        if times > _MAX_RECOVERIES:
            raise PeerLostError(
                f"the link to worker {lost.worker} broke {times} times in one step: {lost.reason}",
                hint="check the network",
            ) from lost
        ended = self._exit_text(lost.worker)
        if ended is not None:
            raise PeerLostError(f"worker {lost.worker} is gone: {ended}") from lost
        _log.warning(
            "lost the link to worker %s (%s); connecting again",
            lost.worker,
            lost.reason,
            extra=event("worker lost", "connecting again", worker=lost.worker),
        )
        self._peers.reconnect(lost.worker)
        try:
            self.pipeline.repeat_commit(lost.worker)
        except LinkLost as again:
            self.recover(again)
            return
        back = event("worker back", worker=lost.worker)
        _log.info("worker %s is back", lost.worker, extra=back)

    def why(self, lost: LinkLost) -> str:
        """How the worker of a lost link ended, if it was started here; else what broke the link."""
        return self._exit_text(lost.worker) or lost.reason

    def _exit_text(self, worker: WorkerId) -> str | None:
        for ended in self._local.exited():
            if ended.worker_id == worker:
                return str(ended)
        return None


def _failure(error: BaseException) -> Message:
    """What a worker is told of a run that failed; it stays for the next one."""
    known = error if isinstance(error, HeteroError) else HeteroError(type(error).__name__)
    return Message(Error(type(known).__name__, known.message[:2000], known.hint))


def _in_background(job: Callable[[], T]) -> Future[T]:
    """The result of what a thread does meanwhile; a run that ends does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fingerprint", daemon=True).start()
    return future


def gradient_needs(trainable: Trainable) -> list[bool]:
    """For each stage whether anything trainable lies before it: its input then needs a gradient."""
    needs, below = [], False
    for stage in trainable:
        needs.append(below)
        below = below or bool(stage)
    return needs
