"""One recorded step as the rows and bars of its picture."""

from __future__ import annotations

from hetero_framework import units
from hetero_framework.core.spans import COMMIT, COMPUTE, RECEIVE, SEND
from hetero_framework.extras.observe.measured import MeasuredStep
from hetero_framework.extras.observe.timeline import Trace, TraceEvent
from hetero_framework.extras.observe.timeline_picture import Bar, Row, StepPicture


def picture(trace: Trace, step: int) -> StepPicture:
    """Step `step`, counted from 0, ready to be drawn, with its bound."""
    taken = MeasuredStep.of(trace, step)
    zero, seconds = taken.began, taken.computed - taken.began
    stages_of = [
        [k for k, stage in enumerate(trace.stages) if stage.process == number]
        for number in range(len(trace.processes))
    ]

    def shade(event: TraceEvent) -> float:
        stages = stages_of[event.process]
        return stages.index(event.stage) / max(1, len(stages) - 1)

    def row(number: int) -> Row:
        events = [event for event in taken.events if event.process == number]
        tasks = [e for e in events if e.kind in COMPUTE]
        bars = [Bar(e.kind, e.began - zero, e.ended - zero, e.micro_batch, shade(e)) for e in tasks]
        bars += [Bar("update", e.began - zero, e.ended - zero) for e in events if e.kind == COMMIT]
        waits = [w for w in taken.waits if w.process == number and w.reason != "start"]
        bars += [Bar(w.reason, w.began - zero, w.ended - zero) for w in waits]
        stages, name = stages_of[number], trace.processes[number].name
        detail = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        return Row(name, detail, bars, moved(events, SEND), moved(events, RECEIVE))

    def moved(events: list[TraceEvent], kind: str) -> list[Bar]:
        return [
            Bar(event.what.lower(), event.began - zero, event.ended - zero)
            for event in events
            if event.kind == kind and event.what in ("FORWARD", "BACKWARD") and event.began >= zero
        ]

    count = len({event.micro_batch for event in taken.events if event.kind in COMPUTE})
    return StepPicture(
        f"Step {step + 1}",
        f"{units.plural(count, 'micro-batch')}, {units.plural(len(trace.stages), 'stage')} on "
        f"{units.plural(len(trace.processes), 'process')}; "
        f"the pipeline took {units.seconds(seconds)}, "
        f"{seconds / taken.bound_s:.2f} times its bound",
        [row(number) for number in range(len(trace.processes))],
        taken.bound_s,
    )
