"""The two pictures of a plan: the layers of each process, and the predicted step."""

from __future__ import annotations

from pathlib import Path

from hetero_framework.config import process_name
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import SimulatedSpan
from hetero_framework.extras.observe import pictures, plan_picture, timeline_picture
from hetero_framework.extras.observe.plan_picture import Held, PlanPicture, PlanRow
from hetero_framework.extras.observe.timeline_picture import Bar, Row, StepPicture
from hetero_framework.extras.planner import Result
from hetero_framework.extras.planner.plan_report import held_text
from hetero_framework.units import plural, seconds

WorkerId = int | str


def draw_plan(result: Result, path: str, *, is_estimate: bool = False) -> tuple[Path, Path]:
    """Write both pictures, the step beside `path` as NAME-step; return their files. Raises
    UserError without matplotlib, for an unknown format and for a file that cannot be written."""
    target = Path(path)
    kind = "Estimated" if is_estimate else "Predicted"
    first = pictures.save(lambda: plan_picture.figure(plan(result, kind)), target)
    return first, timeline_picture.draw(step(result, kind), pictures.beside(target))


def plan(result: Result, kind: str = "Predicted") -> PlanPicture:
    """Processes and layers, those that are not used at the end."""
    layers = int(result.shard_plan[-1]["end"])
    rows = []
    for use in result.devices:
        held = [
            Held(e["start"], e["end"], k, bool(result.gradient_checkpointing.get(str(k))))
            for k, e in enumerate(result.shard_plan)
            if e["id"] == use.id
        ]
        text = held_text([(one.start, one.end) for one in held])
        capacity = use.memory_bytes + max(0, use.free_bytes)
        name = process_name(use.id)
        rows.append(PlanRow(name, text, held, use.memory_bytes, capacity, use.busy))
    rows += [PlanRow(process_name(id), "not used") for id in result.unused]
    again = any(one.recompute for row in rows for one in row.held)
    subtitle = (
        f"{plural(layers, 'layer')} on {plural(len(result.devices), 'process')}; {kind.lower()}"
        f" step {seconds(result.predicted_step_s)}"
        f"{'; orange: computed again backward' if again else ''}"
    )
    return PlanPicture("Plan", subtitle, layers, rows)


def step(result: Result, kind: str = "Predicted") -> StepPicture:
    """The simulated step: tasks of each process, and transfers on its links."""
    schedule, spans = result.schedule, result.schedule.spans
    owners: list[WorkerId] = [entry["id"] for entry in result.shard_plan]
    held = {id: [k for k, owner in enumerate(owners) if owner == id] for id in owners}

    def bar(span: SimulatedSpan) -> Bar:
        stage = span.task.stage
        what = "forward" if span.task.kind == FORWARD else "backward"
        if span.is_transfer:  # a bar of a link, without a number
            return Bar(what, span.began, span.ended)
        what = "forward_backward" if stage == len(owners) - 1 else what
        stages = held[owners[stage]]
        shade = stages.index(stage) / max(1, len(stages) - 1)
        return Bar(what, span.began, span.ended, span.task.micro_batch, shade)

    def sender(span: SimulatedSpan) -> WorkerId:
        return owners[span.task.stage + (1 if span.task.kind == BACKWARD else -1)]

    sent = [span for span in spans if span.is_transfer and span.leg == 0]
    passed_on = {span.task: span for span in spans if span.is_transfer and span.leg == 1}
    received = [passed_on.get(span.task, span) for span in sent]
    rows = []
    for owner, stages in held.items():
        rows.append(
            Row(
                process_name(owner),
                f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}",
                [bar(s) for s in spans if not s.is_transfer and owners[s.task.stage] == owner],
                [bar(s) for s in sent if sender(s) == owner],
                [bar(s) for s in received if owners[s.task.stage] == owner],
            )
        )
    count = plural(schedule.micro_batches, "micro-batch")
    return StepPicture(
        f"{kind} step",
        f"{count}, {plural(len(owners), 'stage')} on {plural(len(rows), 'process')};"
        f" {seconds(result.predicted_step_s)}",
        rows,
        result.lower_bound_s,
    )
