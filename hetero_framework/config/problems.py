"""Error messages for a configuration: JSON path, problem, and what to write instead."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hetero_framework import registry
from hetero_framework.config.aliases import OWNERS, is_harmless, own_name, refusal_of
from hetero_framework.config.section import section_at, sections_of
from hetero_framework.config.strict_json import join_path, json_type


@dataclass(frozen=True)
class Problem:
    """One thing to change, at a JSON path such as `workers[0].port`; `fix` says how, where `text`
    does not."""

    path: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def report(name: str, problems: Sequence[Problem]) -> str:
    """All problems as one message, which begins with `name` if that is not ""."""
    if len(problems) == 1:
        return f"{name}: {problems[0]}" if name else str(problems[0])
    lines = [f"{name} has {len(problems)} problems:"] if name else []
    for problem in problems:
        lines += [f"  {problem}", *([f"    {problem.fix}"] if problem.fix else [])]
    return "\n".join(lines)


def problems_of(details: Sequence[Any], root: type[BaseModel], raw: Any) -> list[Problem]:
    """pydantic's error details as problems; those of one union are merged into one."""
    problems: dict[str, Problem] = {}
    unions: dict[str, list[str]] = {}
    for detail in details:
        keys, is_union = _real_path(detail["loc"], raw)
        path = functools.reduce(join_path, keys, "")
        if is_union and detail["type"] in (*_EXPECTED, *_BOUNDS):
            unions.setdefault(path, []).append(_expected(detail))
            options = " or ".join(dict.fromkeys(unions[path]))
            text = f"must be {options}, not {_value_or_type(detail['input'])}"
            problems[path] = Problem(path, text)
        else:
            problems.setdefault(path, Problem(path, _text(detail, keys, root)))
    # A union also complains about its other form: "must be a text" for a list with one bad item.
    return [
        problem
        for path, problem in problems.items()
        if not (path in unions and any(p.startswith((f"{path}[", f"{path}.")) for p in problems))
    ]


def without_harmless(
    raw: dict[str, Any], root: type[BaseModel]
) -> tuple[dict[str, Any], list[str]]:
    """`raw` without settings of other tools that equal our behaviour, and a line for each of
    them."""
    sections = sections_of(root)
    kept, lines = dict(raw), []
    for section, values in [("", raw), *((s, raw.get(s)) for s in sections)]:
        if not isinstance(values, dict):
            continue
        fields = sections.get(section, root).model_fields
        known = {name for k, field in fields.items() for name in (k, field.alias)}
        left = [k for k, v in values.items() if k not in known and is_harmless(root, section, k, v)]
        rest = {key: value for key, value in values.items() if key not in left}
        kept = {**kept, section: rest} if section else rest
        for key in left:
            text = f"{join_path(section, key)} {shown(values[key])} is left out: there is no such"
            lines.append(f"{text} setting here, and this is what happens anyway")
    return kept, lines


def _real_path(loc: Sequence[str | int], raw: Any) -> tuple[list[str | int], bool]:
    """`loc` without the tags that pydantic adds for the members of a union."""
    keys: list[str | int] = []
    is_union = False
    value = raw
    for position, key in enumerate(loc):
        if isinstance(value, dict) and isinstance(key, str) and not key[:1].isupper():
            keys.append(key)  # of a missing key, too; a tag is the name of a class
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int):
            keys.append(key)
            value = value[key]
        else:
            is_union = is_union or position > 0
    return keys, is_union


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list [...]",
    "dict_type": "an object {...}",
    "model_type": "an object {...}",
    "model_attributes_type": "an object {...}",
    "finite_number": "a finite number",
    "literal_error": "",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _expected(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"]).replace("'", '"')
    if detail["type"] in _BOUNDS:
        words, name = _BOUNDS[detail["type"]]
        return f"{words} {detail['ctx'][name]}"
    return _EXPECTED[detail["type"]]


def _text(detail: Any, keys: Sequence[str | int], root: type[BaseModel]) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "missing":
        return f"is missing ({_description(root, keys)})"
    if kind == "extra_forbidden":
        return unknown_key_text(keys, root)
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {detail['ctx'][bound]}, not {_value_or_type(value)}"
    if kind not in _EXPECTED:
        return str(detail["msg"])
    options = _expected(detail).split('"')[1::2]  # none but those of a literal
    near = difflib.get_close_matches(str(value).lower(), options, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"must be {_expected(detail)}, not {_value_or_type(value)}{hint}"


def unknown_key_text(keys: Sequence[str | int], root: type[BaseModel]) -> str:
    """Why a key is not known: its name here, its place, or that there is no such setting."""
    key, section = str(keys[-1]), str(keys[0]) if len(keys) > 1 else ""
    if here := own_name(root, section, key):
        return f"unknown key; it is called {here}"
    sections = sections_of(root)
    if lacking := registry.lacking(join_path(section, key)):
        return registry.lacks("it", lacking[0])
    if refusal := refusal_of(root, section, key):
        return refusal
    for place, model in {"the top level": root, **sections}.items():
        if key in model.model_fields:
            return f'unknown key here; it belongs in "{place}"'
    holder = section_at(root, keys)
    fields = holder.model_fields
    names = [field.alias or name for name, field in fields.items()]
    near = difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.75)
    if near:
        return f'unknown key; did you mean "{near[0]}"?'
    if lacking := registry.lacking():
        text = "unknown key, unless it is of an extra that this installation lacks"
        return f"{text}: {', '.join(lacking)}"
    if section in OWNERS and holder is sections[section]:
        return "unknown key; docs/configuration.md lists all settings"
    return f"unknown key; known are: {', '.join(names)}"


def _description(root: type[BaseModel], keys: Sequence[str | int]) -> str:
    section = section_at(root, keys)
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    text = fields[str(keys[-1])].description or ""
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def shown(value: Any) -> str:
    """A value in a message: as JSON, short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _value_or_type(value: Any) -> str:
    """A wrong value in a message: its type when it is long, else the value itself."""
    if isinstance(value, (dict, list, tuple)):
        return json_type(value)
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)
