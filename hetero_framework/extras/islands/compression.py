"""Encodes changes of the weights in fewer bytes for other islands, with error feedback.

The rounding error of one change is added to the next change of that parameter: over time everything
is sent, except for the last rounding error. The decoded values are the same on any machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from hetero_framework.core.codecs import CODECS, Codec
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.codecs.codecs import Int8

Kind = Literal["none", "bf16", "int8"]
Packed = dict[str, list[Tensor]]
"""Encoded changes: the tensors to send, by parameter."""

# Longer blocks than on the wire between stages: the rounding error beside a large value is sent
# with the next change, and small numbers are more frequent, so that Huffman's code saves more.
_CODECS: dict[Kind, Codec] = {"none": CODECS["none"], "bf16": CODECS["bf16"], "int8": Int8(256)}
_RAW_DEFLATE = -15  # zlib's wbits of a stream without header and checksum: frames have theirs


class Compression:
    """The encoder of one island's changes. `lost` holds the rounding errors so far. An island that
    begins or joins has none."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.lost: dict[str, Tensor] = {}
        self._next_lost: dict[str, Tensor] = {}

    def pack(self, changes: Mapping[str, Tensor]) -> Packed:
        """The encoding of these changes (float32, on the CPU)."""
        packed: Packed = {}
        for name, change in changes.items():
            meant = change + self.lost[name] if name in self.lost else change
            parts = _CODECS[self._kind].encode(meant)
            packed[name] = [_deflated(parts[0]), parts[1]] if self._kind == "int8" else parts
            if self._kind != "none":
                self._next_lost[name] = meant - _decode(packed[name], meant.shape, self._kind)
        return packed

    def committed(self) -> None:
        """Note that the packed changes are part of the weights now. Without this call they are
        packed anew next time."""
        self.lost.update(self._next_lost)
        self._next_lost = {}


def unpack(packed: Packed, like: Mapping[str, Tensor], kind: Kind) -> dict[str, Tensor]:
    """The changes of another island, with the names and shapes of `like`. Raises ProtocolError for
    data that do not encode such changes."""
    if packed.keys() != like.keys():
        raise ProtocolError("another island sends changes of other parameters")
    return {name: _decode(packed[name], tensor.shape, kind) for name, tensor in like.items()}


def packed_bytes(packed: Packed) -> int:
    """The number of bytes of all tensors that are sent."""
    return sum(tensor.nbytes for parts in packed.values() for tensor in parts)


def _decode(parts: Sequence[Tensor], shape: torch.Size, kind: Kind) -> Tensor:
    if kind == "int8":
        if len(parts) != 2 or parts[0].dtype != torch.uint8:
            raise ProtocolError("a change in int8 comes in other parts than numbers and scales")
        parts = [_inflated(parts[0], shape.numel()), parts[1]]
    return _CODECS[kind].decode(parts, shape, torch.float32)


def _deflated(numbers: Tensor) -> Tensor:
    """int8 [N] in Huffman's code alone, as uint8: rounded changes hardly repeat themselves."""
    coder = zlib.compressobj(wbits=_RAW_DEFLATE, strategy=zlib.Z_HUFFMAN_ONLY)
    stream = coder.compress(numbers.numpy().data) + coder.flush()
    return torch.frombuffer(bytearray(stream), dtype=torch.uint8)


def _inflated(stream: Tensor, count: int) -> Tensor:
    """The int8 [count] that `_deflated` wrote. A longer stream is not read to its end."""
    decoder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        numbers = decoder.decompress(stream.numpy().data, count + 1)
    except zlib.error as error:
        raise ProtocolError(f"a change in int8 cannot be read: {error}") from error
    if len(numbers) != count or not decoder.eof or decoder.unused_data:
        raise ProtocolError(f"a change in int8 has other than {count} numbers")
    if count == 0:  # torch makes no tensor of an empty buffer
        return torch.empty(0, dtype=torch.int8)
    return torch.frombuffer(bytearray(numbers), dtype=torch.int8)
