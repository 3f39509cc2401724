"""Reads YAML as strictly as JSON: one document, with the values that JSON has and no others.

PyYAML reads YAML 1.1, where 1e-4 is a text and `no` is false. Here numbers, booleans and null are
those on which YAML 1.2 and JSON agree; any other word is a text, which the schema judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

_TAG = "tag:yaml.org,2002:"
_PLAIN = {
    "null": r"(null|Null|NULL|~|)\Z",
    "bool": r"(true|True|TRUE|false|False|FALSE)\Z",
    "int": r"-?(0|[1-9][0-9]*)\Z",
    "float": r"(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|-?\.inf|\.nan)\Z",
}
_MOST_VALUES = 100_000  # in a file of other programs, once its aliases are written out
ObjectHook = Callable[[list[tuple[str, Any]], list[str]], dict[str, Any]]


def loads(text: str, *, object_hook: ObjectHook, foreign: bool = False) -> Any:
    """The value in `text`. `object_hook` makes an object of its pairs and the keys that it names.

    `foreign` reads as other programs do: YAML 1.1, with aliases and merge keys, unless these write
    out to more values than any configuration has.
    Raises JSONDecodeError for a place of `text`, ValueError for a number too long, RecursionError.
    """
    loader = None
    try:
        loader = (_Loader if foreign else _Strict)(text)
        loader.object_hook = object_hook
        node = loader.get_single_node()
        if foreign and node is not None:
            _count_values(node, {})
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = getattr(error, "position", 0) if mark is None else mark.index
        cause = getattr(error, "problem", "this character may not stand in a YAML file")
        cause = str(cause or error).removeprefix("but ")
        raise json.JSONDecodeError(cause, text, position) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    object_hook: ObjectHook

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise _error(f"tags (here {event.tag}) are not read; write the value alone", event)
        is_key = index is None and isinstance(parent, yaml.MappingNode)
        if is_key and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
            event.implicit = (False, True)  # a text, also where it looks like a number
        return super().compose_node(parent, index)

    def _object(self, node: yaml.MappingNode) -> dict[str, Any]:
        keys = [key for key, _ in node.value]
        for key in keys:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key must be a text", key)
        self.flatten_mapping(node)  # puts in what a merge key names
        return self.object_hook(self.construct_pairs(node, deep=True), [k.value for k in keys])


class _Strict(_Loader):
    yaml_implicit_resolvers: ClassVar[dict[str | None, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _error("anchors and aliases (& and *) are not read; write the value out", event)
        return super().compose_node(parent, index)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """The number of values in `node`; an alias counts at each place. `counts` has the known numbers
    by node. Raises yaml.YAMLError for more than _MOST_VALUES, or for a node that holds itself."""
    counts[id(node)] = _MOST_VALUES  # while it is being counted
    inner = [] if isinstance(node, yaml.ScalarNode) else node.value
    pairs = inner if isinstance(node, yaml.MappingNode) else [(part,) for part in inner]
    parts = [part for pair in pairs for part in pair]
    total = 1 + sum(counts.get(id(part)) or _count_values(part, counts) for part in parts)
    if total > _MOST_VALUES:
        raise _error("its aliases write out to more than a configuration has; write less", node)
    counts[id(node)] = total
    return total


def _error(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


_Loader.add_constructor(f"{_TAG}map", _Loader._object)
for _name in ("timestamp", "value", "merge"):  # no values of JSON
    _Loader.add_constructor(_TAG + _name, yaml.SafeLoader.construct_scalar)
for _name, _pattern in _PLAIN.items():
    _Strict.add_implicit_resolver(_TAG + _name, re.compile(_pattern), None)
