"""Frames as pure bytes: prefix, header, tensor bytes. No sockets, no torch; only msgpack.

A frame on the wire (all integers of the prefix big-endian, tensor bytes little-endian):

    u64  length of the rest of the frame (4 + header + tensor bytes)
    u32  length of the header
    ...  msgpack header {"t": message type, "m": fields, "x": [[dtype code, shape], ...]}
    ...  the raw bytes of the tensors, back to back; a large frame has marks between pieces of them

`messages.py` defines the fields of a message; docs/maintainers/protocol.md is the specification
byte by byte. Whatever bytes arrive, the only exception that leaves this module is ProtocolError.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from hetero_framework.errors import ProtocolError

PROTOCOL_VERSION = 19

PREFIX = struct.Struct(">QI")
PREFIX_BYTES = PREFIX.size

MAX_HEADER_BYTES = 64 * 1024
"""Largest header of an ordinary message."""
MAX_LONG_HEADER_BYTES = 16 * 1024 * 1024
"""Largest header of the messages that carry lists of names or settings (`Spec.long`)."""
HANDSHAKE_MAX_FRAME_BYTES = 64 * 1024
"""Largest frame from a peer that has not finished the handshake: it carries no tensors."""
DEFAULT_MAX_FRAME_BYTES = 1 << 30
"""Largest frame a coordinator proposes in HELLO unless told otherwise."""
PIECE_BYTES = 1 << 17
"""Bytes of a piece of a frame's tensor bytes. If more follow, a mark stands behind the piece:
GOES_ON, or INSIDE, then a signal (HEARTBEAT, ASK_TURN, TURN, ARRIVAL_RATE) and another mark. The
length of a frame does not count marks and signals."""
GOES_ON, INSIDE = b"\x00", b"\x01"
IMPOSSIBLE_FRAME_BYTES = 1 << 40
"""No frame is that long: a prefix with such a length is not of this protocol."""
MAX_TENSORS = 65_536
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 20
"""Most values in a long header: maps, lists, strings and numbers. They are counted before any is
made, because an empty map is one byte on the wire and 72 in memory."""
MAX_DEPTH = 16
"""Deepest nesting of lists and maps in the fields of a message."""


@dataclass(frozen=True)
class DType:
    """One row of the fixed dtype table: `code` travels, `itemsize` is in bytes."""

    name: str
    code: int
    itemsize: int


DTYPES = (
    DType("float32", 1, 4),
    DType("float16", 2, 2),
    DType("bfloat16", 3, 2),
    DType("float64", 4, 8),
    DType("int64", 5, 8),
    DType("int32", 6, 4),
    DType("int16", 7, 2),
    DType("int8", 8, 1),
    DType("uint8", 9, 1),
    DType("bool", 10, 1),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}

_ABOVE_127 = bytes(range(128, 256))
_SHORT_HEADER_BYTES = 1024

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 64
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 16

Shapes = tuple[tuple[DType, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as it travels. `data` is a flat view of little-endian bytes, which may not change
    until the message is sent. The tensor is checked when its message is encoded."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def brief(value: Any) -> str:
    """A value as errors show it: at most 60 characters, however large or deep it is."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_int(value: Any) -> bool:
    """Whether `value` is a non-negative int of at most 63 bits, and no bool."""
    if type(value) is not int and (not isinstance(value, int) or isinstance(value, bool)):
        return False
    return 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    """Whether `value` lists at most MAX_DIMS sizes of a tensor that some frame could carry."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_DIMS:
        return False
    elements = 1
    for size in value:
        if not is_int(size):
            return False
        elements *= size or 1  # torch multiplies the other sizes of an empty tensor, too
    return elements < IMPOSSIBLE_FRAME_BYTES


def _tensor_bytes(dtype: DType, shape: Any) -> int:
    """Bytes of a tensor. Raises ProtocolError unless `shape` is a valid shape."""
    if not is_shape(shape):
        raise ProtocolError(
            f"a tensor's shape is a list of at most {MAX_DIMS} non-negative ints whose product is "
            f"below {IMPOSSIBLE_FRAME_BYTES}, got {brief(shape)}"
        )
    return int(math.prod(shape) * dtype.itemsize)


# ---------------------------------------------------------------------------------------- frames


def marks_in(payload_bytes: int) -> int:
    """The number of marks in a frame with this many tensor bytes."""
    return max(0, payload_bytes - 1) // PIECE_BYTES


def pack_header(
    name: str, number: int, fields: dict[str, Any], shapes: list[Any], most_bytes: int
) -> bytes:
    """The header of a message called `name`. Raises ProtocolError where msgpack cannot write it or
    it is too large."""
    try:
        header: bytes = msgpack.packb({"t": number, "m": fields, "x": shapes})
    except ValueError as error:  # a string that is not valid Unicode, a map that is too large
        raise ProtocolError(f"{name}: cannot be written: {error}") from error
    check_header(name, header, most_bytes)
    return header


def check_header(name: str, header: bytes, most_bytes: int) -> None:
    """Raise ProtocolError where the header of a message called `name` is too large."""
    if len(header) > most_bytes:
        raise ProtocolError(f"{name}: a header of {len(header)} bytes is larger than {most_bytes}")


def unpack_header(header: bytes) -> dict[str, Any]:
    """The map with the keys t, m and x, whose values are not checked yet."""
    if len(header) > MAX_HEADER_BYTES and _elements(header) > MAX_ELEMENTS:
        raise ProtocolError(f"a header with more than {MAX_ELEMENTS} values")
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, OverflowError, TypeError) as error:
        detail = str(error) or type(error).__name__
        raise ProtocolError(f"a header that is not msgpack: {detail}") from error
    if not isinstance(fields, dict) or fields.keys() != {"t", "m", "x"}:
        raise ProtocolError(f"a header must be a map with t, m and x, got {brief(fields)}")
    return fields


def _elements(header: bytes) -> int:
    """An upper bound of the values that need memory of their own. Each begins with a byte above
    127, which ASCII text does not have. All other values are one byte and shared objects."""
    return len(header) - len(header.translate(None, _ABOVE_127))


def field_bytes(header: bytes) -> int:
    """A rough upper bound of the memory that the values of a header take, in bytes."""
    if len(header) <= _SHORT_HEADER_BYTES:
        return _SHORT_HEADER_BYTES + 16 * len(header)
    return 96 * _elements(header) + 8 * len(header)


def pack_shapes(tensors: Sequence[WireTensor]) -> list[Any]:
    """The dtype code and shape of each tensor. Raises ProtocolError for one that cannot travel."""
    packed = []
    for tensor in tensors:
        if (dtype := BY_NAME.get(tensor.dtype)) is None:
            known = ", ".join(BY_NAME)
            raise ProtocolError(f"dtype {tensor.dtype!r} cannot travel (known: {known})")
        expected, view, shape = _tensor_bytes(dtype, tensor.shape), tensor.data, list(tensor.shape)
        if view.nbytes != expected:
            text = f"a {dtype.name} tensor of shape {shape} has {expected} bytes, got {view.nbytes}"
            raise ProtocolError(text)
        if not view.c_contiguous or (view.itemsize, view.ndim) != (1, 1):
            raise ProtocolError(f"the bytes of a {dtype.name} tensor are not one contiguous row")
        packed.append([dtype.code, shape])
    return packed


def unpack_shapes(name: str, described: Any, payload_bytes: int) -> Shapes:
    """The tensors that a header describes; together they must have `payload_bytes`."""
    if not isinstance(described, list) or len(described) > MAX_TENSORS:
        raise ProtocolError(f"{name}: x must list at most {MAX_TENSORS} tensors")
    shapes = []
    total = 0
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ProtocolError(f"{name}: a tensor is [dtype, shape], got {brief(entry)}")
        code, shape = entry
        if not is_int(code) or code not in _BY_CODE:
            raise ProtocolError(f"{name}: unknown dtype code {brief(code)}")
        total += _tensor_bytes(_BY_CODE[code], shape)
        shapes.append((_BY_CODE[code], tuple(shape)))
    if total != payload_bytes:
        raise ProtocolError(
            f"{name}: the tensors have {total} bytes, the frame carries {payload_bytes}"
        )
    return tuple(shapes)


def split(shapes: Shapes, payload: memoryview) -> tuple[WireTensor, ...]:
    """The tensors as views of the tensor bytes of a frame."""
    tensors = []
    offset = 0
    for dtype, shape in shapes:
        end = offset + math.prod(shape) * dtype.itemsize
        tensors.append(WireTensor(dtype.name, shape, payload[offset:end]))
        offset = end
    return tuple(tensors)


def check_start(data: bytes | bytearray | memoryview) -> None:
    """Raise ProtocolError when the first bytes of a frame (one or more) cannot be a prefix. A
    prefix begins with three zeros: text, TLS greetings and other programs' magic numbers do not."""
    if any(bytes(data[:3])):
        text = bytes(data[:5]).decode("latin-1").rstrip("\r\n")
        is_text = text.isascii() and text.isprintable()
        got = repr(text) if is_text else repr(bytes(data[:5]))[1:]
        raise ProtocolError(f"not a hetero peer (got {got})")


def parse_prefix(
    data: bytes | bytearray | memoryview, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
) -> tuple[int, int]:
    """(header bytes, tensor bytes) of the frame that begins with these PREFIX_BYTES bytes. Raises
    ProtocolError when they are not a frame's, or the frame is larger than agreed."""
    if len(data) != PREFIX_BYTES:
        raise ProtocolError(f"a frame begins with {PREFIX_BYTES} bytes, got {len(data)}")
    rest, header_bytes = PREFIX.unpack(data)
    if rest >= IMPOSSIBLE_FRAME_BYTES:
        check_start(data)
    if rest > max_frame_bytes:
        raise ProtocolError(
            f"the peer announced a frame of {rest} bytes; at most {max_frame_bytes} are agreed"
        )
    if header_bytes > MAX_LONG_HEADER_BYTES:
        raise ProtocolError(
            f"the peer announced a header of {header_bytes} bytes; "
            f"at most {MAX_LONG_HEADER_BYTES} are allowed"
        )
    payload_bytes = rest - 4 - header_bytes
    if header_bytes == 0 or payload_bytes < 0:
        raise ProtocolError(f"a frame of {rest} bytes cannot hold a header of {header_bytes}")
    return header_bytes, payload_bytes
