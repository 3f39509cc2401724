"""The bottleneck of a run's steps: how their time was spent, and which change would help most.

step_account.py has the account of the steps, and the shortest possible step. A change is made to
the account, which is then simulated. The predicted time is measured x simulated with the change /
simulated without it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hetero_framework.core.spans import ALL_STEPS, COMPUTE
from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.extras.observe import step_account
from hetero_framework.extras.observe.step_account import (
    AS_GOOD,
    WORTH_IT,
    Boundary,
    Change,
    Diagnosis,
    NicSpeeds,
    StageTimes,
    scaled,
)
from hetero_framework.extras.observe.timeline import Trace
from hetero_framework.models.sizing.streaming import SLOTS
from hetero_framework.tables import lines, table
from hetero_framework.units import plural, seconds, share

SAME_RESULT = frozenset(
    {"direct", "max_in_flight", "offload", "cut", "interleave", "smaller", "larger"}
)
"""Kinds of changes after which a run learns the same, to the last bit or but for rounding."""
_AS_SIMULATED = 1.02
_CODING_S = 2.5e-9
"""Seconds per element to encode and decode on one CPU thread; a GPU needs less."""
_UNEXPLAINED = 1.15
_UNEVEN = 2.0
_STREAMING_HEAD = ("stage", "from host memory", "on their way", "of it hidden", "awaited")
_PROCESS_HEAD = (
    *("process", "stages", "computes"),
    *("waits: activations", "waits: gradients", "of it wire", "idle"),
)


def diagnose(trace: Trace) -> Diagnosis:
    """Analyse the steps of a trace that have its usual number of micro-batches."""
    counts = {
        step: len({e.micro_batch for e in trace.of_step(step) if e.kind in COMPUTE})
        for step in trace.steps
    }
    if trace.settings.get("timeline_steps") == ALL_STEPS and len(counts) > 1:
        del counts[trace.steps[0]]  # a run's first step is not typical
    m = Counter(counts.values()).most_common(1)[0][0]
    steps = [step_account.MeasuredStep.of(trace, step) for step in counts if counts[step] == m]
    pairs = itertools.pairwise(steps)
    between = [max(0.0, b.began - a.ended) for a, b in pairs if b.step == a.step + 1]
    nics = NicSpeeds(steps)
    every, inner = range(len(trace.processes)), range(len(trace.stages) - 1)
    now = Diagnosis(
        micro_batches=m,
        max_in_flight=trace.settings.get("max_in_flight"),
        step_s=statistics.fmean(step.ended - step.began for step in steps),
        pipeline_s=statistics.fmean(step.computed - step.began for step in steps),
        update_s=statistics.fmean(step.ended - step.computed for step in steps),
        between_s=statistics.fmean(between) if between else None,
        steps=tuple(step.step + 1 for step in steps),
        bound_s=statistics.fmean(step.bound_s for step in steps),
        stages=step_account.stage_times(trace, steps),
        processes=tuple(step_account.process_times(trace, steps, n) for n in every),
        boundaries=tuple(step_account.boundary_of(trace, steps, nics, k) for k in inner),
        dropped=trace.dropped,
    )
    return _with_changes(trace, now, nics)


class _Idea(NamedTuple):
    kind: str
    text: str
    then: Diagnosis
    samples: float = 1.0  # in a step, over the samples of now


def _with_changes(trace: Trace, now: Diagnosis, nics: NicSpeeds) -> Diagnosis:
    """The account with its simulated seconds, and with the prediction of every change that can be
    made here. Changes that ask least come first."""
    plan = replace(now, simulated_s=now.simulate())
    if plan.simulated_s > _AS_SIMULATED * plan.pipeline_s:
        plan = _overlapping(plan)
    scale = plan.pipeline_s / plan.simulated_s if plan.simulated_s else 1.0
    changes = []
    ideas = _ideas(trace, plan, nics) if len(plan.stages) > 1 else _streamed(trace, plan)
    for idea in ideas:
        step_s = scale * idea.then.simulate() + now.update_s
        # Work between steps (data, a checkpoint) is taken to grow with the samples.
        between_s = now.between_s or 0.0
        gain = idea.samples * (now.step_s + between_s) / (step_s + between_s * idea.samples) - 1
        if idea.kind != "cut" or gain >= AS_GOOD:  # a cut may be better by the bound alone
            changes.append(Change(idea.kind, idea.text, step_s, gain))
    return replace(now, simulated_s=plan.simulated_s, changes=tuple(changes))


def _overlapping(plan: Diagnosis) -> Diagnosis:
    """The plan with part of the wire time counted as latency, so that its simulation is no slower
    than the measurement. The simulator has the frames of a process take turns, but several links
    may move frames at once."""

    def shared(share: float) -> Diagnosis:
        boundaries = []
        for b in plan.boundaries:
            latency_s = b.latency_s + share * (b.forward_s + b.backward_s) / 2
            boundaries.append(replace(scaled(b, 1 - share), latency_s=latency_s))
        changed = replace(plan, boundaries=tuple(boundaries))
        return replace(changed, simulated_s=changed.simulate())

    low, high = 0.0, 1.0
    for _ in range(5):
        middle = (low + high) / 2
        is_slower = shared(middle).simulated_s > plan.pipeline_s
        low, high = (middle, high) if is_slower else (low, middle)
    return shared(high)


def _ideas(trace: Trace, plan: Diagnosis, nics: NicSpeeds) -> Iterator[_Idea]:
    m, rows = plan.micro_batches, trace.settings.get("per_device_train_batch_size")
    yield from _direct(trace, plan, nics)
    if plan.max_in_flight is not None:
        text = f"training.max_in_flight null instead of {plan.max_in_flight}, if memory allows"
        yield _Idea("max_in_flight", text, replace(plan, max_in_flight=None))
    yield from _streamed(trace, plan)
    yield from _cut(trace, plan)
    yield from _interleaved(plan)
    codecs = _codecs(plan)
    yield from codecs[:1]
    if isinstance(rows, int) and rows > 1 and not any(s.streaming_s for s in plan.stages):
        text = f"micro-batches of {rows // 2} instead of {rows} and twice as many"
        text, share = f"{text}, if one of half the size takes half the time", (rows // 2) / rows
        stages = tuple(scaled(stage, share) for stage in plan.stages)
        boundaries = tuple(scaled(b, share) for b in plan.boundaries)
        then = replace(plan, stages=stages, boundaries=boundaries, micro_batches=2 * m)
        yield _Idea("smaller", text, then, 2 * share)
    text = f"{2 * m} micro-batches in a step instead of {m} (a batch twice as large)"
    yield _Idea("more", text, replace(plan, micro_batches=2 * m), 2.0)
    yield from codecs[1:]


def _direct(trace: Trace, plan: Diagnosis, nics: NicSpeeds) -> Iterator[_Idea]:
    def direct(b: Boundary) -> Boundary:
        # The new link's speed is unknown: it is taken to be as fast as the two machines'
        # other links were at their best, and its path half as long, since it has half the legs.
        path = [plan.stages[b.after].process, plan.stages[b.after + 1].process]
        forward_s = nics.seconds(b.forward_bytes, path, alone=True)
        backward_s = nics.seconds(b.backward_bytes, path[::-1], alone=True)
        delay = b.latency_s + (b.forward_s + b.backward_s) / 2
        delay = min(delay, max(delay / 2, statistics.fmean((forward_s, backward_s))))
        forward_s, backward_s = min(b.forward_s, forward_s), min(b.backward_s, backward_s)
        latency_s = max(0.0, delay - (forward_s + backward_s) / 2)
        return replace(
            b, way="direct", forward_s=forward_s, backward_s=backward_s, latency_s=latency_s
        )

    relayed = [b for b in plan.boundaries if b.way == "relay"]
    changed = tuple(direct(b) if b in relayed else b for b in plan.boundaries)
    pairs = [sorted(plan.stages[k].process for k in (b.after, b.after + 1)) for b in relayed]
    names = list(dict.fromkeys(" and ".join(trace.processes[n].name for n in p) for p in pairs))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f'direct links (links: "auto"), if they can reach each other: {shown}'
    if relayed:
        yield _Idea("direct", text, replace(plan, boundaries=changed))


def _streamed(trace: Trace, plan: Diagnosis) -> Iterator[_Idea]:
    """Fewer streamed layers, and larger micro-batches, where a stage waits for weights."""
    m, rows = plan.micro_batches, trace.settings.get("per_device_train_batch_size")
    if waiting := [stage for stage in plan.stages if stage.awaited > AS_GOOD]:
        stages = tuple(scaled(stage, 1 - stage.awaited) for stage in plan.stages)
        # Rounded down to whole slots; with no more layers than slots, all stay on the device.
        left = [(s.index, (s.offload - s.too_many) // SLOTS * SLOTS) for s in waiting]
        fewer = [f"shard_plan[{k}].offload {n if n > SLOTS else 0}" for k, n in left]
        old = ", ".join(str(stage.offload) for stage in waiting)
        text = f"{', '.join(fewer)} instead of {old}, if memory allows"
        yield _Idea("offload", text, replace(plan, stages=stages))
    if waiting and isinstance(rows, int) and m % 2 == 0:
        text = f"micro-batches of {2 * rows} instead of {rows} and half as many, if memory allows"
        stages = tuple(scaled(s, max(1.0, 2 * (1 - s.awaited))) for s in plan.stages)
        boundaries = tuple(scaled(b, 2.0) for b in plan.boundaries)
        then = replace(plan, stages=stages, boundaries=boundaries, micro_batches=m // 2)
        yield _Idea("larger", text, then)


def _cut(trace: Trace, plan: Diagnosis) -> Iterator[_Idea]:
    """A better cut, if there is one. Layers move between stages one at a time, the best move first,
    while the bound falls. The first cut whose bound is within 1 % of the last cut's is chosen."""

    def scored(counts: list[int]) -> tuple[tuple[float, float], list[int], Diagnosis]:
        # The bound, then how even the devices' loads are: moves that only prepare others count
        # too. Rounded, since sums in another order must not look like an improvement.
        cut = _with_layers(trace, plan, counts)
        loads = dict.fromkeys((stage.process for stage in cut.stages), 0.0)
        for stage in cut.stages:
            loads[stage.process] += stage.forward_s + stage.backward_s
        bound = round(step_bound(cut.profile, plan.micro_batches), 9)
        return (bound, round(sum(load * load for load in loads.values()), 12)), counts, cut

    counts = [stage.end - stage.start for stage in plan.stages]
    cuts = [scored(counts)]
    while True:
        moved = []
        for source, target in itertools.permutations(range(len(counts)), 2):
            if (n := list(cuts[-1][1]))[source] > 1:
                n[source], n[target] = n[source] - 1, n[target] + 1
                moved.append(scored(n))
        best = min(moved, key=lambda entry: entry[0], default=cuts[-1])
        if best[0] >= cuts[-1][0]:
            break
        cuts.append(best)
    goal = (1 + AS_GOOD) * cuts[-1][0][0]
    _, chosen, cut = next(entry for entry in cuts if entry[0][0] <= goal)
    if chosen != counts:
        old, new = (", ".join(map(str, numbers)) for numbers in (counts, chosen))
        yield _Idea("cut", f"layers per stage {new} instead of {old}, if memory allows", cut)


