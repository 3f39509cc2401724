"""The registry: maps names in a configuration or on the command line to what they stand for.

heart.toml lists the entries of the heart, and extras/NAME/extra.toml lists the entries of an extra.
These files are read as data: an extra's code is imported only when one of its names is asked for. A
table is a kind of thing ("objectives"). An entry is `name = "module:attribute"`, relative to the
folder of the file, or `name = { at = "module:attribute", fact = ... }` with facts that are known
without an import. Under "commands" an entry is the command's summary, and commands/NAME.py is its
module.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero_framework.errors import ConfigError

_ROOT = Path(__file__).parent
_WHOLE = "install hetero_framework whole, or take the setting out"
_PACKAGE = __name__.rpartition(".")[0]
_registered: dict[tuple[str, str], tuple[Any, Mapping[str, Any]]] = {}


@dataclass(frozen=True)
class Registered:
    """An entry: its `text` and `facts`, as in the file of `extra` ("" is the heart)."""

    extra: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """The package that the entry's module is relative to."""
        return ".".join([_PACKAGE, "extras", self.extra] if self.extra else [_PACKAGE])


@cache
def _tables() -> dict[str, dict[str, Registered]]:
    """Kind -> name -> entry. The heart's entries come first, then the extras', by folder name."""
    files = {"": _ROOT / "heart.toml"}
    files |= {file.parent.name: file for file in sorted(_ROOT.glob("extras/*/extra.toml"))}
    tables: dict[str, dict[str, Registered]] = {}
    for extra, file in files.items():
        if not file.with_name("__init__.py").is_file():
            raise ImportError(f"{file}: its folder has no __init__.py")
        for kind, names in tomllib.loads(file.read_text(encoding="utf-8")).items():
            table = tables.setdefault(kind, {})
            if twice := table.keys() & names.keys():
                raise ImportError(f"{file}: {kind} has {min(twice)!r} twice")
            table |= {name: _entry(extra, given) for name, given in names.items()}
    return tables


def _entry(extra: str, given: str | dict[str, Any]) -> Registered:
    if isinstance(given, str):
        return Registered(extra, given)
    return Registered(extra, given["at"], {k: v for k, v in given.items() if k != "at"})


def entries(kind: str) -> dict[str, Registered]:
    """The entries of a kind in the files, by name, without names that `register` added."""
    return _tables().get(kind, {})


def names(kind: str) -> list[str]:
    """All names of a kind: first those in the files, then those that `register` added."""
    own = [name for of, name in _registered if of == kind]
    return [*entries(kind), *(name for name in own if name not in entries(kind))]


def has(kind: str, name: str) -> bool:
    """Whether a name of this kind is known."""
    return (kind, name) in _registered or name in entries(kind)


def installed(kind: str) -> list[str]:
    """The names of a kind, without names whose extra cannot be imported."""
    known = entries(kind)
    return [name for name in names(kind) if name not in known or is_installed(known[name].extra)]


def register(kind: str, name: str, thing: Any, **facts: Any) -> None:
    """Let a name stand for `thing`. Files of --import call this, on every machine."""
    _registered[kind, name] = thing, facts


def facts(kind: str, name: str) -> Mapping[str, Any]:
    """The facts of an entry; imports nothing. Raises KeyError for a name that is not known."""
    if (kind, name) in _registered:
        return _registered[kind, name][1]
    return entries(kind)[name].facts


def find(kind: str, name: str) -> Any:
    """The object that a name stands for. Imports the extra of the name. Raises KeyError for an
    unknown name, ConfigError if the extra cannot be imported."""
    if (kind, name) in _registered:
        return _registered[kind, name][0]
    entry = entries(kind)[name]
    module, _, attribute = entry.text.partition(":")
    found = _imported(entry, module, f"{kind} {name!r}")
    return getattr(found, attribute) if attribute else found


def needed(kind: str, name: str, what: str) -> Any:
    """As `find`, but for an unknown name raises ConfigError, which says that `what` needs it."""
    if has(kind, name):
        return find(kind, name)
    raise ConfigError(f"{what} needs an extra that this installation lacks", hint=_WHOLE)


def command(name: str) -> ModuleType:
    """The module of a command. Raises as `find` does."""
    return _imported(entries("commands")[name], f"commands.{name}", f"the command {name!r}")


def _imported(entry: Registered, module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(f"{entry.package}.{module}")
    except ImportError as error:
        *folder, absent = (error.name or "").split(".")[:3]  # may be an extra that this one uses
        if not entry.extra or folder != [_PACKAGE, "extras"]:
            raise
        raise ConfigError(lacks(what, absent), hint=_WHOLE) from error


def extra_for(setting: str, value: str) -> str | None:
    """The extra that a run with this value of a setting needs; None if it needs no extra."""
    for condition, entry in entries("extras").items():
        path, _, values = condition.partition("=")
        if path == setting and value in values.split("|"):
            return entry.text
    return None


def lacking(setting: str = "") -> list[str]:
    """The extras that `setting` (any setting if "") needs and this installation lacks."""
    found = ((name.partition("=")[0].rstrip("!"), e.text) for name, e in entries("extras").items())
    needed = {extra for name, extra in found if setting in ("", name)}
    return [extra for extra in sorted(needed) if not is_installed(extra)]


def lacks(what: str, extra: str) -> str:
    """The error text for `what`, which needs an extra that is not here."""
    return f"{what} needs the extra {extra!r}, which this installation lacks"


@cache
def is_installed(extra: str | None) -> bool:
    """Whether the folder of an extra is here and can be imported; no name means the heart."""
    try:
        spec = importlib.util.find_spec(Registered(extra or "", "").package)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None
