"""The diagram as a file: drawn by Graphviz, else by matplotlib, else as Mermaid text.

In the picture of matplotlib processes stand in a grid of PER_ROW columns; every box is as large
as its measured texts. An arrow to the process on the right is straight; all others run in the gaps
between columns and in lanes below rows, so that none crosses a box. Lengths are points; y grows
downwards.
"""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphviz

from hetero_framework.config import Config
from hetero_framework.extras.observe import pictures
from hetero_framework.extras.observe.diagram import (
    LINE,
    PER_ROW,
    STAGE_EDGE,
    STYLES,
    WORDS,
    Diagram,
    DiagramDetails,
    ProcessBox,
    to_dot,
    to_mermaid,
)
from hetero_framework.extras.observe.pictures import FAINT, INK, PAPER, text_pt

_PAD, _GAP, _MARGIN, _LANE, _LEADING = 12.0, 64.0, 24.0, 17.0, 1.35
_NAME, _ABOUT, _STAGE, _WORDS, _TITLE, _COUNTS = 15.0, 12.0, 12.0, 10.0, 17.0, 13.0
_HEAD = 9.0
_LINES = {"solid": "-", "dashed": (0, (4, 2.5)), "dotted": (0, (1, 2))}
_FORMATS = ("png", "svg", "pdf", "mmd")
_BETTER = "the package graphviz gives a better one"
_log = logging.getLogger(__name__)

Text = tuple[str, float, bool]
"""A line: its text, size and whether it is bold."""


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def _height(lines: list[Text]) -> float:
    return sum(_LEADING * size for _, size, _ in lines)


def _width(lines: list[Text]) -> float:
    return max((text_pt(text, size, bold=bold) for text, size, bold in lines), default=0.0)


class _Cell:
    """A process, or the other islands: its lines, and its stages below them."""

    def __init__(self, place: ProcessBox | None, others: tuple[str, ...] = ()) -> None:
        self.place = place
        self.stages: dict[int, list[Text]] = {}
        if place is None:
            self.lines = [(text, _STAGE, k == 0) for k, text in enumerate(others)]
        else:
            self.lines = [(text, _NAME, True) for text in place.names]
            self.lines += [(text, _ABOUT, False) for text in place.lines]
            for index, texts in place.stages:
                self.stages[index] = [(text, _STAGE, k == 0) for k, text in enumerate(texts)]

    @property
    def inner(self) -> float:
        """Width of the stages' boxes."""
        return max((_width(lines) for lines in self.stages.values()), default=0.0) + 2 * _PAD

    @property
    def width(self) -> float:
        return max(_width(self.lines), self.inner if self.stages else 0.0) + 2 * _PAD

    def height(self, about: float) -> float:
        """Height with `about` for the lines, so that the first stages of a row are level."""
        if not self.stages:
            return _height(self.lines) + 2 * _PAD
        stages = sum(_height(lines) + 2 * _PAD for lines in self.stages.values())
        return about + stages + _GAP / 3 * (len(self.stages) - 1) + 3 * _PAD


def _stages_in(box: _Box, about: float, cell: _Cell) -> dict[int, _Box]:
    """The stages' boxes below the lines of a process."""
    boxes, y = {}, box.y + about + 2 * _PAD
    for index, lines in cell.stages.items():
        boxes[index] = _Box(box.x + _PAD, y, box.width - 2 * _PAD, _height(lines) + 2 * _PAD)
        y += boxes[index].height + _GAP / 3
    return boxes


