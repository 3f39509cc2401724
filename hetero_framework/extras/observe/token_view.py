"""Examples on a screen: their tokens, with those in the loss in colour or between brackets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from hetero_framework.log import printable

_COVERED = "bold green"
_MARKS = ("⟦", "⟧", "│")
_ASCII_MARKS = ("[[", "]]", "|")


def print_examples(examples: Sequence[Mapping[str, Any]], file: TextIO | None = None) -> None:
    """Write the examples (fields of `Shown`); in colour where `file` shows colours."""
    from rich.console import Console

    file = file or sys.stdout
    if file is None:  # a screen that was closed
        return
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    begin, end, between = _MARKS if _writes(file, "".join(_MARKS)) else _ASCII_MARKS
    coloured = console.color_system is not None and not console.no_color
    how = "in green" if coloured else f"between {begin} and {end}"
    lines = [_line(f"The loss covers what is {how}; {between} stands between tokens.")]
    for example in examples:
        count = f"{example['tokens']:,} tokens, {example['trained']:,} of them in the loss"
        lines += [_line(""), _line(f"{example['where']}: {count}", "bold")]
        lines += _text(example["pieces"], between, None if coloured else (begin, end))
        if example["left_out"]:
            lines.append(_line(f"  left out: {'; '.join(example['left_out'])}", "yellow"))
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, overflow="fold")


def _writes(file: TextIO, text: str) -> bool:
    try:
        text.encode(file.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def _line(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(text), style=style)


def _text(pieces: Sequence[Any], between: str, marks: tuple[str, str] | None) -> list[Any]:
    """The tokens, a line for each line of the text; ends of lines and tabs are visible."""
    from rich.text import Text

    lines, covered = [Text("  ")], False
    for number, (piece, is_covered) in enumerate(pieces):
        if number and len(lines[-1]) > 2:
            if marks and covered and not is_covered:
                lines[-1].append(marks[1])
            lines[-1].append(between, "dim")
        elif marks and covered and not is_covered:
            lines[-2].append(marks[1])
        if marks and is_covered and not covered:
            lines[-1].append(marks[0])
        covered = is_covered
        shown = piece.replace("\n", "\\n\n").replace("\t", "\\t").replace("\r", "\\r")
        for part in shown.splitlines(keepends=True):
            lines[-1].append(printable(part.rstrip("\n")), _COVERED if covered else "")
            if part.endswith("\n"):
                lines.append(Text("  "))
    if len(lines) > 1 and len(lines[-1]) <= 2:
        lines.pop()
    if marks and covered:
        lines[-1].append(marks[1])
    return lines
