"""The effect of each setting on a run, from the marks of its field (`Effect` and `Scope`).

A resumed run, islands and caches compare settings by their effects. Settings of where training data
are and how they become tokens are not compared; the tokens are (trainer/continuation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from hetero_framework.config.composition import whole_schema
from hetero_framework.config.schema import Config
from hetero_framework.config.section import Effect, Mark, Scope, Section, classes_in


def settings(root: type[Section]) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """All settings of a schema, "links", "training", "training.seed", "workers.port" and so on,
    with section and field."""
    for name, field in root.model_fields.items():
        yield name, root, field
        for section in classes_in(field.annotation):
            for key, inner in section.model_fields.items():
                yield f"{name}.{inner.alias or key}", cast(type[Section], section), inner


def _effect(section: type[Section], field: FieldInfo) -> Effect:
    return next((mark for mark in field.metadata if isinstance(mark, Effect)), section.effect)


@cache
def effects(schema: type[Config] | None = None) -> dict[str, Effect]:
    """The effect of each setting of a schema; by default of the schema with all extras."""
    root = schema or whole_schema(Config)
    return {name: _effect(section, field) for name, section, field in settings(root)}


@cache
def scopes() -> dict[str, Scope]:
    """The scope of each setting of the schema with all extras."""
    found = {}
    for name, section, field in settings(whole_schema(Config)):
        marks = (mark for mark in (*field.metadata, section.scope) if isinstance(mark, Scope))
        changes = _effect(section, field) in (Effect.IDENTITY, Effect.RESULT)
        found[name] = next(marks, Scope.ALL_ISLANDS if changes else Scope.PER_ISLAND)
    return found


def effect_of(name: str, config: Config) -> Effect | None:
    """The effect of a setting of this configuration's schema or of the schema with all extras, or
    None. A value other than a checkpoint's is refused for IDENTITY, and reported with the old value
    for RESULT and ROUNDING."""
    return effects(type(config)).get(name) or effects().get(name)


@cache
def marked(mark: Mark, schema: type[Config]) -> frozenset[str]:
    """The settings of a schema that have this mark."""
    return frozenset(name for name, _, field in settings(schema) if mark in field.metadata)


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON types by names like "training.seed"; a section that is present is True."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        settings[name] = value
        if isinstance(value, dict):
            settings[name] = True
            settings |= {f"{name}.{key}": item for key, item in value.items()}
    return settings


def of_config(config: Config) -> dict[str, Any]:
    """All settings of a configuration as `flat` has them, with the defaults of settings that its
    schema lacks. model.quantization is the precision of the layers, by machine where it differs."""
    found = {**flat(config.to_dict()), "model.quantization": config.kinds}
    for name, _, field in settings(whole_schema(Config)):
        if found.get(name.partition(".")[0]) is True and name not in found:
            default = field.get_default(call_default_factory=True)
            found[name] = to_jsonable_python(default)
    return found


def agreed(config: Config) -> dict[str, Any]:
    """The settings within sections on which all islands have to agree."""
    found, known = of_config(config), scopes()
    return {k: v for k, v in found.items() if "." in k and known[k] is Scope.ALL_ISLANDS}
