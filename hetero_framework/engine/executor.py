"""Runs the stages of one process, one task at a time, in the order of the step.

The executor knows no wire. It is told what arrived, asks `Readiness` what to do next, lets the
stage do it, and hands the result to the next stage here, or to `BoundaryIO` for a stage elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero_framework import control
from hetero_framework.core import failpoints, spans
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.messages import Backward, Forward, StageFigures
from hetero_framework.core.planned_order import Lane, OrderTimeout, PlannedOrder
from hetero_framework.core.spans import Recorder
from hetero_framework.engine import stage_api as api
from hetero_framework.engine.boundary_io import BoundaryIO
from hetero_framework.engine.out_of_memory import failed
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Readiness, Task
from hetero_framework.engine.schedule.step_schedule import StepSchedule
from hetero_framework.errors import ProtocolError
from hetero_framework.models.cut.side import Bundle

_AHEAD = 2  # tasks that may be queued on a device that computes asynchronously


@dataclass
class _StageQueue:
    """One stage and the tensors that wait for it."""

    stage: api.StageInterface
    inputs: dict[int, api.Tensors] = field(default_factory=dict)
    hidden: dict[int, api.Arrival] = field(default_factory=dict)
    gradients: dict[int, api.Arrival] = field(default_factory=dict)
    in_flight: dict[int, api.Arrival] = field(default_factory=dict)
    queue_peak: int = 0
    misses_before: int = 0
    has_backwards: bool = False
    """Whether this step has separate backwards here, for which forwards are stored. The last stage
    does both as one task, and stages before all that is trained need no backward."""

    @property
    def misses(self) -> int | None:
        """Prefetch misses of this step; None where nothing streams."""
        n = self.stage.residence.misses
        return None if n is None else n - self.misses_before

    def note_queue(self) -> None:
        self.queue_peak = max(self.queue_peak, len(self.hidden) + len(self.gradients))


class Executor:
    """The stages of one process, executed by one thread."""

    def __init__(
        self,
        stages: Sequence[api.StageInterface],
        device: Device,
        recorder: Recorder,
        io: BoundaryIO,
    ) -> None:
        self._queues = {stage.index: _StageQueue(stage) for stage in stages}
        self._device = device
        self._recorder = recorder
        self._io = io
        self._readiness, self._order = Readiness({}), PlannedOrder()
        self._order_timeout = OrderTimeout(0.0)
        self.waits_s = 0.0
        """Seconds until `run_next` is worth another call, since a ready task waits for its turn; 0
        where none waits."""
        self._tasks: list[tuple[Task, DeviceEvent, DeviceEvent]] = []
        self.info: api.StepInfo | None = None

    def stage(self, index: int) -> api.StageInterface:
        if index not in self._queues:
            raise ProtocolError(f"stage {index} is not held here")
        return self._queues[index].stage

    def begin(
        self, info: api.StepInfo, schedule: StepSchedule, take: api.TakeEarly | None = None
    ) -> None:
        """Start a step, or start it over. Tensors that wait from an earlier attempt are dropped."""
        self.info = info
        for queue in self._queues.values():
            self._drop(queue)
            queue.stage.begin(info, take)
            queue.queue_peak, queue.misses_before = 0, queue.stage.residence.misses or 0
            differentiates = info.train and queue.stage.differentiates
            queue.has_backwards = differentiates and not queue.stage.is_last
        limits = {index: schedule.in_flight_limits[index] for index in self._queues}
        self._order = PlannedOrder(filter(self._has_tasks, schedule.tasks))
        self._order_timeout = OrderTimeout(schedule.order_timeout_s)
        self._readiness, self.waits_s = Readiness(limits, order=self._order), 0.0
        self._tasks.clear()
        self._recorder.begin(info.step, attempt=info.attempt, train=info.train)

    def abort(self) -> None:
        for queue in self._queues.values():
            self._drop(queue)
            queue.stage.abort()
        self._readiness, self._order, self.waits_s = Readiness({}), PlannedOrder(), 0.0
        self._tasks.clear()
        self.info = None

    # Arrivals. Each method raises ProtocolError for a tensor that is not expected here or now.

    def put_inputs(self, stage: int, micro_batch: int, inputs: api.Tensors) -> None:
        queue = self._queue("INPUTS", stage, micro_batch)
        self._check_new("INPUTS", FORWARD, queue, queue.inputs, micro_batch)
        queue.inputs[micro_batch] = inputs
        if queue.stage.is_first or micro_batch in queue.hidden:
            self._readiness.arrived(Task(FORWARD, stage, micro_batch))

    def has_inputs(self, stage: int) -> bool:
        """Whether inputs of a micro-batch wait for this stage."""
        return bool(self._queues[stage].inputs)

    def put_hidden(self, stage: int, micro_batch: int, arrival: api.Arrival) -> None:
        queue = self._queue("FORWARD", stage, micro_batch)
        self._check_new("FORWARD", FORWARD, queue, queue.hidden, micro_batch)
        queue.hidden[micro_batch] = arrival
        queue.note_queue()
        if micro_batch in queue.inputs:
            self._readiness.arrived(Task(FORWARD, stage, micro_batch))

    def put_gradient(self, stage: int, micro_batch: int, arrival: api.Arrival) -> None:
        queue = self._queue("BACKWARD", stage, micro_batch)
        self._check_new("BACKWARD", BACKWARD, queue, queue.gradients, micro_batch)
        if micro_batch not in queue.in_flight:
            text = f"BACKWARD of micro-batch {micro_batch} came to stage {stage} before its forward"
            raise ProtocolError(text)
        queue.gradients[micro_batch] = arrival
        queue.note_queue()
        self._readiness.arrived(Task(BACKWARD, stage, micro_batch))

    def _queue(self, name: str, stage: int, k: int) -> _StageQueue:
        if stage not in self._queues:
            raise ProtocolError(f"{name} of micro-batch {k} came for stage {stage}, not held here")
        return self._queues[stage]

    def _check_new(
        self, name: str, kind: str, queue: _StageQueue, waiting: Mapping[int, object], k: int
    ) -> None:
        what, stage = f"{name} of micro-batch {k} came to stage {queue.stage.index}", queue.stage
        if k >= self._step.micro_batches:
            raise ProtocolError(f"{what}; the step has {self._step.micro_batches} micro-batches")
        if k in waiting or k < self._readiness.started(kind, stage.index):
            raise ProtocolError(f"{what} a second time")

    @property
    def is_done(self) -> bool:
        """Whether all micro-batches of a training step are through all stages here."""
        return self.info is not None and all(map(self.is_through, self._queues))

    def is_through(self, stage: int) -> bool:
        """Whether all micro-batches of the training step that runs are through this stage."""
        queue, count = self._queues[stage], self._step.micro_batches
        if self._readiness.started(FORWARD, stage) < count:
            return False
        return not queue.has_backwards or self._readiness.started(BACKWARD, stage) == count

    def run_next(self) -> bool:
        """Do one task, if one is ready and need not wait for its turn. Returns whether it did. An
        error of a stage becomes a HeteroError that names the place."""
        task = self._readiness.next()
        self.waits_s = 0.0
        if task is None:
            return False
        # While the device is busy, waiting for the planned task costs nothing.
        busy = self._device.is_async and self._tasks and not self._tasks[-1][2].done()
        lane, k = task.lane, task.micro_batch
        if wait_s := self._order_timeout.left_s(self._order, lane, idle=not busy):
            self.waits_s = wait_s
            return False
        if self._device.is_async and len(self._tasks) >= _AHEAD:
            # At most _AHEAD tasks are queued, so that an urgent task need not wait for long.
            self._tasks[-_AHEAD][2].wait()
        queue = self._queues[task.stage]
        self._order.went(lane, k)
        self._readiness.start(task, stores=task.kind == FORWARD and queue.has_backwards)
        began, residence = self._device.record_event(), queue.stage.residence
        try:
            if residence.streams:
                residence.begin(task.kind, k, self._following(queue, task.kind))
            send = self._backward(queue, k) if task.kind == BACKWARD else self._forward(queue, k)
            if residence.streams:
                residence.end()
            self._tasks.append((task, began, self._device.record_event()))
            send()  # may encode on the device
        except (*control.FAILURES, MemoryError) as error:
            where, info = f"stage {task.stage}, {task.kind} of micro-batch {k}", self._step
            raise failed(where, error, self._device, (info.step, info.attempt)) from error
        return True

    def commit(
        self,
        stage: api.StageInterface,
        learning_rate: float,
        grad_scale: float,
        adam: api.Adam | None = None,
    ) -> None:
        """Have a stage step its optimizer, and record how long that took."""
        began = self._device.record_event()
        stage.commit(learning_rate, grad_scale, *([adam] if adam else []))
        if self._recorder.enabled:
            ended = self._device.record_event()
            ended.wait()
            times = began.at_s, ended.at_s
            self._recorder.span(spans.COMMIT, stage.index, spans.NO_MICRO_BATCH, *times)
        self._record_visits(stage)

    def statistics(self) -> dict[int, StageFigures]:
        """Times and queue peaks of the step so far. In training the last stage's forwards count as
        backwards. Waits for the device, and hands the spans to the recorder."""
        seconds = {(k, kind): 0.0 for k in self._queues for kind in (FORWARD, BACKWARD)}
        for task, began, ended in self._tasks:
            ended.wait()
            queue = self._queues[task.stage]
            both = queue.stage.is_last and self.info is not None and self.info.train
            kind = BACKWARD if both else task.kind
            seconds[task.stage, kind] += began.until_s(ended)
            if self._recorder.enabled:
                name = spans.FORWARD_BACKWARD if both else task.kind
                times = began.at_s, ended.at_s
                self._recorder.span(name, task.stage, task.micro_batch, *times)
        self._tasks.clear()
        for queue in self._queues.values():
            self._record_visits(queue.stage)
        return {
            k: StageFigures(
                forward_s=seconds[k, FORWARD],
                backward_s=seconds[k, BACKWARD],
                queue_peak=queue.queue_peak,
                in_flight_peak=self._readiness.peak_in_flight(k),
                peak_memory_bytes=0,
                arrive_forward_s=0.0,
                arrive_backward_s=0.0,
                prefetch_misses=queue.misses,
            )
            for k, queue in self._queues.items()
        }

    def _record_visits(self, stage: api.StageInterface) -> None:
        visits = stage.residence.transfers()
        for kind, *events in visits if self._recorder.enabled else ():
            began, ended = (event.at_s for event in events)
            if ended > began:
                self._recorder.span(kind, stage.index, spans.NO_MICRO_BATCH, began, ended)

    def _following(self, queue: _StageQueue, kind: str) -> str:
        """The kind of the stage's next task, after one of `kind` that begins: by the planned order,
        or else as in 1F1B."""
        index, started = queue.stage.index, self._readiness.started
        forward, backward = (self._order.place((each, index)) for each in (FORWARD, BACKWARD))
        if forward != backward:
            return FORWARD if forward < backward else BACKWARD
        if not queue.has_backwards or started(BACKWARD, index) == self._step.micro_batches:
            return FORWARD
        is_full = self._readiness.is_full(index) and kind == FORWARD  # a backward makes room
        no_forward = started(FORWARD, index) == self._step.micro_batches
        return BACKWARD if is_full or no_forward else FORWARD

    def _has_tasks(self, lane: Lane) -> bool:
        """Whether this step has tasks of this lane here."""
        kind, index = lane
        queue = self._queues.get(index)
        return queue is not None and (kind == FORWARD or queue.has_backwards)

    def _forward(self, queue: _StageQueue, k: int) -> Callable[[], None]:
        stage = queue.stage
        inputs = queue.inputs.pop(k)
        arrival = queue.hidden.pop(k, api.Arrival())
        failpoints.hit("forward" if self._step.train else "evaluation")
        if not stage.is_last:
            left = stage.forward(k, inputs, arrival.tensors)
            failpoints.hit("forward-done")
            if queue.has_backwards:
                # The stored forward may use the receive buffer until its backward is done.
                queue.in_flight[k] = arrival
            else:
                left = _copied(left, arrival)
                arrival.release()
            return lambda: self._pass_on(stage, k, left)
        if not self._step.train:
            outcome = stage.evaluate(k, inputs, arrival.tensors)
            arrival.release()
            return lambda: self._io.outcome(self._step, k, outcome)
        outcome, gradients = stage.forward_backward(k, inputs, arrival.tensors)
        failpoints.hit("backward-done")
        gradients = _copied(gradients, arrival)
        arrival.release()

        def send() -> None:
            self._io.outcome(self._step, k, outcome)
            self._pass_back(stage, k, gradients)

        return send

    def _backward(self, queue: _StageQueue, k: int) -> Callable[[], None]:
        stage = queue.stage
        arrival = queue.gradients.pop(k)
        failpoints.hit("backward")
        gradients = _copied(stage.backward(k, arrival.tensors), arrival)
        failpoints.hit("backward-done")
        arrival.release()
        queue.in_flight.pop(k).release()
        self._readiness.release(stage.index)
        return lambda: self._pass_back(stage, k, gradients)

    def _pass_on(self, stage: api.StageInterface, k: int, left: Bundle) -> None:
        following = stage.index + 1
        if following in self._queues:
            self.put_hidden(following, k, api.Arrival(left))
        else:
            info = self._step
            self._io.send(Forward(info.step, info.attempt, following, k), left)

    def _pass_back(self, stage: api.StageInterface, k: int, gradients: Bundle) -> None:
        """Send gradients to the stage before; the micro-batch is finished if there are none."""
        before = stage.index - 1
        if not stage.input_requires_grad or not gradients:
            self._io.finished(self._step, k)
        elif before in self._queues:
            self.put_gradient(before, k, api.Arrival(gradients))
        else:
            info = self._step
            self._io.send(Backward(info.step, info.attempt, before, k), gradients)

    @property
    def _step(self) -> api.StepInfo:
        assert self.info is not None
        return self.info

    @staticmethod
    def _drop(queue: _StageQueue) -> None:
        for waiting in (queue.hidden, queue.gradients, queue.in_flight):
            for arrival in waiting.values():
                arrival.release()
            waiting.clear()
        queue.inputs.clear()
        queue.stage.residence.transfers()


def _copied(results: Bundle, arrival: api.Arrival) -> Bundle:
    """`results`, with copies of tensors that lie in the receive buffer, which is freed next."""
    buffers = {t.untyped_storage().data_ptr() for t in arrival.tensors if t.numel()}
    return tuple(
        t.detach().clone().requires_grad_(t.requires_grad)
        if t.untyped_storage().data_ptr() in buffers
        else t
        for t in results
    )
