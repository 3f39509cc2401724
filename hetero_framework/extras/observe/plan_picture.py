"""The picture of a plan: a row for each process, the layers that it holds, and its memory.

Drawn by matplotlib (the extra "pictures"), in the colours of the step's picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_framework.extras.observe.pictures import heading_pt, names_pt, text_pt
from hetero_framework.extras.observe.timeline_picture import color_of, ink_on
from hetero_framework.units import share, size

_PAPER, _INK, _FAINT, _IDLE, _GRID = "#fdfdfb", "#222222", "#5f6670", "#f1f0ec", "#d9d8d3"
_MEMORY = "#7d9c86"
_ROW_PT, _TOP_PT, _BOTTOM_PT, _GAP_PT, _MEMORY_PT = 46.0, 66.0, 46.0, 34.0, 190.0
_LAYERS_PT, _LAYER_PT = (420.0, 900.0), 16.0
_BAR, _LINE_PT = 0.52, 5.0


@dataclass(frozen=True)
class Held:
    """A stage: layers [start, end), its number, and whether it computes again backward."""

    start: int
    end: int
    stage: int
    recompute: bool = False


@dataclass(frozen=True)
class PlanRow:
    """A process: what it holds, bytes of its memory that the plan takes and that there are, and the
    share of the step in which it computes. One that is not used holds nothing."""

    name: str
    detail: str
    held: Sequence[Held] = field(default_factory=tuple)
    memory_bytes: float = 0.0
    capacity_bytes: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True)
class PlanPicture:
    """The contents of the picture."""

    title: str
    subtitle: str
    layers: int
    rows: Sequence[PlanRow]


def figure(picture: PlanPicture) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = len(picture.rows)
    left = 24 + names_pt((row.name, row.detail) for row in picture.rows)
    plot = min(max(_LAYER_PT * picture.layers, _LAYERS_PT[0]), _LAYERS_PT[1])
    beside = max(_MEMORY_PT, *(text_pt(_memory_text(row), 8) for row in picture.rows))
    width = left + plot + _GAP_PT + beside + 24
    headed = heading_pt(picture.title, picture.subtitle)
    plot, width = plot + max(0.0, headed - width), max(width, headed)
    height = _TOP_PT + _ROW_PT * rows + _BOTTOM_PT
    drawn = Figure(figsize=(width / 72, height / 72), facecolor=_PAPER)
    places = ((left, plot), (left + plot + _GAP_PT, beside))
    low, high = _BOTTOM_PT / height, _ROW_PT * rows / height
    layers, memory = (drawn.add_axes((x / width, low, wide / width, high)) for x, wide in places)
    most = max(row.capacity_bytes for row in picture.rows) or 1.0
    for axes, limit, label in (
        (layers, float(picture.layers), "layers of the model"),
        (memory, 1.0, "memory"),
    ):
        axes.set(xlim=(0, limit), ylim=(rows, 0), yticks=[])
        axes.set_facecolor("none")
        axes.spines[:].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=9, labelcolor=_FAINT)
        axes.set_xlabel(label, fontsize=9.5, color=_FAINT)
    layers.grid(axis="x", color=_GRID, linewidth=0.5)
    layers.xaxis.set_major_locator(MaxNLocator(integer=True))
    memory.set_xticks([])
    for number, row in enumerate(picture.rows):
        _draw_name(layers, row, number, plot)
        _draw_layers(layers, row, number, plot / picture.layers)
        _draw_memory(memory, row, number, most)
    drawn.text(16 / width, 1 - 24 / height, picture.title, fontsize=14, weight="bold", color=_INK)
    drawn.text(16 / width, 1 - 42 / height, picture.subtitle, fontsize=10.5, color=_FAINT)
    return drawn


def _draw_name(axes: Any, row: PlanRow, top: int, plot: float) -> None:
    place = axes.get_yaxis_transform()  # x in shares of the axes, y in rows
    for text, down, size_pt, weight, color in (
        (row.name, 0.3, 10, "bold", _INK),
        (row.detail, 0.66, 8.5, "normal", _FAINT),
    ):
        axes.text(
            -8 / plot, top + down, text, transform=place, ha="right", va="center",
            fontsize=size_pt, weight=weight, color=color,
        )  # fmt: skip


def _draw_layers(axes: Any, row: PlanRow, top: int, points_per_layer: float) -> None:
    y = top + (1 - _BAR) / 2
    axes.barh(y, axes.get_xlim()[1], _BAR, align="edge", color=_IDLE)
    for held in row.held:
        fill = color_of("backward" if held.recompute else "forward", 0.35)
        wide = held.end - held.start
        # One without layers holds the embedding or the head alone: a line at its end of the model.
        line = _LINE_PT / points_per_layer
        left = held.start if wide or not held.start else held.start - line
        axes.barh(y, wide or line, _BAR, left, align="edge", color=fill, edgecolor=_PAPER)
        text = f"{held.start}-{held.end - 1}" if wide > 1 else str(held.start)
        if wide and wide * points_per_layer > text_pt(text, 8.5) + 2:
            axes.text(
                held.start + wide / 2, top + 0.5, text, ha="center", va="center", fontsize=8.5,
                color=ink_on(fill),
            )  # fmt: skip


def _draw_memory(axes: Any, row: PlanRow, top: int, most: float) -> None:
    """Draw a process's memory, and the plan's part of it, as shares of the largest memory."""
    y = top + 0.5
    axes.barh(y, row.capacity_bytes / most, 0.22, color=_IDLE, edgecolor=_GRID, linewidth=0.6)
    axes.barh(y, row.memory_bytes / most, 0.22, color=_MEMORY)
    axes.text(0, y - 0.27, _memory_text(row), fontsize=8, color=_FAINT, va="center")


def _memory_text(row: PlanRow) -> str:
    if not row.held:
        return "not used"
    return f"{size(row.memory_bytes)} of {size(row.capacity_bytes)}, busy {share(row.busy)}"
