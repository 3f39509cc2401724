"""The bottleneck of a run's steps: how their time was spent, and which change would help most.

`measured` has the times of stages, processes and boundaries, `bound` the shortest possible step,
and `simulated_changes` the effect of changes.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from hetero_framework.config import layers_text
from hetero_framework.core.spans import ALL_STEPS, COMPUTE
from hetero_framework.extras.observe import measured, simulated_changes
from hetero_framework.extras.observe.timeline import Trace
from hetero_framework.tables import table
from hetero_framework.units import plural, seconds, share, size

WORTH_IT = 0.05
"""A change that brings less is not called a help: measured steps differ by as much."""
SAME_RESULT = frozenset({"direct", "max_in_flight", "cut", "interleave", "smaller"})
"""Kinds of changes after which a run learns the same: to the last bit, or but for rounding."""
_AS_SIMULATED = 1.02
_UNEXPLAINED = 1.15
_UNEVEN = 2.0


@dataclass(frozen=True)
class Diagnosis(simulated_changes.Baseline):
    """The times of `steps` (counted from 1), and the changes that would help."""

    steps: tuple[int, ...]
    bound_s: float
    stages: tuple[measured.StageTimes, ...]
    processes: tuple[measured.ProcessTimes, ...]
    boundaries: tuple[measured.Boundary, ...]
    changes: tuple[simulated_changes.Change, ...]
    dropped: int

    @property
    def ratio(self) -> float:
        """The pipeline's measured seconds over its bound."""
        return self.pipeline_s / self.bound_s if self.bound_s else 1.0

    @property
    def best(self) -> simulated_changes.Change | None:
        """The change that would help most; None when none would help much."""
        return self.best_of({change.kind for change in self.changes})

    def best_of(self, kinds: Collection[str]) -> simulated_changes.Change | None:
        """The same among some kinds: of those within 1 % of the best, the one that asks least."""
        possible = [change for change in self.changes if change.kind in kinds]
        most = max((change.gain for change in possible), default=0.0)
        if most < WORTH_IT:
            return None
        return next(
            change for change in possible if change.gain >= most - simulated_changes.AS_GOOD
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, for programs."""
        best = self.best
        return {**asdict(self), "ratio": self.ratio, "best": None if best is None else asdict(best)}


def diagnose(trace: Trace) -> Diagnosis:
    """Analyse the steps of a trace that have its usual number of micro-batches."""
    counts = {
        step: len({e.micro_batch for e in trace.of_step(step) if e.kind in COMPUTE})
        for step in trace.steps
    }
    if trace.settings.get("timeline_steps") == ALL_STEPS and len(counts) > 1:
        del counts[trace.steps[0]]  # a run's first step is not typical
    m = Counter(counts.values()).most_common(1)[0][0]
    numbers = [step for step, count in counts.items() if count == m]
    steps = [measured.MeasuredStep.of(trace, step) for step in numbers]
    pairs = itertools.pairwise(steps)
    between = [max(0.0, b.began - a.ended) for a, b in pairs if b.step == a.step + 1]
    stages = measured.stage_times(trace, steps)
    nics = measured.NicSpeeds(steps)
    every, inner = range(len(trace.processes)), range(len(trace.stages) - 1)
    boundaries = tuple(measured.boundary_of(trace, steps, nics, k) for k in inner)
    pipeline_s = statistics.fmean(step.computed - step.began for step in steps)
    plan = simulated_changes.MeasuredPlan(stages, boundaries)
    max_in_flight = trace.settings.get("max_in_flight")
    simulated_s = plan.step_s(m, max_in_flight)
    if simulated_s > _AS_SIMULATED * pipeline_s:
        plan, simulated_s = simulated_changes.overlapping(plan, m, max_in_flight, pipeline_s)
    now = simulated_changes.Baseline(
        micro_batches=m,
        max_in_flight=max_in_flight,
        step_s=statistics.fmean(step.ended - step.began for step in steps),
        pipeline_s=pipeline_s,
        update_s=statistics.fmean(step.ended - step.computed for step in steps),
        between_s=statistics.fmean(between) if between else None,
        simulated_s=simulated_s,
    )
    return Diagnosis(
        **vars(now),
        steps=tuple(step + 1 for step in numbers),
        bound_s=statistics.fmean(step.bound_s for step in steps),
        stages=stages,
        processes=tuple(measured.process_times(trace, steps, n) for n in every),
        boundaries=boundaries,
        changes=tuple(simulated_changes.changes(trace, now, plan, nics)),
        dropped=trace.dropped,
    )


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis as text for the user."""
    steps, between_s = diagnosis.steps, diagnosis.between_s
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    lines = [
        f"{which}: {plural(diagnosis.micro_batches, 'micro-batch')} through "
        f"{plural(len(diagnosis.stages), 'stage')}",
        f"a step takes {seconds(diagnosis.step_s)}: pipeline {seconds(diagnosis.pipeline_s)}, then "
        f"{seconds(diagnosis.update_s)} for gradients and optimizer",
        *([f"between steps {seconds(between_s)}"] if between_s is not None else []),
        f"no order of these tasks and transfers takes less than {seconds(diagnosis.bound_s)};",
        f"the pipeline took {diagnosis.ratio:.2f} times that",
        "",
        *table(_STAGE_HEAD, [_stage_row(diagnosis, s) for s in diagnosis.stages], left=(0, 1, 2)),
        "",
        *table(_PROCESS_HEAD, [_process_row(diagnosis, p) for p in diagnosis.processes]),
    ]
    crossed = [b for b in diagnosis.boundaries if b.way != "same process"]
    if crossed:
        lines += ["", *table(_LINKS_HEAD, [_links_row(p) for p in diagnosis.processes])]
        lines += ["", *table(_BOUNDARY_HEAD, [_boundary_row(b) for b in crossed], left=(0, 1))]
    return "\n".join([*lines, "", *_notes(diagnosis), *_advice(diagnosis)])


_STAGE_HEAD = ("stage", "process", "layers", "forward", "backward")
_PROCESS_HEAD = (
    "process", "computes", "waits: activations", "waits: gradients", "of it wire", "idle"
)  # fmt: skip
_LINKS_HEAD = ("links of", "send", "of it hidden", "receive", "of it hidden")
_BOUNDARY_HEAD = ("boundary", "way", "activation", "wire", "gradient", "wire", "delay")


def _stage_row(diagnosis: Diagnosis, stage: measured.StageTimes) -> tuple[str, ...]:
    process = next(p.name for p in diagnosis.processes if stage.index in p.stages)
    times = (seconds(stage.forward_s), seconds(stage.backward_s))
    if stage.index == len(diagnosis.stages) - 1:
        times = (seconds(stage.forward_s + stage.backward_s), "(both)")
    return (str(stage.index), process, layers_text(stage.start, stage.end), *times)


def _process_row(diagnosis: Diagnosis, p: measured.ProcessTimes) -> tuple[str, ...]:
    parts = (p.compute_s, p.activations_s, p.gradients_s, p.wire_s, p.start_s + p.done_s)
    whole = diagnosis.pipeline_s
    return (p.name, *(share(part / whole) if whole else "-" for part in parts))


def _links_row(p: measured.ProcessTimes) -> tuple[str, ...]:
    sent = (size(p.sent_bytes), share(p.send_hidden)) if p.send_s else ("-", "-")
    received = (size(p.received_bytes), share(p.receive_hidden)) if p.receive_s else ("-", "-")
    return (p.name, *sent, *received)


def _boundary_row(b: measured.Boundary) -> tuple[str, ...]:
    way = f"{b.way}, {b.codec}" if b.codec else b.way
    there = (size(b.forward_bytes), seconds(b.forward_s))
    back = (size(b.backward_bytes), seconds(b.backward_s)) if b.backward_bytes else ("-", "-")
    return (f"{b.after} - {b.after + 1}", way, *there, *back, seconds(b.latency_s))


def _advice(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.changes:
        return ["one stage has nothing to wait for: only a faster device would help"]
    best, same = diagnosis.best, diagnosis.best_of(SAME_RESULT)
    if best is None:
        lines = ["no single change would help much; predicted for each:"]
    else:
        lines = [f"most would help: {best.text}"]
        if same != best:
            harmless = same.text if same is not None else "none would help much"
            lines.append(f"of changes that leave the results as they are: {harmless}")
        lines.append("predicted for each:")
    rows = [
        (f"{round(change.gain, 2) + 0.0:+.0%}", seconds(change.step_s), change.text)
        for change in sorted(diagnosis.changes, key=lambda change: -change.gain)
    ]
    return lines + table(("samples/s", "a step", "change"), rows, left=(2,))


def _notes(diagnosis: Diagnosis) -> list[str]:
    notes = []
    if diagnosis.simulated_s and diagnosis.pipeline_s > _UNEXPLAINED * diagnosis.simulated_s:
        notes.append(
            f"the pipeline took {diagnosis.pipeline_s / diagnosis.simulated_s:.2f} times what "
            "these times of stages and links explain: processes that share cores or a link, other "
            "work on a machine, or uneven micro-batches; trust the predictions less"
        )
    uneven = [stage for stage in diagnosis.stages if stage.slowest > _UNEVEN]
    if uneven:
        numbers = ", ".join(str(stage.index) for stage in uneven)
        worst = max(stage.slowest for stage in uneven)
        notes.append(
            f"tasks of stage{'s' if len(uneven) > 1 else ''} {numbers} are uneven, the slowest "
            f"{worst:.1f} times the median: samples of other lengths, or other work on a machine"
        )
    if diagnosis.dropped:
        notes.append(f"{diagnosis.dropped} spans were not kept; lower training.timeline_steps")
    return [*(f"note: {note}" for note in notes), ""] if notes else []
