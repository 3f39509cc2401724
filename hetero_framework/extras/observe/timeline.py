"""The timeline of a run: spans of all processes as events on one clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from hetero_framework.config import layers_text, process_name
from hetero_framework.core.spans import BACKWARD, COMPUTE, FORWARD, FORWARD_BACKWARD, RECEIVE, SEND

WorkerId = int | str
TaskKey = tuple[str, int, int]
"""Kind, stage, micro-batch."""
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[Integer, Field(ge=0)]
Seconds = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True)
class TraceEvent:
    """A span on the coordinator's clock. `process` is an index of `Trace.processes`. `peer` is the
    other process of a transfer (None otherwise). `nbytes` is 0 if unknown."""

    kind: str
    process: Number
    stage: Number
    micro_batch: Integer
    step: Integer
    began: Seconds
    ended: Seconds
    what: str = ""
    peer: Number | None = None
    nbytes: Number = 0
    dtype: str = ""
    codec: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def key(self) -> TaskKey:
        return (self.kind, self.stage, self.micro_batch)


@dataclass(frozen=True)
class Process:
    """A process of the run: its id in the plan, and its device."""

    owner: WorkerId
    device: str = ""

    @property
    def name(self) -> str:
        return process_name(self.owner)


@dataclass(frozen=True)
class StageInfo:
    """A stage: the process that runs it, its layers [start, end), and how many of them visit the
    device from host memory."""

    process: Number
    start: int
    end: int
    offload: int = 0

    @property
    def layers(self) -> str:
        return layers_text(self.start, self.end)


@dataclass(frozen=True)
class Trace:
    """The content of timeline.json. Times are seconds after the first event. `settings` are the
    run's settings that affect speed. `dropped` counts spans that were not kept."""

    processes: tuple[Process, ...]
    stages: tuple[StageInfo, ...]
    events: tuple[TraceEvent, ...]
    settings: Mapping[str, Any]
    dropped: int = 0

    @property
    def steps(self) -> list[int]:
        """The recorded training steps, counted from 0."""
        return sorted({event.step for event in self.events if event.kind in COMPUTE})

    def of_step(self, step: int) -> list[TraceEvent]:
        return self._by_step.get(step, [])

    @cached_property
    def _by_step(self) -> dict[int, list[TraceEvent]]:
        by_step: dict[int, list[TraceEvent]] = {}
        for event in self.events:
            by_step.setdefault(event.step, []).append(event)
        return by_step


Tasks = Mapping[TaskKey, TraceEvent]


@dataclass(frozen=True)
class Wait:
    """A pause of a process between two of its tasks.

    `reason` is what the next task waited for: "activations", "gradients", or "start" (the first
    stage waits for no other). `wire_s` is the part after the tensor was ready at its sender: time
    on the wire and in queues.
    """

    process: int
    began: float
    ended: float
    reason: str
    wire_s: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


_Frame = tuple[int, str, int, int]  # step, type, stage, micro-batch


def transfers(events: Iterable[TraceEvent]) -> Iterator[tuple[TraceEvent, TraceEvent]]:
    """(send, receive) of each frame that both of its ends recorded."""
    events = list(events)
    sends = {(_frame(e), e.process, e.peer): e for e in events if e.kind == SEND}
    for event in events:
        where = (_frame(event), event.peer, event.process)
        if event.kind == RECEIVE and event.peer is not None and where in sends:
            yield sends[where], event


def _frame(event: TraceEvent) -> _Frame:
    return (event.step, event.what, event.stage, event.micro_batch)


def aligned(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """The events of one step, each worker's clock moved just enough that causes precede effects.

    A link measures its peer's clock to half a round trip at best. But no frame arrives before its
    sending begins, and no task begins before the task whose tensor it takes has ended. Each such
    pair bounds, from one side, how far one process may be moved against another. Chains of pairs
    bound it further. Each process in turn is moved into its bounds against the processes before
    it, or to the middle of bounds that exclude each other. Clocks drift, so each step differs.
    """
    shift = _shifts(events)
    return [
        replace(e, began=e.began + shift[e.process], ended=e.ended + shift[e.process])
        for e in events
    ]


def _shifts(events: Sequence[TraceEvent]) -> dict[int, float]:
    """Seconds by which each process's events are moved; 0 for the coordinator's."""
    processes = sorted({event.process for event in events} | {0})
    least = dict.fromkeys(itertools.product(processes, processes), -math.inf)
    for cause, at, effect, then in _causes(events):
        least[cause, effect] = max(least[cause, effect], at - then)
    for middle, one, other in itertools.product(processes, processes, processes):
        if one != other:
            least[one, other] = max(least[one, other], least[one, middle] + least[middle, other])
    shift = {0: 0.0}
    for process in processes[1:]:
        low = max(shift[before] + least[before, process] for before in shift)
        high = min(shift[before] - least[process, before] for before in shift)
        shift[process] = (low + high) / 2 if low > high else min(max(0.0, low), high)
    return shift


def _causes(events: Sequence[TraceEvent]) -> Iterator[tuple[int, float, int, float]]:
    """(process of a cause, its time, process of the effect, its time) for all causes in a step."""
    for send, receive in transfers(events):
        yield send.process, send.began, receive.process, receive.ended
    tasks = tasks_of(events)
    for task in tasks.values():
        before = awaited(task, tasks)
        if before is not None and before.process != task.process:
            yield before.process, before.ended, task.process, task.began


def tasks_of(events: Iterable[TraceEvent]) -> Tasks:
    """The stages' computations, by (kind, stage, micro-batch)."""
    return {event.key: event for event in events if event.kind in COMPUTE}


def awaited(task: TraceEvent, tasks: Tasks) -> TraceEvent | None:
    """The task of a neighbouring stage whose tensor `task` takes; None if there is none."""
    k, behind = task.micro_batch, task.stage + 1
    if task.kind == BACKWARD:
        return tasks.get((FORWARD_BACKWARD, behind, k)) or tasks.get((BACKWARD, behind, k))
    return tasks.get((FORWARD, task.stage - 1, k))


def with_bytes(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """The events, with a frame's size and type at both of its ends if one end recorded them."""
    known = {_frame(e): e for e in events if e.nbytes}
    return [
        replace(e, nbytes=known[_frame(e)].nbytes, dtype=known[_frame(e)].dtype)
        if e.kind in (SEND, RECEIVE) and not e.nbytes and _frame(e) in known
        else e
        for e in events
    ]


def waits(stages: Sequence[StageInfo], events: Iterable[TraceEvent]) -> list[Wait]:
    """The pauses between the tasks of each process in one step. A process's first pause begins
    with the step's first task anywhere."""
    tasks = tasks_of(events)
    in_order = sorted(tasks.values(), key=lambda task: task.began)
    free = {stage.process: in_order[0].began for stage in stages} if in_order else {}
    pauses = []
    for task in in_order:
        if task.began > free[task.process]:
            pauses.append(_wait(stages, task, free[task.process], tasks))
        free[task.process] = max(free[task.process], task.ended)
    return pauses


def _wait(stages: Sequence[StageInfo], task: TraceEvent, free: float, tasks: Tasks) -> Wait:
    reason = "start" if task.stage == 0 else "activations"
    reason = "gradients" if task.kind == BACKWARD else reason
    cause, wire = awaited(task, tasks), 0.0
    if cause is not None and stages[cause.stage].process != task.process:
        wire = max(0.0, task.began - max(free, cause.ended))
    return Wait(task.process, free, task.began, reason, wire)
