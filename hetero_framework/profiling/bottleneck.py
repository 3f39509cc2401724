"""Where the time of a run's steps went, and which one change would help most.

Everything is computed from timeline.json: the times of stages and boundaries as they were
measured give a `simulator.Profile`; simulating it gives what the pipeline should have taken, and
simulating it with one thing changed gives what that change would bring. A prediction is scaled by
what was measured: `measured x simulated with the change / simulated as it is`.

Units: seconds. F and B are the forward and backward time of a stage for one micro-batch.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetero_framework.config import layers_text
from hetero_framework.core.trace import (
    ALL_STEPS,
    BACKWARD,
    COLLECT,
    COMMIT,
    COMPUTE,
    FORWARD,
    FORWARD_BACKWARD,
    RECEIVE,
    SEND,
)
from hetero_framework.planner.simulator import Edge, Profile, simulate, step_bound
from hetero_framework.planner.tuning import tune
from hetero_framework.profiling.timeline import Event, Trace, Wait, waits
from hetero_framework.visualizer.text import bytes_text, table

WORTH_IT = 0.05
"""A change that brings less is not called a help: measured steps differ by as much."""
SAME_RESULT = frozenset({"direct", "window", "cut", "interleave", "smaller"})
"""Kinds of changes after which a run learns the same: to the last bit, or but for rounding."""
_AS_GOOD = 0.01
_AS_SIMULATED = 1.02
_UNEXPLAINED = 1.15
_UNEVEN = 2.0
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_INT8_BYTES = 1 + 4 / 64
"""Bytes of an element as int8 in blocks of 64 with a float32 scale each."""
_CODING_S = 2.5e-9
"""Seconds per element to encode and decode on one CPU thread; a GPU needs less."""


# ------------------------------------------------------------------------------------- the nouns


@dataclass(frozen=True)
class StageTimes:
    """One stage: its place, and means over micro-batches and steps. The last stage does F and B
    as one task; how they share its time is taken from the other stages, and changes nothing."""

    index: int
    process: int
    start: int
    end: int
    forward_s: float
    backward_s: float
    slowest: float
    """The slowest task over the median one."""


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


@dataclass(frozen=True)
class Change:
    """One change, what a step would take with it, and the gain in samples per second."""

    kind: str
    text: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Diagnosis:
    """Means over `steps` (counted from 1), which had `micro_batches` each."""

    steps: tuple[int, ...]
    micro_batches: int
    step_s: float
    pipeline_s: float
    update_s: float
    between_s: float | None
    bound_s: float
    simulated_s: float
    stages: tuple[StageTimes, ...]
    processes: tuple[ProcessTimes, ...]
    boundaries: tuple[Boundary, ...]
    changes: tuple[Change, ...]
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
        """The same among some kinds of changes. Of those within 1 % of the best, the one that
        asks least."""
        possible = [change for change in self.changes if change.kind in kinds]
        most = max((change.gain for change in possible), default=0.0)
        if most < WORTH_IT:
            return None
        return next(change for change in possible if change.gain >= most - _AS_GOOD)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, for programs."""
        best = self.best
        return {
            **asdict(self),
            "ratio": self.ratio,
            "best": None if best is None else asdict(best),
        }


# ---------------------------------------------------------------------------------- the analysis


def diagnose(trace: Trace) -> Diagnosis:
    """Analyse the steps of a trace that have its usual number of micro-batches."""
    counts = {
        step: len({e.micro_batch for e in trace.of_step(step) if e.kind in COMPUTE})
        for step in trace.steps
    }
    if trace.settings.get("timeline_steps") == ALL_STEPS and len(counts) > 1:
        del counts[trace.steps[0]]  # a run's first step is not typical
    m = Counter(counts.values()).most_common(1)[0][0]
    steps = [step for step, count in counts.items() if count == m]
    spans = [_Step.of(trace, step) for step in steps]
    between = [
        max(0.0, after.began - before.ended)
        for before, after in itertools.pairwise(spans)
        if after.step == before.step + 1
    ]
    stages = _stage_times(trace, spans)
    nics = _Nics(spans)
    boundaries = tuple(_boundary(trace, spans, nics, k) for k in range(len(trace.stages) - 1))
    pipeline_s = statistics.fmean(span.computed - span.began for span in spans)
    plan = _Plan(stages, boundaries)
    max_in_flight = trace.settings.get("max_in_flight")
    simulated_s = _simulated_s(plan.profile, m, max_in_flight)
    if simulated_s > _AS_SIMULATED * pipeline_s:
        plan, simulated_s = _overlapping(plan, m, max_in_flight, pipeline_s)
    found = Diagnosis(
        steps=tuple(step + 1 for step in steps),
        micro_batches=m,
        step_s=statistics.fmean(s.ended - s.began for s in spans),
        pipeline_s=pipeline_s,
        update_s=statistics.fmean(s.ended - s.computed for s in spans),
        between_s=statistics.fmean(between) if between else None,
        bound_s=step_bound(plan.profile, m),
        simulated_s=simulated_s,
        stages=stages,
        processes=tuple(_process_times(trace, spans, n) for n in range(len(trace.processes))),
        boundaries=boundaries,
        changes=(),
        dropped=trace.dropped,
    )
    return replace(found, changes=tuple(_changes(trace, found, plan, nics, max_in_flight)))


