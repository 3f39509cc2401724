"""The account of recorded steps: mean seconds of their stages, processes and boundaries."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from hetero_framework.core.spans import (
    AWAITED,
    BACKWARD,
    COMMIT,
    COMPUTE,
    FORWARD,
    FORWARD_BACKWARD,
    RECEIVE,
    WEIGHTS,
)
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.extras.observe import timeline
from hetero_framework.extras.observe.timeline import (
    StageInfo,
    TaskKey,
    Tasks,
    Trace,
    TraceEvent,
    Wait,
    waits,
)

Interval = tuple[float, float]


def recorded_bound(stages: Sequence[StageInfo], events: Sequence[TraceEvent]) -> float:
    """Least seconds of a step with just these tasks and transfers, whatever their order.

    The largest of these: the longest chain of tasks that wait for each other; and, for each process
    and each direction of its links, its busy time with the shortest chain before and the shortest
    after. Between two processes a chain has the delay of the quickest tensor that crossed there in
    this step: a mean over steps would bound no step. Chains may seem longer than the step where
    clocks contradict each other, so the result is at most the seconds that the step took.
    """
    tasks = timeline.tasks_of(events)
    if not tasks:
        return 0.0
    took = max(task.ended for task in tasks.values()) - min(t.began for t in tasks.values())
    takers = {event: _taken_by(event, len(stages)) for event in events if event.kind == RECEIVE}
    before, after = _chains(tasks, {(takers[e], e.process): e.ended for e in takers})
    groups: dict[object, list[tuple[Interval, float, float]]] = {}
    for key, task in tasks.items():
        use = ((task.began, task.ended), before[key], after[key])
        groups.setdefault(task.process, []).append(use)
    for event, key in takers.items():
        if (taker := tasks.get(key)) and (maker := timeline.awaited(taker, tasks)):
            head, tail = before[maker.key] + maker.seconds, after[key] + taker.seconds
            for nic in ((event.process, "in"), (event.peer, "out")):
                groups.setdefault(nic, []).append(((event.began, event.ended), head, tail))
    bounds = [
        min(head for _, head, _ in group)
        + covered(i for i, *_ in group)
        + min(t for *_, t in group)
        for group in groups.values()
    ]
    return min(max(*(before[key] + task.seconds for key, task in tasks.items()), *bounds), took)


def _taken_by(event: TraceEvent, num_stages: int) -> TaskKey:
    """The task that waits for a frame."""
    forward = FORWARD_BACKWARD if event.stage == num_stages - 1 else FORWARD
    kind = BACKWARD if event.what == "BACKWARD" else forward
    return (kind, event.stage, event.micro_batch)


def _chains(
    tasks: Tasks, arrivals: Mapping[tuple[TaskKey, int], float]
) -> tuple[dict[TaskKey, float], dict[TaskKey, float]]:
    """Seconds of the longest chain of tasks before and after each task. `arrivals` has the time
    at which a task's tensor came to a process."""
    links: list[tuple[TaskKey, TaskKey, tuple[int, str]]] = []  # cause, effect, edge
    delays: dict[tuple[int, str], float] = {}
    # Forwards towards the last stage, then backwards towards the first.
    for key in sorted(tasks, key=lambda k: (k[0] == BACKWARD, -k[1] if k[0] == BACKWARD else k[1])):
        (kind, stage, k), task = key, tasks[key]
        if (cause := timeline.awaited(task, tasks)) is not None:
            edge = (stage, kind)
            arrived = arrivals.get((key, task.process), cause.ended)
            delay = max(0.0, min(arrived, task.began) - cause.ended)
            delays[edge] = min(delays.get(edge, delay), delay)
            links.append((cause.key, key, edge))
        if kind == BACKWARD and (FORWARD, stage, k) in tasks:
            links.append(((FORWARD, stage, k), key, (stage, "itself")))
    before, after = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 0.0)
    for made, key, edge in links:
        ready = before[made] + tasks[made].seconds + delays.get(edge, 0.0)
        before[key] = max(before[key], ready)
    for made, key, edge in reversed(links):
        after[made] = max(after[made], delays.get(edge, 0.0) + tasks[key].seconds + after[key])
    return before, after


