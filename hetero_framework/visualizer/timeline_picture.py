"""The picture of one step: a row for each process, what it did and when, and what its links moved.

Colours: forward is blue and backward orange, which people with any common colour blindness tell
apart; of several stages of one process the later ones are darker. Where a number fits, a box
carries its micro-batch's.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero_framework.errors import UserError
from hetero_framework.visualizer.render import NoGraphvizError, render, write_picture
from hetero_framework.visualizer.scene import Box, Label, Scene, text_width

FORMATS = ("svg", "png", "pdf")

FORWARD_SHADES = ("#9ccdf0", "#1f6fae")
BACKWARD_SHADES = ("#f7c568", "#c46a00")
UPDATE = "#8b8b8b"
WAIT_ACTIVATIONS = "#dfeaf3"
WAIT_GRADIENTS = "#fbeeda"
IDLE = "#f1f0ec"
LINK = "#ecebe6"
INK = "#222222"
FAINT = "#5f6670"
GRID = "#d9d8d3"
BOUND = "#a3195b"

_log = logging.getLogger(__name__)
_MARGIN = 28.0
_TASK = 26.0
_STRIP = 7.0
_GAP = 3.0
_ROW_GAP = 16.0
_MIN_WIDTH = 900.0
_MAX_WIDTH = 2600.0
_BOX = 16.0
"""Width that the median forward should have, so that two digits fit."""
_SIZES = (10.0, 9.0, 8.0, 7.0)
_TICK = 110.0


@dataclass(frozen=True)
class Bar:
    """A span of a row, in seconds after the step's beginning.

    `kind` is "forward", "backward", "forward_backward", "update", "activations" or "gradients"
    (a wait for one); on a link "forward" or "backward", the direction of the tensor. `shade` is 0
    for the first stage of a process, 1 for the last one. `tip` is shown under the pointer.
    """

    kind: str
    began: float
    ended: float
    number: int | None = None
    shade: float = 0.0
    tip: str = ""


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
    bound_s: float | None = None

    @property
    def seconds(self) -> float:
        bars = [bar for row in self.rows for bar in (*row.bars, *row.sends, *row.receives)]
        return max((bar.ended for bar in bars), default=0.0)


def draw(
    picture: StepPicture,
    path: str | os.PathLike[str],
    form: str | None = None,
) -> Path:
    """Write the picture to `path` and return the file that was written.

    `form` is svg, png or pdf; None takes it from the file's name. PNG and PDF need Graphviz;
    without it an SVG is written instead, with a warning. Raises UserError for an unknown
    format or a file that cannot be written.
    """
    target = Path(path)
    chosen = (form or target.suffix.removeprefix(".")).lower()
    if chosen not in FORMATS:
        raise UserError(
            f"there is no picture format {chosen!r}", hint=f"give one of: {', '.join(FORMATS)}"
        )
    scene = layout(picture)
    try:
        return write_picture(target, render(scene, chosen))
    except NoGraphvizError as error:
        svg = write_picture(target.with_suffix(".svg"), render(scene, "svg"))
        _log.warning(
            "%s, so no %s was drawn; wrote %s instead. Install Graphviz (the programs dot and "
            "neato on PATH) for PNG and PDF.",
            error,
            chosen.upper(),
            svg,
        )
        return svg


def layout(picture: StepPicture) -> Scene:
    """Place everything: title, legend, rows from the top, the axis below them."""
    names = [text_width(row.name, 13, bold=True) for row in picture.rows]
    names += [text_width(row.detail, 11) for row in picture.rows]
    left = _MARGIN + max(names, default=0.0) + 40
    width = _plot_width(picture)
    scene = Scene(width=left + width + _MARGIN + 8, height=0.0, title=picture.title)
    scene.labels.append(Label(_MARGIN, _MARGIN + 8, picture.title, 17, bold=True, anchor="start"))
    scene.labels.append(Label(_MARGIN, _MARGIN + 30, picture.subtitle, 13, False, FAINT, "start"))
    top = _legend(scene, picture, _MARGIN + 46)
    seconds = picture.seconds or 1.0

    def x(at: float) -> float:
        return left + width * min(max(at / seconds, 0.0), 1.0)

    bound = picture.bound_s if picture.bound_s and picture.bound_s <= seconds * 1.0001 else None
    y = top + (26 if bound is not None else 10)
    first = y
    for row in picture.rows:
        y = _place_row(scene, row, x, y, left, width)
    bottom = y - _ROW_GAP + 6
    _axis(scene, x, seconds, width, first - 4, bottom)
    if bound is not None:
        scene.boxes.append(
            Box(x(bound) - 0.75, first - 8, 1.5, bottom - first + 8, BOUND, BOUND, 0, 0)
        )
        label = f"bound {_ms_text(bound)} ms"
        near_end = x(bound) + text_width(label, 11) / 2 > scene.width - 8
        scene.labels.append(
            Label(x(bound), first - 18, label, 11, True, BOUND, "end" if near_end else "middle")
        )
    scene.height = bottom + 44 + _MARGIN / 2
    return scene


def _plot_width(picture: StepPicture) -> float:
    """Wide enough for the median forward to show its number, within limits."""
    forwards = sorted(
        bar.ended - bar.began for row in picture.rows for bar in row.bars if bar.kind == "forward"
    )
    median = forwards[len(forwards) // 2] if forwards else 0.0
    wanted = _BOX * picture.seconds / median if median > 0 else _MIN_WIDTH
    return min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)


def _place_row(
    scene: Scene, row: Row, x: Callable[[float], float], y: float, left: float, width: float
) -> float:
    """Draw one process; returns where the next one begins."""
    scene.labels.append(Label(_MARGIN, y + 8, row.name, 13, bold=True, anchor="start"))
    scene.labels.append(Label(_MARGIN, y + 24, row.detail, 11, False, FAINT, "start"))
    scene.boxes.append(Box(left, y, width, _TASK, IDLE, IDLE, 0, 0))
    for bar in sorted(row.bars, key=lambda bar: bar.kind not in ("activations", "gradients")):
        _place_bar(scene, bar, x, y, _TASK)
    y += _TASK + _GAP
    for name, strip in (("out", row.sends), ("in", row.receives)):
        if row.sends or row.receives:
            label = Label(left - 6, y + _STRIP / 2, name, 8, False, FAINT, "end")
            scene.labels.append(label)
            scene.boxes.append(Box(left, y, width, _STRIP, LINK, LINK, 0, 0))
            for bar in strip:
                _place_bar(scene, bar, x, y, _STRIP)
            y += _STRIP + 2
    return y + _ROW_GAP


def _place_bar(
    scene: Scene, bar: Bar, x: Callable[[float], float], y: float, height: float
) -> None:
    start = x(bar.began)
    width = max(x(bar.ended) - start, 0.5)
    # A white line between neighbours, unless it would cover the bar itself.
    line, edge = (0.7, "#ffffff") if width > 3 and height > _STRIP else (0.0, "")
    both = bar.kind == "forward_backward"
    if both:
        upper, lower = _color("forward", bar.shade), _color("backward", bar.shade)
        scene.boxes.append(Box(start, y, width, height, upper, edge or upper, 0, line, bar.tip))
        scene.boxes.append(
            Box(start, y + height / 2, width, height / 2, lower, edge or lower, 0, line, bar.tip)
        )
    else:
        fill = _color(bar.kind, bar.shade)
        line = 0.0 if bar.kind in ("activations", "gradients") else line
        scene.boxes.append(Box(start, y, width, height, fill, edge or fill, 0, line, bar.tip))
    if bar.number is None or height <= _STRIP:
        return
    text = str(bar.number)
    for size in _SIZES:
        if text_width(text, size) + 1.5 <= width:
            color = _ink(_color("backward" if both else bar.kind, bar.shade))
            if both:
                # On the lower half: two colours behind a number make it hard to read.
                size = min(size, 9.0)
                scene.labels.append(
                    Label(start + width / 2, y + height * 0.75, text, size, False, color)
                )
            else:
                scene.labels.append(
                    Label(start + width / 2, y + height / 2, text, size, False, color)
                )
            return


def _color(kind: str, shade: float) -> str:
    plain = {"update": UPDATE, "activations": WAIT_ACTIVATIONS, "gradients": WAIT_GRADIENTS}
    if kind in plain:
        return plain[kind]
    light, dark = FORWARD_SHADES if kind == "forward" else BACKWARD_SHADES
    return "#" + "".join(
        f"{round(int(light[i : i + 2], 16) * (1 - shade) + int(dark[i : i + 2], 16) * shade):02x}"
        for i in (1, 3, 5)
    )


def _ink(fill: str) -> str:
    """Black or white, whichever is easier to read on a colour: by its luminance (WCAG 2.1)."""
    parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"


def _axis(
    scene: Scene,
    x: Callable[[float], float],
    seconds: float,
    width: float,
    top: float,
    bottom: float,
) -> None:
    """Ticks at round numbers of milliseconds, with faint lines through the gaps of the rows."""
    step = _round_step(seconds * 1e3 * _TICK / width)
    lines = []
    for number in range(int(seconds * 1e3 / step * 1.0000001) + 1):
        at = x(number * step / 1e3)
        lines.append(Box(at - 0.25, top, 0.5, bottom - top + 4, GRID, GRID, 0, 0))
        scene.labels.append(Label(at, bottom + 14, _number_text(number * step), 11, False, FAINT))
    scene.boxes[:0] = lines  # below everything
    middle = (x(0.0) + x(seconds)) / 2
    text = "milliseconds since the first task of the step"
    scene.labels.append(Label(middle, bottom + 32, text, 12, False, FAINT))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and their fractions) that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-6)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def _number_text(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if value < 10 else f"{value:,.0f}"


def _ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _legend(scene: Scene, picture: StepPicture, y: float) -> float:
    """One or more lines of colours and their meanings; returns where they end."""
    bars = [bar for row in picture.rows for bar in row.bars]
    kinds = {bar.kind for bar in bars}
    entries = [
        ("forward", "forward"),
        ("backward", "backward"),
        ("forward_backward", "forward and backward in one"),
        ("update", "gradients and optimizer"),
        ("activations", "waits for activations"),
        ("gradients", "waits for gradients"),
    ]
    shown = [(kind, text) for kind, text in entries if kind in kinds]
    notes = []
    if any(bar.shade for bar in bars):
        notes.append("darker: a later stage of the same process")
    if any(row.sends or row.receives for row in picture.rows):
        notes.append("out, in: activations (blue) and gradients (orange) on its links")
    x = _MARGIN
    for kind, text in shown:
        needed = 22 + text_width(text, 12) + 14
        if x + needed > scene.width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 20
        _place_bar(scene, Bar(kind, 0, 1), lambda at, x=x: x + 16 * at, y, 13)  # type: ignore[misc]
        scene.labels.append(Label(x + 22, y + 6.5, text, 12, False, INK, "start"))
        x += needed
    for text in notes:
        if x + text_width(text, 12) > scene.width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 20
        scene.labels.append(Label(x, y + 6.5, text, 12, False, FAINT, "start"))
        x += text_width(text, 12) + 18
    return y + 22