@dataclass(frozen=True)
class _Step:
    """One step's events: from its first task to its last (`computed`) and to its end."""

    step: int
    events: list[Event]
    waits: list[Wait]
    began: float
    computed: float
    ended: float

    @classmethod
    def of(cls, trace: Trace, step: int) -> _Step:
        events = trace.of_step(step)
        tasks = [event for event in events if event.kind in COMPUTE]
        update = [event.ended for event in events if event.kind in (COLLECT, COMMIT)]
        computed = max(task.ended for task in tasks)
        return cls(
            step,
            events,
            waits(trace, step),
            min(task.began for task in tasks),
            computed,
            max([computed, *update]),
        )

    def tasks(self, stage: int) -> Iterator[Event]:
        return (e for e in self.events if e.kind in COMPUTE and e.stage == stage)


def _stage_times(trace: Trace, spans: Sequence[_Step]) -> tuple[StageTimes, ...]:
    seconds: dict[tuple[int, str], list[float]] = {}
    for span in spans:
        for event in span.events:
            if event.kind in COMPUTE:
                seconds.setdefault((event.stage, event.kind), []).append(event.seconds)
    mean = {key: statistics.fmean(values) for key, values in seconds.items()}
    forward = sum(value for (_, kind), value in mean.items() if kind == FORWARD)
    backward = sum(value for (_, kind), value in mean.items() if kind == BACKWARD)
    share = forward / (forward + backward) if forward and backward else 1 / 3
    found = []
    for index, info in enumerate(trace.stages):
        both = mean.get((index, FORWARD_BACKWARD), 0.0)
        uneven = [
            max(values) / statistics.median(values)
            for (stage, _), values in seconds.items()
            if stage == index and statistics.median(values) > 0
        ]
        found.append(
            StageTimes(
                index,
                info.process,
                info.start,
                info.end,
                mean.get((index, FORWARD), 0.0) + share * both,
                mean.get((index, BACKWARD), 0.0) + (1 - share) * both,
                max(uneven, default=1.0),
            )
        )
    return tuple(found)


def _process_times(trace: Trace, spans: Sequence[_Step], process: int) -> ProcessTimes:
    def mean(value: Callable[[_Step], float]) -> float:
        return statistics.fmean(value(span) for span in spans)

    def waited(span: _Step, reason: str) -> float:
        return sum(w.seconds for w in span.waits if w.process == process and w.reason == reason)

    def own(span: _Step, *kinds: str) -> list[Event]:
        return [e for e in span.events if e.process == process and e.kind in kinds]

    def done(span: _Step) -> float:
        return span.computed - max((e.ended for e in own(span, *COMPUTE)), default=span.began)

    def hidden(kind: str) -> float:
        total = overlap = 0.0
        for span in spans:
            moving = _union((e.began, e.ended) for e in own(span, kind))
            working = _union((e.began, e.ended) for e in own(span, *COMPUTE))
            total += _length(moving)
            overlap += _overlap(moving, working)
        return overlap / total if total else 1.0

    def moving(kind: str) -> float:
        return mean(lambda span: _length(_union((e.began, e.ended) for e in own(span, kind))))

    return ProcessTimes(
        name=trace.processes[process].name,
        stages=tuple(k for k, stage in enumerate(trace.stages) if stage.process == process),
        compute_s=mean(lambda span: sum(e.seconds for e in own(span, *COMPUTE))),
        activations_s=mean(lambda span: waited(span, "activations")),
        gradients_s=mean(lambda span: waited(span, "gradients")),
        start_s=mean(lambda span: waited(span, "start")),
        done_s=mean(done),
        wire_s=mean(lambda span: sum(w.wire_s for w in span.waits if w.process == process)),
        send_s=moving(SEND),
        send_hidden=hidden(SEND),
        receive_s=moving(RECEIVE),
        receive_hidden=hidden(RECEIVE),
        sent_bytes=mean(lambda span: sum(e.nbytes for e in own(span, SEND))),
        received_bytes=mean(lambda span: sum(e.nbytes for e in own(span, RECEIVE))),
    )


