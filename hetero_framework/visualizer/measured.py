"""How wide texts are, in points, in the font that matplotlib draws them with."""

from __future__ import annotations

from collections.abc import Iterable


def text_pt(text: str, size_pt: float, *, bold: bool = False) -> float:
    """A line of that size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size_pt, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def names_pt(rows: Iterable[tuple[str, str]]) -> float:
    """The widest of names and of what stands below each."""
    return max(max(text_pt(a, 10, bold=True), text_pt(b, 8.5)) for a, b in rows)


def heading_pt(title: str, subtitle: str) -> float:
    """A picture that is wide enough for its heading."""
    return 32 + max(text_pt(title, 14, bold=True), text_pt(subtitle, 10.5))
