"""The engine: drives micro-batches through all stages, local and remote.

One thread computes and decides here; readers and writers of the links work beside it. The policy
is schedule.py's, the numbers are the stages'; this module only moves things.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_framework import control
from hetero_framework.config import StageSpec, WireConfig
from hetero_framework.core.devices import Device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import (
    Abort,
    Aborted,
    Backward,
    BackwardDone,
    Body,
    Bye,
    Commit,
    Committed,
    Control,
    Forward,
    GradientNorms,
    LoadState,
    Message,
    OfStep,
    State,
    StateKind,
    StateLoaded,
    StateRequest,
)
from hetero_framework.core.messages import Loss as LossMessage
from hetero_framework.core.trace import Recorder, Span
from hetero_framework.engine import messages
from hetero_framework.engine.boundary_io import ArrivalMeter, BoundaryIO
from hetero_framework.engine.executor import Executor
from hetero_framework.engine.hosts import Event, Hosts, LinkLost
from hetero_framework.engine.stage_api import (
    GradientReport,
    Loss,
    StageInterface,
    StatePart,
    StepInfo,
    StepSchedule,
    Tensors,
)
from hetero_framework.errors import PeerLostError
from hetero_framework.models.objective import Objective
from hetero_framework.planner.readiness import Admission

_POLL_S = 0.5


@dataclass(frozen=True)
class StageStatistics:
    """One stage in one step: seconds computing forward and backward and waiting, the longest
    queue of arrivals and of stored forwards, its worker's peak memory in bytes, and mean seconds
    on the wire of an activation and of a gradient that arrived (0: they did not travel)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    queue_peak: int = 0
    in_flight_peak: int = 0
    peak_memory_bytes: int = 0
    arrive_forward_s: float = 0.0
    arrive_backward_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s


