"""Runs the stages of one process: what has arrived, what is ready, one task at a time.

The runner knows no wire. It is told what arrived, asks the schedule what to do next, lets the
stage do it, and hands the result to an `Outbox`, which knows where the neighbours live.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from hetero_framework.errors import HeteroError, as_hetero_error
from hetero_framework.trainer.schedule import BACKWARD, FORWARD, Task, choose
from hetero_framework.trainer.verbs import StageVerbs, StepInfo, Tensors


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Arrival:
    """A tensor that crossed a boundary; `release` gives its receive buffer back."""

    tensor: torch.Tensor | None
    release: Callable[[], None] = _nothing


class Outbox(Protocol):
    """Where results go. `stage` is the stage that shall receive them."""

    def hidden(self, stage: int, micro_batch: int, hidden_BSD: torch.Tensor) -> None: ...
    def gradient(self, stage: int, micro_batch: int, gradient_BSD: torch.Tensor | None) -> None: ...
    def loss(self, micro_batch: int, loss: float) -> None: ...
    def finished(self, micro_batch: int) -> None: ...


def task_failed(task: Task, cause: Exception) -> HeteroError:
    """The error for the user when a stage raised in its work: where, and out of memory or a bug."""
    known = as_hetero_error(cause)
    where = f"stage {task.stage}, {task.kind} of micro-batch {task.micro_batch}"
    if known is not None:
        return type(known)(f"{where}: {known.message}", hint=known.hint)
    return HeteroError(f"{where}: {type(cause).__name__}: {cause}")


@dataclass
class _Lane:
    """One stage and what waits for it. Each direction takes its micro-batches in order."""

    stage: StageVerbs
    next_forward: int = 0
    next_backward: int = 0
    inputs: dict[int, Tensors] = field(default_factory=dict)
    hidden: dict[int, Arrival] = field(default_factory=dict)
    gradients: dict[int, Arrival] = field(default_factory=dict)
    held: dict[int, Arrival] = field(default_factory=dict)
    busy_s: float = 0.0
    queue_peak: int = 0


class StageRunner:
    """The stages of one process, executed by one thread."""

    def __init__(self, stages: Sequence[StageVerbs], outbox: Outbox) -> None:
        self._lanes = {stage.index: _Lane(stage) for stage in stages}
        self._outbox = outbox
        self.info: StepInfo | None = None

    @property
    def stages(self) -> list[StageVerbs]:
        return [lane.stage for lane in self._lanes.values()]

    def stage(self, index: int) -> StageVerbs:
        return self._lanes[index].stage

    def owns(self, index: int) -> bool:
        return index in self._lanes

    def begin(self, info: StepInfo) -> None:
        """Start a step, or start it over: whatever waited for an earlier one is dropped."""
        self.info = info
        for lane in self._lanes.values():
            self._drop(lane)
            lane.stage.begin(info)
            lane.next_forward = lane.next_backward = 0
            lane.busy_s = 0.0
            lane.queue_peak = 0

    def abort(self) -> None:
        for lane in self._lanes.values():
            self._drop(lane)
            lane.stage.abort()
        self.info = None

    def put_inputs(self, stage: int, micro_batch: int, inputs: Tensors) -> None:
        self._lanes[stage].inputs[micro_batch] = inputs

    def put_hidden(self, stage: int, micro_batch: int, arrival: Arrival) -> None:
        lane = self._lanes[stage]
        lane.hidden[micro_batch] = arrival
        lane.queue_peak = max(lane.queue_peak, len(lane.hidden) + len(lane.gradients))

    def put_gradient(self, stage: int, micro_batch: int, arrival: Arrival) -> None:
        lane = self._lanes[stage]
        lane.gradients[micro_batch] = arrival
        lane.queue_peak = max(lane.queue_peak, len(lane.hidden) + len(lane.gradients))

    def run_next(self) -> bool:
        """Do one task, if any is ready. Raises HeteroError that says where when a stage raises."""
        ready = [task for lane in self._lanes.values() for task in self._ready(lane)]
        if not ready:
            return False
        task = choose(ready)
        lane = self._lanes[task.stage]
        started = time.perf_counter()
        try:
            send = self._backward(lane) if task.kind == BACKWARD else self._forward(lane)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError) as error:
            raise task_failed(task, error) from error
        lane.busy_s += time.perf_counter() - started
        send()
        return True

    def statistics(self) -> dict[int, dict[str, float]]:
        """Per stage: seconds busy in this step, longest queue of arrivals."""
        return {
            index: {"busy_s": lane.busy_s, "queue_peak": lane.queue_peak}
            for index, lane in self._lanes.items()
        }

    # -- inside ---------------------------------------------------------------------------------

    def _ready(self, lane: _Lane) -> list[Task]:
        tasks = []
        if lane.next_backward in lane.gradients:
            tasks.append(Task(BACKWARD, lane.stage.index, lane.next_backward))
        k = lane.next_forward
        if k in lane.inputs and (lane.stage.is_first or k in lane.hidden):
            tasks.append(Task(FORWARD, lane.stage.index, k))
        return tasks

    def _forward(self, lane: _Lane) -> Callable[[], None]:
        assert self.info is not None
        stage, k = lane.stage, lane.next_forward
        lane.next_forward += 1
        inputs = lane.inputs.pop(k)
        arrival = lane.hidden.pop(k, Arrival(None))
        if not stage.is_last:
            hidden_BSD = stage.forward(k, inputs, arrival.tensor)
            if self.info.train:
                # The stored forward may look into the receive buffer until its backward is done.
                lane.held[k] = arrival
            else:
                hidden_BSD = _own(hidden_BSD, arrival)
                arrival.release()
            return lambda: self._outbox.hidden(stage.index + 1, k, hidden_BSD)
        if not self.info.train:
            loss = stage.evaluate(k, inputs, arrival.tensor)
            arrival.release()
            return lambda: self._after_loss(stage, k, loss, None)
        loss, gradient_BSD = stage.forward_backward(k, inputs, arrival.tensor)
        gradient_BSD = _own(gradient_BSD, arrival)
        arrival.release()
        return lambda: self._after_loss(stage, k, loss, gradient_BSD)

    def _after_loss(
        self, stage: StageVerbs, k: int, loss: float, gradient_BSD: torch.Tensor | None
    ) -> None:
        assert self.info is not None
        self._outbox.loss(k, loss)
        if stage.is_first or not self.info.train:
            self._outbox.finished(k)
        else:
            self._outbox.gradient(stage.index - 1, k, gradient_BSD)

    def _backward(self, lane: _Lane) -> Callable[[], None]:
        stage, k = lane.stage, lane.next_backward
        lane.next_backward += 1
        arrival = lane.gradients.pop(k)
        gradient_BSD = _own(stage.backward(k, arrival.tensor), arrival)
        arrival.release()
        lane.held.pop(k, Arrival(None)).release()
        if stage.is_first:
            return lambda: self._outbox.finished(k)
        return lambda: self._outbox.gradient(stage.index - 1, k, gradient_BSD)

    @staticmethod
    def _drop(lane: _Lane) -> None:
        for waiting in (lane.hidden, lane.gradients, lane.held):
            for arrival in waiting.values():
                arrival.release()
            waiting.clear()
        lane.inputs.clear()


_T = TypeVar("_T", torch.Tensor, "torch.Tensor | None")


def _own(result: _T, arrival: Arrival) -> _T:
    """`result`, copied if it lies in the receive buffer that is about to be given back."""
    if result is None or arrival.tensor is None or not result.numel():
        return result
    if result.untyped_storage().data_ptr() == arrival.tensor.untyped_storage().data_ptr():
        return result.clone()
    return result
