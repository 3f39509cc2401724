"""The registry's facts about objectives: each one's data, and the class of its model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_framework import registry
from hetero_framework.errors import ConfigError

Task = str
"""The task of a model's head, which decides the class: "causal-lm", or one that the registry's
table "heads" or "families" has."""


@dataclass(frozen=True)
class Needs:
    """The data and the task of the model that an objective is trained with. `reads` are the
    settings that it reads, apart from settings for all objectives."""

    data: str = "text"
    task: Task = "causal-lm"
    reads: Sequence[str] = ()


def needs_of(objective: str) -> Needs:
    """The entry of an objective. Raises ConfigError for an unknown one."""
    if registry.has("objectives", objective):
        return Needs(**registry.facts("objectives", objective))
    if (extra := registry.extra_for("training.objective", objective)) is not None:
        raise ConfigError(
            registry.lacks(f"training.objective: {objective!r}", extra),
            hint="install hetero_framework whole, or choose another objective",
        )
    known = registry.names("objectives")
    near = difflib.get_close_matches(objective.lower(), known, n=1)
    more = "docs/objectives.md tells them apart; a file of --import, on every machine, adds one"
    raise ConfigError(
        f"training.objective: there is no objective {objective!r}; there are {', '.join(known)}",
        hint=f'did you mean "{near[0]}"?' if near else more,
    )


def needs_if_known(objective: str) -> Needs:
    """The entry of an objective, or of "sft" for an objective that no file has registered yet."""
    return needs_of(objective) if registry.has("objectives", objective) else Needs()


def rows_of(kind: str) -> int:
    """Rows of a micro-batch that an example of this kind of data makes."""
    return int(registry.facts("data", kind).get("rows", 1))


def shows_pictures(kind: str) -> bool:
    """Whether data of this kind have pictures, so that the first stage has the model's towers."""
    return registry.has("data", kind) and bool(registry.facts("data", kind).get("pictures"))


def reads_text(kind: str) -> bool:
    """Whether data of this kind are records with texts, and not a data set of an imported file."""
    return not registry.has("data", kind) or registry.facts("data", kind).get("text", True)


def objectives_reading(setting: str) -> str:
    """The condition that an objective which reads this setting is chosen."""
    known = registry.entries("objectives")
    return f"training.objective={'|'.join(o for o in known if setting in needs_of(o).reads)}"


def objectives_of_texts() -> str:
    """The condition that the objective is trained on texts."""
    known = registry.entries("objectives")
    others = [name for name in known if not reads_text(needs_of(name).data)]
    return f"training.objective!={'|'.join(others)}"
