"""Host memory for tensors that visit the device: pinned as far as the system allows."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.units import size

_LEAST_BYTES = 1 << 16
_ALIGNED_BYTES = 512
_LARGE_BYTES = 1 << 32
Transfers = deque[tuple[str, DeviceEvent, DeviceEvent]]
"""For `stage_api.Residence.transfers`."""
MOST_TRANSFERS = 10_000
_log = logging.getLogger(__name__)


class HostBytes:
    """A number of bytes in host memory. In pieces of powers of two, as torch pins them anyway: one
    piece would be rounded up to the next power."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pinned_bytes = 0
        self._pieces: list[tuple[int, Tensor]] = []  # (where it begins, piece)
        begin, left = 0, -(-nbytes // _LEAST_BYTES) * _LEAST_BYTES
        while left:
            length = 1 << (left.bit_length() - 1)
            piece = device.pinned(length)
            if piece is None:
                length = left
                piece = torch.empty(length, dtype=torch.uint8)
            else:
                self.pinned_bytes += length
            self._pieces.append((begin, piece))
            begin, left = begin + length, left - length

    def fill(self, source: Tensor) -> None:
        """Take over the bytes of a tensor of uint8; complete on return."""
        for part, piece in self.copies_to(source):
            piece.copy_(part)

    def copies_to(self, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(part of `target`, piece) for all bytes."""
        pairs = []
        for begin, piece in self._pieces:
            end = min(begin + len(piece), self.nbytes)
            if end > begin:
                pairs.append((target[begin:end], piece[: end - begin]))
        return pairs


class HostTensors:
    """Host memory for tensors, in pieces of powers of two with room for several: each is in one
    piece, and little is lost."""

    def __init__(self, device: Device) -> None:
        self.nbytes = 0
        self.pinned_bytes = 0
        self._plain_bytes = self._told_bytes = 0
        self._device = device
        self._rests: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """As many bytes, for good."""
        length = -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.nbytes += length
        fitting = (k for k, rest in enumerate(self._rests) if len(rest) >= length)
        if (place := next(fitting, None)) is None:
            place, piece = len(self._rests), self._device.pinned(_piece_bytes(length))
            if piece is None:
                piece = torch.empty(length, dtype=torch.uint8)
                self._plain_bytes += length
            else:
                self.pinned_bytes += len(piece)
            self._rests.append(piece)
        rest = self._rests[place]
        self._rests[place] = rest[length:]
        return rest[:nbytes]

    def tell(self, contents: str) -> None:
        """Say how much it is, once it has grown to the double of what was said."""
        if self.nbytes > 2 * self._told_bytes:
            self._told_bytes, plain = self.nbytes, self._plain_bytes
            slower = f", {size(plain)} of it not pinned, which is slower" if plain else ""
            _log.info("%s in host memory: %s%s", contents, size(self.nbytes), slower)


def _piece_bytes(nbytes: int) -> int:
    several = min(4 * nbytes, _LARGE_BYTES)
    return 1 << (max(nbytes, several, _LEAST_BYTES) - 1).bit_length()


class FileBytes:
    """Bytes that lie in files, mapped into memory: the place of each part, and the part."""

    pinned_bytes = 0

    def __init__(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        self._parts = parts

    def copies_to(self, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """As `HostBytes.copies_to`."""
        return [(target[begin : begin + len(part)], part) for begin, part in self._parts]
