"""Checks of the adapter settings that PEFT reads as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_AROUND = {
    "target_modules": ("", ""),
    "exclude_modules": ("", ""),
    "layers_pattern": (r"(?:^|.*?\.)", r"\.(?P<idx>\d+)\."),
    "modules_to_save": (r"(^|.*\.)", r"($|\..*)"),
    "rank_pattern": (r"(.*\.)?(", ")$"),
    "alpha_pattern": (r"(.*\.)?(", ")$"),
}
"""The text that PEFT puts before and after each expression. In the first two settings the names of
a list are compared literally."""
EXPRESSIONS = tuple(_AROUND)


def expression(setting: str, text: str) -> re.Pattern[str]:
    """The expression that PEFT builds of `text`. Raises ValueError with the fault and its place."""
    before, after = _AROUND[setting]
    shift = 0
    try:
        re.compile(text)
        shift = len(before)
        return re.compile(before + text + after)
    except (re.error, RecursionError, OverflowError) as error:
        place = getattr(error, "pos", None)
        where = f" at position {max(0, place - shift)}" if place is not None else ""
        what = getattr(error, "msg", None) or str(error)
        hint = ' (any text is ".*", not "*")' if text.startswith(("*", "?", "+")) else ""
        raise ValueError(
            f'"{text}" is not a regular expression: {what}{where}{hint}'.replace("\n", " ")
        ) from None


def expressions(setting: str, value: Any) -> Iterator[str]:
    """The texts in the value of a setting that PEFT reads as expressions."""
    if isinstance(value, str):
        if value.lower() != "all-linear" or setting != "target_modules":
            yield value
    elif isinstance(value, (Mapping, Iterable)) and setting not in (
        "target_modules",
        "exclude_modules",
    ):
        yield from map(str, value)
