"""A picture as plain data (boxes, labels, arrows, badges) and its two renderings.

Positions are in points, x to the right and y down, from the top left corner. `to_svg` needs
nothing; `to_dot` is drawn by Graphviz' neato, which keeps every position (for PNG and PDF).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape

FONT = "Helvetica"
BACKGROUND = "#fdfdfb"
BADGE_RADIUS = 9.5
LINE = 1.2
_TIP = 2.5  # Graphviz draws an arrow's tip this far beyond its end


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `tip` is what an SVG viewer shows under the pointer."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str
    radius: float = 8
    line: float = LINE
    tip: str = ""


@dataclass(frozen=True)
class Label:
    """One line of text at (x, y): centred there, or with its "start" or its "end" at x."""

    x: float
    y: float
    text: str
    size: float = 12
    bold: bool = False
    color: str = "#222222"
    anchor: Literal["middle", "start", "end"] = "middle"


@dataclass(frozen=True)
class Arrow:
    """A straight arrow with a number on it, `at` of the way along (0..1)."""

    x1: float
    y1: float
    x2: float
    y2: float
    number: str
    color: str
    at: float = 0.5

    @property
    def badge(self) -> tuple[float, float]:
        return self.x1 + (self.x2 - self.x1) * self.at, self.y1 + (self.y2 - self.y1) * self.at

    def towards_end(self, before: float) -> tuple[float, float]:
        """The place on the arrow that is `before` points short of its tip."""
        share = before / math.hypot(self.x2 - self.x1, self.y2 - self.y1)
        return self.x2 - (self.x2 - self.x1) * share, self.y2 - (self.y2 - self.y1) * share


@dataclass
class Scene:
    """The shapes of a picture, in drawing order: all boxes, then arrows, then labels."""

    width: float
    height: float
    title: str
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """A generous estimate, so that text stays in its box with whatever font there is."""
    ems = sum(1.0 if unicodedata.east_asian_width(char) in "WF" else 0.58 for char in text)
    return ems * size * (1.08 if bold else 1.0)


def wrap(text: str, max_chars: int) -> list[str]:
    """Break text at spaces, and names at '.', '-', ':' and '/', so that no line is longer."""
    lines = [""]
    for piece in _pieces(text, max_chars):
        if len(lines[-1]) + len(piece.rstrip()) > max_chars:
            lines.append("")
        lines[-1] += piece
    return [line.strip() for line in lines if line.strip()]


def _pieces(text: str, max_chars: int) -> list[str]:
    pieces = [""]
    for char in text:
        pieces[-1] += char
        if char in " .-:/" or len(pieces[-1]) >= max_chars:
            pieces.append("")
    return pieces


def to_svg(scene: Scene) -> str:
    """The scene as one SVG document."""
    width, height = _number(scene.width), _number(scene.height)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}, Arial, sans-serif" '
        'text-anchor="middle">',
        f"<title>{escape(scene.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>',
    ]
    for box in scene.boxes:
        end = f"><title>{escape(box.tip)}</title></rect>" if box.tip else "/>"
        lines.append(
            f'<rect x="{_number(box.x)}" y="{_number(box.y)}" width="{_number(box.width)}" '
            f'height="{_number(box.height)}" rx="{_number(box.radius)}" fill="{box.fill}" '
            f'stroke="{box.stroke}" stroke-width="{_number(box.line)}"{end}'
        )
    for arrow in scene.arrows:
        lines += _svg_arrow(arrow)
    for label in scene.labels:
        weight = ' font-weight="bold"' if label.bold else ""
        weight += f' text-anchor="{label.anchor}"' if label.anchor != "middle" else ""
        lines.append(
            f'<text x="{_number(label.x)}" y="{_number(label.y + label.size * 0.35)}" '
            f'font-size="{_number(label.size)}"{weight} fill="{label.color}">'
            f"{escape(label.text)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _svg_arrow(arrow: Arrow) -> list[str]:
    length = math.hypot(arrow.x2 - arrow.x1, arrow.y2 - arrow.y1)
    along = ((arrow.x2 - arrow.x1) / length, (arrow.y2 - arrow.y1) / length)
    neck = arrow.towards_end(9)
    corners = [
        (arrow.x2, arrow.y2),
        (neck[0] - 4.5 * along[1], neck[1] + 4.5 * along[0]),
        (neck[0] + 4.5 * along[1], neck[1] - 4.5 * along[0]),
    ]
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
    x, y = arrow.badge
    return [
        f'<line x1="{_number(arrow.x1)}" y1="{_number(arrow.y1)}" x2="{_number(neck[0])}" '
        f'y2="{_number(neck[1])}" stroke="{arrow.color}" stroke-width="1.8"/>',
        f'<polygon points="{points}" fill="{arrow.color}"/>',
        f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(BADGE_RADIUS)}" '
        f'fill="{arrow.color}"/>',
        f'<text x="{_number(x)}" y="{_number(y + 4)}" font-size="11" font-weight="bold" '
        f'fill="#ffffff">{escape(arrow.number)}</text>',
    ]


def to_dot(scene: Scene) -> str:
    """The scene as DOT text for neato; every node is pinned to its position."""
    nodes: list[str] = []
    edges: list[str] = []

    def node(x: float, y: float, **attributes: str) -> str:
        name = f"n{len(nodes)}"
        place = f"{_number(x / 72)},{_number((scene.height - y) / 72)}!"
        nodes.append(f"  {name} [{_attributes({'pos': place, **attributes})}];")
        return name

    def point(x: float, y: float) -> str:
        return node(x, y, shape="point", style="invis", width="0", height="0")

    # Graphviz cuts the page to what is on it: two corners keep the margin.
    point(0, 0)
    point(scene.width, scene.height)
    for box in scene.boxes:
        node(
            box.x + box.width / 2,
            box.y + box.height / 2,
            shape="box",
            style="rounded,filled" if box.radius else "filled",
            fillcolor=box.fill,
            color=box.stroke,
            width=_number(box.width / 72),
            height=_number(box.height / 72),
            **({} if box.line == LINE else {"penwidth": _number(box.line)}),
        )
    for arrow in scene.arrows:
        x, y = arrow.badge
        start, end = point(arrow.x1, arrow.y1), point(*arrow.towards_end(_TIP))
        badge = node(
            x,
            y,
            shape="circle",
            style="filled",
            width=_number(2 * BADGE_RADIUS / 72),
            label=_dot_text(arrow.number),
            fillcolor=arrow.color,
            color=arrow.color,
            fontcolor="#ffffff",
            fontname=f"{FONT}-Bold",
            fontsize="11",
        )
        color = _attributes({"color": arrow.color})
        edges.append(f'  {start} -> {badge} [{color}, arrowhead="none"];')
        edges.append(f"  {badge} -> {end} [{color}];")
    for label in scene.labels:
        # Graphviz sets text to a side only inside a box of a known width.
        width = 0.0 if label.anchor == "middle" else text_width(label.text, label.size, label.bold)
        side = {"middle": 0.0, "start": 0.5, "end": -0.5}[label.anchor]
        node(
            label.x + side * width,
            label.y,
            shape="none",
            fixedsize="true" if width else "false",
            width=_number(width / 72),
            height="0",
            margin="0",
            label=_dot_text(label.text)
            + {"middle": "", "start": "\\l", "end": "\\r"}[label.anchor],
            fontsize=_number(label.size),
            fontcolor=label.color,
            fontname=f"{FONT}-Bold" if label.bold else FONT,
        )
    head = _attributes(
        {"bgcolor": BACKGROUND, "splines": "line", "outputorder": "nodesfirst", "pad": "0"}
    )
    return "\n".join(
        [
            "digraph hetero {",
            f"  graph [{head}];",
            '  node [label="", fixedsize="true", penwidth="1.2"];',
            '  edge [penwidth="1.8", arrowsize="0.8"];',
            *nodes,
            *edges,
            "}",
            "",
        ]
    )


def _attributes(values: dict[str, str]) -> str:
    return ", ".join(f'{name}="{value}"' for name, value in values.items())


def _dot_text(text: str) -> str:
    """Inside a quoted DOT string: no escapes, no entities."""
    return text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def centred(
    x: float, y: float, lines: Sequence[str], size: float, line_height: float, color: str
) -> list[Label]:
    """Lines below each other, centred on `x`; the first line's middle is half a line below `y`."""
    return [
        Label(x, y + line_height * (index + 0.5), line, size=size, color=color)
        for index, line in enumerate(lines)
    ]