class Pipeline:
    """All stages of the model as one thing that can run a step."""

    def __init__(
        self,
        stages: Sequence[StageSpec],
        local: Sequence[StageInterface],
        peers: Hosts,
        device: Device,
        *,
        objective: Objective,
        wire: WireConfig,
        step_timeout_s: float,
        meter: ArrivalMeter | None = None,
    ) -> None:
        """`local` are the stages of this process; the others are reached through `peers`."""
        self._stages = list(stages)
        self._peers = peers
        self._device = device
        self._objective = objective
        self._step_timeout_s = step_timeout_s
        self._meter = meter or ArrivalMeter(Recorder(0))
        devices = len({spec.owner for spec in stages})
        self._runner = Executor(local, device, self._meter.recorder, num_devices=devices)
        self._exchange = BoundaryIO(
            self._runner,
            device,
            wire,
            peers.post,
            on_loss=self._note_loss,
            on_finished=lambda info, k: self._finished.add(k),
            on_failure=peers.fail,
            loss_is_awaited=False,
        )
        self._runner.outbox = self._exchange
        self._max_in_flight = 1
        self._info = StepInfo(step=0, attempt=0, train=True, micro_batches=0, num_items=1)
        self._losses: dict[int, Loss] = {}
        self._finished: set[int] = set()
        self._replies: dict[tuple[WorkerId, type[Body]], Message] = {}
        self._aborting: dict[WorkerId, object] = {}
        self._commits: dict[WorkerId, Message] = {}
        self._spans: dict[WorkerId | str, list[Span]] = {}
        self._round_trips: dict[frozenset[WorkerId], float] = {}
        self._direct_bytes: dict[WorkerId, int] = {}
        self._requests = 0
        self._last_progress = time.monotonic()
        self._began = time.perf_counter()
        peers.route(stages)

    def close(self) -> None:
        """End the thread that sends, if there is one."""
        self._exchange.close()

    # -- one step, in the order of its verbs ----------------------------------------------------

    def begin(self, info: StepInfo, orders: StepSchedule, max_in_flight: int) -> None:
        """Announce a step to every stage. At most `max_in_flight` micro-batches are in
        the pipeline."""
        self._info = info
        self._max_in_flight = max_in_flight
        self._losses.clear()
        self._finished.clear()
        self._replies.clear()
        self._began = time.perf_counter()
        self._peers.expect(info.step, info.attempt)
        self._runner.begin(info, orders)
        for worker in self._peers.workers:
            self._peers.ping(worker)
            self._peers.send(worker, messages.step_message(info, orders))

    def run(self, batches: Sequence[Tensors]) -> list[float]:
        """Drive all micro-batches forward (and backward); their losses in micro-batch order.

        Raises LinkLost or DirectLost when a link breaks and PeerLostError when nothing moves any
        more.
        """
        admission = Admission(len(batches), self._max_in_flight)
        self._last_progress = time.monotonic()
        while len(self._finished) < len(batches) or len(self._losses) < len(batches):
            self._drain()
            entering = admission.next(len(self._finished))
            # One at a time, so that the first forward need not wait for the inputs of the others.
            if entering is not None and not self._runner.has_inputs(0):
                self._launch(entering, batches[entering])
                admission.admit()
            elif self._runner.run_next():
                self._last_progress = time.monotonic()
            elif entering is not None:
                self._launch(entering, batches[entering])
                admission.admit()
            else:
                self._wait(lambda: f"losses of micro-batches {self._open_micro_batches(batches)}")
        return [float(self._losses[k]) for k in range(len(batches))]

    def report_gradients(self) -> tuple[list[GradientReport], dict[int, StageStatistics]]:
        """Every stage's gradient norms, in stage order, and its times; tied gradients are summed
        on the way. Workers send theirs by themselves when they are done."""
        reports: dict[int, GradientReport] = {}
        replies = {}
        for worker in self._peers.workers:
            replies[worker] = self._reply(worker, GradientNorms)
            reports.update(messages.reports_of(replies[worker]))
        tied = next(
            (r.tied_gradient for r in reports.values() if r.tied_gradient is not None), None
        )
        # From the back: where `local` holds the head too, its share is known first.
        for stage in reversed(self._runner.stages):
            report = stage.report_gradients(tied if stage.is_first else None)
            tied = report.tied_gradient if report.tied_gradient is not None else tied
            reports[stage.index] = report
        statistics = self.statistics(replies)
        return [reports[spec.index] for spec in self._stages], statistics

    def commit(
        self, learning_rate: float, grad_scale: float, recover: Callable[[LinkLost], None]
    ) -> None:
        """Step everywhere; workers are told and not waited for.

        Once this has begun, the step is decided: a link that breaks before its worker has answered
        is mended by `recover`, which calls `repeat_commit`.
        """
        for stage in self._runner.stages:
            self._runner.commit(stage, learning_rate, grad_scale)
        tied = next((w for s in self._runner.stages if (w := s.tied_weight()) is not None), None)
        for stage in self._runner.stages:
            if stage.is_last and tied is not None:
                stage.set_tied_weight(tied)
        last_owner = self._stages[-1].owner
        self._commits = {
            worker: messages.commit_message(
                self._info, learning_rate, grad_scale, tied if worker == last_owner else None
            )
            for worker in self._peers.workers
        }
        for worker, order in list(self._commits.items()):
            try:
                self._peers.send(worker, order)
            except LinkLost as lost:
                recover(lost)

    def repeat_commit(self, worker: WorkerId) -> None:
        """Over a new link: tell a worker again what it has not confirmed. One that has done it
        already only says so."""
        if worker in self._commits:
            self._peers.send(worker, self._commits[worker])

    @property
    def direct_bytes(self) -> dict[WorkerId, int]:
        """What each worker has sent straight to others so far, as its last report said."""
        return dict(self._direct_bytes)

    @property
    def round_trips(self) -> dict[frozenset[WorkerId], float]:
        """Seconds there and back between workers that have a link, as their reports said."""
        return dict(self._round_trips)

    def drain_commits(self) -> None:
        """Wait until every worker has confirmed the last commit."""
        self._last_progress = time.monotonic()
        while self._commits:
            self._wait(lambda: f"COMMITTED of workers {', '.join(map(str, self._commits))}")

    def take_spans(self) -> dict[WorkerId | str, list[Span]]:
        """What has been recorded since the last call, by process; times are of its own clock."""
        taken, self._spans = self._spans, {}
        taken["local"] = self._meter.recorder.take()
        return taken

    def abort(self) -> None:
        """Forget the step everywhere; weights stay as they are. When it returns, nothing that was
        sent before is on its way any more.

        After LinkLost it may be called again: a worker that is aborting already is not told twice.
        """
        self._exchange.flush()
        self._runner.abort()
        for worker in self._peers.workers:
            link = self._peers.generation(worker)
            if self._aborting.get(worker) is not link:
                self._replies.pop((worker, Aborted), None)
                self._aborting[worker] = link
                self._peers.send(worker, Message(Abort(*self._key)))
        for worker in [w for w in self._peers.workers if w in self._aborting]:
            self._reply(worker, Aborted)
            del self._aborting[worker]
        for message in self._replies.values():
            message.release()
        self._replies.clear()

    # -- state ----------------------------------------------------------------------------------

    def read_state(self, kind: StateKind) -> Iterator[tuple[int, int, StatePart]]:
        """(stage, part number, part) of every stage; one part in memory at a time."""
        for spec in self._stages:
            if self._runner.owns(spec.index):
                for number, part in enumerate(self._runner.stage(spec.index).state(kind)):
                    yield spec.index, number, part
                continue
            number, last = 0, False
            while not last:
                self._peers.send(spec.owner, Message(StateRequest(spec.index, kind, number)))
                message = self._reply(spec.owner, State)
                part = messages.state_part(message)
                yield spec.index, number, part
                message.release()
                number, last = number + 1, part.last

    def load_state(self, stage: int, kind: str, parts: Iterable[StatePart]) -> None:
        """Have a stage take over its parts of a "checkpoint", an "adapter" or a "tied" weight."""
        spec = self._stages[stage]
        for number, part in enumerate(parts):
            if self._runner.owns(stage):
                self._runner.stage(stage).load_state(kind, part)
                continue
            self._peers.send(
                spec.owner, messages.part_message(LoadState, stage, kind, number, part)
            )
            self._reply(spec.owner, StateLoaded)

    def share_tied_weight(self) -> None:
        """After loading: give the head the embedding's weight where they are one."""
        tied = next((w for s in self._runner.stages if (w := s.tied_weight()) is not None), None)
        if tied is not None:
            self.load_state(len(self._stages) - 1, "tied", [StatePart({"tied": tied}, last=True)])

    # -- messages of others' making ---------------------------------------------------------------

    def control(self, worker: WorkerId, name: str, data: Any = None) -> Any:
        """Ask a worker's handler for `name`; its answer. Raises UserError when it has none."""
        message = self.ask(worker, control.request(self._requests + 1, name, data))
        message.release()
        return control.result(message)

    def ask(self, worker: WorkerId, question: Message) -> Message:
        """Send a CONTROL request and wait for its answer, which the caller releases."""
        self._requests = question.expect(Control).request or 0
        self._peers.send(worker, question)
        return self._reply(worker, Control)

    # -- inside ---------------------------------------------------------------------------------

    def _launch(self, micro_batch: int, inputs: Tensors) -> None:
        """Let one more micro-batch in: what stages need of it goes ahead of the activations."""
        packed = messages.pack_inputs(inputs)
        for spec in self._stages:
            names = self._objective.stage_inputs(spec, inputs)
            if self._runner.owns(spec.index):
                on_device = {name: self._device.copy_in(inputs[name]) for name in names}
                self._runner.put_inputs(spec.index, micro_batch, on_device)
            else:
                needed = {name: packed[name] for name in names}
                message = messages.inputs_message(self._info, spec.index, micro_batch, needed)
                self._peers.send(spec.owner, message)

    def _drain(self) -> None:
        while (event := self._peers.receive(0)) is not None:
            self._handle(event)

    def _wait(self, waiting_for: Callable[[], str]) -> None:
        """Block for the next event. Raises PeerLostError after `step_timeout_s` without any."""
        event = self._peers.receive(_POLL_S)
        if event is not None:
            self._handle(event)
        elif time.monotonic() - self._last_progress > self._step_timeout_s:
            raise PeerLostError(
                f"nothing has moved for {self._step_timeout_s:.0f} s in step "
                f"{self._info.step + 1}; waiting for {waiting_for()}",
                hint="a worker hangs or is far slower than planned: look at its screen; "
                "training.step_timeout_s sets this limit",
            )

    def _handle(self, event: Event) -> None:
        self._last_progress = time.monotonic()
        message = event.message
        assert message is not None
        body = message.body
        if isinstance(body, Committed):
            self._confirmed(event.worker, body)
        elif isinstance(body, OfStep) and (body.step, body.attempt) != self._key:
            message.release()
        elif isinstance(body, Forward):
            self._runner.put_hidden(body.stage, body.micro_batch, event.arrival)
        elif isinstance(body, Backward):
            self._runner.put_gradient(body.stage, body.micro_batch, event.arrival)
        elif isinstance(body, LossMessage):
            self._note_loss(self._info, body.micro_batch, body.loss)
        elif isinstance(body, BackwardDone):
            self._finished.add(body.micro_batch)
        elif isinstance(body, Bye):
            raise LinkLost(event.worker, body.reason)
        elif isinstance(body, Control) and body.answers != self._requests:
            message.release()
        else:
            self._replies[event.worker, type(body)] = message

    def _note_loss(self, info: StepInfo, micro_batch: int, loss: Loss) -> None:
        self._losses[micro_batch] = loss
        if not info.train:
            self._finished.add(micro_batch)

    def _confirmed(self, worker: WorkerId, body: Committed) -> None:
        order = self._commits.get(worker)
        if order is not None and order.expect(Commit).step == body.step:
            del self._commits[worker]
        if body.spans:
            self._spans.setdefault(worker, []).extend(body.spans)

    def _reply(self, worker: WorkerId, kind: type[Body]) -> Message:
        self._last_progress = time.monotonic()
        while (worker, kind) not in self._replies:
            self._wait(lambda: f"{kind.spec.name} of worker {worker}")
        return self._replies.pop((worker, kind))

    @property
    def _key(self) -> tuple[int, int]:
        return (self._info.step, self._info.attempt)

    def _open_micro_batches(self, batches: Sequence[Tensors]) -> str:
        return ", ".join(str(k) for k in range(len(batches)) if k not in self._finished)

    def statistics(self, replies: Mapping[WorkerId, Message]) -> dict[int, StageStatistics]:
        """Of the step so far: this process's stages, and those in the workers' GRADIENT_NORMS."""
        seconds = time.perf_counter() - self._began
        arrivals = self._meter.take()
        raw: dict[int, dict[str, Any]] = {
            index: {
                **dataclasses.asdict(times),
                "peak_memory_bytes": self._device.peak_memory(),
                "arrive_forward_s": arrivals["forward"].get(index, 0.0),
                "arrive_backward_s": arrivals["backward"].get(index, 0.0),
            }
            for index, times in self._runner.statistics().items()
        }
        for worker, message in replies.items():
            norms = message.expect(GradientNorms)
            for entry in norms.stages:
                raw[entry.index] = dataclasses.asdict(entry.figures)
            self._direct_bytes[worker] = norms.direct_bytes
            for trip in norms.round_trips:
                self._round_trips[frozenset((worker, trip.worker_id))] = trip.seconds
        found = {}
        for index, values in sorted(raw.items()):
            busy_s = values["forward_s"] + values["backward_s"]
            found[index] = StageStatistics(**values, wait_s=max(0.0, seconds - busy_s))
        return found
