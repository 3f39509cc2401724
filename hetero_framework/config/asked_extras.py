"""Extras that a configuration asks for.

In some tables of the registry the names are conditions of `ReadIf`, or objects that are no setting,
such as arguments of `train`. The table "extras" has the extra that a run needs under a condition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from hetero_framework import registry
from hetero_framework.config.idle import holds
from hetero_framework.config.problems import shown
from hetero_framework.config.schema import Config
from hetero_framework.errors import ConfigError


def asked(kind: str, config: Config, objects: Collection[str] = ()) -> Iterator[Any]:
    """The registered objects of a kind whose condition is met, each once."""
    found: list[Any] = []
    for condition in registry.names(kind):
        entry = registry.entries(kind).get(condition)
        if _is_met(condition, config, objects) and registry.is_installed(entry and entry.extra):
            thing = registry.find(kind, condition)
            if thing not in found:
                found.append(thing)
                yield thing


def chosen(kind: str, config: Config, objects: Collection[str] = ()) -> Any:
    """The last of the objects that `asked` gives; None without any."""
    found = [*asked(kind, config, objects)]
    return found[-1] if found else None


def absent_extras(config: Config, objects: Collection[str] = ()) -> Iterator[str]:
    """A line for each setting whose default asks for an absent extra: the run does without. Raises
    ConfigError for a setting that the user has set, and for one of the `objects`."""
    for condition, entry in registry.entries("extras").items():
        if not _is_met(condition, config, objects) or registry.is_installed(entry.text):
            continue
        setting, has_values, _ = condition.partition("=")
        is_one_of = has_values and not setting.endswith("!")
        setting = setting.rstrip("!")
        value = f": {shown(config.setting(setting))}" if is_one_of else ""
        text = registry.lacks(setting + value, entry.text)
        if setting in objects or _is_set(config, setting):
            hint = f"install hetero_framework whole, or take {setting} out"
            raise ConfigError(text, hint=hint)
        yield f"{text}: the run does without it"


def _is_met(condition: str, config: Config, objects: Collection[str]) -> bool:
    is_setting = condition.partition(".")[0] in type(config).model_fields
    return holds(config, condition) if is_setting else condition in objects


def _is_set(config: Config, setting: str) -> bool:
    section, _, name = setting.partition(".")
    holder = getattr(config, section)
    default = type(holder).model_fields[name].get_default(call_default_factory=True)
    return setting in config._given or getattr(holder, name) != default
