"""The picture of a configuration, drawn as what it is: a star.

The coordinator stands on the left and has one TCP link to each worker. The arrows on the links
carry the number of the stage they lead to; an activation between two workers passes through the
coordinator, so its number stands on two links. Gradients travel the same way back.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hetero_framework.config import Config, Machine, StageSpec
from hetero_framework.errors import UserError
from hetero_framework.visualizer.render import NoGraphvizError, render, write_picture
from hetero_framework.visualizer.scene import (
    Arrow,
    Box,
    Label,
    Scene,
    centred,
    text_width,
    to_dot,
    to_svg,
    wrap,
)
from hetero_framework.visualizer.text import bytes_text, count_text, printable

Format = Literal["png", "svg", "pdf", "mmd"]

COORDINATOR_COLORS = ("#e6eefa", "#2f5f9e")
WORKER_COLORS = ("#e8f4ea", "#3c8350")
STAGE_COLORS = ("#ffffff", "#b8c2cc")
LINK_COLORS = ("#f1f0ec", "#dcd9d0")
ARROW_COLOR = "#c2571a"
FAINT = "#5f6670"

_MARGIN = 28.0
_PAD = 14.0
_LINE = 18.0
_TITLE_LINE = 22.0
_STAGE_GAP = 12.0
_STAGE_GAP_WITH_ARROW = 44.0
_MACHINE_GAP = 24.0
_MIN_LINK_WIDTH = 190.0
_MIN_MACHINE_WIDTH = 176.0
_MAX_LINE_CHARS = 36

_LEGEND = (
    "An arrow's number is the stage it leads to. Gradients travel the same way back.",
    "What goes from worker to worker passes through the coordinator.",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiagramDetails:
    """What the configuration does not say. Stages by index, devices by owner; all optional."""

    model: str | None = None
    num_layers: int | None = None
    parameters: Mapping[int, int] = field(default_factory=dict)
    memory_bytes: Mapping[int, int] = field(default_factory=dict)
    devices: Mapping[int | str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Machine:
    """A process as it is drawn: its lines of text and its stages."""

    owner: int | str
    name: str
    lines: tuple[str, ...]
    link: str
    stages: tuple[StageSpec, ...]


def draw(
    config: Config,
    path: str | os.PathLike[str],
    format: str | None = None,
    details: DiagramDetails | None = None,
    *,
    notify: Callable[[str], None] = _log.warning,
) -> Path:
    """Write the picture to `path` and return the file that was written.

    `format` is png, svg, pdf or mmd (Mermaid); None takes it from the file's name. PNG and PDF need
    Graphviz; without it an SVG and a Mermaid file are written beside and `notify` says so (the
    SVG is returned). Raises UserError for an unknown format or a file that cannot be written.
    """
    target = Path(path)
    chosen = (format or target.suffix.removeprefix(".")).lower()
    if chosen not in get_args(Format):
        raise UserError(
            f"There is no picture format {chosen!r}.",
            hint=f"Give one of: {', '.join(get_args(Format))}.",
        )
    details = details or DiagramDetails()
    if chosen == "mmd":
        return write_picture(target, mermaid(config, details).encode())
    scene = layout(config, details)
    if chosen == "svg":
        return write_picture(target, to_svg(scene).encode())
    try:
        return write_picture(target, render(scene, chosen))
    except NoGraphvizError as error:
        svg = write_picture(target.with_suffix(".svg"), to_svg(scene).encode())
        other = write_picture(target.with_suffix(".mmd"), mermaid(config, details).encode())
        notify(
            f"{error}, so no {chosen.upper()} was drawn; wrote {svg} and {other} instead. "
            "Install Graphviz (the programs dot and neato on PATH) for PNG and PDF."
        )
        return svg


def dot(config: Config, details: DiagramDetails | None = None) -> str:
    """The picture as DOT text, to be drawn by neato."""
    return to_dot(layout(config, details or DiagramDetails()))


def mermaid(config: Config, details: DiagramDetails | None = None) -> str:
    """The picture as a Mermaid flowchart. Identifiers are ours; every name is a quoted label."""
    details = details or DiagramDetails()
    machines = _machines(config, details)
    lines = ["flowchart LR"]
    for number, machine in enumerate(machines):
        lines.append(f"  subgraph m{number}[{_quoted(machine.name, *machine.lines)}]")
        for stage in machine.stages:
            text = _quoted(f"stage {stage.index}", *_stage_lines(stage, details))
            lines.append(f"    s{stage.index}[{text}]")
        if number == 0 and _relays(config):
            lines.append('    relay(["relay"])')
        lines.append("  end")
    for number, machine in enumerate(machines[1:], 1):
        lines.append(f"  m0 ---|{_quoted(machine.link)}| m{number}")
    for number, source, target in _mermaid_hops(config):
        lines.append(f'  {source} -->|"{number}"| {target}')
    lines.append(f"  style m0 fill:{COORDINATOR_COLORS[0]},stroke:{COORDINATOR_COLORS[1]}")
    for number in range(1, len(machines)):
        lines.append(f"  style m{number} fill:{WORKER_COLORS[0]},stroke:{WORKER_COLORS[1]}")
    return "\n".join([*lines, ""])


def layout(config: Config, details: DiagramDetails) -> Scene:
    """Place everything: coordinator left, workers right below each other, links between them."""
    machines = _machines(config, details)
    coordinator, workers = machines[0], machines[1:]
    counts = _counts(config, details)
    width_left = _machine_width(coordinator, details)
    width_right = max((_machine_width(worker, details) for worker in workers), default=0.0)
    link_lines = [wrap(worker.link, _MAX_LINE_CHARS) for worker in workers]
    link_width = max(
        [_MIN_LINK_WIDTH] + [text_width(line, 12) + 36 for lines in link_lines for line in lines]
    )
    total = width_left + (link_width + width_right if workers else 0.0)
    legend = [part for line in _LEGEND for part in wrap(line, max(40, int(total / 6.4)))]
    if len(config.shard_plan) == 1:
        legend = []
    model_lines = wrap(_model_name(config, details), max(24, int(total / 10.5)))

    top = _MARGIN + 24 * len(model_lines) + _LINE + 12
    heads = [_head_height(w, lines) for w, lines in zip(workers, link_lines, strict=True)]
    heights = [_machine_height(w, details, head) for w, head in zip(workers, heads, strict=True)]
    column = sum(heights) + _MACHINE_GAP * max(0, len(workers) - 1)
    own_head = _head_height(coordinator, [])
    own = _machine_height(coordinator, details, own_head)
    body = max(column, own)
    scene = Scene(
        width=total + 2 * _MARGIN,
        height=top + body + (16 + _LINE * len(legend) if legend else 0) + _MARGIN,
        title=": ".join(part for part in (" ".join(model_lines), counts) if part),
    )
    middle = scene.width / 2
    scene.labels += [
        Label(middle, _MARGIN + 24 * index + 8, line, size=17, bold=True)
        for index, line in enumerate(model_lines)
    ]
    scene.labels.append(
        Label(middle, _MARGIN + 24 * len(model_lines) + 4, counts, size=13, color=FAINT)
    )
    inset = (body - own) / 2
    _place_machine(
        scene,
        coordinator,
        details,
        frame=Box(_MARGIN, top, width_left, body, *COORDINATOR_COLORS),
        content_y=top + inset,
        head=own_head,
    )
    y = top + (body - column) / 2
    link_x = _MARGIN + width_left
    for worker, lines, head, height in zip(workers, link_lines, heads, heights, strict=True):
        link = Box(link_x, y + 8, link_width, height - 16, *LINK_COLORS, radius=0)
        scene.boxes.insert(0, link)  # below the frames that it ends at
        scene.labels += centred(link_x + link_width / 2, y + _PAD, lines, 12, _LINE, FAINT)
        frame = Box(link_x + link_width, y, width_right, height, *WORKER_COLORS)
        places = _place_machine(scene, worker, details, frame=frame, content_y=y, head=head)
        for stage, stage_y, stage_height in places:
            _place_arrows(scene, config, stage, link, stage_y, stage_height)
        y += height + _MACHINE_GAP
    scene.labels += centred(middle, top + body + 14, legend, 12, _LINE, FAINT)
    return scene


def _place_machine(
    scene: Scene,
    machine: _Machine,
    details: DiagramDetails,
    *,
    frame: Box,
    content_y: float,
    head: float,
) -> Iterator[tuple[StageSpec, float, float]]:
    """Draw one process; returns (stage, y, height) of its stages."""
    scene.boxes.append(frame)
    middle = frame.x + frame.width / 2
    scene.labels.append(
        Label(middle, content_y + _PAD + _TITLE_LINE / 2, machine.name, size=15, bold=True)
    )
    below = content_y + _PAD + _TITLE_LINE
    scene.labels += centred(middle, below, machine.lines, 12, _LINE, FAINT)
    y = content_y + head
    places = []
    previous: StageSpec | None = None
    for stage in machine.stages:
        if previous is not None:
            gap = _gap(previous, stage)
            if gap == _STAGE_GAP_WITH_ARROW:
                number = str(stage.index)
                scene.arrows.append(Arrow(middle, y, middle, y + gap, number, ARROW_COLOR, 0.4))
            y += gap
        lines = _stage_lines(stage, details)
        height = _stage_height(lines)
        scene.boxes.append(
            Box(frame.x + _PAD, y, frame.width - 2 * _PAD, height, *STAGE_COLORS, radius=5)
        )
        scene.labels.append(Label(middle, y + 8 + _LINE / 2, f"stage {stage.index}", bold=True))
        scene.labels += centred(middle, y + 8 + _LINE, lines, 12, _LINE, "#222222")
        places.append((stage, y, height))
        y += height
        previous = stage
    return iter(places)


def _place_arrows(
    scene: Scene, config: Config, stage: StageSpec, link: Box, y: float, height: float
) -> None:
    """The arrows of one worker's stage on its link: in above, out below."""
    stages = config.stages()
    left, right = link.x, link.x + link.width
    if stages[stage.index - 1].owner != stage.owner:
        number = str(stage.index)
        scene.arrows.append(
            Arrow(left, y + height * 0.3, right + _PAD, y + height * 0.3, number, ARROW_COLOR, 0.3)
        )
    if not stage.is_last and stages[stage.index + 1].owner != stage.owner:
        number = str(stage.index + 1)
        scene.arrows.append(
            Arrow(right + _PAD, y + height * 0.7, left, y + height * 0.7, number, ARROW_COLOR, 0.4)
        )


