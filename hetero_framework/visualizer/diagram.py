"""The picture of a configuration: its machines, their stages, and what each boundary does.

`Diagram.of` says what is drawn. Graphviz lays it out (`to_dot`); Mermaid gets the same as text
(`to_mermaid`); where the program `dot` is absent, `to_svg` draws it on a plain grid.
"""

from __future__ import annotations

import logging
import os
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import graphviz

from hetero_framework.config import Config, Machine, StageSpec
from hetero_framework.errors import UserError
from hetero_framework.log import printable
from hetero_framework.units import count, plural, size

Format = Literal["png", "svg", "pdf", "mmd"]
How = Literal["inside", "direct", "relay", "auto"]

PER_ROW = 4
"""Machines beside each other: what a page shows without shrinking the text."""
_MAX_CHARS = 30
_FONT = "Helvetica,Arial,sans-serif"
_INK, _FAINT, _PAPER = "#222222", "#5f6670", "#fdfdfb"
_COORDINATOR, _WORKER = ("#e6eefa", "#2f5f9e"), ("#e8f4ea", "#3c8350")
_STAGE_EDGE, _LINE = "#b8c2cc", "#c2571a"
_WORDS: Mapping[How, tuple[str, ...]] = {
    "inside": (),
    "direct": ("direct",),
    "relay": ("through the", "coordinator"),
    "auto": ("direct", "if possible"),
}
_AUTO = "direct where they reach each other, else through the coordinator"
_DASHES: Mapping[How, tuple[str, str]] = {"relay": ("dashed", "7 5"), "auto": ("dotted", "2 5")}
"""How a line is broken, as Graphviz and as SVG say it; others are solid."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiagramDetails:
    """Facts that the configuration does not have. Stages by index, devices by owner; all optional.

    `direct` has the boundaries (the stage before each) with a link from worker to worker, once
    that is known.
    """

    model: str | None = None
    num_layers: int | None = None
    parameters: Mapping[int, int] = field(default_factory=dict)
    memory_bytes: Mapping[int, int] = field(default_factory=dict)
    devices: Mapping[int | str, str] = field(default_factory=dict)
    direct: frozenset[int] | None = None


@dataclass(frozen=True)
class Place:
    """A process: its name in lines, lines about it, and its stages as (number, lines)."""

    names: tuple[str, ...]
    lines: tuple[str, ...]
    stages: tuple[tuple[int, tuple[str, ...]], ...]
    colors: tuple[str, str]


@dataclass(frozen=True)
class Boundary:
    """The boundary between stage `before` and the next one."""

    before: int
    how: How


@dataclass(frozen=True)
class Diagram:
    """All that a picture shows; places in the order in which the plan first needs them."""

    title: tuple[str, ...]
    counts: str
    places: tuple[Place, ...]
    boundaries: tuple[Boundary, ...]
    caption: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, details: DiagramDetails | None = None) -> Diagram:
        details = details or DiagramDetails()
        stages = config.stages()
        owners = list(dict.fromkeys(["local", *(stage.owner for stage in stages)]))
        boundaries = tuple(
            _boundary(config, before, after, details) for before, after in pairwise(stages)
        )
        layers = details.num_layers or stages[-1].end
        nouns = ((layers, "layer"), (len(stages), "stage"), (len(owners), "process"))
        return cls(
            title=_title(config, details),
            counts=", ".join(plural(*noun) for noun in nouns),
            places=tuple(_place(config, owner, details) for owner in owners),
            boundaries=boundaries,
            caption=_caption(config, boundaries),
        )

    @property
    def rows(self) -> list[tuple[Place, ...]]:
        return [self.places[i : i + PER_ROW] for i in range(0, len(self.places), PER_ROW)]


def _boundary(
    config: Config, before: StageSpec, after: StageSpec, details: DiagramDetails
) -> Boundary:
    links = config.shard_plan[after.index].links or config.links
    how: How
    if before.owner == after.owner:
        how = "inside"
    elif "local" in (before.owner, after.owner):
        how = "direct"
    elif details.direct is not None:
        how = "direct" if before.index in details.direct else "relay"
    else:
        how = links
    return Boundary(before.index, how)


def _caption(config: Config, boundaries: Sequence[Boundary]) -> tuple[str, ...]:
    lines = []
    if boundaries:
        lines.append("Activations follow the arrows; gradients travel the same way back.")
    if any(boundary.how == "auto" for boundary in boundaries):
        lines.append(f"If possible: {_AUTO}.")
    codecs = [("activations", config.wire.activations), ("gradients", config.wire.gradients)]
    coded = [f"{what} as {codec}" for what, codec in codecs if codec != "none"]
    if coded and any(boundary.how != "inside" for boundary in boundaries):
        lines.append(f"Between processes: {', '.join(coded)}.")
    return tuple(lines)


def _place(config: Config, owner: int | str, details: DiagramDetails) -> Place:
    is_local = owner == "local"
    machine: Machine = config.coordinator if is_local else config.worker(owner)
    lines = [_one_line(machine.hostname or "") or machine.ip]
    if not is_local:
        host = f"[{machine.ip}]" if ":" in machine.ip else machine.ip
        lines.append(f"{host}:{config.worker(owner).port}")
    label = details.devices.get(owner)
    lines.append(f"{label} ({machine.device})" if label else f"device {machine.device}")
    return Place(
        names=_wrap("coordinator" if is_local else f"worker {owner}"),
        lines=tuple(part for line in lines for part in _wrap(line)),
        stages=tuple(
            (spec.index, _stage_lines(spec, details))
            for spec in config.stages()
            if spec.owner == owner
        ),
        colors=_COORDINATOR if is_local else _WORKER,
    )


def _stage_lines(stage: StageSpec, details: DiagramDetails) -> tuple[str, ...]:
    parts = ["embedding"] if stage.is_first else []
    parts += [stage.layers] if stage.end > stage.start else []
    parts += ["head"] if stage.is_last else []
    facts = []
    if stage.index in details.parameters:
        facts.append(f"{count(details.parameters[stage.index])} parameters")
    if stage.index in details.memory_bytes:
        facts.append(size(details.memory_bytes[stage.index]))
    lines = (f"stage {stage.index}", " + ".join(parts) or "no layers", ", ".join(facts))
    return tuple(line for line in lines if line)


def _title(config: Config, details: DiagramDetails) -> tuple[str, ...]:
    model = config.model
    kind = str((model.from_config or {}).get("model_type", "")) if model else ""
    name = details.model or (model and model.name_or_path) or kind or "plan"
    return _wrap(name, 60)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _wrap(text: str, width: int = _MAX_CHARS) -> tuple[str, ...]:
    """Lines of at most `width` characters, broken after a space or one of . - : / if there is
    one in their second half."""
    lines, rest = [], _one_line(text)
    while len(rest) > width:
        cut = max(rest.rfind(char, width // 2, width) for char in " .-:/") + 1 or width
        lines.append(rest[:cut].strip())
        rest = rest[cut:]
    return (*lines, rest.strip())


# ---------------------------------------------------------------------------------------- Graphviz


def to_dot(diagram: Diagram) -> graphviz.Digraph:
    """The diagram for Graphviz: a cluster for each process, PER_ROW of them beside each other."""
    dot = graphviz.Digraph(
        "hetero",
        graph_attr={
            "label": _html(
                *(_bold(line, 17) for line in diagram.title),
                _faint(diagram.counts, 13),
                _space(6),
                *(_faint(line, 12) for line in diagram.caption),
            ),
            "labelloc": "t", "rankdir": "LR", "bgcolor": _PAPER, "fontname": _FONT,
            "pad": "0.25", "nodesep": "0.25", "ranksep": "0.6",
        },
        node_attr={
            "shape": "box", "style": "rounded,filled", "fillcolor": "#ffffff", "width": "1.5",
            "color": _STAGE_EDGE, "fontname": _FONT, "fontsize": "12", "fontcolor": _INK,
        },
        edge_attr={
            "color": _LINE, "penwidth": "1.8", "arrowsize": "0.8", "fontname": _FONT,
            "fontsize": "11", "fontcolor": _FAINT,
        },
    )  # fmt: skip
    for number, place in enumerate(diagram.places):
        fill, line = place.colors
        with dot.subgraph(name=f"cluster{number}") as box:
            about = (_faint(text, 12) for text in place.lines)
            label = _html(_space(4), *(_bold(text, 15) for text in place.names), *about)
            box.attr(label=label, labelloc="t", style="rounded,filled", fillcolor=fill)
            box.attr(color=line, penwidth="1.2", rank="same", margin="12")
            for index, (first, *rest) in place.stages:
                box.node(f"s{index}", _html(_bold(first, 12), *map(_dot_text, rest)))
    cells = _cells(diagram)
    for b in diagram.boundaries:
        (one, _), (other, _) = cells[b.before], cells[b.before + 1]
        beside = one < other and one // PER_ROW == other // PER_ROW
        words = _html(*map(_dot_text, _WORDS[b.how]), _space(3)) if _WORDS[b.how] else ""
        # Only what leads to the right decides about columns; the rest finds its way around.
        dot.edge(
            f"s{b.before}", f"s{b.before + 1}", words,
            style=_DASHES.get(b.how, ("solid", ""))[0], constraint=str(beside).lower(),
        )  # fmt: skip
    return dot


def _cells(diagram: Diagram) -> dict[int, tuple[int, int]]:
    """Of each stage: the number of its place, and its own among those of the place."""
    return {
        index: (number, row)
        for number, place in enumerate(diagram.places)
        for row, (index, _) in enumerate(place.stages)
    }


def _html(*lines: str) -> str:
    return "<" + "<br/>".join(lines or (" ",)) + ">"


def _bold(text: str, size: int) -> str:
    return f'<font point-size="{size}"><b>{_dot_text(text)}</b></font>'


def _faint(text: str, size: int) -> str:
    return f'<font point-size="{size}" color="{_FAINT}">{_dot_text(text)}</font>'


def _space(size: int) -> str:
    return f'<font point-size="{size}"> </font>'


def _dot_text(text: str) -> str:
    """For a label in HTML; Graphviz reads backslashes there too."""
    return escape(text).replace("\\", "\\\\")


# ---------------------------------------------------------------------------------------- Mermaid


def to_mermaid(diagram: Diagram) -> str:
    """The diagram as a Mermaid flowchart. Identifiers are ours; every name is a quoted label."""
    lines = ["flowchart LR"]
    for number, place in enumerate(diagram.places):
        lines.append(f"  subgraph m{number}[{_quoted(*place.names, *place.lines)}]")
        lines += [f"    s{index}[{_quoted(*texts)}]" for index, texts in place.stages]
        lines.append("  end")
    for b in diagram.boundaries:
        words = (_AUTO,) if b.how == "auto" else (" ".join(_WORDS[b.how]),)
        label = f"|{_quoted(*words)}|" if words[0] else ""
        line = "-.->" if b.how in _DASHES else "-->"
        lines.append(f"  s{b.before} {line}{label} s{b.before + 1}")
    for number, place in enumerate(diagram.places):
        lines.append(f"  style m{number} fill:{place.colors[0]},stroke:{place.colors[1]}")
    return "\n".join([*lines, ""])


def _quoted(*lines: str) -> str:
    return '"' + "<br/>".join(map(_mermaid_text, lines)) + '"'


def _mermaid_text(text: str) -> str:
    """Mermaid's numeric entities for everything that could mean something to its parser."""
    return "".join(
        char if char.isalnum() or char in " .,:/+-_()[]" else f"#{ord(char)};" for char in text
    )


