"""The picture of one step: for each process a row of tasks, and rows of transfers on its links.

Drawn by matplotlib (the extra "pictures"). Forward is blue and backward orange, which people with
any common colour blindness tell apart; later stages of a process are darker.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_framework.core.spans import AWAITED, COMMIT, COMPUTE, RECEIVE, SEND, VISITS
from hetero_framework.extras.observe import pictures
from hetero_framework.extras.observe.measured import MeasuredStep
from hetero_framework.extras.observe.timeline import Trace, TraceEvent
from hetero_framework.units import plural
from hetero_framework.units import seconds as seconds_text

SHADES = {"forward": ("#9ccdf0", "#1f6fae"), "backward": ("#f7c568", "#c46a00")}
"""Colours of the first and of the last stage of a process."""
PLAIN = {
    "update": "#8b8b8b",
    **{"activations": "#dfeaf3", "gradients": "#fbeeda"},
    **{"visits": "#7fb98f", "awaited": "#1d5c35"},
}
_MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "update": "gradients and optimizer",
    "activations": "waits for activations",
    "gradients": "waits for gradients",
    "visits": "host: to and from host memory",
    "awaited": "waits for weights",
}
_BOUND = "#a3195b"
_TASK, _OUT, _IN, _VISITS, _STRIP = 0.0, 0.5, 0.62, 0.74, 0.1
"""The places of tasks, of the links' transfers and of visits in a row of height 1, downwards."""
_BAR = 0.45
_LAYERS = {"activations": 0, "gradients": 0, "awaited": 2}
_WIDTH_PT = (620.0, 2400.0)
_NUMBER_PT = 15.0
"""Room for the median forward's number, within the least and the greatest width."""
_ROW_PT, _TOP_PT, _BOTTOM_PT = 58.0, 86.0, 46.0
_LEGEND_PT = 8.5


@dataclass(frozen=True)
class Bar:
    """A span of a row, in seconds after the step's beginning; `shade` is 0 for the first stage of a
    process, 1 for the last one. `kind` is "forward", "backward", "forward_backward", "update",
    "activations" or "gradients" (a wait); on a link "forward" or "backward", the direction; of
    host memory "visits" or "awaited"."""

    kind: str
    began: float
    ended: float
    number: int | None = None
    shade: float = 0.0


@dataclass(frozen=True)
class Row:
    """One process: its name, what it holds, its tasks and waits, what its links moved, and what
    came and went between its host memory and its device."""

    name: str
    detail: str
    bars: Sequence[Bar]
    sends: Sequence[Bar] = field(default_factory=tuple)
    receives: Sequence[Bar] = field(default_factory=tuple)
    visits: Sequence[Bar] = field(default_factory=tuple)


@dataclass(frozen=True)
class StepPicture:
    """The contents of the picture. `bound_s` is marked: no schedule could end earlier."""

    title: str
    subtitle: str
    rows: Sequence[Row]
    bound_s: float

    @property
    def seconds(self) -> float:
        bars = [(*row.bars, *row.sends, *row.receives, *row.visits) for row in self.rows]
        return max(bar.ended for bar in itertools.chain(*bars))


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
        visits = [
            Bar("awaited" if e.kind == AWAITED else "visits", e.began - zero, e.ended - zero)
            for e in events
            if e.kind in VISITS and e.ended > zero
        ]
        return Row(name, detail, bars, moved(events, SEND), moved(events, RECEIVE), visits)

    def moved(events: list[TraceEvent], kind: str) -> list[Bar]:
        return [
            Bar(event.what.lower(), event.began - zero, event.ended - zero)
            for event in events
            if event.kind == kind and event.what in ("FORWARD", "BACKWARD") and event.began >= zero
        ]

    count = len({event.micro_batch for event in taken.events if event.kind in COMPUTE})
    return StepPicture(
        f"Step {step + 1}",
        f"{plural(count, 'micro-batch')}, {plural(len(trace.stages), 'stage')} on "
        f"{plural(len(trace.processes), 'process')}; "
        f"the pipeline took {seconds_text(seconds)}, "
        f"{seconds / taken.bound_s:.2f} times its bound",
        [row(number) for number in range(len(trace.processes))],
        taken.bound_s,
    )


def draw(picture: StepPicture, path: str | os.PathLike[str], form: str | None = None) -> Path:
    """As `pictures.save`."""
    return pictures.save(lambda: figure(picture), path, form)


def figure(picture: StepPicture) -> Any:
    """The picture as a matplotlib Figure."""
    left = 44 + pictures.names_pt((row.name, row.detail) for row in picture.rows)
    headed = max(pictures.heading_pt(picture.title, picture.subtitle), _legend_pt(picture))
    plot = max(_plot_width(picture), headed - left - 24)
    width, height = left + plot + 24, _TOP_PT + _ROW_PT * len(picture.rows) + _BOTTOM_PT
    drawn = pictures.sheet(picture.title, picture.subtitle, width, height)
    place = (left, _BOTTOM_PT, plot, height - _TOP_PT - _BOTTOM_PT)
    label = "milliseconds since the first task of the step"
    least = len(picture.rows) - (0.1 if any(row.visits for row in picture.rows) else 0.2)
    axes = pictures.rows_in(drawn, place, picture.seconds * 1e3, least, label)
    axes.grid(axis="x", color=pictures.GRID, linewidth=0.5)
    points_per_s = plot / picture.seconds
    for number, row in enumerate(picture.rows):
        _draw_row(axes, row, number, picture.seconds, points_per_s)
    _draw_legend(drawn, picture, 16 / width, 1 - 48 / height)
    axes.axvline(picture.bound_s * 1e3, color=_BOUND, linewidth=1.5)
    at_end = picture.bound_s > 0.9 * picture.seconds
    axes.text(
        picture.bound_s * 1e3, -0.06, f"bound {seconds_text(picture.bound_s)}", fontsize=9,
        color=_BOUND, weight="bold", ha="right" if at_end else "center",
    )  # fmt: skip
    return drawn