def covered_by_both(ones: Collection[Interval], others: Collection[Interval]) -> float:
    return covered(ones) + covered(others) - covered([*ones, *others])


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of the intervals runs."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


AS_GOOD = 0.01
WORTH_IT = 0.05
"""Least gain of a change that is called a help: measured steps differ by as much."""


@dataclass(frozen=True)
class StageTimes:
    """One stage: its place, and mean seconds of its tasks for a micro-batch. The last stage does
    forward and backward as one task, split here as in the other stages; no result depends on the
    split. A task's time includes the device's waits for weights from host memory."""

    index: int
    process: int
    start: int
    end: int
    forward_s: float
    backward_s: float
    slowest: float
    """The slowest task's time over the median task's."""
    offload: int = 0
    """The number of its layers whose weights come from host memory."""
    streaming_s: float = 0.0
    hidden: float = 1.0
    """The share of `streaming_s` in which the process computed and did not wait for weights."""
    awaited: float = 0.0
    """The share of the tasks' time in which the device waited for weights."""
    too_many: int = 0
    """The number of streamed layers to give up so that no task waits for weights."""


@dataclass(frozen=True)
class ProcessTimes:
    """How a process spent the time of a step: mean seconds over the steps.

    compute + activations + gradients + start + done = the pipeline's seconds. `wire_s` is the
    part of the waits in which the awaited tensor was finished already and on its way.
    """

    name: str
    stages: tuple[int, ...]
    compute_s: float
    activations_s: float
    gradients_s: float
    start_s: float
    done_s: float
    wire_s: float


