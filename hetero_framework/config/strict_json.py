"""Reads an object of JSON or YAML strictly: errors name a line and column, or the path of a value.

The standard readers accept duplicate keys and NaN silently; both are refused here. A file is YAML
where its name ends in .yaml or .yml; an extra reads it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero_framework import registry
from hetero_framework.errors import ConfigError, in_words

MAX_FILE_BYTES = 16 * 1024 * 1024
_SHOWN_COLUMNS = 100
_MOST_LEVELS = 100
"""Levels to which the functions that walk through a configuration can go."""
YAML_ENDINGS = (".yaml", ".yml")


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ConfigError where it cannot be read or is refused."""
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path} is a directory, not a configuration file",
                hint=f"name a file in it, such as {path / 'hetero_config.json'}",
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist",
            hint="create one with `hetero init`, or name it with --config FILE",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {in_words(error)}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} has more than the {MAX_FILE_BYTES >> 20} MiB of the largest configuration;"
            " is it the right file?"
        )
    return parse_object(content, name=str(path))


def parse_object(content: bytes, *, name: str, foreign: bool = False) -> dict[str, Any]:
    """The object in `content` (UTF-8, a byte order mark is accepted). `name` is for messages, and
    its ending says whether it is YAML. `foreign`: a file of another program, YAML unless it ends in
    .json, and read as that program does."""
    text = _decode(content, name)
    if not text.strip():
        raise ConfigError(f"{name} is empty", hint="`hetero init` writes a complete file")
    is_yaml = name.endswith(YAML_ENDINGS) or (foreign and not name.endswith(".json"))
    try:
        if is_yaml:
            loads = registry.needed("notations", "YAML", name)
            value = loads(text, object_hook=_Object, foreign=foreign)
        else:
            value = json.loads(text, object_pairs_hook=_Object)
        faults = list(_faults(value))
    except json.JSONDecodeError as error:
        raise ConfigError(_at(name, "YAML" if is_yaml else "JSON", error)) from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    except ValueError as error:  # an integer with thousands of digits
        raise ConfigError(f"{name} holds a number that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must hold one object {{...}}, but holds {json_type(value)}")
    if len(faults) == 1:
        raise ConfigError(f"{name}: {faults[0]}")
    if faults:
        raise ConfigError(f"{name} is not acceptable:\n" + "\n".join(f"  {f}" for f in faults))
    return value


_TYPES = (
    (bool, "a boolean (true/false)"),  # before int, which it is too
    ((int, float), "a number"),
    (str, "a text"),
    ((list, tuple), "a list [...]"),
    (dict, "an object {...}"),
    (type(None), "null"),
)


def json_type(value: Any) -> str:
    """The JSON name of a Python value's type, with an article."""
    names = (name for kind, name in _TYPES if isinstance(value, kind))
    return next(names, type(value).__name__)


def join_path(parent: str, key: str | int) -> str:
    """One step further in a JSON path: `workers` + 0 -> `workers[0]`, + `port` -> `.port`."""
    if isinstance(key, int):
        return f"{parent}[{key}]"
    return f"{parent}.{key}" if parent else str(key)


class _Object(dict[str, Any]):
    """An object that remembers which of its `keys` were given more than once. Keys that YAML's
    merge keys add are not in `keys`, and may be given again."""

    def __init__(self, pairs: list[tuple[str, Any]], keys: Sequence[str] | None = None) -> None:
        super().__init__(pairs)
        names = [key for key, _ in pairs] if keys is None else keys
        counts = Counter(names) if len(self) < len(pairs) else {}  # most have no key twice
        self.repeated = [key for key, count in counts.items() if count > 1]


def repeated_keys(text: str, index: int) -> list[str]:
    """The paths of the keys that an object of the JSON value at `index` gives more than once."""
    value, _ = json.JSONDecoder(object_pairs_hook=_Object).raw_decode(text, index)
    objects = ((path, one) for path, one, _ in _values(value) if isinstance(one, _Object))
    return [join_path(path, key) for path, one in objects for key in one.repeated]


def _values(value: Any) -> Iterator[tuple[str, Any, int]]:
    """`value` and all values in it, in the order of the text: path, value, level."""
    waiting = [iter([("", value)])]
    while waiting:
        if (found := next(waiting[-1], None)) is None:
            waiting.pop()
        else:
            yield *found, len(waiting) - 1
            if isinstance(found[1], (dict, list)):
                waiting.append(_inside(*found))


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return ((join_path(path, key), item) for key, item in items)


def _decode(content: bytes, name: str) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in content[:4]:
        raise ConfigError(f"{name} is UTF-16 text or binary; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save it as UTF-8"
        ) from None


def _at(name: str, language: str, error: json.JSONDecodeError) -> str:
    """The message for a place in the text, with the line there."""
    line = error.doc.split("\n")[error.lineno - 1]
    left = max(0, error.colno - 1 - _SHOWN_COLUMNS // 2)
    shown = line[left : left + _SHOWN_COLUMNS].replace("\t", " ").rstrip()
    marker = " " * (error.colno - 1 - left) + "^"
    place = f"{name}, line {error.lineno}, column {error.colno}"
    return f"{place}: not valid {language}: {error.msg}\n    {shown}\n    {marker}"


def _faults(value: Any) -> Iterator[str]:
    """The faults that the standard reader accepts: repeated keys and non-finite numbers.
    RecursionError for too many levels."""
    for path, one, level in _values(value):
        if level > _MOST_LEVELS:
            raise RecursionError
        if isinstance(one, _Object):
            for key in one.repeated:
                yield f'{join_path(path, key)}: the key "{key}" is given twice; keep one'
        elif isinstance(one, float) and not math.isfinite(one):
            yield f"{path}: the number is not finite (NaN, Infinity or too large)"
