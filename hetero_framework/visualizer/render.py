"""Pictures as files: SVG by our own hand, PNG and PDF through Graphviz."""

from __future__ import annotations

import subprocess
from pathlib import Path

import graphviz

from hetero_framework.errors import UserError
from hetero_framework.visualizer.scene import Scene, to_dot, to_svg

_PNG_DPI = 144
_PNG_WIDTH = 4200
"""Widest PNG, in pixels; a wider scene is drawn with fewer dots per inch."""


class NoGraphvizError(Exception):
    """Graphviz is not installed, or failed; the text says which."""


def render(scene: Scene, form: str) -> bytes:
    """The scene as "svg", "png" or "pdf". Raises NoGraphvizError for the last two."""
    if form == "svg":
        return to_svg(scene).encode()
    source = to_dot(scene)
    if form == "png":
        dpi = min(_PNG_DPI, int(_PNG_WIDTH * 72 / scene.width))
        source = source.replace("  graph [", f'  graph [dpi="{dpi}", ', 1)
    try:
        return bytes(graphviz.Source(source, engine="neato").pipe(format=form, quiet=True))
    except graphviz.ExecutableNotFound:
        raise NoGraphvizError("Graphviz is not installed") from None
    except subprocess.SubprocessError as error:
        raise NoGraphvizError("Graphviz failed") from error


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
