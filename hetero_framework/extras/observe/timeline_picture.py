"""The picture of one step: for each process a row of tasks, and rows of transfers on its links.

Drawn by matplotlib (the extra "pictures"). Forward is blue and backward orange, which people with
any common colour blindness tell apart; later stages of a process are darker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_framework.extras.observe.pictures import heading_pt, names_pt, save, text_pt
from hetero_framework.units import seconds

SHADES = {"forward": ("#9ccdf0", "#1f6fae"), "backward": ("#f7c568", "#c46a00")}
"""Colours of the first and of the last stage of a process."""
PLAIN = {"update": "#8b8b8b", "activations": "#dfeaf3", "gradients": "#fbeeda"}
_MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "update": "gradients and optimizer",
    "activations": "waits for activations",
    "gradients": "waits for gradients",
}
_IDLE, _PAPER, _INK, _FAINT, _BOUND = "#f1f0ec", "#fdfdfb", "#222222", "#5f6670", "#a3195b"
_TASK, _OUT, _IN, _STRIP = 0.0, 0.5, 0.62, 0.1
"""The places of tasks and of the links' transfers in a row of height 1, downwards."""
_BAR = 0.45
_WIDTH_PT = (620.0, 2400.0)
_NUMBER_PT = 15.0
"""Room for the median forward's number, within the least and the greatest width."""
_ROW_PT, _TOP_PT, _BOTTOM_PT = 58.0, 86.0, 46.0
_LEGEND_PT = 8.5


@dataclass(frozen=True)
class Bar:
    """A span of a row, in seconds after the step's beginning; `shade` is 0 for the first stage of a
    process, 1 for the last one. `kind` is "forward", "backward", "forward_backward", "update",
    "activations" or "gradients" (a wait); on a link "forward" or "backward", the direction."""

    kind: str
    began: float
    ended: float
    number: int | None = None
    shade: float = 0.0


@dataclass(frozen=True)
class Row:
    """One process: its name, what it holds, its tasks and waits, and what its links moved."""

    name: str
    detail: str
    bars: Sequence[Bar]
    sends: Sequence[Bar] = field(default_factory=tuple)
    receives: Sequence[Bar] = field(default_factory=tuple)


@dataclass(frozen=True)
class StepPicture:
    """The contents of the picture. `bound_s` is marked: no schedule could end earlier."""

    title: str
    subtitle: str
    rows: Sequence[Row]
    bound_s: float

    @property
    def seconds(self) -> float:
        bars = [bar for row in self.rows for bar in (*row.bars, *row.sends, *row.receives)]
        return max(bar.ended for bar in bars)


def draw(picture: StepPicture, path: str | os.PathLike[str], form: str | None = None) -> Path:
    """As `pictures.save`."""
    return save(lambda: figure(picture), path, form)


def figure(picture: StepPicture) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure

    left = 44 + names_pt((row.name, row.detail) for row in picture.rows)
    headed = max(heading_pt(picture.title, picture.subtitle), _legend_pt(picture))
    plot = max(_plot_width(picture), headed - left - 24)
    width, height = left + plot + 24, _TOP_PT + _ROW_PT * len(picture.rows) + _BOTTOM_PT
    drawn = Figure(figsize=(width / 72, height / 72), facecolor=_PAPER)
    axes = drawn.add_axes(
        (left / width, _BOTTOM_PT / height, plot / width, 1 - (_TOP_PT + _BOTTOM_PT) / height)
    )
    axes.set(xlim=(0, picture.seconds * 1e3), ylim=(len(picture.rows) - 0.2, 0), yticks=[])
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#d9d8d3", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=_FAINT)
    axes.set_xlabel("milliseconds since the first task of the step", fontsize=9.5, color=_FAINT)
    points_per_s = plot / picture.seconds
    for number, row in enumerate(picture.rows):
        _draw_row(axes, row, number, picture.seconds, points_per_s)
    drawn.text(16 / width, 1 - 24 / height, picture.title, fontsize=14, weight="bold", color=_INK)
    drawn.text(16 / width, 1 - 42 / height, picture.subtitle, fontsize=10.5, color=_FAINT)
    _draw_legend(drawn, picture, 16 / width, 1 - 48 / height)
    axes.axvline(picture.bound_s * 1e3, color=_BOUND, linewidth=1.5)
    at_end = picture.bound_s > 0.9 * picture.seconds
    axes.text(
        picture.bound_s * 1e3, -0.06, f"bound {seconds(picture.bound_s)}", fontsize=9,
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
    place = axes.get_yaxis_transform()  # x in shares of the axes, y in rows
    for text, down, size, weight, color in (
        (row.name, 0.16, 10, "bold", _INK),
        (row.detail, 0.4, 8.5, "normal", _FAINT),
    ):
        axes.text(
            -28 / (points_per_s * whole_s), top + down, text, transform=place, ha="right",
            va="center", fontsize=size, weight=weight, color=color,
        )  # fmt: skip
    strips = [("", _TASK, _BAR, row.bars)]
    if row.sends or row.receives:
        strips += [("out", _OUT, _STRIP, row.sends), ("in", _IN, _STRIP, row.receives)]
    for name, down, high, bars in strips:
        y = top + down
        axes.broken_barh([(0, whole_s * 1e3)], (y, high), facecolors=_IDLE)
        axes.text(
            -6 / (points_per_s * whole_s), y + high / 2, name, transform=place, ha="right",
            va="center", fontsize=6.5, color=_FAINT,
        )  # fmt: skip
        # Waits first: a task may begin before the wait that it ends was over by its clock.
        for bar in sorted(bars, key=lambda bar: bar.kind not in ("activations", "gradients")):
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
    size = min(7.5, (wide - 1.5) / text_pt(text, 1.0))
    if size >= 5.0:
        # Of two halves on the lower one: two colours behind a number make it hard to read.
        middle = y + high * (0.75 if len(halves) > 1 else 0.5)
        axes.text(
            (bar.began + bar.ended) * 5e2, middle, text, ha="center", va="center_baseline",
            fontsize=size, color=ink_on(color_of(halves[-1], bar.shade)),
        )  # fmt: skip


def _legend(picture: StepPicture) -> list[tuple[str | None, str]]:
    """A kind of bar, or None for a note, and what it means."""
    bars = [bar for row in picture.rows for bar in row.bars]
    kinds = {kind for bar in bars for kind in bar.kind.split("_")}
    items: list[tuple[str | None, str]] = [(k, text) for k, text in _MEANINGS.items() if k in kinds]
    if any(bar.shade for bar in bars):
        items.append((None, "darker: a later stage of the process"))
    if any(row.sends or row.receives for row in picture.rows):
        items.append((None, "out, in: tensors on its links"))
    return items


def _legend_pt(picture: StepPicture) -> float:
    """Its width: each entry has a patch of 1.2, a space of 0.5 and a gap of 1.2 font sizes."""
    return 40 + sum(text_pt(text, _LEGEND_PT) + 2.9 * _LEGEND_PT for _, text in _legend(picture))


def _draw_legend(drawn: Any, picture: StepPicture, x: float, y: float) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(label=text, **({"alpha": 0.0} if kind is None else {"color": color_of(kind, 0.0)}))
        for kind, text in _legend(picture)
    ]
    drawn.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(x, y), ncols=len(handles),
        fontsize=_LEGEND_PT, frameon=False, borderaxespad=0, borderpad=0, handlelength=1.2,
        columnspacing=1.2, handletextpad=0.5, labelcolor=_INK,
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
    return _INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"
