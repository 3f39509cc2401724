"""Effects of single changes: the measured plan, changed and simulated.

A prediction is `measured x simulated with the change / simulated without it`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.extras.observe.measured import Boundary, NicSpeeds, StageTimes
from hetero_framework.extras.observe.timeline import Trace

AS_GOOD = 0.01
_CODING_S = 2.5e-9
"""Seconds per element to encode and decode on one CPU thread; a GPU needs less."""


@dataclass(frozen=True)
class Change:
    """One change, the seconds of a step with it, and the gain in samples per second."""

    kind: str
    text: str
    step_s: float
    gain: float


@dataclass(frozen=True)
class Baseline:
    """Means over steps of `micro_batches` each, in seconds. `simulated_s` is the pipeline when
    simulated, `between_s` None where no two steps were recorded in a row."""

    micro_batches: int
    max_in_flight: int | None
    step_s: float
    pipeline_s: float
    update_s: float
    between_s: float | None
    simulated_s: float


@dataclass(frozen=True)
class MeasuredPlan:
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

    def step_s(self, micro_batches: int, max_in_flight: int | None) -> float:
        """Seconds of a step when simulated, run as the coordinator would choose to run it."""
        return tune(self.profile, micro_batches, max_in_flight=max_in_flight).forecast.seconds

    def scaled(self, work: float, wire: float) -> MeasuredPlan:
        """All stages' seconds times `work`, all boundaries' times `wire`."""
        stages = tuple(stage.scaled(work) for stage in self.stages)
        return MeasuredPlan(stages, tuple(b.scaled(wire) for b in self.boundaries))


def overlapping(
    plan: MeasuredPlan, micro_batches: int, max_in_flight: int | None, pipeline_s: float
) -> tuple[MeasuredPlan, float]:
    """The plan with as much wire time shared by several frames as makes it no slower than the
    measurement, and its simulated seconds: the simulator has the frames of a process take turns,
    but several links may move several at once."""

    def shared(share: float) -> tuple[MeasuredPlan, float]:
        boundaries = tuple(
            b.scaled(1 - share, more_latency_s=share * (b.forward_s + b.backward_s) / 2)
            for b in plan.boundaries
        )
        changed = replace(plan, boundaries=boundaries)
        return changed, changed.step_s(micro_batches, max_in_flight)

    low, high = 0.0, 1.0
    for _ in range(5):
        middle = (low + high) / 2
        if shared(middle)[1] > pipeline_s:
            low = middle
        else:
            high = middle
    return shared(high)


@dataclass(frozen=True)
class _Idea:
    kind: str
    text: str
    plan: MeasuredPlan
    micro_batches: int
    samples: float = 1.0
    """Samples in a step over those of now."""


def changes(trace: Trace, now: Baseline, plan: MeasuredPlan, nics: NicSpeeds) -> Iterator[Change]:
    """Every change that can be made here with its prediction, those that ask least first."""
    scale = now.pipeline_s / now.simulated_s if now.simulated_s else 1.0
    for idea in _ideas(trace, now, plan, nics) if len(plan.stages) > 1 else ():
        max_in_flight = None if idea.kind == "max_in_flight" else now.max_in_flight
        pipeline = scale * idea.plan.step_s(idea.micro_batches, max_in_flight)
        step = pipeline + now.update_s
        # Work between steps (data, a checkpoint) is taken to grow with the samples.
        between_s = now.between_s or 0.0
        took, takes = now.step_s + between_s, step + between_s * idea.samples
        gain = idea.samples * took / takes - 1
        if idea.kind == "cut" and gain < AS_GOOD:
            continue  # better by the bound, but not when it is simulated
        yield Change(idea.kind, idea.text, step, gain)


def _ideas(trace: Trace, now: Baseline, plan: MeasuredPlan, nics: NicSpeeds) -> Iterator[_Idea]:
    m, rows = now.micro_batches, trace.settings.get("per_device_train_batch_size")
    yield from _direct(trace, plan, nics, m)
    if now.max_in_flight is not None:
        text = f"training.max_in_flight null instead of {now.max_in_flight}, if memory allows"
        yield _Idea("max_in_flight", text, plan, m)
    yield from _cut(trace, plan, m)
    yield from _interleaved(plan, m)
    codecs = _codecs(plan, m)
    yield from codecs[:1]
    if isinstance(rows, int) and rows > 1:
        text = (
            f"micro-batches of {rows // 2} instead of {rows} and twice as many, if one of half the "
            "size takes half the time"
        )
        share = (rows // 2) / rows
        yield _Idea("smaller", text, plan.scaled(share, share), 2 * m, 2 * share)
    text = f"{2 * m} micro-batches in a step instead of {m} (a batch twice as large)"
    yield _Idea("more", text, plan, 2 * m, 2.0)
    yield from codecs[1:]


def _direct(
    trace: Trace, plan: MeasuredPlan, nics: NicSpeeds, micro_batches: int
) -> Iterator[_Idea]:
    relayed = [b for b in plan.boundaries if b.way == "relay"]
    if not relayed:
        return

    def direct(b: Boundary) -> Boundary:
        # The new link's speed is unknown: it is taken to be as fast as the two machines'
        # other links were at their best, and its path half as long, since it has half the legs.
        path = [plan.stages[b.after].process, plan.stages[b.after + 1].process]
        frames = [nics.frame_s(b.forward_bytes, path), nics.frame_s(b.backward_bytes, path[::-1])]
        forward_s, backward_s = map(min, zip((b.forward_s, b.backward_s), frames, strict=True))
        delay = b.latency_s + (b.forward_s + b.backward_s) / 2
        delay = min(delay, max(delay / 2, statistics.fmean(frames)))
        latency_s = max(0.0, delay - (forward_s + backward_s) / 2)
        return replace(
            b, way="direct", forward_s=forward_s, backward_s=backward_s, latency_s=latency_s
        )

    changed = tuple(direct(b) if b.way == "relay" else b for b in plan.boundaries)
    pairs = [sorted(plan.stages[k].process for k in (b.after, b.after + 1)) for b in relayed]
    names = list(dict.fromkeys(" and ".join(trace.processes[n].name for n in p) for p in pairs))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f'direct links (links: "auto"), if they can reach each other: {shown}'
    yield _Idea("direct", text, replace(plan, boundaries=changed), micro_batches)


def _cut(trace: Trace, plan: MeasuredPlan, micro_batches: int) -> Iterator[_Idea]:
    """Layers moved between stages one at a time, the best move first, as long as the bound falls;
    of the cuts so far the first whose bound is within 1 % of the last one's."""

    def score(cut: MeasuredPlan) -> tuple[float, float]:
        # The bound, then how even the devices' loads are: moves that only prepare others count
        # too. Rounded, since sums in another order must not look like an improvement.
        loads: dict[int, float] = {}
        for stage in cut.stages:
            load = loads.get(stage.process, 0.0) + stage.forward_s + stage.backward_s
            loads[stage.process] = load
        bound = round(step_bound(cut.profile, micro_batches), 9)
        return bound, round(sum(load * load for load in loads.values()), 12)

    counts = [stage.end - stage.start for stage in plan.stages]
    cuts = [(score(plan), counts, plan)]
    while True:
        tried = [(n, _with_layers(trace, plan, n)) for n in _moved(cuts[-1][1])]
        best = min(((score(cut), n, cut) for n, cut in tried), key=lambda t: t[0], default=cuts[-1])
        if best[0] >= cuts[-1][0]:
            break
        cuts.append(best)
    goal = (1 + AS_GOOD) * cuts[-1][0][0]
    _, chosen, cut = next(entry for entry in cuts if entry[0][0] <= goal)
    if chosen != counts:
        old, new = (", ".join(map(str, numbers)) for numbers in (counts, chosen))
        text = f"layers per stage {new} instead of {old}, if memory allows"
        yield _Idea("cut", text, cut, micro_batches)


