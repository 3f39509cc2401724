"""The diagram as a file: drawn by Graphviz, else by matplotlib, or as Mermaid text.

In matplotlib's picture the processes stand in one column. The arrows between them run in lanes on
its right, so that none crosses a box. Lengths are points; y grows downwards.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import graphviz

from hetero_framework.config import Config
from hetero_framework.extras.observe import pictures
from hetero_framework.extras.observe.diagram import (
    LINE,
    STAGE_EDGE,
    STYLES,
    WORDS,
    Diagram,
    DiagramDetails,
    How,
    ProcessBox,
    to_dot,
    to_mermaid,
)
from hetero_framework.extras.observe.pictures import FAINT, INK, PAPER, text_pt

_PAD, _GAP, _MARGIN, _LANE, _LEADING = 12.0, 26.0, 24.0, 18.0, 1.35
_ASIDE = 4.0  # arrows leave a stage below its middle and enter one above it
_FORMATS = ("png", "svg", "pdf", "mmd")
_log = logging.getLogger(__name__)


class _TextLine(NamedTuple):
    text: str
    size: float = 12.0
    is_bold: bool = False


def _first_bold(texts: Sequence[str]) -> list[_TextLine]:
    return [_TextLine(text, is_bold=k == 0) for k, text in enumerate(texts)]


def _about(place: ProcessBox) -> list[_TextLine]:
    return [*(_TextLine(name, 15.0, True) for name in place.names), *map(_TextLine, place.lines)]


def _width(texts: Sequence[_TextLine]) -> float:
    return max((text_pt(t.text, t.size, bold=t.is_bold) for t in texts), default=0.0)


class _Column:
    """The picture of a diagram, drawn from the top down; `_y` is where the drawing goes on."""

    def __init__(self, diagram: Diagram) -> None:
        from matplotlib.figure import Figure

        self._figure = Figure(facecolor=PAPER)
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._diagram = diagram
        self._stages = {k: _first_bold(text) for p in diagram.places for k, text in p.stages}
        self._inner = max(map(_width, self._stages.values())) + 2 * _PAD
        abouts = [_first_bold(diagram.others), *map(_about, diagram.places)]
        self._outer = max(self._inner, *map(_width, abouts)) + 2 * _PAD
        self._middle = _MARGIN + self._outer / 2
        self._y, self._lanes = _MARGIN, 1
        self._ends: dict[int, tuple[float, float]] = {}  # top and bottom of each stage

    def figure(self) -> Any:
        head = self._head()
        self._write(head, _MARGIN, "left")
        self._y += _PAD
        if self._diagram.others:
            self._draw_others()
        for place in self._diagram.places:
            self._draw_place(place)
        for boundary, how in enumerate(self._diagram.boundaries):
            self._draw_boundary(boundary, how)
        width = 2 * _MARGIN + max(self._outer + _LANE * self._lanes, _width(head))
        height = self._y - _GAP + _MARGIN
        self._figure.set_size_inches(width / 72, height / 72)
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        return self._figure

    def _head(self) -> list[_TextLine]:
        texts = [*self._diagram.caption]
        for how in dict.fromkeys(how for how in self._diagram.boundaries if how != "inside"):
            line = STYLES.get(how, "solid").capitalize()
            texts.append(f"{line} arrows: {' '.join(WORDS[how])}.")
        title = [_TextLine(text, 17.0, True) for text in self._diagram.title]
        return [*title, _TextLine(self._diagram.counts, 13.0), *map(_TextLine, texts)]

    def _draw_others(self) -> None:
        top = self._y
        self._write_padded(_first_bold(self._diagram.others))
        self._box(_MARGIN, top, self._outer, (PAPER, STAGE_EDGE), linestyle="dashed")
        ends = [(self._middle, self._y), (self._middle, self._y + _GAP)]
        self._arrow(ends, "dashed", "<|-|>")
        self._y += _GAP

    def _draw_place(self, place: ProcessBox) -> None:
        top = self._y
        self._write_padded(_about(place))
        for index, _ in place.stages:
            above = self._y
            self._write_padded(self._stages[index])
            left = self._middle - self._inner / 2
            self._box(left, above, self._inner, ("#ffffff", STAGE_EDGE))
            self._ends[index] = above, self._y
            self._y += _PAD
        self._box(_MARGIN, top, self._outer, place.colors, zorder=0.5)
        self._y += _GAP

    def _draw_boundary(self, boundary: int, how: How) -> None:
        (top, bottom), (next_top, next_bottom) = self._ends[boundary], self._ends[boundary + 1]
        if how == "inside":
            self._arrow([(self._middle, bottom), (self._middle, next_top)], "solid")
            return
        lane, order = 1, [*self._ends]
        if order.index(boundary + 1) != order.index(boundary) + 1:
            lane = self._lanes = self._lanes + 1
        out, into = (top + bottom) / 2 + _ASIDE, (next_top + next_bottom) / 2 - _ASIDE
        x, turn = self._middle + self._inner / 2, _MARGIN + self._outer + _LANE * lane
        points = [(x, out), (turn, out), (turn, into), (x, into)]
        self._arrow(points, STYLES.get(how, "solid"))

    def _write_padded(self, texts: Sequence[_TextLine]) -> None:
        self._y += _PAD
        self._write(texts, self._middle)
        self._y += _PAD

    def _write(self, texts: Sequence[_TextLine], x: float, side: str = "center") -> None:
        for text, size, is_bold in texts:
            self._y += _LEADING * size
            self._axes.text(
                x, self._y - _LEADING * size / 2, text, ha=side, va="center_baseline",
                fontsize=size, weight="bold" if is_bold else "normal",
                color=INK if is_bold else FAINT,
            )  # fmt: skip

    def _box(
        self, x: float, top: float, width: float, colors: tuple[str, str], **look: Any
    ) -> None:
        """Draw a box from `top` down to `_y`."""
        from matplotlib.patches import FancyBboxPatch

        form, (fill, edge) = "round,pad=0,rounding_size=6", colors
        look = {"facecolor": fill, "edgecolor": edge, "linewidth": 1.2, **look}
        self._axes.add_patch(FancyBboxPatch((x, top), width, self._y - top, form, **look))

    def _arrow(self, points: Sequence[tuple[float, float]], style: str, heads: str = "-|>") -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        look: dict[str, Any] = {"color": LINE, "linewidth": 1.6, "linestyle": style}
        look |= {"shrinkA": 0, "shrinkB": 0, "joinstyle": "round", "mutation_scale": 9}
        self._axes.add_patch(FancyArrowPatch(path=Path(points), arrowstyle=heads, **look))


def figure(diagram: Diagram) -> Any:
    """The picture as a matplotlib Figure."""
    return _Column(diagram).figure()


def draw(
    config: Config,
    path: str | os.PathLike[str],
    format: str | None = None,
    details: DiagramDetails | None = None,
) -> Path:
    """Write the picture and return its file. Where Graphviz is absent or fails, matplotlib draws.
    Without `format` the file name decides. Raises UserError for an unknown format or a file that
    cannot be written."""
    target = Path(path)
    chosen = pictures.picture_format(target, format, _FORMATS)
    diagram = Diagram.of(config, details)
    if chosen == "mmd":
        return pictures.write_picture(target, to_mermaid(diagram).encode())
    dot = to_dot(diagram)
    if chosen == "png":
        dot.attr(dpi="144")
    try:
        return pictures.write_picture(target, bytes(dot.pipe(format=chosen, quiet=True)))
    except (graphviz.ExecutableNotFound, subprocess.SubprocessError) as error:
        _log.debug("matplotlib draws %s: %s", target, error)
        return pictures.save(lambda: figure(diagram), target, chosen)
