"""Tables of text that fit the terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence

_UNBOUNDED = 10_000
_GAP = 2
_LEAST = 12
"""Least width of a column of names whose longest word is longer than this."""

Part = str | Iterable[str] | None


def lines(*parts: Part) -> str:
    """The text of a report. A string is a line, the strings of a list are indented lines below it,
    and None is left out."""
    shown: list[str] = []
    for part in parts:
        listed = [part] if isinstance(part, str) else [f"  {line}" for line in part or ()]
        shown += listed
    return "\n".join(shown)


def one_line(text: str) -> str:
    """A text of several lines as one line."""
    return " ".join(text.split())


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """Lines of a table. Columns numbered in `left` are aligned at the left, others at the right. If
    the terminal is too narrow, headings and names fold; in a file or pipe every row is one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [(name, [row[i] for row in rows]) for i, name in enumerate(head)]
    widths = _widths(columns, left, terminal_width() - _GAP * (len(head) - 1))
    drawn = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for i, name in enumerate(head):
        justify = "left" if i in left else "right"
        drawn.add_column(Text(name), justify=justify, overflow="fold", width=widths[i])  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=_UNBOUNDED, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def _widths(
    columns: Sequence[tuple[str, Sequence[str]]], left: Collection[int], room: int
) -> list[int]:
    """The columns' widths, narrowed to fit `room`: columns of numbers first, then names, each down
    to its longest word or number. If that is not enough the table is wider than the terminal."""
    widths, least = [], []
    for i, (name, cells) in enumerate(columns):
        words = [word for text in (name, *cells) for word in text.split()]
        whole = [*name.split(), *cells]
        widths.append(max(map(len, (name, *cells))))
        least.append(min(max(map(len, words)), _LEAST) if i in left else max(map(len, whole)))
    while sum(widths) > room and widths != least:
        slack = [width - low for width, low in zip(widths, least, strict=True)]
        # A heading over numbers folds before a name does.
        gives = max(range(len(slack)), key=lambda i: (i not in left and slack[i] > 0, slack[i]))
        widths[gives] -= 1
    return widths


def terminal_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED
