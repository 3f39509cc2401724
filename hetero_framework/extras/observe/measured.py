"""Mean times of a trace's steps for each stage, process and boundary, in seconds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetero_framework.core.spans import (
    BACKWARD,
    COMMIT,
    COMPUTE,
    FORWARD,
    FORWARD_BACKWARD,
    RECEIVE,
    SEND,
)
from hetero_framework.extras.observe.bound import length, recorded_bound, union
from hetero_framework.extras.observe.timeline import Trace, TraceEvent, Wait, waits


@dataclass(frozen=True)
class StageTimes:
    """One stage: its place, and means of one micro-batch's tasks. The last stage does forward and
    backward as one; their shares are taken from the other stages, and change nothing."""

    index: int
    process: int
    start: int
    end: int
    forward_s: float
    backward_s: float
    slowest: float
    """The slowest task over the median one."""

    @property
    def per_layer(self) -> tuple[float, float]:
        """Forward and backward seconds of a layer, as if all were alike."""
        layers = self.end - self.start
        return self.forward_s / layers, self.backward_s / layers

    def scaled(self, factor: float) -> StageTimes:
        return replace(self, forward_s=self.forward_s * factor, backward_s=self.backward_s * factor)


@dataclass(frozen=True)
class ProcessTimes:
    """Where a process's share of a step went: means over the steps.

    compute + activations + gradients + start + done = the pipeline's seconds. `wire_s` is the
    part of the waits in which the awaited tensor was finished already and on its way. Sending and
    receiving run beside these; `*_hidden` is their share during which this process computed.
    """

    name: str
    stages: tuple[int, ...]
    compute_s: float
    activations_s: float
    gradients_s: float
    start_s: float
    done_s: float
    wire_s: float
    send_s: float
    send_hidden: float
    receive_s: float
    receive_hidden: float
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class Boundary:
    """The boundary between a stage and the next one, as measured."""

    after: int
    way: str
    """"same process", "direct" or "relay"."""
    forward_s: float
    backward_s: float
    latency_s: float
    forward_bytes: int
    backward_bytes: int
    dtype: str
    codec: str

    def scaled(self, factor: float, more_latency_s: float = 0.0) -> Boundary:
        """The same with tensors that occupy the wire `factor` times as long."""
        forward_s, backward_s = self.forward_s * factor, self.backward_s * factor
        latency_s = self.latency_s + more_latency_s
        return replace(self, forward_s=forward_s, backward_s=backward_s, latency_s=latency_s)


@dataclass(frozen=True)
class MeasuredStep:
    """One step's events: from its first task to its last (`computed`) and to its end."""

    step: int
    events: list[TraceEvent]
    waits: list[Wait]
    began: float
    computed: float
    ended: float
    bound_s: float

    @classmethod
    def of(cls, trace: Trace, step: int) -> MeasuredStep:
        stages, events = trace.stages, trace.of_step(step)
        tasks = [event for event in events if event.kind in COMPUTE]
        began, computed = min(task.began for task in tasks), max(task.ended for task in tasks)
        ended = max([computed, *(event.ended for event in events if event.kind == COMMIT)])
        bound_s = recorded_bound(stages, events)
        return cls(step, events, waits(stages, events), began, computed, ended, bound_s)


def stage_times(trace: Trace, steps: Sequence[MeasuredStep]) -> tuple[StageTimes, ...]:
    seconds: dict[tuple[int, str], list[float]] = {}
    for step in steps:
        for event in step.events:
            if event.kind in COMPUTE:
                seconds.setdefault((event.stage, event.kind), []).append(event.seconds)
    mean = {key: statistics.fmean(values) for key, values in seconds.items()}
    forward = sum(value for (_, kind), value in mean.items() if kind == FORWARD)
    backward = sum(value for (_, kind), value in mean.items() if kind == BACKWARD)
    share = forward / (forward + backward) if forward and backward else 1 / 3
    stages = []
    for index, info in enumerate(trace.stages):
        both = mean.get((index, FORWARD_BACKWARD), 0.0)
        uneven = [
            max(values) / statistics.median(values)
            for (stage, _), values in seconds.items()
            if stage == index and statistics.median(values) > 0
        ]
        times = (
            mean.get((index, FORWARD), 0.0) + share * both,
            mean.get((index, BACKWARD), 0.0) + (1 - share) * both,
            max(uneven, default=1.0),
        )
        stages.append(StageTimes(index, info.process, info.start, info.end, *times))
    return tuple(stages)