def _with_layers(trace: Trace, plan: Diagnosis, counts: Sequence[int]) -> Diagnosis:
    """The plan with `counts[k]` layers on stage k; all layers of a stage count alike.

    The first and the last stage also hold embedding and head, whose share was not measured. So a
    layer added or taken away there counts as the stage's mean, but at most as the quickest layer of
    middle stages on like devices. If there are none, a layer taken away counts at most as the
    quickest layer of any middle stage.
    """

    def like(stage: StageTimes, other: StageTimes) -> bool:
        device = trace.processes[stage.process].device
        same_kind = device != "" and trace.processes[other.process].device == device
        return other.process == stage.process or same_kind

    def of_layer(stage: StageTimes) -> tuple[float, float]:
        layers = stage.end - stage.start
        return stage.forward_s / layers, stage.backward_s / layers

    middle = [stage for stage in plan.stages[1:-1] if stage.end > stage.start]
    stages = []
    for stage, layers in zip(plan.stages, counts, strict=True):
        more = layers - (stage.end - stage.start)
        if stage.end > stage.start and more:
            layer = of_layer(stage)
            alike = [other for other in middle if like(stage, other)]
            if stage.index in (0, len(counts) - 1) and (alike or (middle and more < 0)):
                quick = min(map(of_layer, alike or middle), key=sum)
                layer = min(layer[0], quick[0]), min(layer[1], quick[1])
            forward_s = stage.forward_s + more * layer[0]
            stage = replace(
                stage, forward_s=forward_s, backward_s=stage.backward_s + more * layer[1]
            )
        stages.append(stage)
    return replace(plan, stages=tuple(stages))


