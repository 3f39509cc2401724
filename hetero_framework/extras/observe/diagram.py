"""The picture of a configuration: machines, stages, and the settings of each boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Literal

import graphviz

from hetero_framework.config import Config, StageSpec, process_name
from hetero_framework.extras.observe.pictures import FAINT, INK, PAPER
from hetero_framework.log import printable
from hetero_framework.units import count, plural, size

How = Literal["inside", "direct", "relay", "auto"]

PER_ROW = 4
"""Processes in a row: as many as a page shows without shrinking the text."""
_MAX_CHARS = 30
_FONT = "DejaVu Sans,Verdana,sans-serif"  # equally wide on all systems, so that boxes fit
_COORDINATOR, _WORKER = ("#e6eefa", "#2f5f9e"), ("#e8f4ea", "#3c8350")
STAGE_EDGE, LINE = "#b8c2cc", "#c2571a"
WORDS: Mapping[How, tuple[str, ...]] = {
    "inside": (),
    "direct": ("direct",),
    "relay": ("through the", "coordinator"),
    "auto": ("direct", "if possible"),
}
_AUTO = "direct where they reach each other, else through the coordinator"
STYLES: Mapping[How, str] = {"relay": "dashed", "auto": "dotted"}
"""Styles of the lines that are not solid, in Graphviz's words."""


@dataclass(frozen=True)
class DiagramDetails:
    """Facts that the configuration does not have: of stages by index, of devices by owner. `direct`
    has the boundaries, by the stage before each, with a link between workers; None: not known."""

    model: str | None = None
    num_layers: int | None = None
    parameters: Mapping[int, int] = field(default_factory=dict)
    memory_bytes: Mapping[int, int] = field(default_factory=dict)
    devices: Mapping[int | str, str] = field(default_factory=dict)
    direct: frozenset[int] | None = None


@dataclass(frozen=True)
class ProcessBox:
    """A process: lines of its name, lines about it, and its stages as (number, lines)."""

    names: tuple[str, ...]
    lines: tuple[str, ...]
    stages: tuple[tuple[int, tuple[str, ...]], ...]
    colors: tuple[str, str]


@dataclass(frozen=True)
class Diagram:
    """All that a picture shows. `places` are in the order in which the plan first needs them.
    Boundary k lies between stages k and k + 1."""

    title: tuple[str, ...]
    counts: str
    places: tuple[ProcessBox, ...]
    boundaries: tuple[How, ...]
    caption: tuple[str, ...]
    others: tuple[str, ...] = ()
    """The other islands, if there are any, as lines of a box beside the coordinator's."""

    @classmethod
    def of(cls, config: Config, details: DiagramDetails | None = None) -> Diagram:
        details = details or DiagramDetails()
        stages, owners = config.plan.stages, config.plan.owners
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
            others=_others(config),
        )


def _boundary(config: Config, before: StageSpec, after: StageSpec, details: DiagramDetails) -> How:
    if before.owner == after.owner:
        return "inside"
    if "local" in (before.owner, after.owner):
        return "direct"
    if details.direct is not None:
        return "direct" if before.index in details.direct else "relay"
    return config.shard_plan[after.index].links or config.links


def _others(config: Config) -> tuple[str, ...]:
    if (island := config.setting("island")) is None:
        return ()
    lines = ["other islands", f"found at {island.lighthouse}"]
    if island.sync_steps == 1:
        lines.append("gradients, every step")
    else:
        coded = f" as {island.compression}" if island.compression != "none" else ""
        lines.append(f"changes{coded}, every {island.sync_steps} steps")
    return tuple(part for line in lines for part in _wrap(line))


def _caption(config: Config, boundaries: Sequence[How]) -> tuple[str, ...]:
    lines = []
    if boundaries:
        lines.append("Activations follow the arrows; gradients travel the same way back.")
    if "auto" in boundaries:
        lines.append(f"If possible: {_AUTO}.")
    codecs = [("activations", config.wire.activations), ("gradients", config.wire.gradients)]
    coded = [f"{what} as {codec}" for what, codec in codecs if codec != "none"]
    if coded and set(boundaries) - {"inside"}:
        lines.append(f"Between processes: {', '.join(coded)}.")
    return tuple(lines)


def _place(config: Config, owner: int | str, details: DiagramDetails) -> ProcessBox:
    is_local = owner == "local"
    machine = config.machine(owner)
    host = _unbroken(machine.hostname or "")
    lines = [] if is_local or host in ("", _unbroken(machine.ip)) else [host]
    lines.append((host or machine.ip) if is_local else config.worker(owner).address)
    label = details.devices.get(owner)
    lines.append(f"{label} ({machine.device})" if label else f"device {machine.device}")
    if config.quantizes:
        lines.append(f"weights {config.quantization(owner) or 'in full precision'}")
    return ProcessBox(
        names=_wrap(process_name(owner)),
        lines=tuple(part for line in lines for part in _wrap(line)),
        stages=tuple(
            (spec.index, _stage_lines(config, spec, details)) for spec in config.plan.of(owner)
        ),
        colors=_COORDINATOR if is_local else _WORKER,
    )


def _stage_lines(config: Config, stage: StageSpec, details: DiagramDetails) -> tuple[str, ...]:
    facts = []
    if stage.index in details.parameters:
        facts.append(f"{count(details.parameters[stage.index])} parameters")
    if stage.index in details.memory_bytes:
        facts.append(size(details.memory_bytes[stage.index]))
    lines = (f"stage {stage.index}", config.contents(stage), ", ".join(facts))
    return tuple(line for line in lines if line)