Interval = tuple[float, float]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def _length(intervals: Sequence[Interval]) -> float:
    return sum(ended - began for began, ended in intervals)


def _overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds in both of two lists as `_union` makes them."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds


class _Nics:
    """How fast each process's way in and way out are, by the frames that passed.

    The tensors of several links may pass one way at the same time and slow each other down; so
    the speed of a way is all its bytes over the time in which any were moving.
    """

    def __init__(self, spans: Sequence[_Step]) -> None:
        passed: dict[_Nic, list[Event]] = {}
        for span in spans:
            for event in span.events:
                if event.kind == RECEIVE and event.what in ("FORWARD", "BACKWARD") and event.nbytes:
                    passed.setdefault((event.process, "in"), []).append(event)
                    if event.peer is not None:
                        passed.setdefault((event.peer, "out"), []).append(event)
        self._shared = {
            nic: _length(_union((e.began, e.ended) for e in events)) / sum(e.nbytes for e in events)
            for nic, events in passed.items()
        }
        self._frame = {
            nic: _lower_quartile([e.seconds / e.nbytes for e in events])
            for nic, events in passed.items()
        }

    def seconds(self, nbytes: float, way: Sequence[int]) -> float:
        """Seconds for which so many bytes occupy the way from process to process."""
        return nbytes * max(self._shared.get(nic, 0.0) for nic in _nics_of(way))

    def frame_s(self, nbytes: float, way: Sequence[int]) -> float:
        """Seconds of one frame of so many bytes, by the quicker ones that passed."""
        return nbytes * max(self._frame.get(nic, 0.0) for nic in _nics_of(way))


_Nic = tuple[int, str]


def _nics_of(way: Sequence[int]) -> list[_Nic]:
    return [nic for one, other in itertools.pairwise(way) for nic in ((one, "out"), (other, "in"))]


def _boundary(trace: Trace, spans: Sequence[_Step], nics: _Nics, after: int) -> Boundary:
    """The measurements between stage `after` and the next one."""
    one, other = trace.stages[after].process, trace.stages[after + 1].process
    if one == other:
        return Boundary(after, "same process", 0.0, 0.0, 0.0, 0, 0, "", "")
    forward = _Frames(spans, "FORWARD", source=after, target=after + 1, receiver=other)
    backward = _Frames(spans, "BACKWARD", source=after + 1, target=after, receiver=one)
    arrived = forward.arrived + backward.arrived
    relayed = any(event.peer not in (one, other) for event in arrived)
    way = [one, 0, other] if relayed else [one, other]
    forward_s = nics.seconds(forward.nbytes, way)
    backward_s = nics.seconds(backward.nbytes, way[::-1])
    latencies = [
        max(0.0, frames.delay_s - seconds)
        for frames, seconds in ((forward, forward_s), (backward, backward_s))
        if frames.arrived
    ]
    return Boundary(
        after,
        "relay" if relayed else "direct",
        forward_s,
        backward_s,
        statistics.fmean(latencies) if latencies else 0.0,
        round(forward.nbytes),
        round(backward.nbytes),
        next((event.dtype for event in arrived if event.dtype), ""),
        next((event.codec for event in arrived if event.codec), ""),
    )


