"""The facts about objectives that the registry has: the data that each is trained on, and the class
of its model."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from hetero_framework import registry
from hetero_framework.config.aliases import meant
from hetero_framework.errors import ConfigError

Task = Literal[
    "causal-lm", "sequence-classification", "token-classification", "image-classification"
]
"""The task of a model's head, which decides the class: transformers' AutoModelFor..."""


@dataclass(frozen=True)
class Needs:
    """The data and the task of the model that an objective is trained with."""

    data: str = "text"
    task: Task = "causal-lm"


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
    own = "one of your own is registered by a file of --import, on every machine"
    raise ConfigError(
        f"training.objective: there is no objective {objective!r}; there are {', '.join(known)}",
        hint=meant("training.objective", objective)
        or (f'did you mean "{near[0]}"?' if near else own),
    )


def needs_if_known(objective: str) -> Needs:
    """The entry of an objective; that of "sft" for one that no file has registered yet."""
    return needs_of(objective) if registry.has("objectives", objective) else Needs()


def rows_of(kind: str) -> int:
    """Rows of a micro-batch that an example of this kind of data makes."""
    return int(registry.facts("data", kind).get("rows", 1))
