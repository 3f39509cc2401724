"""Fields of messages: the values that a dataclass's annotations allow on the wire.

A dataclass travels as a map of field names to values, in which a field that is None is left out.
Its annotations may be int (not negative), float (finite), both with bounds (`Annotated[int, least,
most]`), AnyFloat, bool, str, a Literal of strings, WorkerId, Shape, tuples (lists on the wire),
dicts with string keys, whose floats are finite, other such dataclasses, and Any for values that
msgpack carries unchanged. A string becomes one printable line when it is read, since a peer's words
may reach a screen, a table or a file, and must not fake a line there. No sockets, no torch.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hetero_framework.core.frames import (
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    MAX_LONG_HEADER_BYTES,
    MAX_TENSORS,
    brief,
    is_int,
    is_shape,
)
from hetero_framework.errors import ProtocolError
from hetero_framework.log import one_line

MAX_TEXT_BYTES = 1 << 13
"""Most bytes of a string of a message; a longer one is cut."""
WorkerId = int | str
Shape = Annotated[tuple[int, ...], "shape"]
Raw = Annotated[str, "raw"]
"""A string that is looked up or compared, never shown: it stays as it came."""


AnyFloat = Annotated[float, "any"]
"""A float that may be infinite or NaN."""


@dataclass(frozen=True)
class FieldKind:
    """The type of a field: its name in errors and documents, what it accepts on the wire, and its
    forms on the wire (`pack`) and here (`unpack`), where they differ."""

    name: str
    accepts: Callable[[Any], bool]
    pack: Callable[[Any], Any] | None = None
    unpack: Callable[[Any], Any] | None = None


def _is_float(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float)


_SIMPLE = (bool, float, str, bytes, type(None))


def _is_plain(value: Any, depth: int = 1, *, finite: bool = False) -> bool:
    """Whether msgpack carries a value unchanged and, if `finite`, its floats are finite. Raises
    ProtocolError, which names what msgpack does not carry."""
    if isinstance(value, _SIMPLE):
        return not finite or not isinstance(value, float) or math.isfinite(value)
    if depth > MAX_DEPTH:
        raise ProtocolError(f"fields are nested deeper than {MAX_DEPTH}")
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ProtocolError("an integer does not fit 64 bits")
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item, depth + 1, finite=finite) for item in value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ProtocolError(f"map keys must be strings, got {brief(key)}")
        return all(_is_plain(item, depth + 1, finite=finite) for item in value.values())
    raise ProtocolError(f"{type(value).__name__} cannot travel in a message's fields")


def _words(text: str) -> str:
    return one_line(text, MAX_TEXT_BYTES)


_PLAIN_KINDS: dict[Any, FieldKind] = {
    int: FieldKind("int", lambda value: type(value) is int and 0 <= value < 2**63),
    float: FieldKind("float", lambda v: _is_float(v) and math.isfinite(v), unpack=float),
    AnyFloat: FieldKind("float, infinite or NaN, too", _is_float, unpack=float),
    bool: FieldKind("bool", lambda value: isinstance(value, bool)),
    str: FieldKind("string", lambda value: isinstance(value, str), unpack=_words),
    Raw: FieldKind("string", lambda value: isinstance(value, str)),
    WorkerId: FieldKind(
        "int or string",
        lambda value: is_int(value) or isinstance(value, str),
        unpack=lambda value: _words(value) if isinstance(value, str) else value,
    ),
    Shape: FieldKind("shape", is_shape, unpack=tuple),
    dict[str, Any]: FieldKind(
        "map", lambda value: isinstance(value, dict) and _is_plain(value, finite=True)
    ),
    Any: FieldKind("anything", _is_plain),
}


def _kind(hint: Any) -> FieldKind:
    """The kind of values that an annotation means."""
    if hint in _PLAIN_KINDS:
        return _PLAIN_KINDS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, least, most = _kind(args[0]), *args[1:]
        name = f"{kind.name} from {least:g} to {most:g}"
        return replace(kind, name=name, accepts=lambda v: kind.accepts(v) and least <= v <= most)
    if origin is Literal:
        return FieldKind(" or ".join(f'"{value}"' for value in args), lambda value: value in args)
    if origin is tuple and args[1:] == (...,):
        return _list_of(_kind(args[0]))
    if origin is dict and args[0] is str:
        return _map_to(_kind(args[1]))
    if is_dataclass(hint):
        return _record(Fields(hint))
    raise TypeError(f"no kind of field for {hint!r}")


def _list_of(kind: FieldKind) -> FieldKind:
    accepts, pack, unpack = kind.accepts, kind.pack, kind.unpack
    return FieldKind(
        f"list of {kind.name}",
        lambda value: isinstance(value, (list, tuple)) and all(map(accepts, value)),
        None if pack is None else lambda value: list(map(pack, value)),
        tuple if unpack is None else lambda value: tuple(map(unpack, value)),
    )


def _map_to(kind: FieldKind) -> FieldKind:
    unpack = kind.unpack or (lambda value: value)
    return FieldKind(
        f"map to {kind.name}",
        lambda value: (
            isinstance(value, dict)
            and all(isinstance(key, str) for key in value)
            and all(map(kind.accepts, value.values()))
        ),
        unpack=lambda value: {_words(key): unpack(item) for key, item in value.items()},
    )


def _record(record: Fields) -> FieldKind:
    name = ", ".join(f"{key}: {kind.name}" for key, (kind, _) in record.kinds.items())

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and record.problem(value) is None

    return FieldKind("{" + name + "}", accepts, record.pack, record.unpack)


class Fields:
    """The fields of a dataclass, to and from a map."""

    def __init__(self, cls: Any) -> None:
        hints = get_type_hints(cls, include_extras=True)
        self._cls = cls
        self.kinds: dict[str, tuple[FieldKind, bool]] = {}
        """The kind of each field by name, and whether it is required."""
        for field in fields(cls):
            hint, optional = hints[field.name], hints[field.name] is Any
            if get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint):
                (hint,), optional = set(get_args(hint)) - {type(None)}, True
            self.kinds[field.name] = (_kind(hint), not optional)
        self._converted = [(n, k.unpack) for n, (k, _) in self.kinds.items() if k.unpack]
        self._packers = [(n, k.pack) for n, (k, _) in self.kinds.items()]

    def problem(self, values: dict[Any, Any]) -> str | None:
        """The problem of a map; None when there is none."""
        for name, (kind, required) in self.kinds.items():
            value = values.get(name)
            if value is None:
                if required:
                    if name in values:
                        return f"field {name!r} must be {kind.name}, got None"
                    return f"field {name!r} is missing"
            elif not kind.accepts(value):
                return f"field {name!r} must be {kind.name}, got {brief(value)}"
        for name in values:
            if name not in self.kinds:
                known = ", ".join(self.kinds) or "none"
                return f"unknown field {brief(name)} (known: {known})"
        return None

    def read(self, values: Any) -> Any:
        """The dataclass of the map that a peer gave. Raises ProtocolError where it is not valid."""
        problem = self.problem(values) if isinstance(values, dict) else f"no map: {brief(values)}"
        if problem is not None:
            raise ProtocolError(f"{self._cls.__name__}: {problem}")
        return self.unpack(dict(values))

    def pack(self, value: Any) -> dict[str, Any]:
        """The map; fields that are None are left out."""
        packed = {}
        for name, pack in self._packers:
            item = getattr(value, name)
            if item is not None:
                packed[name] = item if pack is None else pack(item)
        return packed

    def unpack(self, values: dict[str, Any]) -> Any:
        """The dataclass of a map that has no `problem`; the map may be changed."""
        for name, unpack in self._converted:
            if values.get(name) is not None:
                values[name] = unpack(values[name])
        return self._cls(**values)


class Spec:
    """The number, sender, tensors and fields of one message; see `messages.message`."""

    def __init__(
        self, cls: type[Any], number: int, sender: str, tensors: tuple[int, int], long: bool
    ) -> None:
        self.name = "".join(f"_{c}" if c.isupper() else c for c in cls.__name__).strip("_").upper()
        self.number = number
        self.sender = sender
        self.tensors = tensors
        self.max_header_bytes = MAX_LONG_HEADER_BYTES if long else MAX_HEADER_BYTES
        self.fields = Fields(cls)
        self.named = "names" in self.fields.kinds and tensors[1] > 0
        """Whether the message has one tensor for each of its `names`."""
        self.sided = "sides" in self.fields.kinds
        """Whether the message has one or two more tensors for each of its `sides`."""

    def check(self, fields: dict[str, Any], num_tensors: int) -> None:
        """Raise ProtocolError unless these are exactly the fields and tensors of the message."""
        try:
            problem = self.fields.problem(fields)
        except ProtocolError as error:
            problem = error.message
        if problem is not None:
            raise ProtocolError(f"{self.name}: {problem}")
        low, high = [len(fields.get("names") or ())] * 2 if self.named else self.tensors
        sides = len(fields.get("sides") or ())
        if not low + sides <= num_tensors <= high + 2 * sides:
            self._refuse_count(low + sides, high + 2 * sides, num_tensors)

    def check_count(self, tensors: Any) -> None:
        """Raise ProtocolError for a list of more tensors than the message may ever have."""
        low, high = self.tensors[0], MAX_TENSORS if self.sided else self.tensors[1]
        if isinstance(tensors, list) and len(tensors) > high:
            self._refuse_count(low, high, len(tensors))

    def _refuse_count(self, low: int, high: int, got: int) -> None:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ProtocolError(f"{self.name}: {wanted} tensors expected, got {got}")