def _moved(counts: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of layers after moving one of them from any stage to any other."""
    for source, target in itertools.permutations(range(len(counts)), 2):
        if counts[source] > 1:
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            yield moved


def _with_layers(trace: Trace, plan: MeasuredPlan, counts: Sequence[int]) -> MeasuredPlan:
    """The plan with `counts[k]` layers on stage k, all layers of a stage alike.

    The first and the last stage also hold embedding and head, whose share was not measured: a
    layer added there is charged like one of the stage's mean, a layer taken away is credited
    with no more than a layer costs on a like device, or else on the quickest of the others.
    """

    def like(stage: StageTimes, other: StageTimes) -> bool:
        device = trace.processes[stage.process].device
        same_kind = device != "" and trace.processes[other.process].device == device
        return other.process == stage.process or same_kind

    middle = [stage for stage in plan.stages[1:-1] if stage.end > stage.start]
    stages = []
    for stage, layers in zip(plan.stages, counts, strict=True):
        more = layers - (stage.end - stage.start)
        if stage.end > stage.start and more:
            layer = stage.per_layer
            alike = [other for other in middle if like(stage, other)]
            if stage.index in (0, len(counts) - 1) and (alike or (middle and more < 0)):
                quick = min((other.per_layer for other in alike or middle), key=sum)
                layer = min(layer[0], quick[0]), min(layer[1], quick[1])
            forward_s = stage.forward_s + more * layer[0]
            backward_s = stage.backward_s + more * layer[1]
            stage = replace(stage, forward_s=forward_s, backward_s=backward_s)
        stages.append(stage)
    return replace(plan, stages=tuple(stages))


def _interleaved(plan: MeasuredPlan, micro_batches: int) -> Iterator[_Idea]:
    """Each process holds two stages of half the layers instead of one."""
    stages, boundaries = plan.scaled(0.5, 1.0).stages, plan.boundaries
    one_each = len({stage.process for stage in stages}) == len(stages)
    if one_each and min(stage.end - stage.start for stage in stages) >= 2:
        # The last process has a link to the first one, the coordinator, whatever else it has.
        back = replace(boundaries[-1], way="direct")
        text = "two stages of half the layers for each process (a plan that lists each twice)"
        changed = MeasuredPlan(stages * 2, (*boundaries, back, *boundaries))
        yield _Idea("interleave", text, changed, micro_batches)


def _codecs(plan: MeasuredPlan, micro_batches: int) -> list[_Idea]:
    """For each codec: activations and gradients in fewer bytes, unless they are already."""
    crossed = [b for b in plan.boundaries if b.way != "same process" and not b.codec]
    if not crossed:
        return []
    import torch  # slow

    from hetero_framework.core.codecs import CODECS, Codec

    def coded(b: Boundary, codec: Codec) -> Boundary:
        dtype = getattr(torch, b.dtype, None)
        if b not in crossed or not isinstance(dtype, torch.dtype) or not codec.supports(dtype):
            return b
        elements = max(b.forward_bytes, b.backward_bytes) // dtype.itemsize
        share = codec.nbytes((elements,), dtype) / max(1, elements * dtype.itemsize)
        return b.scaled(share, more_latency_s=elements * _CODING_S) if share < 1 else b

    ideas = []
    for name, codec in CODECS.items():
        boundaries = tuple(coded(b, codec) for b in plan.boundaries)
        if boundaries != plan.boundaries:
            text = f'wire.activations and wire.gradients "{name}" (rounds tensors at boundaries)'
            ideas.append(_Idea(name, text, replace(plan, boundaries=boundaries), micro_batches))
    return ideas
