"""The schema of a file: the heart's settings, and those of the extras that the file asks for.

An extra declares its settings in extras/NAME/settings.py: sections of its own ("sections" in its
extra.toml), and classes derived from a section of the heart ("settings"), which add to that
section. A function under "disagreements" finds contradictions between sections, as
`_disagreements` of schema.py does. A file asks for the extras of its objective and its sections. If
a name in it is still unknown, its schema holds the settings of all extras.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model

from hetero_framework import registry
from hetero_framework.config.problems import Problem
from hetero_framework.config.section import Section, WholeFile, sections_of
from hetero_framework.errors import ConfigError

File = TypeVar("File", bound=WholeFile)


def schema_for(root: type[File], raw: Mapping[str, Any]) -> type[File]:
    """The schema that a file with these settings needs. Raises ConfigError where the file asks for
    an extra that this installation lacks."""
    extras = set()
    for place, extra in _asked(raw):
        if extra is None:
            return whole_schema(root)
        try:
            with_extras(root, frozenset({extra}))
        except ConfigError as error:
            raise ConfigError(registry.lacks(place, extra), hint=error.hint) from error
        extras.add(extra)
    schema = with_extras(root, frozenset(extras))
    return whole_schema(root) if any(_unknown(schema, raw)) else schema


def _asked(raw: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(setting, extra) for what a file asks for; None: an objective that may read anything."""
    for name, entry in registry.entries("sections").items():
        if raw.get(name) is not None:
            yield name, entry.extra
    training = raw.get("training")
    objective = training.get("objective") if isinstance(training, Mapping) else None
    if isinstance(objective, str):
        known = registry.entries("objectives").get(objective)
        if known is None or known.extra:
            yield f"training.objective: {objective!r}", known.extra if known is not None else None


def _unknown(schema: type[WholeFile], raw: Mapping[str, Any]) -> Iterator[str]:
    """Names in a file that its schema does not have."""
    yield from raw.keys() - schema.model_fields.keys()
    for name, section in sections_of(schema).items():
        if isinstance(values := raw.get(name), Mapping):
            yield from values.keys() - section.model_fields.keys()


@cache
def whole_schema(root: type[File]) -> type[File]:
    """The schema with the settings of all extras that this installation has."""
    kinds = (registry.entries("settings"), registry.entries("sections"))
    present = set()
    for extra in {entry.extra for kind in kinds for entry in kind.values()}:
        try:
            with_extras(root, frozenset({extra}))
            present.add(extra)
        except ConfigError:
            continue
    return with_extras(root, frozenset(present))


@cache
def with_extras(root: type[File], extras: frozenset[str]) -> type[File]:
    """The schema with these extras' settings. Raises ConfigError if one cannot be imported."""
    added: dict[str, list[type[Section]]] = {}
    own = sections_of(root)
    for part in _found("settings", extras).values():
        section = next(name for name, heart in own.items() if issubclass(part, heart))
        added.setdefault(section, []).append(part)
    fields: dict[str, Any] = {
        name: (section | None, Field(default=None, description=section.__doc__))
        for name, section in _found("sections", extras).items()
    }
    for name, parts in added.items():
        joined = create_model(own[name].__name__, __base__=tuple(parts), __module__=root.__module__)
        joined.__doc__ = own[name].__doc__
        field = root.model_fields[name]
        is_optional = type(None) in typing.get_args(field.annotation)
        default: Any = {"default": None} if is_optional else {"default_factory": joined}
        kind: Any = joined | None if is_optional else joined
        for mark in field.metadata:
            kind = Annotated[kind, mark]
        fields[name] = (kind, Field(description=field.description, **default))
    if not fields:
        return root
    schema = create_model(root.__name__, __base__=root, __module__=root.__module__, **fields)
    schema.__doc__, schema.extras = root.__doc__, extras
    return schema


def _found(kind: str, extras: frozenset[str]) -> dict[str, Any]:
    entries = registry.entries(kind)
    return {name: registry.find(kind, name) for name, e in entries.items() if e.extra in extras}


def disagreements(schema: type[WholeFile], parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Contradictions that the extras of a schema find between the sections that are valid."""
    for check in _found("disagreements", schema.extras).values():
        yield from check(parts)