def _interleaved(plan: Diagnosis) -> Iterator[_Idea]:
    """Each process holds two stages of half the layers instead of one."""
    one_each = len({stage.process for stage in plan.stages}) == len(plan.stages)
    if one_each and min(stage.end - stage.start for stage in plan.stages) >= 2:
        # The last process has a link to the first one, the coordinator, whatever else it has.
        back = replace(plan.boundaries[-1], way="direct")
        text = "two stages of half the layers for each process (a plan that lists each twice)"
        stages = tuple(scaled(stage, 0.5) for stage in plan.stages)
        boundaries = (*plan.boundaries, back, *plan.boundaries)
        yield _Idea("interleave", text, replace(plan, stages=stages * 2, boundaries=boundaries))


def _codecs(plan: Diagnosis) -> list[_Idea]:
    """For each codec, activations and gradients in fewer bytes, where they have no codec yet."""
    if all(b.way == "same process" or b.codec for b in plan.boundaries):
        return []
    import torch  # slow

    from hetero_framework.core.codecs import CODECS, Codec

    def coded(b: Boundary, codec: Codec) -> Boundary:
        dtype = getattr(torch, b.dtype, None)
        if b.way == "same process" or b.codec or not isinstance(dtype, torch.dtype):
            return b
        elements = max(b.forward_bytes, b.backward_bytes) // dtype.itemsize
        nbytes = codec.nbytes((elements,), dtype) if codec.supports(dtype) else math.inf
        share = nbytes / max(1, elements * dtype.itemsize)
        latency_s = b.latency_s + elements * _CODING_S
        return replace(scaled(b, share), latency_s=latency_s) if share < 1 else b

    ideas = []
    for name, codec in CODECS.items():
        boundaries = tuple(coded(b, codec) for b in plan.boundaries)
        if boundaries != plan.boundaries:
            text = f'wire.activations and wire.gradients "{name}" (rounds tensors at boundaries)'
            ideas.append(_Idea(name, text, replace(plan, boundaries=boundaries)))
    return ideas