class _Frames:
    """The frames of one direction over a boundary: their mean size, and the shortest time from the
    end of a task to its tensor's arrival at the neighbour in each step; others wait for frames in
    front of them."""

    def __init__(
        self, spans: Sequence[_Step], what: str, *, source: int, target: int, receiver: int
    ) -> None:
        self.arrived: list[Event] = []
        delays = []
        for span in spans:
            made = {
                task.micro_batch: task.ended
                for task in span.tasks(source)
                if (task.kind == FORWARD) == (what == "FORWARD")
            }
            arrived = [
                event
                for event in span.events
                if (event.kind, event.what) == (RECEIVE, what)
                and (event.stage, event.process) == (target, receiver)
            ]
            known = [event for event in arrived if event.micro_batch in made]
            if known:
                delays.append(min(event.ended - made[event.micro_batch] for event in known))
            self.arrived += arrived
        self.delay_s = max(0.0, statistics.median(delays)) if delays else 0.0
        sizes = [event.nbytes for event in self.arrived]
        self.nbytes = statistics.fmean(sizes) if sizes else 0.0


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


# ------------------------------------------------------------------------------------- what if


@dataclass(frozen=True)
class _Plan:
    """The plan that is simulated."""

    stages: tuple[StageTimes, ...]
    boundaries: tuple[Boundary, ...]

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

    def scaled(self, work: float, bytes_: float) -> _Plan:
        """All stages' seconds times `work`, all boundaries' times `bytes_`."""
        return replace(
            self,
            stages=tuple(
                replace(s, forward_s=s.forward_s * work, backward_s=s.backward_s * work)
                for s in self.stages
            ),
            boundaries=tuple(
                replace(b, forward_s=b.forward_s * bytes_, backward_s=b.backward_s * bytes_)
                for b in self.boundaries
            ),
        )


def _simulated_s(profile: Profile, micro_batches: int, max_in_flight: int | None) -> float:
    """Seconds of a step, run as the coordinator would choose to run it."""
    choice = tune(profile, micro_batches, max_in_flight=max_in_flight)
    found = simulate(
        profile,
        micro_batches,
        choice.max_in_flight,
        policy=choice.policy,
        in_flight_limits=choice.in_flight_limits,
    )
    return found.seconds


def _overlapping(
    plan: _Plan, micro_batches: int, max_in_flight: int | None, pipeline_s: float
) -> tuple[_Plan, float]:
    """The plan with as much of the time on the wire at the same time as other frames' as makes it
    no slower than what was measured, and its simulated seconds.

    The simulator lets the frames of a process take turns. Several links may move several at once.
    """

    def overlapping(share: float) -> _Plan:
        return replace(
            plan,
            boundaries=tuple(
                replace(
                    b,
                    forward_s=b.forward_s * (1 - share),
                    backward_s=b.backward_s * (1 - share),
                    latency_s=b.latency_s + share * (b.forward_s + b.backward_s) / 2,
                )
                for b in plan.boundaries
            ),
        )

    low, high = 0.0, 1.0
    for _ in range(5):
        middle = (low + high) / 2
        if _simulated_s(overlapping(middle).profile, micro_batches, max_in_flight) > pipeline_s:
            low = middle
        else:
            high = middle
    chosen = overlapping(high)
    return chosen, _simulated_s(chosen.profile, micro_batches, max_in_flight)


@dataclass(frozen=True)
class _Idea:
    kind: str
    text: str
    plan: _Plan
    micro_batches: int
    samples: float = 1.0
    """Samples in a step over those of now."""


def _changes(
    trace: Trace, found: Diagnosis, plan: _Plan, nics: _Nics, max_in_flight: int | None
) -> Iterator[Change]:
    """Every change that can be made here with its prediction, those that ask least first."""
    between = found.between_s or 0.0
    now = found.step_s + between
    scale = found.pipeline_s / found.simulated_s if found.simulated_s else 1.0
    m, rows = found.micro_batches, trace.settings.get("per_device_train_batch_size")
    ideas = [
        _direct(trace, plan, nics, m),
        _max_in_flight(plan, m, max_in_flight),
        _cut(trace, plan, m),
        _interleaved(plan, m),
        _codec(plan, m, "bf16"),
        _smaller(plan, m, rows),
        _more(plan, m),
        _codec(plan, m, "int8"),
    ]
    for idea in ideas:
        if idea is not None:
            limit = None if idea.kind == "window" else max_in_flight
            pipeline = scale * _simulated_s(idea.plan.profile, idea.micro_batches, limit)
            step = pipeline + found.update_s
            # What happens between steps (data, a checkpoint) is taken to grow with the samples.
            gain = idea.samples * now / (step + between * idea.samples) - 1
            if idea.kind == "cut" and gain < _AS_GOOD:
                continue  # better by the bound, but not when it is simulated
            yield Change(idea.kind, idea.text, step, gain)


