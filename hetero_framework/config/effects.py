"""The effect of each setting on a run, from the marks of its field (`Effect` and `Scope`).

A resumed run, islands and caches compare settings by it. Where the training data are and how they
become tokens is not compared as settings: the resulting tokens are (trainer/continuation.py).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hetero_framework.config.schema import Config
from hetero_framework.config.section import Effect, Scope, Section


def settings(root: type[Section] = Config) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """All settings of a schema, "links", "training", "training.seed", "workers.port" and so on,
    with section and field."""
    for name, field in root.model_fields.items():
        yield name, root, field
        for section in _sections(field.annotation):
            for key, inner in section.model_fields.items():
                yield f"{name}.{inner.alias or key}", section, inner


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield typing.cast(type[Section], annotation)
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def _effect(section: type[Section], field: FieldInfo) -> Effect:
    return next((mark for mark in field.metadata if isinstance(mark, Effect)), section.effect)


def _scope(section: type[Section], field: FieldInfo) -> Scope:
    marks = (mark for mark in (*field.metadata, section.scope) if isinstance(mark, Scope))
    changes = _effect(section, field) in (Effect.IDENTITY, Effect.RESULT)
    return next(marks, Scope.ALL_ISLANDS if changes else Scope.PER_ISLAND)


EFFECTS = {name: _effect(section, field) for name, section, field in settings()}
SCOPES = {name: _scope(section, field) for name, section, field in settings()}
REFUSED = frozenset(name for name, effect in EFFECTS.items() if effect is Effect.IDENTITY)
"""Another value than a checkpoint's is refused."""
REPORTED = frozenset(EFFECTS) - REFUSED - {n for n, e in EFFECTS.items() if e is Effect.FREE}
"""Another value is reported with the old one."""


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON types by such names; a section that is present is also True by its name."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        settings[name] = value
        if isinstance(value, dict):
            settings[name] = True
            settings |= {f"{name}.{key}": item for key, item in value.items()}
    return settings


def of_config(config: Config) -> dict[str, Any]:
    """All settings of a configuration in that form; the precision in which layers are held, by
    machine or not, is model.quantization."""
    return {**flat(config.to_dict()), "model.quantization": config.kinds}


def agreed(config: Config) -> dict[str, Any]:
    """The settings within sections on which all islands have to agree."""
    found = of_config(config)
    return {k: v for k, v in found.items() if "." in k and SCOPES[k] is Scope.ALL_ISLANDS}