def _plot_width(picture: StepPicture) -> float:
    """Points: wide enough for the median forward to show its number, within limits."""
    forwards = sorted(
        bar.ended - bar.began for row in picture.rows for bar in row.bars if bar.kind == "forward"
    )
    median = forwards[len(forwards) // 2] if forwards else picture.seconds
    return min(max(_NUMBER_PT * picture.seconds / max(median, 1e-9), _WIDTH_PT[0]), _WIDTH_PT[1])


def _draw_row(axes: Any, row: Row, top: int, whole_s: float, points_per_s: float) -> None:
    x = -28 / (points_per_s * whole_s)
    pictures.name_row(axes, x, (row.name, top + 0.16), (row.detail, top + 0.4))
    strips = [("", _TASK, _BAR, row.bars)]
    if row.sends or row.receives:
        strips += [("out", _OUT, _STRIP, row.sends), ("in", _IN, _STRIP, row.receives)]
    if row.visits:
        strips += [("host", _VISITS if len(strips) > 1 else _OUT, _STRIP, row.visits)]
    for name, down, high, bars in strips:
        y = top + down
        axes.broken_barh([(0, whole_s * 1e3)], (y, high), facecolors=pictures.IDLE)
        axes.text(
            -6 / (points_per_s * whole_s), y + high / 2, name, ha="right", va="center",
            transform=axes.get_yaxis_transform(), fontsize=6.5, color=pictures.FAINT,
        )  # fmt: skip
        # Waits first: a task may begin before the wait that it ends was over by its clock. But
        # those for weights are within a copy.
        for bar in sorted(bars, key=lambda bar: _LAYERS.get(bar.kind, 1)):
            _draw_bar(axes, bar, y, high, points_per_s)


def _draw_bar(axes: Any, bar: Bar, y: float, high: float, points_per_s: float) -> None:
    wide = (bar.ended - bar.began) * points_per_s
    least = 0.0 if bar.kind in ("activations", "gradients") else 0.6 / points_per_s
    span = [(bar.began * 1e3, max(bar.ended - bar.began, least) * 1e3)]
    line = 0.6 if wide > 3 and high == _BAR and bar.kind in (*SHADES, "forward_backward") else 0.0
    halves = bar.kind.split("_")
    for number, kind in enumerate(halves):
        share = high / len(halves)
        axes.broken_barh(
            span, (y + number * share, share), facecolors=color_of(kind, bar.shade),
            edgecolor="white", linewidth=line,
        )  # fmt: skip
    if bar.number is None:
        return
    text = str(bar.number)
    size = min(7.5, (wide - 1.5) / pictures.text_pt(text, 1.0))
    if size >= 5.0:
        # Of two halves on the lower one: two colours behind a number make it hard to read.
        middle = y + high * (0.75 if len(halves) > 1 else 0.5)
        axes.text(
            (bar.began + bar.ended) * 5e2, middle, text, ha="center", va="center_baseline",
            fontsize=size, color=ink_on(color_of(halves[-1], bar.shade)),
        )  # fmt: skip


def _legend(picture: StepPicture) -> list[tuple[str | None, str]]:
    """A kind of bar, or None for a note, and what it means."""
    bars = [bar for row in picture.rows for bar in (*row.bars, *row.visits)]
    kinds = {kind for bar in bars for kind in bar.kind.split("_")}
    items: list[tuple[str | None, str]] = [(k, text) for k, text in _MEANINGS.items() if k in kinds]
    if any(bar.shade for bar in bars):
        items.append((None, "darker: a later stage of the process"))
    if any(row.sends or row.receives for row in picture.rows):
        items.append((None, "out, in: tensors on its links"))
    return items


def _legend_pt(picture: StepPicture) -> float:
    """Its width: each entry has a patch of 1.2, a space of 0.5 and a gap of 1.2 font sizes."""
    return 40 + sum(
        pictures.text_pt(text, _LEGEND_PT) + 2.9 * _LEGEND_PT for _, text in _legend(picture)
    )


def _draw_legend(drawn: Any, picture: StepPicture, x: float, y: float) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(label=text, **({"alpha": 0.0} if kind is None else {"color": color_of(kind, 0.0)}))
        for kind, text in _legend(picture)
    ]
    drawn.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(x, y), ncols=len(handles),
        fontsize=_LEGEND_PT, frameon=False, borderaxespad=0, borderpad=0, handlelength=1.2,
        columnspacing=1.2, handletextpad=0.5, labelcolor=pictures.INK,
    )  # fmt: skip


def color_of(kind: str, shade: float) -> str:
    """The colour of a kind of bar, between the two of its first and its last stage."""
    if kind in PLAIN:
        return PLAIN[kind]
    light, dark = SHADES[kind]
    return "#" + "".join(
        f"{round(int(light[i : i + 2], 16) * (1 - shade) + int(dark[i : i + 2], 16) * shade):02x}"
        for i in (1, 3, 5)
    )


def ink_on(fill: str) -> str:
    """Black or white, whichever is easier to read on a colour: by its luminance (WCAG 2.1)."""
    parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return pictures.INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"
