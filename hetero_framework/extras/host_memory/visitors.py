"""Tensors that visit the device from host memory, which is pinned as far as the system allows."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.engine.stage_api import Residence, Transfer
from hetero_framework.units import size

_LEAST_BYTES = 1 << 16
_ALIGNED_BYTES = 512
_LARGE_BYTES = 1 << 32
_MOST_TRANSFERS = 10_000
_log = logging.getLogger(__name__)


class Visitors(Residence):
    """Visiting tensors of one kind and one stage. Used by the stage's computing thread, and by the
    thread that runs its backward meanwhile."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = HostTensors(device)
        self._leaving: deque[tuple[list[Tensor], DeviceEvent]] = deque()
        self._transfers: deque[Transfer] = deque(maxlen=_MOST_TRANSFERS)

    def transfers(self) -> list[Transfer]:
        taken = [*self._transfers]
        self._transfers.clear()
        return taken

    def _queue(
        self, kind: str, pairs: Sequence[tuple[Tensor, Tensor]], *after: DeviceEvent
    ) -> DeviceEvent:
        """Do `Device.queue_copies`, and return the end of the copies."""
        began, ended = self._device.queue_copies(pairs, kind, *after)
        self._transfers.append((kind, began, ended))
        return ended

    def _let_go(self, most: int) -> None:
        """Free the device memory of all leaving tensors except the last `most` entries."""
        while len(self._leaving) > most:
            tensors, left = self._leaving[0]
            # The next user of the memory is queued on this thread's stream.
            self._device.order_behind(left)
            self._leaving.popleft()
            tensors.clear()


class HostTensors:
    """Host memory for tensors, each in one piece. Pieces are powers of two, since torch pins these,
    and no larger than what is expected to be taken, so that little is lost."""

    def __init__(self, device: Device) -> None:
        self.nbytes = self.plain_bytes = self._told_bytes = self._expected_bytes = 0
        self._device = device
        self._rests: list[Tensor] = []

    def expect(self, nbytes: int) -> None:
        """Say how many bytes will be taken from now on, as far as is known."""
        self._expected_bytes = nbytes

    def take(self, nbytes: int) -> Tensor:
        """Memory of `nbytes`, which is never given back."""
        length = -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.nbytes += length
        fitting = (k for k, rest in enumerate(self._rests) if len(rest) >= length)
        if (place := next(fitting, None)) is None:
            several = max(length, min(self._expected_bytes, _LARGE_BYTES), _LEAST_BYTES)
            room = 1 << (several.bit_length() - 1)
            if room < 2 * length:  # the next power of two has room for more than one
                room = 1 << (several - 1).bit_length()
            piece = self._device.pinned(room)
            if piece is None:
                piece = torch.empty(length, dtype=torch.uint8)
                self.plain_bytes += length
            place = len(self._rests)
            self._rests.append(piece)
        self._expected_bytes -= length
        rest = self._rests[place]
        self._rests[place] = rest[length:]
        return rest[:nbytes]

    def tell(self, contents: str) -> None:
        """Log how much memory is taken, once it is more than twice the amount last logged."""
        if self.nbytes > 2 * self._told_bytes:
            self._told_bytes, plain = self.nbytes, self.plain_bytes
            slower = f", {size(plain)} of it not pinned, which is slower" if plain else ""
            _log.info("%s in host memory: %s%s", contents, size(self.nbytes), slower)


def in_pieces(device: Device, nbytes: int) -> tuple[list[tuple[int, Tensor]], int]:
    """Host memory of `nbytes`: pairs (offset, piece), and the number of bytes that are not pinned.
    Pieces are powers of two, since torch would round one larger piece up to the next power."""
    pieces, begin = list[tuple[int, Tensor]](), 0
    while (left := nbytes - begin) > 0:
        piece = device.pinned(max(_LEAST_BYTES, 1 << (left.bit_length() - 1)))
        if piece is None:
            return [*pieces, (begin, torch.empty(left, dtype=torch.uint8))], left
        pieces.append((begin, piece[:left]))
        begin += len(piece)
    return pieces, 0
