"""The diagram as a file: drawn by Graphviz, else by matplotlib, else as Mermaid text."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Literal, get_args

import graphviz

from hetero_framework.config import Config
from hetero_framework.extras.observe import diagram_figure, pictures
from hetero_framework.extras.observe.diagram import Diagram, DiagramDetails, to_dot, to_mermaid

Format = Literal["png", "svg", "pdf", "mmd"]
_BETTER = "the package graphviz gives a better one"
_log = logging.getLogger(__name__)


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
    chosen = pictures.picture_format(target, format, get_args(Format))
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
        pictures.save(lambda: diagram_figure.figure(diagram), target, chosen)
        _log.warning("%s, so matplotlib has drawn %s; %s", problem, target, _BETTER)
        return target
    written = pictures.write_picture(target.with_suffix(".mmd"), to_mermaid(diagram).encode())
    text = "%s, and neither is matplotlib, so no %s was drawn; %s"
    instead = f"wrote {written} instead, which Markdown viewers and mermaid.live draw"
    _log.warning(text, problem, chosen.upper(), instead)
    return written
