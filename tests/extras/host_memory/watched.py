"""A CPU that counts what is on the device for the time of a visit."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hetero_framework.core.devices import Device, DeviceEvent


class Watched(Device):
    """`most` by the name of a stream: tensors, and their bytes, of the device that were there at
    once when copies of that stream were queued."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, int] = {}
        self.most: dict[str, tuple[int, int]] = {}
        self._there: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        known = {id(tensor) for reference, _ in self._there if (tensor := reference()) is not None}
        for target, source in pairs:
            visitor = source if stream.endswith("out") else target
            if id(visitor) not in known:
                self._there.append((weakref.ref(visitor), visitor.nbytes))
        self._there = [entry for entry in self._there if entry[0]() is not None]
        now = len(self._there), sum(nbytes for _, nbytes in self._there)
        self.most[stream] = max(now, self.most.get(stream, (0, 0)))
        self.copies[stream] = self.copies.get(stream, 0) + len(pairs)
        return super().queue_copies(pairs, stream, *after)
