"""A CPU that counts what is on the device for the time of a visit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hetero_framework.core.devices import Device, DeviceEvent


class Watched(Device):
    """`most` by the name of a stream: tensors, and their bytes, of the device that were there at
    once when copies of that stream were queued."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, int] = {}
        self.most: dict[str, tuple[int, int]] = {}
        self._there: dict[StorageWeakRef, int] = {}

    def queue_copies(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        for target, source in pairs:
            visitor = source if stream.endswith("out") else target
            self._there[StorageWeakRef(visitor.untyped_storage())] = visitor.nbytes
        self._there = {held: nbytes for held, nbytes in self._there.items() if not held.expired()}
        now = len(self._there), sum(self._there.values())
        self.most[stream] = max(now, self.most.get(stream, (0, 0)))
        self.copies[stream] = self.copies.get(stream, 0) + len(pairs)
        return super().queue_copies(pairs, stream, *after)
