"""The two pictures of a plan: the layers and memory of each process, and the predicted step, in the
colours of a measured one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetero_framework.config import process_name
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import SimulatedSpan
from hetero_framework.extras.observe import pictures, timeline_picture
from hetero_framework.extras.observe.timeline_picture import Bar, Row, StepPicture
from hetero_framework.extras.planner import Result
from hetero_framework.extras.planner.plan_report import held_text
from hetero_framework.units import plural, seconds, share, size

WorkerId = int | str
_MEMORY = "#7d9c86"
_ROW_PT, _TOP_PT, _BOTTOM_PT, _GAP_PT, _MEMORY_PT = 46.0, 66.0, 46.0, 34.0, 190.0
_LAYERS_PT, _LAYER_PT = (420.0, 900.0), 16.0
_BAR, _LINE_PT = 0.52, 5.0


def draw_plan(result: Result, path: str, *, is_estimate: bool = False) -> tuple[Path, Path]:
    """Write both pictures, the step beside `path` as NAME-step; return their files. Raises
    UserError without matplotlib, for an unknown format and for a file that cannot be written."""
    target = Path(path)
    kind = "Estimated" if is_estimate else "Predicted"
    first = pictures.save(lambda: plan(result, kind), target)
    return first, timeline_picture.draw(step(result, kind), pictures.beside(target))


class _Row(NamedTuple):
    """A process: what it holds (layers [start, end), and whether it computes again backward), and
    bytes of its memory that the plan takes and that there are."""

    name: str
    detail: str
    held: Sequence[tuple[int, int, bool]] = ()
    memory: str = "not used"
    memory_bytes: float = 0.0
    capacity_bytes: float = 0.0


def _rows(result: Result) -> list[_Row]:
    """Those of all processes; those that are not used come at the end."""
    rows, again = [], result.gradient_checkpointing
    for use in result.devices:
        held = [
            (entry["start"], entry["end"], bool(again.get(str(k))))
            for k, entry in enumerate(result.shard_plan)
            if entry["id"] == use.id
        ]
        capacity = use.memory_bytes + max(0, use.free_bytes)
        told = f"{size(use.memory_bytes)} of {size(capacity)}, busy {share(use.busy)}"
        detail = held_text([(start, end) for start, end, _ in held])
        rows.append(_Row(process_name(use.id), detail, held, told, use.memory_bytes, capacity))
    return rows + [_Row(process_name(id), "not used") for id in result.unused]


def plan(result: Result, kind: str = "Predicted") -> Any:
    """The plan as a matplotlib Figure: a row for each process, its layers, and its memory."""
    from matplotlib.ticker import MaxNLocator

    layers, rows = int(result.shard_plan[-1]["end"]), _rows(result)
    again = any(recompute for row in rows for _, _, recompute in row.held)
    subtitle = (
        f"{plural(layers, 'layer')} on {plural(len(result.devices), 'process')}; {kind.lower()}"
        f" step {seconds(result.predicted_step_s)}"
        f"{'; orange: computed again backward' if again else ''}"
    )
    left = 24 + pictures.names_pt((row.name, row.detail) for row in rows)
    plot = min(max(_LAYER_PT * layers, _LAYERS_PT[0]), _LAYERS_PT[1])
    beside = max(_MEMORY_PT, *(pictures.text_pt(row.memory, 8) for row in rows))
    width = left + plot + _GAP_PT + beside + 24
    headed = pictures.heading_pt("Plan", subtitle)
    plot, width = plot + max(0.0, headed - width), max(width, headed)
    drawn = pictures.sheet("Plan", subtitle, width, _TOP_PT + _ROW_PT * len(rows) + _BOTTOM_PT)
    on, high, count = _BOTTOM_PT, _ROW_PT * len(rows), len(rows)
    of_model = pictures.rows_in(drawn, (left, on, plot, high), layers, count, "layers of the model")
    place = (left + plot + _GAP_PT, on, beside, high)
    memory = pictures.rows_in(drawn, place, 1.0, count, "memory")
    of_model.grid(axis="x", color=pictures.GRID, linewidth=0.5)
    of_model.xaxis.set_major_locator(MaxNLocator(integer=True))
    memory.set_xticks([])
    most = max(row.capacity_bytes for row in rows) or 1.0
    for y, row in enumerate(rows):
        pictures.name_row(of_model, -8 / plot, (row.name, y + 0.3), (row.detail, y + 0.66))
        _draw_layers(of_model, row, y, plot / layers)
        look = {"color": pictures.IDLE, "edgecolor": pictures.GRID, "linewidth": 0.6}
        memory.barh(y + 0.5, row.capacity_bytes / most, 0.22, **look)
        memory.barh(y + 0.5, row.memory_bytes / most, 0.22, color=_MEMORY)
        memory.text(0, y + 0.23, row.memory, fontsize=8, color=pictures.FAINT, va="center")
    return drawn


def _draw_layers(axes: Any, row: _Row, top: int, points_per_layer: float) -> None:
    y = top + (1 - _BAR) / 2
    axes.barh(y, axes.get_xlim()[1], _BAR, align="edge", color=pictures.IDLE)
    for start, end, recompute in row.held:
        fill = timeline_picture.color_of("backward" if recompute else "forward", 0.35)
        wide, look = end - start, {"align": "edge", "color": fill, "edgecolor": pictures.PAPER}
        # One without layers holds the embedding or the head alone: a line at its end of the model.
        line = _LINE_PT / points_per_layer
        axes.barh(y, wide or line, _BAR, start if wide or not start else start - line, **look)
        text = f"{start}-{end - 1}" if wide > 1 else str(start)
        if wide and wide * points_per_layer > pictures.text_pt(text, 8.5) + 2:
            ink = timeline_picture.ink_on(fill)
            place = {"ha": "center", "va": "center", "fontsize": 8.5, "color": ink}
            axes.text(start + wide / 2, top + 0.5, text, **place)


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