def text(d: Diagnosis) -> str:
    """The diagnosis as text for the user."""
    steps = f"steps {d.steps[0]} to {d.steps[-1]}" if len(d.steps) > 1 else f"step {d.steps[0]}"
    return lines(
        f"{steps}: {plural(d.micro_batches, 'micro-batch')} through "
        f"{plural(len(d.stages), 'stage')}",
        f"a step takes {seconds(d.step_s)}: pipeline {seconds(d.pipeline_s)}, then "
        f"{seconds(d.update_s)} for gradients and optimizer",
        None if d.between_s is None else f"between steps {seconds(d.between_s)}",
        f"no order of these tasks and transfers takes less than {seconds(d.bound_s)};",
        f"the pipeline took {d.ratio:.2f} times that",
        *_tables(d),
        "",
        *_notes(d),
        *_advice(d),
    )


def _tables(d: Diagnosis) -> Iterator[str]:
    """Processes, and stages whose layers visit from host memory, each after an empty line."""
    streaming, processes = [], []
    for p in d.processes:
        parts = (p.compute_s, p.activations_s, p.gradients_s, p.wire_s, p.start_s + p.done_s)
        shares = (share(part / (d.pipeline_s or 1.0)) for part in parts)
        processes.append([p.name, ", ".join(map(str, p.stages)), *shares])
    for s in d.stages:
        if s.streaming_s:
            layers = f"{s.offload} of {plural(s.end - s.start, 'layer')}"
            shown = (share(s.hidden), f"{share(s.awaited)} of its tasks")
            streaming.append([str(s.index), layers, seconds(s.streaming_s), *shown])
    yield from ("", *table(_PROCESS_HEAD, processes, left=(0, 1)))
    if streaming:
        yield from ("", *table(_STREAMING_HEAD, streaming, left=(0, 1)))


def _advice(d: Diagnosis) -> Iterator[str]:
    if not d.changes:
        yield "one stage has nothing to wait for: only a faster device would help"
        return
    best, same = d.best, d.best_of(SAME_RESULT)
    if best is None:
        yield "no single change would help much; predicted for each:"
    else:
        yield f"most would help: {best.text}"
        if same != best:
            harmless = same.text if same is not None else "none would help much"
            yield f"of changes that leave the results as they are: {harmless}"
        yield "predicted for each:"
    rows = [
        (f"{round(change.gain, 2) + 0.0:+.0%}", seconds(change.step_s), change.text)
        for change in sorted(d.changes, key=lambda change: -change.gain)
    ]
    yield from table(("samples/s", "a step", "change"), rows, left=(2,))


def _notes(d: Diagnosis) -> Iterator[str]:
    slower = d.pipeline_s / (d.simulated_s or math.inf)
    bound = [stage for stage in d.stages if stage.awaited > WORTH_IT]
    if bound:
        numbers = ", ".join(str(stage.index) for stage in bound)
        yield (
            f"note: weights from host memory bound stage{'s' if len(bound) > 1 else ''} {numbers}:"
            " they are awaited in the tasks, which take longer by that"
        )
    uneven = [stage for stage in d.stages if stage.slowest > _UNEVEN]
    if slower > _UNEXPLAINED:
        yield (
            f"note: the pipeline took {slower:.2f} times what these times of stages and links "
            "explain: processes that share cores or a link, other work on a machine, or uneven "
            "micro-batches; trust the predictions less"
        )
    if uneven:
        numbers = ", ".join(str(stage.index) for stage in uneven)
        worst = max(stage.slowest for stage in uneven)
        yield (
            f"note: tasks of stage{'s' if len(uneven) > 1 else ''} {numbers} are uneven, the "
            f"slowest {worst:.1f} times the median: samples of other lengths, or other work on a "
            "machine"
        )
    if d.dropped:
        yield f"note: {d.dropped} spans were not kept; lower training.timeline_steps"
    if slower > _UNEXPLAINED or uneven or d.dropped or bound:
        yield ""