def _machines(config: Config, details: DiagramDetails) -> list[_Machine]:
    """The coordinator, then the workers in the order in which the plan first needs them."""
    stages = config.stages()
    order = list(dict.fromkeys(stage.owner for stage in stages))
    coordinator = config.coordinator
    machines = [
        _Machine(
            "local",
            "coordinator",
            _machine_lines(coordinator, details.devices.get("local")),
            "",
            tuple(stage for stage in stages if stage.owner == "local"),
        )
    ]
    for worker in sorted(config.workers, key=lambda worker: order.index(worker.id)):
        host = f"[{worker.ip}]" if ":" in worker.ip else worker.ip
        machines.append(
            _Machine(
                worker.id,
                f"worker {worker.id}",
                _machine_lines(worker, details.devices.get(worker.id)),
                f"TCP {host}:{worker.port}",
                tuple(stage for stage in stages if stage.owner == worker.id),
            )
        )
    return machines


def _machine_lines(machine: Machine, label: str | None) -> tuple[str, ...]:
    hostname = machine.hostname or machine.ip
    text = f"{label} ({machine.device})" if label else f"device {machine.device}"
    return tuple(
        line for part in (hostname, text) for line in wrap(_one_line(part), _MAX_LINE_CHARS)
    )


def _stage_lines(stage: StageSpec, details: DiagramDetails) -> list[str]:
    parts = []
    if stage.is_first:
        parts.append("embedding")
    if stage.end > stage.start:
        parts.append(stage.layers)
    if stage.is_last:
        parts.append("head")
    lines = [" + ".join(parts) or "no layers"]
    facts = []
    if stage.index in details.parameters:
        facts.append(f"{count_text(details.parameters[stage.index])} parameters")
    if stage.index in details.memory_bytes:
        facts.append(bytes_text(details.memory_bytes[stage.index]))
    return lines + ([", ".join(facts)] if facts else [])


