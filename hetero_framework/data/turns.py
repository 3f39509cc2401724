"""Finds which characters of a rendered conversation belong to which message.

Every loop of the template over messages gets marks, which show in the text where each message
begins. Apart from the marks, the text stays the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

NUMBER = "hetero_turn"  # the key that numbers a message

_MARK = "\ue000{loop}:{message}\ue001"
_MARKS = re.compile("\ue000(\\d+):(\\d*)\ue001")
# Comments, the ends of loops, their beginnings, and assignments of an item of a list by number.
_TAGS = re.compile(
    r"\{#.*?#\}"
    r"|\{%[-+]?\s*(?:(endfor)|for\s+([^%]+?)\s+in\b.*?|set\s+(\w+)\s*=\s*\w+\[\s*(\w+)\s*\])"
    r"\s*([-+]?%\})",
    re.DOTALL,
)


def mark_turns(template: str) -> str:
    """The template with a mark at the beginning of each message, and at the end of each loop."""
    loops: list[tuple[int, str]] = []
    written: list[str] = []
    rest = 0
    for count, tag in enumerate(_TAGS.finditer(template)):
        ended, item, taken, index, close = tag.groups()
        mark = None
        if ended and loops:
            number, _ = loops.pop()
            mark = f"{{{{ '{_MARK.format(loop=number, message='')}' }}}}"
        elif item:
            loops.append((count, item))
            mark = _begin(count, item) if item.isidentifier() else None
        elif taken and loops and loops[-1][1] == index:
            mark = _begin(loops[-1][0], taken)
        if mark is not None:
            # A tag's closing decides on the white space after it: the endif closes like this tag.
            written += [
                template[rest : tag.start(5)],
                f"%}}{{% if true %}}{mark}{{% endif {close}",
            ]
            rest = tag.end()
    return "".join([*written, template[rest:]])


def _begin(loop: int, variable: str) -> str:
    before, after = _MARK.format(loop=loop, message="\0").split("\0")
    shown = f"'{before}' ~ {variable}['{NUMBER}'] ~ '{after}'"
    return f"{{{{ ({shown}) if {variable} is mapping and '{NUMBER}' in {variable} }}}}"


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the numbers that a marked template writes."""
    return [{**message, NUMBER: number} for number, message in enumerate(messages)]


def find_turns(marked: str, messages: int) -> tuple[str, list[list[range]]]:
    """A marked rendering without its marks, and the ranges of each message's characters."""
    text, *pieces = _MARKS.split(marked)
    turns: list[list[range]] = [[] for _ in range(messages)]
    inside: dict[str, int] = {}  # loop: message, the innermost loop last
    for loop, message, piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        inside.pop(loop, None)
        if message:
            inside[loop] = int(message)
        end = len(text) + len(piece)
        if inside and piece:
            turn = turns[next(reversed(inside.values()))]
            if turn and turn[-1].stop == len(text):
                turn[-1] = range(turn[-1].start, end)
            else:
                turn.append(range(len(text), end))
        text += piece
    return text, [
        [part for part in turn if not text[part.start : part.stop].isspace()] for turn in turns
    ]