# ----------------------------------------------------------------------------- SVG without Graphviz

_GAP, _PAD, _LINE_HEIGHT, _HEAD = 100.0, 14.0, 17.0, 24.0
_LANE = 30.0
"""Between two lines that pass below a row of machines."""


def to_svg(diagram: Diagram) -> str:
    """The diagram as SVG: a grid of machines, and lines that leave the grid's gaps to no box."""
    return _Grid(diagram).draw()


class _Grid:
    """Positions in points. A line to the next column goes straight; any other one goes down to a
    lane of its own below the row, along it, and up or down to its target's left side."""

    def __init__(self, diagram: Diagram) -> None:
        self._diagram = diagram
        self._cells = _cells(diagram)
        self._parts: list[str] = []
        self._rows = diagram.rows
        self._lanes: list[list[Boundary]] = [[] for _ in self._rows]
        for b in diagram.boundaries:
            if b.how != "inside" and not self._is_straight(b):
                self._lanes[self._cells[b.before][0] // PER_ROW].append(b)
        detours = 12.0 * max(map(len, self._lanes))
        self._left = 28 + detours
        self._gap = _GAP + detours
        self._widths = [
            max(map(_width, diagram.places[c::PER_ROW])) for c in range(len(self._rows[0]))
        ]
        text = [_text_width(t, 17) for t in diagram.title]
        text += [_text_width(t, 12) for t in diagram.caption]
        grid = sum(self._widths) + self._gap * (len(self._widths) - 1)
        self._left = max(self._left, (max(text) - grid) / 2 + 28)
        self._page = 2 * self._left + grid
        self._heads = [max(_head(place) for place in row) for row in self._rows]
        self._tops = [68.0 + 22 * len(diagram.title)]
        for row, head, lanes in zip(self._rows, self._heads, self._lanes, strict=True):
            height = head + max(_body(place) for place in row)
            self._tops.append(self._tops[-1] + height + 24 + _LANE * len(lanes))

    def _is_straight(self, b: Boundary) -> bool:
        (one, i), (other, k) = self._cells[b.before], self._cells[b.before + 1]
        return other == one + 1 and other % PER_ROW != 0 and i == k

    def draw(self) -> str:
        diagram, bottom = self._diagram, self._tops[-1] + 6
        for i, line in enumerate(diagram.title):
            self._text(self._page / 2, 40 + 22 * i, line, 17, bold=True)
        self._text(self._page / 2, self._tops[0] - 28, diagram.counts, 13, _FAINT)
        for number, place in enumerate(diagram.places):
            self._place(number, place)
        for b in diagram.boundaries:
            self._boundary(b)
        for i, line in enumerate(diagram.caption):
            self._text(self._page / 2, bottom + _LINE_HEIGHT * i, line, 12, _FAINT)
        size = (round(self._page), round(bottom + _LINE_HEIGHT * len(diagram.caption) + 14))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
            f'viewBox="0 0 {size[0]} {size[1]}" font-family="{_FONT}" text-anchor="middle">\n'
            '<defs><marker id="tip" orient="auto" markerUnits="userSpaceOnUse" markerWidth="11" '
            f'markerHeight="9" refX="10" refY="4.5"><path d="M0,0 L11,4.5 L0,9 z" fill="{_LINE}"/>'
            f'</marker></defs>\n<rect width="100%" height="100%" fill="{_PAPER}"/>'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])

    def _x(self, number: int) -> float:
        column = number % PER_ROW
        return self._left + sum(self._widths[:column]) + self._gap * column

    def _stage(self, index: int) -> tuple[float, float, float, float]:
        """x, y, width and height of a stage's box."""
        number, row = self._cells[index]
        stages = self._diagram.places[number].stages
        y = self._tops[number // PER_ROW] + self._heads[number // PER_ROW]
        y += sum(_height(lines) + _HEAD for _, lines in stages[:row])
        width = self._widths[number % PER_ROW] - 2 * _PAD
        return self._x(number) + _PAD, y, width, _height(stages[row][1])

    def _place(self, number: int, place: Place) -> None:
        row, width = number // PER_ROW, self._widths[number % PER_ROW]
        x, y = self._x(number), self._tops[row]
        self._box(x, y, width, self._heads[row] + _body(place), place.colors)
        for i, line in enumerate((*place.names, *place.lines)):
            size, color = (15, _INK) if line in place.names else (12, _FAINT)
            self._text(x + width / 2, y + 20 + _LINE_HEIGHT * i, line, size, color, bold=size == 15)
        for index, lines in place.stages:
            left, top, wide, high = self._stage(index)
            self._box(left, top, wide, high, ("#ffffff", _STAGE_EDGE))
            for i, line in enumerate(lines):
                at = top + 8 + _LINE_HEIGHT * (i + 0.5)
                self._text(left + wide / 2, at, line, 12, bold=i == 0)

    def _boundary(self, b: Boundary) -> None:
        x, y, width, height = self._stage(b.before)
        left, top, _, high = self._stage(b.before + 1)
        words = _WORDS[b.how]
        if b.how == "inside":
            path = f"M{x + width / 2:.1f},{y + height:.1f} V{top - 1:.1f}"
        elif self._is_straight(b):
            start = y + min(height, high) / 2
            path = f"M{x + width:.1f},{start:.1f} H{left - 1:.1f}"
            for i, word in enumerate(reversed(words)):
                middle = (x + width + left) / 2
                self._text(middle, start - 11 - (_LINE_HEIGHT - 3) * i, word, 11, _FAINT)
        else:
            row = self._cells[b.before][0] // PER_ROW
            lane = self._lanes[row].index(b)
            below = self._tops[row + 1] - 14 - _LANE * (len(self._lanes[row]) - 1 - lane)
            out, into = x + width + _PAD + 14 + 12 * lane, left - _PAD - 14 - 12 * lane
            end = top + high / 2
            path = (
                f"M{x + width:.1f},{y + height * 0.7:.1f} H{out:.1f} V{below:.1f} H{into:.1f} "
                f"V{end:.1f} H{left - 1:.1f}"
            )
            self._text((out + into) / 2, below - 10, " ".join(words), 11, _FAINT)
        dashes = f' stroke-dasharray="{_DASHES[b.how][1]}"' if b.how in _DASHES else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="1.8" '
            f'stroke-linejoin="round"{dashes} marker-end="url(#tip)"/>'
        )

    def _box(
        self, x: float, y: float, width: float, height: float, colors: tuple[str, str]
    ) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8" '
            f'fill="{colors[0]}" stroke="{colors[1]}" stroke-width="1.2"/>'
        )

    def _text(
        self, x: float, y: float, text: str, size: int, color: str = _INK, *, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y + size * 0.35:.1f}" font-size="{size}"{weight} '
            f'fill="{color}">{escape(text)}</text>'
        )