def _title(config: Config, details: DiagramDetails) -> tuple[str, ...]:
    model = config.model
    kind = str((model.from_config or {}).get("model_type", "")) if model else ""
    name_of_island = config.setting("island.name")
    island = (f"island {name_of_island}",) if name_of_island is not None else ()
    name = details.model or (model and model.source) or kind or "plan"
    return (*_wrap(name, 60), *island)


def _unbroken(text: str) -> str:
    return printable(" ".join(text.split()))


def _wrap(text: str, width: int = _MAX_CHARS) -> tuple[str, ...]:
    """Lines of at most `width` characters, broken after a space, else after . - : or /, in their
    second half, else within a word."""
    lines, rest = [], _unbroken(text)
    while len(rest) > width:
        space, *others = (rest.rfind(char, width // 2, width) + 1 for char in " .-:/")
        cut = space or max(others) or width
        lines.append(rest[:cut].strip())
        rest = rest[cut:]
    return (*lines, rest.strip())


def to_dot(diagram: Diagram) -> graphviz.Digraph:
    """The diagram for Graphviz: a cluster for each process, PER_ROW of them beside each other."""
    dot = graphviz.Digraph(
        "hetero",
        graph_attr={
            "label": _html(
                *(_bold(line, 17) for line in diagram.title),
                _text(diagram.counts, 13),
                _text(" ", 6),
                *(_text(line, 12) for line in diagram.caption),
            ),
            "labelloc": "t", "rankdir": "LR", "bgcolor": PAPER, "fontname": _FONT,
            "pad": "0.25", "nodesep": "0.25", "ranksep": "0.6",
        },
        node_attr={
            "shape": "box", "style": "rounded,filled", "fillcolor": "#ffffff", "width": "1.5",
            "color": STAGE_EDGE, "fontname": _FONT, "fontsize": "12", "fontcolor": INK,
            "margin": "0.2,0.08",  # room for the wider font of an SVG viewer
        },
        edge_attr={
            "color": LINE, "penwidth": "1.8", "arrowsize": "0.8", "fontname": _FONT,
            "fontsize": "11", "fontcolor": FAINT,
        },
    )  # fmt: skip
    for number, place in enumerate(diagram.places):
        fill, line = place.colors
        with dot.subgraph(name=f"cluster{number}") as box:
            about = (_text(text, 12) for text in place.lines)
            label = _html(_text(" ", 4), *(_bold(text, 15) for text in place.names), *about)
            box.attr(label=label, labelloc="t", style="rounded,filled", fillcolor=fill)
            box.attr(color=line, penwidth="1.2", rank="same", margin="18")
            for index, (first, *rest) in place.stages:
                box.node(f"s{index}", _html(_bold(first, 12), *map(_dot_text, rest)))
    if diagram.others:
        first, *rest = diagram.others
        label = _html(_bold(first, 12), *map(_dot_text, rest))
        dot.node("others", label, style="rounded,dashed", fillcolor=PAPER)
        dot.edge("others", "s0", dir="both", style="dashed")
    number_of = {i: number for number, place in enumerate(diagram.places) for i, _ in place.stages}
    for index, how in enumerate(diagram.boundaries):
        one, other = number_of[index], number_of[index + 1]
        beside = one < other and one // PER_ROW == other // PER_ROW
        words = _html(*map(_dot_text, WORDS[how]), _text(" ", 3)) if WORDS[how] else ""
        # Only edges to the right within a row place the columns; others go around the boxes.
        dot.edge(
            f"s{index}", f"s{index + 1}", words,
            style=STYLES.get(how, "solid"), constraint=str(beside).lower(),
        )  # fmt: skip
    return dot


def _html(*lines: str) -> str:
    return "<" + "<br/>".join(lines) + ">"


def _bold(text: str, size: int) -> str:
    return f"<b>{_text(text, size, INK)}</b>"


def _text(text: str, size: int, color: str = FAINT) -> str:
    return f'<font point-size="{size}" color="{color}">{_dot_text(text)}</font>'


def _dot_text(text: str) -> str:
    """Text for a label in HTML. Graphviz reads backslashes there too."""
    return escape(text).replace("\\", "\\\\")


def to_mermaid(diagram: Diagram) -> str:
    """The diagram as a Mermaid flowchart. Identifiers are ours; every name is a quoted label."""
    lines = ["flowchart LR"]
    for number, place in enumerate(diagram.places):
        lines.append(f"  subgraph m{number}[{_quoted(*place.names, *place.lines)}]")
        lines += [f"    s{index}[{_quoted(*texts)}]" for index, texts in place.stages]
        lines.append("  end")
    if diagram.others:
        lines += [f"  others[{_quoted(*diagram.others)}]", "  others <-.-> s0"]
    for index, how in enumerate(diagram.boundaries):
        words = _AUTO if how == "auto" else " ".join(WORDS[how])
        label = f"|{_quoted(words)}|" if words else ""
        line = "-.->" if how in STYLES else "-->"
        lines.append(f"  s{index} {line}{label} s{index + 1}")
    for number, place in enumerate(diagram.places):
        lines.append(f"  style m{number} fill:{place.colors[0]},stroke:{place.colors[1]}")
    return "\n".join([*lines, ""])


def _quoted(*lines: str) -> str:
    return '"' + "<br/>".join(map(_mermaid_text, lines)) + '"'


def _mermaid_text(text: str) -> str:
    """Text with numeric entities for all characters that Mermaid's parser may interpret."""
    return "".join(
        char if char.isalnum() or char in " .,:/+-_()[]" else f"#{ord(char)};" for char in text
    )