def _model_name(config: Config, details: DiagramDetails) -> str:
    if details.model is not None:
        return _one_line(details.model)
    if config.model is None:
        return ""
    kind = (config.model.from_config or {}).get("model_type", "")
    return _one_line(config.model.name_or_path or str(kind))


def _counts(config: Config, details: DiagramDetails) -> str:
    layers = details.num_layers or config.shard_plan[-1].end
    return ", ".join(
        [
            _plural(layers, "layer"),
            _plural(len(config.shard_plan), "stage"),
            _plural(1 + len(config.workers), "process"),
        ]
    )


def _plural(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def _relays(config: Config) -> bool:
    owners = [stage.owner for stage in config.stages()]
    pairs = itertools.pairwise(owners)
    return any(a != b and "local" not in (a, b) for a, b in pairs)


def _mermaid_hops(config: Config) -> Iterator[tuple[int, str, str]]:
    """(number, from, to) of each arrow; from worker to worker takes two, through the relay."""
    stages = config.stages()
    for before, after in itertools.pairwise(stages):
        source, target = f"s{before.index}", f"s{after.index}"
        if before.owner == after.owner or "local" in (before.owner, after.owner):
            yield after.index, source, target
        else:
            yield after.index, source, "relay"
            yield after.index, "relay", target


def _quoted(*lines: str) -> str:
    return '"' + "<br/>".join(_mermaid_text(line) for line in lines) + '"'


def _mermaid_text(text: str) -> str:
    """Mermaid's numeric entities for everything that could mean something to its parser."""
    return "".join(
        char if char.isalnum() or char in " .,:/+-_()[]" else f"#{ord(char)};"
        for char in _one_line(text)
    )


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _gap(previous: StageSpec, stage: StageSpec) -> float:
    return _STAGE_GAP_WITH_ARROW if stage.index == previous.index + 1 else _STAGE_GAP


def _stage_height(lines: list[str]) -> float:
    return 16 + _LINE * (1 + len(lines))


def _head_height(machine: _Machine, link_lines: list[str]) -> float:
    """From a machine's top edge to its first stage: its own lines, or those of its link."""
    own = _TITLE_LINE + _LINE * len(machine.lines)
    return _PAD + max(own, _LINE * len(link_lines)) + 8


def _machine_height(machine: _Machine, details: DiagramDetails, head: float) -> float:
    height = head + sum(_stage_height(_stage_lines(s, details)) for s in machine.stages) + _PAD
    return height + sum(_gap(a, b) for a, b in itertools.pairwise(machine.stages))


def _machine_width(machine: _Machine, details: DiagramDetails) -> float:
    widths = [_MIN_MACHINE_WIDTH, text_width(machine.name, 15, bold=True) + 2 * _PAD]
    widths += [text_width(line, 12) + 2 * _PAD for line in machine.lines]
    widths += [
        text_width(line, 12) + 4 * _PAD
        for stage in machine.stages
        for line in _stage_lines(stage, details)
    ]
    return max(widths)