@dataclass(frozen=True)
class Boundary:
    """The boundary between a stage and the next one, as measured."""

    after: int
    way: str
    """"same process", "direct" or "relay"."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    dtype: str = ""
    codec: str = ""


_Timed = TypeVar("_Timed", StageTimes, Boundary)


@dataclass(frozen=True)
class Change:
    """One change, the seconds of a step with it, and the gain in samples per second."""

    kind: str
    text: str
    step_s: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Means over `steps` (counted from 1) of `micro_batches` each, in seconds, and the changes that
    would help. `simulated_s` is the simulated time of the pipeline. `between_s` is None if no two
    recorded steps follow each other."""

    micro_batches: int
    max_in_flight: int | None
    step_s: float
    pipeline_s: float
    update_s: float
    between_s: float | None
    simulated_s: float = 0.0
    steps: tuple[int, ...]
    bound_s: float
    stages: tuple[StageTimes, ...]
    processes: tuple[ProcessTimes, ...]
    boundaries: tuple[Boundary, ...]
    changes: tuple[Change, ...] = ()
    dropped: int

    @property
    def ratio(self) -> float:
        """The pipeline's measured seconds over its bound."""
        return self.pipeline_s / self.bound_s if self.bound_s else 1.0

    @property
    def best(self) -> Change | None:
        """The change that would help most; None when none would help much."""
        return self.best_of({change.kind for change in self.changes})

    def best_of(self, kinds: Collection[str]) -> Change | None:
        """As `best`, among some kinds: of the changes within 1 % of the best, the first one."""
        possible = [change for change in self.changes if change.kind in kinds]
        most = max((change.gain for change in possible), default=0.0)
        if most < WORTH_IT:
            return None
        return next(change for change in possible if change.gain >= most - AS_GOOD)

    @property
    def profile(self) -> Profile:
        return Profile.of(
            [stage.forward_s for stage in self.stages],
            [stage.backward_s for stage in self.stages],
            devices=[stage.process for stage in self.stages],
            edges=[
                Edge(b.forward_s, b.backward_s, b.latency_s, 0 if b.way == "relay" else None)
                for b in self.boundaries
            ],
        )

    def simulate(self) -> float:
        """Simulated seconds of the pipeline, with the schedule that a coordinator would choose."""
        tuned = tune(self.profile, self.micro_batches, max_in_flight=self.max_in_flight)
        return tuned.forecast.seconds

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON types."""
        best = self.best
        return {**asdict(self), "ratio": self.ratio, "best": None if best is None else asdict(best)}


def scaled(one: _Timed, factor: float) -> _Timed:
    """A stage or boundary that takes `factor` times as long for each tensor."""
    return replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor)


@dataclass(frozen=True)
class MeasuredStep:
    """One step: its events and waits, and when it began, ended its tasks (`computed`) and ended."""

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
    for event in itertools.chain.from_iterable(step.events for step in steps):
        if event.kind in COMPUTE:
            seconds.setdefault((event.stage, event.kind), []).append(event.seconds)
    mean = {key: statistics.fmean(values) for key, values in seconds.items()}
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    forward, backward = (
        sum(value for (_, of), value in mean.items() if of == kind) for kind in (FORWARD, BACKWARD)
    )
    share = forward / (forward + backward) if forward and backward else 1 / 3
    stages = []
    for k, info in enumerate(trace.stages):
        both = mean.get((k, FORWARD_BACKWARD), 0.0)
        forward_s = mean.get((k, FORWARD), 0.0) + share * both
        backward_s = mean.get((k, BACKWARD), 0.0) + (1 - share) * both
        uneven = [
            max(seconds[at]) / medians[at] for at in seconds if at[0] == k and medians[at] > 0
        ]
        times = (forward_s, backward_s, max(uneven, default=1.0))
        there = (k, info.process, info.start, info.end, *times)
        stages.append(StageTimes(*there, info.offload, *_streaming(trace, steps, k)))
    return tuple(stages)


def _streaming(
    trace: Trace, steps: Sequence[MeasuredStep], stage: int
) -> tuple[float, float, float, int]:
    """`streaming_s` and the later fields of StageTimes."""
    count, hidden_s = Counter[str](), 0.0
    total, waited = defaultdict[str, float](float), defaultdict[str, float](float)
    for step in steps:
        spans, computed = defaultdict[str, list[Interval]](list), []
        for event in step.events:
            if event.stage == stage:
                spans[event.kind].append((event.began, event.ended))
            if event.process == trace.stages[stage].process and event.kind in COMPUTE:
                computed.append((event.began, event.ended))
        for kind in (*COMPUTE, WEIGHTS):
            count[kind] += len(spans[kind])
            total[kind] += covered(spans[kind])
            waited[kind] += covered_by_both(spans[AWAITED], spans[kind])
        hidden_s += covered_by_both(spans[WEIGHTS], computed)
    if not (moving_s := total.pop(WEIGHTS)):
        return 0.0, 1.0, 0.0, 0
    hidden_s -= waited.pop(WEIGHTS)
    # Each layer fewer saves a copy in each task, or in each half of a task that does both.
    longest_s = max((waited[kind] / count[kind] for kind in waited if count[kind]), default=0.0)
    too_many = math.ceil(longest_s * count[WEIGHTS] / moving_s)
    awaited = sum(waited.values()) / (sum(total.values()) or 1.0)
    return moving_s / len(steps), hidden_s / moving_s, awaited, too_many


def process_times(trace: Trace, steps: Sequence[MeasuredStep], process: int) -> ProcessTimes:
    each = [_times_in(step, process) for step in steps]
    mean = {name: statistics.fmean(times[name] for times in each) for name in each[0]}
    stages = tuple(k for k, stage in enumerate(trace.stages) if stage.process == process)
    return ProcessTimes(trace.processes[process].name, stages, **mean)


def _times_in(step: MeasuredStep, process: int) -> dict[str, float]:
    """The fields of ProcessTimes for one step."""
    pauses = [wait for wait in step.waits if wait.process == process]
    tasks = [e for e in step.events if e.process == process and e.kind in COMPUTE]
    return {
        "compute_s": sum(task.seconds for task in tasks),
        **{
            f"{reason}_s": sum(wait.seconds for wait in pauses if wait.reason == reason)
            for reason in ("activations", "gradients", "start")
        },
        "done_s": step.computed - max((task.ended for task in tasks), default=step.began),
        "wire_s": sum(wait.wire_s for wait in pauses),
    }


class NicSpeeds:
    """The speeds of processes' NICs, by the frames that passed: all bytes of a NIC over the time in
    which any moved, since the tensors of several links slow each other down."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        passed: dict[tuple[int | None, str], list[TraceEvent]] = {}
        for event in itertools.chain.from_iterable(step.events for step in steps):
            if event.kind == RECEIVE and event.what in ("FORWARD", "BACKWARD") and event.nbytes:
                for nic in ((event.process, "in"), (event.peer, "out")):
                    passed.setdefault(nic, []).append(event)
        self._shared: dict[tuple[int | None, str], float] = {}
        self._frame: dict[tuple[int | None, str], float] = {}
        for nic, events in passed.items():
            moving_s = covered((e.began, e.ended) for e in events)
            self._shared[nic] = moving_s / sum(e.nbytes for e in events)
            self._frame[nic] = sorted(e.seconds / e.nbytes for e in events)[(len(events) - 1) // 4]

    def seconds(self, nbytes: float, path: Sequence[int], *, alone: bool = False) -> float:
        """Seconds for which `nbytes` occupy the path from process to process. With `alone`, at the
        speed of a single frame, judged by the quicker frames that passed."""
        known = self._frame if alone else self._shared
        nics = [nic for a, b in itertools.pairwise(path) for nic in ((a, "out"), (b, "in"))]
        return nbytes * max(known.get(nic, 0.0) for nic in nics)


def boundary_of(
    trace: Trace, steps: Sequence[MeasuredStep], nics: NicSpeeds, after: int
) -> Boundary:
    """The boundary between stage `after` and the next one, as measured."""
    one, other = trace.stages[after].process, trace.stages[after + 1].process
    if one == other:
        return Boundary(after, "same process")
    ways = (
        _frames(steps, "FORWARD", after, after + 1, other),
        _frames(steps, "BACKWARD", after + 1, after, one),
    )
    arrived = [event for frames, _ in ways for event in frames]
    relayed = any(event.peer not in (one, other) for event in arrived)
    path = [one, 0, other] if relayed else [one, other]
    there, back = (statistics.fmean([e.nbytes for e in frames] or [0]) for frames, _ in ways)
    times = nics.seconds(there, path), nics.seconds(back, path[::-1])
    late = [
        max(0.0, delay_s - wire_s)
        for (frames, delay_s), wire_s in zip(ways, times, strict=True)
        if frames
    ]
    latency_s, way = statistics.fmean(late or [0.0]), "relay" if relayed else "direct"
    dtype = next((event.dtype for event in arrived if event.dtype), "")
    codec = next((event.codec for event in arrived if event.codec), "")
    return Boundary(after, way, *times, latency_s, round(there), round(back), dtype, codec)


def _frames(
    steps: Sequence[MeasuredStep], what: str, source: int, target: int, receiver: int
) -> tuple[list[TraceEvent], float]:
    """The frames of one direction over a boundary, and their delay. In a step that is the shortest
    time from a task's end to its tensor's arrival at the neighbour, since other tensors wait for
    frames in front of them. The delay is the median over the steps."""
    frames, delays = [], []
    for step in steps:
        tasks = [e for e in step.events if e.kind in COMPUTE and e.stage == source]
        made = {e.micro_batch: e.ended for e in tasks if (e.kind == FORWARD) == (what == "FORWARD")}
        wanted = (RECEIVE, what, target, receiver)
        arrived = [e for e in step.events if (e.kind, e.what, e.stage, e.process) == wanted]
        frames += arrived
        waited = [e.ended - made[e.micro_batch] for e in arrived if e.micro_batch in made]
        delays += [min(waited)] if waited else []
    return frames, max(0.0, statistics.median(delays)) if delays else 0.0