def _direct(trace: Trace, plan: _Plan, nics: _Nics, micro_batches: int) -> _Idea | None:
    relayed = [b for b in plan.boundaries if b.way == "relay"]
    if not relayed:
        return None

    def direct(b: Boundary) -> Boundary:
        # How fast the new link is nobody knows: it is taken to be as fast as the two machines'
        # other links were at their best, and its way half as long, since it has half the legs.
        way = [plan.stages[b.after].process, plan.stages[b.after + 1].process]
        frames = [
            nics.frame_s(b.forward_bytes, way),
            nics.frame_s(b.backward_bytes, way[::-1]),
        ]
        forward_s, backward_s = map(min, zip((b.forward_s, b.backward_s), frames, strict=True))
        delay = b.latency_s + (b.forward_s + b.backward_s) / 2
        delay = min(delay, max(delay / 2, statistics.fmean(frames)))
        latency_s = max(0.0, delay - (forward_s + backward_s) / 2)
        return replace(
            b, way="direct", forward_s=forward_s, backward_s=backward_s, latency_s=latency_s
        )

    changed = tuple(direct(b) if b.way == "relay" else b for b in plan.boundaries)
    pairs = [sorted(plan.stages[k].process for k in (b.after, b.after + 1)) for b in relayed]
    names = list(
        dict.fromkeys(" and ".join(trace.processes[n].name for n in pair) for pair in pairs)
    )
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f'direct links (links: "auto"), if they can reach each other: {shown}'
    return _Idea("direct", text, replace(plan, boundaries=changed), micro_batches)


def _max_in_flight(plan: _Plan, micro_batches: int, max_in_flight: int | None) -> _Idea | None:
    if max_in_flight is None:
        return None
    text = f"training.max_in_flight null instead of {max_in_flight}, if memory allows"
    return _Idea("window", text, plan, micro_batches)


def _cut(trace: Trace, plan: _Plan, micro_batches: int) -> _Idea | None:
    """Layers moved between stages one at a time, the best move first, as long as the bound falls;
    of the cuts on that way the first whose bound is within 1 % of the last one's."""

    def score(cut: _Plan) -> tuple[float, float]:
        # The bound, then how even the devices' loads are: moves that only prepare others count
        # too. Rounded, since sums in another order must not look like an improvement.
        loads: dict[int, float] = {}
        for stage in cut.stages:
            load = loads.get(stage.process, 0.0) + stage.forward_s + stage.backward_s
            loads[stage.process] = load
        bound = round(step_bound(cut.profile, micro_batches), 9)
        return bound, round(sum(load * load for load in loads.values()), 12)

    counts = [stage.end - stage.start for stage in plan.stages]
    way = [(score(plan), counts, plan)]
    while True:
        tried = [(n, _with_layers(trace, plan, n)) for n in _moved(way[-1][1])]
        best = min(((score(cut), n, cut) for n, cut in tried), key=lambda t: t[0], default=way[-1])
        if best[0] >= way[-1][0]:
            break
        way.append(best)
    goal = (1 + _AS_GOOD) * way[-1][0][0]
    _, chosen, cut = next(entry for entry in way if entry[0][0] <= goal)
    if chosen == counts:
        return None
    old, new = (", ".join(map(str, numbers)) for numbers in (counts, chosen))
    text = f"layers per stage {new} instead of {old}, if memory allows"
    return _Idea("cut", text, cut, micro_batches)