def process_times(trace: Trace, steps: Sequence[MeasuredStep], process: int) -> ProcessTimes:
    def mean(value: Callable[[MeasuredStep], float]) -> float:
        return statistics.fmean(value(step) for step in steps)

    def waited(step: MeasuredStep, reason: str) -> float:
        return sum(w.seconds for w in step.waits if w.process == process and w.reason == reason)

    def events(step: MeasuredStep, *kinds: str) -> list[TraceEvent]:
        return [e for e in step.events if e.process == process and e.kind in kinds]

    def busy(step: MeasuredStep, *kinds: str) -> float:
        return length(union((e.began, e.ended) for e in events(step, *kinds)))

    def done(step: MeasuredStep) -> float:
        return step.computed - max((e.ended for e in events(step, *COMPUTE)), default=step.began)

    def hidden(kind: str) -> float:
        moving = mean(lambda step: busy(step, kind))
        working = mean(lambda step: busy(step, *COMPUTE))
        both = moving + working - mean(lambda step: busy(step, kind, *COMPUTE))
        return both / moving if moving else 1.0

    return ProcessTimes(
        name=trace.processes[process].name,
        stages=tuple(k for k, stage in enumerate(trace.stages) if stage.process == process),
        compute_s=mean(lambda step: sum(e.seconds for e in events(step, *COMPUTE))),
        activations_s=mean(lambda step: waited(step, "activations")),
        gradients_s=mean(lambda step: waited(step, "gradients")),
        start_s=mean(lambda step: waited(step, "start")),
        done_s=mean(done),
        wire_s=mean(lambda step: sum(w.wire_s for w in step.waits if w.process == process)),
        send_s=mean(lambda step: busy(step, SEND)),
        send_hidden=hidden(SEND),
        receive_s=mean(lambda step: busy(step, RECEIVE)),
        receive_hidden=hidden(RECEIVE),
        sent_bytes=mean(lambda step: sum(e.nbytes for e in events(step, SEND))),
        received_bytes=mean(lambda step: sum(e.nbytes for e in events(step, RECEIVE))),
    )


class NicSpeeds:
    """How fast each process's NICs are, by the frames that passed: all bytes of a NIC over the time
    in which any were moving, since the tensors of several links slow each other down."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        passed: dict[tuple[int, str], list[TraceEvent]] = {}
        for event in itertools.chain.from_iterable(step.events for step in steps):
            if event.kind == RECEIVE and event.what in ("FORWARD", "BACKWARD") and event.nbytes:
                passed.setdefault((event.process, "in"), []).append(event)
                if event.peer is not None:
                    passed.setdefault((event.peer, "out"), []).append(event)
        self._shared: dict[tuple[int, str], float] = {}
        self._frame: dict[tuple[int, str], float] = {}
        for nic, events in passed.items():
            moving_s = length(union((e.began, e.ended) for e in events))
            self._shared[nic] = moving_s / sum(e.nbytes for e in events)
            self._frame[nic] = sorted(e.seconds / e.nbytes for e in events)[(len(events) - 1) // 4]

    def seconds(self, nbytes: float, path: Sequence[int]) -> float:
        """Seconds for which `nbytes` occupy the path from process to process."""
        return nbytes * max(self._shared.get(nic, 0.0) for nic in _nics_of(path))

    def frame_s(self, nbytes: float, path: Sequence[int]) -> float:
        """Seconds of one frame of `nbytes`, by the quicker ones that passed."""
        return nbytes * max(self._frame.get(nic, 0.0) for nic in _nics_of(path))


def _nics_of(path: Sequence[int]) -> list[tuple[int, str]]:
    return [nic for a, b in itertools.pairwise(path) for nic in ((a, "out"), (b, "in"))]


def boundary_of(
    trace: Trace, steps: Sequence[MeasuredStep], nics: NicSpeeds, after: int
) -> Boundary:
    """The measurements between stage `after` and the next one."""
    one, other = trace.stages[after].process, trace.stages[after + 1].process
    if one == other:
        return Boundary(after, "same process", 0.0, 0.0, 0.0, 0, 0, "", "")
    forward = _Frames(steps, "FORWARD", source=after, target=after + 1, receiver=other)
    backward = _Frames(steps, "BACKWARD", source=after + 1, target=after, receiver=one)
    arrived = forward.arrived + backward.arrived
    relayed = any(event.peer not in (one, other) for event in arrived)
    path = [one, 0, other] if relayed else [one, other]
    forward_s = nics.seconds(forward.nbytes, path)
    backward_s = nics.seconds(backward.nbytes, path[::-1])
    latencies = [
        max(0.0, frames.delay_s - seconds)
        for frames, seconds in ((forward, forward_s), (backward, backward_s))
        if frames.arrived
    ]
    way, latency_s = "relay" if relayed else "direct", statistics.fmean(latencies or [0.0])
    nbytes = round(forward.nbytes), round(backward.nbytes)
    dtype = next((event.dtype for event in arrived if event.dtype), "")
    codec = next((event.codec for event in arrived if event.codec), "")
    return Boundary(after, way, forward_s, backward_s, latency_s, *nbytes, dtype, codec)


class _Frames:
    """The frames of one direction over a boundary: their mean size, and the shortest time from the
    end of a task to its tensor's arrival at the neighbour in each step; others wait for frames in
    front of them."""

    def __init__(
        self, steps: Sequence[MeasuredStep], what: str, *, source: int, target: int, receiver: int
    ) -> None:
        self.arrived: list[TraceEvent] = []
        delays = []
        for step in steps:
            tasks = [e for e in step.events if e.kind in COMPUTE and e.stage == source]
            tasks = [task for task in tasks if (task.kind == FORWARD) == (what == "FORWARD")]
            made = {task.micro_batch: task.ended for task in tasks}
            wanted = (RECEIVE, what, target, receiver)
            arrived = [e for e in step.events if (e.kind, e.what, e.stage, e.process) == wanted]
            self.arrived += arrived
            waited = [e.ended - made[e.micro_batch] for e in arrived if e.micro_batch in made]
            delays += [min(waited)] if waited else []
        self.delay_s = max(0.0, statistics.median(delays)) if delays else 0.0
        self.nbytes = statistics.fmean([e.nbytes for e in self.arrived] or [0])