def _text_width(text: str, size: float) -> float:
    """A generous estimate, so that text stays in its box with whatever font there is."""
    ems = sum(1.0 if unicodedata.east_asian_width(char) in "WF" else 0.6 for char in text)
    return ems * size


def _height(lines: Sequence[str]) -> float:
    return 16 + _LINE_HEIGHT * len(lines)


def _head(place: Place) -> float:
    return 20 + _LINE_HEIGHT * len(place.names + place.lines) + 4


def _body(place: Place) -> float:
    return sum(_height(lines) + _HEAD for _, lines in place.stages) - _HEAD + _PAD


def _width(place: Place) -> float:
    stages = [_text_width(line, 12) + 24 for _, lines in place.stages for line in lines]
    own = [_text_width(line, 12) for line in place.lines]
    names = [_text_width(name, 16) for name in place.names]
    return 2 * _PAD + max([110.0, *names, *own, *stages])


# ------------------------------------------------------------------------------------------- files


def draw(
    config: Config,
    path: str | os.PathLike[str],
    format: str | None = None,
    details: DiagramDetails | None = None,
) -> Path:
    """Write the picture to `path` and return the file that was written.

    `format` is png, svg, pdf or mmd (Mermaid); None takes it from the file's name. PNG and PDF need
    Graphviz; without it an SVG and a Mermaid file are written instead, with a warning (the SVG is
    returned). Raises UserError for an unknown format or a file that cannot be written.
    """
    target = Path(path)
    chosen = (format or target.suffix.removeprefix(".")).lower()
    if chosen not in get_args(Format):
        raise UserError(
            f"there is no picture format {chosen!r}",
            hint=f"give one of: {', '.join(get_args(Format))}",
        )
    diagram = Diagram.of(config, details)
    if chosen == "mmd":
        return write_picture(target, to_mermaid(diagram).encode())
    dot = to_dot(diagram)
    if chosen == "png":
        dot.attr(dpi="144")
    try:
        return write_picture(target, bytes(dot.pipe(format=chosen, quiet=True)))
    except graphviz.ExecutableNotFound:
        problem = "Graphviz is not installed"
    except subprocess.SubprocessError:
        problem = "Graphviz failed"
    svg = write_picture(target.with_suffix(".svg"), to_svg(diagram).encode())
    if chosen == "svg":
        return svg
    other = write_picture(target.with_suffix(".mmd"), to_mermaid(diagram).encode())
    _log.warning(
        "%s, so no %s was drawn; wrote %s and %s instead. Install Graphviz (the program dot on "
        "PATH) for PNG and PDF.",
        problem,
        chosen.upper(),
        svg,
        other,
    )
    return svg


def write_picture(path: Path, content: bytes) -> Path:
    """Write the file and its folders. Raises UserError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"cannot write the picture {path}: {error.strerror}", hint="give another --output"
        ) from error
    return path