def _moved(counts: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of layers after moving one of them from any stage to any other."""
    for source, number in enumerate(counts):
        if number > 1:
            for target in range(len(counts)):
                if target != source:
                    moved = list(counts)
                    moved[source] -= 1
                    moved[target] += 1
                    yield moved


def _with_layers(trace: Trace, plan: _Plan, counts: Sequence[int]) -> _Plan:
    """The plan with so many layers on its stages, all layers of a stage alike.

    The first and the last stage also hold embedding and head, whose share nobody measured: a
    layer added there is charged like one of the stage's mean, a layer taken away is credited
    with no more than a layer costs on a like device, or else on the quickest of the others.
    """

    def per_layer(stage: StageTimes) -> tuple[float, float]:
        own = stage.end - stage.start
        return stage.forward_s / own, stage.backward_s / own

    def like(stage: StageTimes, other: StageTimes) -> bool:
        device = trace.processes[stage.process].device
        same_kind = device != "" and trace.processes[other.process].device == device
        return other.process == stage.process or same_kind

    middle = [stage for stage in plan.stages[1:-1] if stage.end > stage.start]
    stages = []
    for stage, layers in zip(plan.stages, counts, strict=True):
        own = stage.end - stage.start
        if not own or layers == own:
            stages.append(stage)
            continue
        forward, backward = per_layer(stage)
        alike = [other for other in middle if like(stage, other)]
        if stage.index in (0, len(counts) - 1) and (alike or (middle and layers < own)):
            quick = min((per_layer(other) for other in alike or middle), key=sum)
            forward, backward = min(forward, quick[0]), min(backward, quick[1])
        more = layers - own
        stages.append(
            replace(
                stage,
                forward_s=stage.forward_s + more * forward,
                backward_s=stage.backward_s + more * backward,
            )
        )
    return replace(plan, stages=tuple(stages))


def _interleaved(plan: _Plan, micro_batches: int) -> _Idea | None:
    """Each process holds two stages of half the layers instead of one."""
    p = len(plan.stages)
    one_each = len({stage.process for stage in plan.stages}) == p > 1
    if not one_each or min(stage.end - stage.start for stage in plan.stages) < 2:
        return None
    half = plan.scaled(0.5, 1.0)
    # The last process has a link to the first one, the coordinator, whatever else it has.
    back = replace(half.boundaries[-1], way="direct")
    text = "two stages of half the layers for each process (a plan that lists each twice)"
    changed = replace(
        half, stages=half.stages * 2, boundaries=(*half.boundaries, back, *half.boundaries)
    )
    return _Idea("interleave", text, changed, micro_batches)


def _codec(plan: _Plan, micro_batches: int, codec: str) -> _Idea | None:
    """Activations and gradients in fewer bytes, where they are not yet."""
    size = {"bf16": 2, "int8": _INT8_BYTES}[codec]
    boundaries = []
    for b in plan.boundaries:
        item = _ITEM_BYTES.get(b.dtype, 0)
        if b.way != "same process" and not b.codec and item > size:
            elements = max(b.forward_bytes, b.backward_bytes) / item
            b = replace(
                b,
                forward_s=b.forward_s * size / item,
                backward_s=b.backward_s * size / item,
                latency_s=b.latency_s + elements * _CODING_S,
            )
        boundaries.append(b)
    if tuple(boundaries) == plan.boundaries:
        return None
    text = f'wire.activations and wire.gradients "{codec}" (rounds what crosses a boundary)'
    return _Idea(codec, text, replace(plan, boundaries=tuple(boundaries)), micro_batches)


def _smaller(plan: _Plan, micro_batches: int, rows: Any) -> _Idea | None:
    """The same samples in twice as many micro-batches."""
    if len(plan.stages) == 1 or not isinstance(rows, int) or rows < 2:
        return None
    text = (
        f"micro-batches of {rows // 2} instead of {rows} and twice as many, if one of half the "
        "size takes half the time"
    )
    share = (rows // 2) / rows
    return _Idea("smaller", text, plan.scaled(share, share), 2 * micro_batches, 2 * share)


def _more(plan: _Plan, micro_batches: int) -> _Idea | None:
    if len(plan.stages) == 1:
        return None
    m = micro_batches
    text = f"{2 * m} micro-batches in a step instead of {m} (a batch twice as large)"
    return _Idea("more", text, plan, 2 * micro_batches, 2.0)


# ------------------------------------------------------------------------------------ for people


def text(found: Diagnosis) -> str:
    """The diagnosis as a person reads it."""
    steps = found.steps
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    lines = [
        f"{which}: {found.micro_batches} micro-batches through {len(found.stages)} "
        f"stage{'s' if len(found.stages) > 1 else ''}",
        f"a step takes {_ms(found.step_s)}: pipeline {_ms(found.pipeline_s)}, then "
        f"{_ms(found.update_s)} for gradients and optimizer"
        + (f"; {_ms(found.between_s)} between steps" if found.between_s is not None else ""),
        f"no schedule of these stages and links can be faster than {_ms(found.bound_s)}; "
        f"the pipeline took {found.ratio:.2f} times that",
        "",
        *table(_STAGE_HEAD, [_stage_row(found, s) for s in found.stages], left=(0, 1, 2)),
        "",
        *table(_PROCESS_HEAD, [_process_row(found, p) for p in found.processes], left=(0,)),
    ]
    crossed = [b for b in found.boundaries if b.way != "same process"]
    if crossed:
        lines += ["", *table(_BOUNDARY_HEAD, [_boundary_row(b) for b in crossed], left=(0, 1))]
    return "\n".join([*lines, "", *_notes(found), *_advice(found)])


_STAGE_HEAD = ("stage", "process", "layers", "forward", "backward")
_PROCESS_HEAD = (
    "process", "computes", "waits: activations", "gradients", "of it wire", "idle",
    "sends", "hidden", "receives", "hidden",
)  # fmt: skip
_BOUNDARY_HEAD = ("boundary", "way", "activation", "wire", "gradient", "wire", "delay")


def _stage_row(found: Diagnosis, stage: StageTimes) -> tuple[str, ...]:
    process = next(p.name for p in found.processes if stage.index in p.stages)
    layers = layers_text(stage.start, stage.end)
    if stage.index == len(found.stages) - 1:
        both = _ms(stage.forward_s + stage.backward_s)
        return (str(stage.index), process, layers, both, "(both)")
    return (str(stage.index), process, layers, _ms(stage.forward_s), _ms(stage.backward_s))


def _process_row(found: Diagnosis, process: ProcessTimes) -> tuple[str, ...]:
    def share(seconds: float) -> str:
        return f"{seconds / found.pipeline_s:.0%}" if found.pipeline_s else "-"

    def moved(seconds: float, hidden: float, nbytes: float) -> tuple[str, str]:
        return (bytes_text(nbytes), f"{hidden:.0%}") if seconds else ("-", "-")

    return (
        process.name,
        share(process.compute_s),
        share(process.activations_s),
        share(process.gradients_s),
        share(process.wire_s),
        share(process.start_s + process.done_s),
        *moved(process.send_s, process.send_hidden, process.sent_bytes),
        *moved(process.receive_s, process.receive_hidden, process.received_bytes),
    )


def _boundary_row(b: Boundary) -> tuple[str, ...]:
    way = f"{b.way}, {b.codec}" if b.codec else b.way
    there = (bytes_text(b.forward_bytes), _ms(b.forward_s))
    back = (bytes_text(b.backward_bytes), _ms(b.backward_s)) if b.backward_bytes else ("-", "-")
    return (f"{b.after} - {b.after + 1}", way, *there, *back, _ms(b.latency_s))


def _advice(found: Diagnosis) -> list[str]:
    if not found.changes:
        return ["one stage has nothing to wait for: only a faster device would help"]
    best, same = found.best, found.best_of(SAME_RESULT)
    if best is None:
        lines = ["no single change would help much; predicted for each:"]
    else:
        lines = [f"most would help: {best.text}"]
        if same != best:
            harmless = same.text if same is not None else "none would help much"
            lines.append(f"of changes that leave the results as they are: {harmless}")
        lines.append("predicted for each:")
    rows = [
        (f"{change.gain:+.0%}", _ms(change.step_s), change.text)
        for change in sorted(found.changes, key=lambda change: -change.gain)
    ]
    return lines + table(("samples/s", "a step", "change"), rows, left=(2,))


def _notes(found: Diagnosis) -> list[str]:
    notes = []
    if found.simulated_s and found.pipeline_s > _UNEXPLAINED * found.simulated_s:
        notes.append(
            f"the pipeline took {found.pipeline_s / found.simulated_s:.2f} times what these times "
            "of stages and links explain: processes that share cores or a link, other work on a "
            "machine, or uneven micro-batches; trust the predictions less"
        )
    uneven = [stage for stage in found.stages if stage.slowest > _UNEVEN]
    if uneven:
        numbers = ", ".join(str(stage.index) for stage in uneven)
        worst = max(stage.slowest for stage in uneven)
        notes.append(
            f"tasks of stage{'s' if len(uneven) > 1 else ''} {numbers} are uneven, the slowest "
            f"{worst:.1f} times the median: samples of other lengths, or other work on a machine"
        )
    if found.dropped:
        notes.append(f"{found.dropped} spans were not kept; lower training.timeline_steps")
    return [*(f"note: {note}" for note in notes), ""] if notes else []


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"
