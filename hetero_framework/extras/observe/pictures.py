"""Shared parts of all pictures: formats, files, and the widths of texts that matplotlib draws."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetero_framework.core.files import write_file
from hetero_framework.errors import UserError, of_disk

FORMATS = ("png", "svg", "pdf")
PAPER, INK, FAINT, GRID = "#fdfdfb", "#222222", "#5f6670", "#d9d8d3"


def save(make: Callable[[], Any], path: str | os.PathLike[str], form: str | None = None) -> Path:
    """Write the Figure that `make` draws to `path`. Without `form` the file's name decides. Raises
    UserError for an unknown format and for a file that cannot be written."""
    target = Path(path)
    chosen = picture_format(target, form, FORMATS)
    import matplotlib

    content = io.BytesIO()
    # Dollar signs begin no formula. A character that no font here has is drawn as a box.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "hetero", "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(chosen, {})
        make().savefig(content, format=chosen, dpi=144, metadata=metadata)
    return write_picture(target, content.getvalue())


def picture_format(path: Path, asked: str | None, known: Sequence[str]) -> str:
    """The format that was asked for, else the format of the file's name. Raises UserError."""
    chosen = (asked or path.suffix.removeprefix(".")).lower()
    if chosen not in known:
        raise UserError(
            f"there is no picture format {chosen!r}", hint=f"give one of: {', '.join(known)}"
        )
    return chosen


def write_picture(path: Path, content: bytes) -> Path:
    """Write the file and its folders. Raises UserError, or ResourceError where the disk is full."""
    try:
        write_file(path, content)
    except OSError as error:
        raise of_disk(error, UserError)(
            f"cannot write the picture {path}: {error.strerror}", hint="give another --output"
        ) from error
    return path


def text_pt(text: str, size_pt: float, *, bold: bool = False) -> float:
    """The width of a line of text, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size_pt, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)
