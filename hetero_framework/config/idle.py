"""Settings that were given and have no effect, from the marks of their fields (`ReadIf`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from typing import Any

from hetero_framework import registry
from hetero_framework.config.section import ReadIf, Section

_RESOLVED = {"loss_type": "losses", "eval_strategy": "evaluation"}
"""For settings of the training section: the property that resolves their null."""


class GivenNames(tuple[str, ...]):
    """Names of settings. All compare equal, so configurations of the same values do."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenNames)


def idle_lines(config: Section, given: Collection[str]) -> Iterator[str]:
    """A line for each of the `given` settings ("training.beta") that nothing reads."""
    for name in sorted(given):
        section, _, key = name.partition(".")
        holder = getattr(config, section)
        fields = type(holder).model_fields
        known = (*fields[key].metadata, holder.read_if)
        marks = (mark for mark in known if isinstance(mark, ReadIf))
        if (mark := next(marks, None)) is None:
            continue
        ways = [
            [f"{section}.{part}" if re.split("!?=", part)[0] in fields else part for part in way]
            for way in (way.split(" and ") for way in mark.condition.split(" or "))
        ]
        if not any(all(holds(config, part, own=True) for part in way) for way in ways):
            told = ", or with ".join(" and ".join(map(_words, way)) for way in ways)
            yield f"{name} has no effect: it counts only with {told}"


def holds(config: Section, part: str, *, own: bool = False) -> bool:
    """Whether a condition of a `ReadIf`, written with its section, is met. With `own`, an objective
    that the user has registered meets every condition on the objective: it may read anything."""
    path, has_values, values = part.partition("=")
    section, _, key = path.rstrip("!").partition(".")
    holder: Any = getattr(config, section)
    if key and isinstance(holder, tuple):
        holder = tuple(getattr(one, key) for one in holder)
    elif key:
        holder = holder and getattr(holder, _RESOLVED.get(key, key), None)
    if not has_values:
        return bool(holder)
    if own and key == "objective" and holder not in registry.entries("objectives"):
        return True
    found = holder if isinstance(holder, tuple) else (holder,)
    fits = [
        any(fnmatch("null" if one is None else str(one), value) for value in values.split("|"))
        for one in found
    ]
    return not all(fits) if path.endswith("!") else any(fits)


def _words(part: str) -> str:
    path, _, values = part.partition("=")
    choices = " or ".join(values.replace("|", ", ").rsplit(", ", 1))
    other = "another " * path.endswith("!")
    than = " than" * path.endswith("!")
    return f"{other}{path.rstrip('!')}{than} {choices}".rstrip()
