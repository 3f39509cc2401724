"""Reads an object of JSON or YAML strictly, with errors that name line, column and what to change.

The standard readers accept duplicate keys and NaN silently; both are refused here. A file is YAML
where its name ends in .yaml or .yml; an extra reads it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_framework import registry
from hetero_framework.errors import ConfigError, in_words

MAX_FILE_BYTES = 16 * 1024 * 1024
_SHOWN_COLUMNS = 100
_MOST_LEVELS = 100
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(?=\s*:)|"(?:[^"\\]|\\.)*"|[{}\[\],]')
YAML_ENDINGS = (".yaml", ".yml")
_YAML = re.compile(r"(\s*#.*\n)*\s*(---\s|[A-Za-z_]\w*:(\s|$))")


class Misread(Exception):
    """A text is not valid JSON or YAML: the cause, and its line and column (from 1)."""

    def __init__(self, line: int, column: int, cause: str) -> None:
        super().__init__(cause)
        self.line, self.column, self.cause = line, column, cause


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ConfigError where it cannot be read or is refused."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory, not a configuration file")
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
    try:
        if name.endswith(YAML_ENDINGS) or (foreign and not name.endswith(".json")):
            loads = registry.needed("notations", "YAML", name)
            value = loads(text, object_hook=_Object, foreign=foreign)
        else:
            value = json.loads(text, object_pairs_hook=_Object)
        faults = list(_faults(value, "", text))
    except json.JSONDecodeError as error:
        raise ConfigError(_describe(error, text, name)) from None
    except Misread as error:
        cause = f"not valid YAML: {error.cause}"
        raise ConfigError(_at(name, text, error.line, error.column, cause)) from None
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
    """An object that remembers which keys it was given more than once, and in which `lines`."""

    def __init__(
        self, pairs: list[tuple[str, Any]], lines: Mapping[str, list[int]] | None = None
    ) -> None:
        super().__init__(pairs)
        self.lines = lines or {}
        names = (key for key, _ in pairs) if lines is None else (k for k in lines for _ in lines[k])
        counts = Counter(names) if len(self) < len(pairs) else {}  # most have no key twice
        self.repeated = [key for key, count in counts.items() if count > 1]


def repeated_keys(text: str, index: int) -> list[str]:
    """The paths of the keys that an object of the JSON value at `index` gives more than once."""
    value, _ = json.JSONDecoder(object_pairs_hook=_Object).raw_decode(text, index)
    return list(_repeated(value, ""))


def _repeated(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, _Object):
        yield from (join_path(path, key) for key in value.repeated)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from _repeated(item, join_path(path, key))


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


def _describe(error: json.JSONDecodeError, text: str, name: str) -> str:
    line_number, column, cause = error.lineno, error.colno, error.msg
    if _YAML.match(text):
        return f"{name}: this looks like YAML; let its name end in .yaml"
    rest = text[error.pos :].lstrip()
    before = text[: error.pos].rstrip()
    if rest.startswith(("//", "/*", "#")):
        cause = "JSON has no comments; delete this one"
    elif error.msg.startswith("Illegal trailing comma") or (
        before.endswith(",") and rest[:1] in ("}", "]")
    ):
        comma = len(before) - 1 if before.endswith(",") else error.pos
        line_number = text.count("\n", 0, comma) + 1
        column = comma - text.rfind("\n", 0, comma)
        cause = "a comma before the closing bracket; delete the comma"
    elif rest.startswith("'"):
        cause = 'JSON texts are written with double quotes "..."'
    elif not rest:
        cause = "the file ends too early; a closing bracket or quote is missing"
    elif rest.startswith(("True", "False", "None")):
        cause = "JSON writes true, false and null in lower case"
    return _at(name, text, line_number, column, f"not valid JSON: {cause}")


def _at(name: str, text: str, line_number: int, column: int, cause: str) -> str:
    """The message for a place in the text, with the line there."""
    lines = text.splitlines() or [""]
    line = lines[min(line_number, len(lines)) - 1]
    left = max(0, column - 1 - _SHOWN_COLUMNS // 2)
    shown = line[left : left + _SHOWN_COLUMNS].replace("\t", " ")
    marker = " " * (column - 1 - left) + "^"
    return f"{name}, line {line_number}, column {column}: {cause}\n    {shown}\n    {marker}"


def _faults(value: Any, path: str, text: str, depth: int = 0) -> Iterator[str]:
    """The faults that the standard reader accepts: repeated keys and non-finite numbers.
    RecursionError for more levels than the functions that walk through a configuration can go."""
    if depth > _MOST_LEVELS:
        raise RecursionError
    if isinstance(value, _Object):
        for key in value.repeated:
            here = join_path(path, key)
            lines = " and ".join(map(str, value.lines.get(key) or _lines_of_key(text, here)))
            yield f'{here}: the key "{key}" is given twice (lines {lines}); keep one'
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(item, join_path(path, key), text, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, join_path(path, index), text, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: the number is not finite (NaN, Infinity or too large)"


def _lines_of_key(text: str, wanted: str) -> list[int]:
    """The lines in which the key at the path `wanted` stands, of text that is valid JSON."""
    lines: list[int] = []
    path: list[str | int] = []  # of the value that comes next
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "{[":
            path.append("" if mark == "{" else 0)
        elif mark in "}]":
            path.pop()
        elif mark == ",":
            if isinstance(last := path[-1], int):
                path[-1] = last + 1
        elif token[1] is not None:  # a key: a text with a colon behind it
            path[-1] = json.loads(token[1])
            if functools.reduce(join_path, path, "") == wanted:
                lines.append(text.count("\n", 0, token.start()) + 1)
    return lines
