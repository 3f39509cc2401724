"""Rules for ready tasks and the choice among them, shared by simulator and executor.

A stage takes its micro-batches in ascending order in each direction. A task needs its tensors. A
stage stores at most its in-flight limit of forwards. Among several ready tasks a `Policy` decides
when a step is simulated, and the planned order when it is run. With one stage per device the result
is 1F1B, which alternates by itself; with several it is interleaving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_framework.core.planned_order import BACKWARD, FORWARD, Lane, PlannedOrder

__all__ = [
    "BACKWARD",
    "BACKWARD_FIRST",
    "FORWARD",
    "Admission",
    "DueDates",
    "Policy",
    "Readiness",
    "Task",
]


class Task(NamedTuple):
    """The forward or the backward of one micro-batch in one stage."""

    kind: str
    stage: int
    micro_batch: int

    @property
    def lane(self) -> Lane:
        return self.kind, self.stage


class DueDates(NamedTuple):
    """When the tasks of a stage are due: the forward of micro-batch k at
    `forward + k * each_forward`, its backward at `backward + k * each_backward`."""

    forward: float
    each_forward: float
    backward: float
    each_backward: float


@dataclass(frozen=True)
class Policy:
    """The choice among several ready tasks of one device: the task that is due first runs.

    `stages` has the due dates of each stage of the pipeline, in any unit. Without
    them backward goes before forward, then the oldest micro-batch comes first.
    """

    stages: tuple[DueDates, ...] = ()

    def key(self, task: Task) -> tuple[float, int, int]:
        """Sort key, smallest first; ties go to the older micro-batch, then the deeper stage."""
        kind, stage, k = task
        if not self.stages:
            due = 0.0 if kind == BACKWARD else 1.0
        elif kind == BACKWARD:
            due = self.stages[stage].backward + k * self.stages[stage].each_backward
        else:
            due = self.stages[stage].forward + k * self.stages[stage].each_forward
        return (due, k, -stage)


BACKWARD_FIRST = Policy()
"""Uses the least memory; with one stage per device it is 1F1B."""


class _Tasks:
    """The tasks of one kind of one stage: they run in ascending order."""

    __slots__ = ("arrived", "started")

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.started = 0


class Readiness:
    """The tasks of one device in one step.

    `in_flight_limits[k]` is how many forwards stage k of this device may store. An `order` decides
    among the tasks that are in it, the policy among the rest.
    """

    def __init__(
        self,
        in_flight_limits: Mapping[int, int],
        policy: Policy = BACKWARD_FIRST,
        order: PlannedOrder | None = None,
    ) -> None:
        self._limits = in_flight_limits
        self._policy = policy
        self._order = order
        self._forward = {k: _Tasks() for k in in_flight_limits}
        self._backward = {k: _Tasks() for k in in_flight_limits}
        self._in_flight = dict.fromkeys(in_flight_limits, 0)
        self._peak = dict.fromkeys(in_flight_limits, 0)

    def arrived(self, task: Task) -> None:
        """Note that everything that a task needs has come."""
        self._lane(task).arrived.add(task.micro_batch)

    def next(self) -> Task | None:
        """The task to run now, None when nothing may run."""
        ready = []
        for stage, lane in self._backward.items():
            if lane.started in lane.arrived:
                ready.append(Task(BACKWARD, stage, lane.started))
        for stage, lane in self._forward.items():
            if lane.started in lane.arrived and self._in_flight[stage] < self._limits[stage]:
                ready.append(Task(FORWARD, stage, lane.started))
        if len(ready) < 2:
            return ready[0] if ready else None
        if self._order is None:
            return min(ready, key=self._policy.key)
        order, key = self._order, self._policy.key
        return min(ready, key=lambda task: (order.place(task.lane), key(task)))

    def start(self, task: Task, *, stores: bool) -> None:
        """Note that a task begins; with `stores` it is a forward that is kept until `release`."""
        lane = self._lane(task)
        lane.arrived.remove(task.micro_batch)
        lane.started += 1
        if stores:
            count = self._in_flight[task.stage] = self._in_flight[task.stage] + 1
            self._peak[task.stage] = max(self._peak[task.stage], count)

    def release(self, stage: int) -> None:
        """Note that a stored forward is needed no more."""
        self._in_flight[stage] -= 1

    def is_full(self, stage: int) -> bool:
        """Whether a stage stores as many forwards as it may."""
        return self._in_flight[stage] >= self._limits[stage]

    def started(self, kind: str, stage: int) -> int:
        """The number of tasks of this kind that a stage has begun."""
        return (self._forward if kind == FORWARD else self._backward)[stage].started

    def peak_in_flight(self, stage: int) -> int:
        """The largest number of forwards that a stage has stored at once."""
        return self._peak[stage]

    def _lane(self, task: Task) -> _Tasks:
        return (self._forward if task.kind == FORWARD else self._backward)[task.stage]


class Admission:
    """The entry of micro-batches into the pipeline: at most `max_in_flight` are in it."""

    def __init__(self, micro_batches: int, max_in_flight: int) -> None:
        self._micro_batches = micro_batches
        self._max_in_flight = max_in_flight
        self._admitted = 0

    def next(self, finished: int) -> int | None:
        """The micro-batch that may enter now that `finished` have finished; None while none may."""
        full = self._admitted - finished >= self._max_in_flight
        return None if full or self._admitted >= self._micro_batches else self._admitted

    def admit(self) -> None:
        """Note that the next micro-batch has entered."""
        self._admitted += 1