class _Sheet:
    """The place of everything, then the Figure."""

    def __init__(self, diagram: Diagram) -> None:
        self._diagram = diagram
        others = [_Cell(None, diagram.others)] if diagram.others else []
        self._cells = [*others, *(_Cell(place) for place in diagram.places)]
        self._of = {index: k for k, cell in enumerate(self._cells) for index in cell.stages}
        self._head: list[Text] = [(text, _TITLE, True) for text in diagram.title]
        self._head += [(diagram.counts, _COUNTS, False)]
        self._head += [(text, _ABOUT, False) for text in diagram.caption]
        self._lanes: dict[int, int] = {}  # arrows below each row
        self._turns: dict[int, int] = {}  # and turning at each side of the gaps between columns
        self._place_cells()

    def _row(self, cell: int) -> int:
        return cell // PER_ROW

    def _beside(self, boundary: int) -> bool:
        one, other = self._of[boundary], self._of[boundary + 1]
        return other == one + 1 and self._row(one) == self._row(other)

    def _place_cells(self) -> None:
        cells, columns = self._cells, min(PER_ROW, len(self._cells))
        widths = [max(cell.width for cell in cells[k::PER_ROW]) for k in range(columns)]
        hows = self._diagram.boundaries
        words = [_width([(word, _WORDS, False) for word in WORDS[how]]) for how in hows]
        self._gap = max([_GAP, *(wide + 3 * _PAD for wide in words)])
        apart = [k for k, how in enumerate(hows) if how != "inside"]
        routed = [k for k in apart if not self._beside(k)]
        self._left = [_MARGIN + self._gap / 2 * bool(routed)]
        for wide in widths:
            self._left.append(self._left[-1] + wide + self._gap)
        right = self._left[-1] - self._gap + self._gap / 2 * bool(routed) + _MARGIN
        self.width = max(right, _width(self._head) + 2 * _MARGIN)
        shift = (self.width - right) / 2
        self._left = [x + shift for x in self._left]
        y = _MARGIN + _height(self._head) + _PAD
        self._boxes: list[_Box] = []
        self._stages: dict[int, _Box] = {}
        self._lane_y: dict[int, float] = {}
        for row in range(self._row(len(cells) - 1) + 1):
            members = range(row * PER_ROW, min(len(cells), (row + 1) * PER_ROW))
            about = max(_height(cells[k].lines) for k in members if cells[k].stages)
            heights = {k: cells[k].height(about) for k in members}
            tallest = max(heights.values())
            for k in members:
                column = k % PER_ROW
                spare = widths[column] - cells[k].width
                box = _Box(self._left[column] + spare / 2, y, cells[k].width, heights[k])
                self._boxes.append(box)
                self._stages |= _stages_in(box, about, cells[k])
            self._lane_y[row] = y + tallest + _LANE
            lanes = sum(self._row(self._of[k]) == row for k in routed)
            y += tallest + _LANE * (lanes + 1)
        self.height = y + _MARGIN - _LANE

    def figure(self) -> Any:
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(self.width / 72, self.height / 72), facecolor=PAPER)
        axes = self._axes = drawn.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        self._texts(self._head, self.width / 2, _MARGIN)
        for box, cell in zip(self._boxes, self._cells, strict=True):
            fill, line = cell.place.colors if cell.place else (PAPER, STAGE_EDGE)
            self._rounded(box, fill, line, "-" if cell.place else "--")
            self._texts(cell.lines, box.x + box.width / 2, box.y + _PAD)
            for index, lines in cell.stages.items():
                inner = self._stages[index]
                self._rounded(inner, "#ffffff", STAGE_EDGE)
                self._texts(lines, inner.x + inner.width / 2, inner.y + _PAD)
        if self._diagram.others:
            one, coordinator = self._boxes[0], self._boxes[1]
            ends = [(one.x + one.width, one.middle), (coordinator.x, one.middle)]
            self._line(ends, "dashed", both=True)
        for index, how in enumerate(self._diagram.boundaries):
            self._arrow(index, STYLES.get(how, "solid"), WORDS[how])
        return drawn

    def _rounded(self, box: _Box, fill: str, line: str, style: str = "-") -> None:
        from matplotlib.patches import FancyBboxPatch

        self._axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y), box.width, box.height, "round,pad=0,rounding_size=6",
                facecolor=fill, edgecolor=line, linewidth=1.2, linestyle=style,
            )
        )  # fmt: skip

    def _texts(self, lines: list[Text], x: float, y: float, *, paper: bool = False) -> None:
        behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
        for text, size, bold in lines:
            self._axes.text(
                x, y + _LEADING * size / 2, text, ha="center", va="center_baseline", fontsize=size,
                weight="bold" if bold else "normal", color=INK if bold else FAINT,
                bbox=behind if paper else None,
            )  # fmt: skip
            y += _LEADING * size

    def _arrow(self, boundary: int, style: str, words: tuple[str, ...]) -> None:
        one, other = self._stages[boundary], self._stages[boundary + 1]
        first, last = self._of[boundary], self._of[boundary + 1]
        if first == last:
            x = one.x + one.width / 2
            self._line([(x, one.y + one.height), (x, other.y)], style)
            return
        out, into = (one.x + one.width, one.middle), (other.x, other.middle)
        if self._beside(boundary):
            edge, start = self._boxes[first], self._boxes[last].x
            middle = (edge.x + edge.width + start) / 2
            points = [out, into]
            if abs(out[1] - into[1]) > 0.5:
                points = [out, (middle, out[1]), (middle, into[1]), into]
            self._line(points, style)
            lines = [(word, _WORDS, False) for word in words]
            # On the side of the line's beginning that it does not turn to.
            up = into[1] < out[1] - 0.5
            self._texts(lines, middle, out[1] + 3 if up else out[1] - _height(lines) - 3)
            return
        row, leave, enter = self._row(first), first % PER_ROW + 1, last % PER_ROW
        y = self._lane_y[row] + _LANE * self._next(self._lanes, row)
        x, end = self._turn(leave, -self._gap, 1), self._turn(enter, 0.0, -1)
        self._line([out, (x, out[1]), (x, y), (end, y), (end, into[1]), into], style)
        if words:
            self._texts([(" ".join(words), _WORDS, False)], (x + end) / 2, y - 7, paper=True)

    def _next(self, counts: dict[int, int], key: int) -> int:
        counts[key] = counts.get(key, -1) + 1
        return counts[key]

    def _turn(self, column: int, edge: float, way: int) -> float:
        """The x of an arrow that runs up or down in the gap in front of a column, from one `edge`
        of the gap on; another one for each arrow as far as there is room."""
        number = self._next(self._turns, way * (column + 1)) % 4
        return self._left[column] + edge + way * (_PAD + number * (self._gap / 2 - _PAD) / 4)

    def _line(self, points: list[tuple[float, float]], style: str, *, both: bool = False) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        self._axes.add_patch(
            FancyArrowPatch(
                path=Path(points), arrowstyle="<|-|>" if both else "-|>", mutation_scale=_HEAD,
                color=LINE, linewidth=1.6, linestyle=_LINES[style], shrinkA=0, shrinkB=0,
                joinstyle="round",
            )
        )  # fmt: skip


def figure(diagram: Diagram) -> Any:
    """The picture as a matplotlib Figure."""
    return _Sheet(diagram).figure()


def draw(
    config: Config,
    path: str | os.PathLike[str],
    format: str | None = None,
    details: DiagramDetails | None = None,
) -> Path:
    """Write the picture and return the file that was written: without Graphviz a plainer one, and
    without matplotlib Mermaid text beside `path`, with a warning. `format` None takes it from the
    file's name. Raises UserError for an unknown format or a file that cannot be written."""
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
    except graphviz.ExecutableNotFound:
        problem = "Graphviz (the program dot) is not installed"
    except subprocess.SubprocessError:
        problem = "Graphviz failed"
    if pictures.can_draw():
        pictures.save(lambda: figure(diagram), target, chosen)
        _log.warning("%s, so matplotlib has drawn %s; %s", problem, target, _BETTER)
        return target
    written = pictures.write_picture(target.with_suffix(".mmd"), to_mermaid(diagram).encode())
    text = "%s, and neither is matplotlib, so no %s was drawn; %s"
    instead = f"wrote {written} instead, which Markdown viewers and mermaid.live draw"
    _log.warning(text, problem, chosen.upper(), instead)
    return written
