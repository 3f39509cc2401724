"""Copies to the device of what is not pinned, by a thread of its own.

A copy from such memory holds the thread that asks for it, until the device comes to it. So another
thread reads the bytes, also those of a file, into two pinned buffers in turn, and queues their way
to the device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.engine.boundary_io import Sender
from hetero_framework.errors import HeteroError

_BUFFER_BYTES = 16 << 20
_LONGEST_S = 600.0

Ends = tuple[DeviceEvent, DeviceEvent]


class Delivery:
    """A layer that has been asked for. It is known when it comes as soon as its copy is queued."""

    def __init__(self, ends: Ends | None = None) -> None:
        self._ends = ends
        self._error: Exception | None = None
        self._known = threading.Event()
        if ends is not None:
            self._known.set()

    @property
    def ends(self) -> Ends:
        """Beginning and end of the copy; waits until it is queued. Raises what reading raised."""
        if not self._known.wait(_LONGEST_S):
            raise HeteroError(
                f"a layer could not be read from host memory or its file within {_LONGEST_S:.0f} s",
                hint="look at the disk that holds the model",
            )
        if self._error is not None:
            raise self._error
        assert self._ends is not None
        return self._ends

    def settle(self) -> None:
        """Wait until the copy is over, whether it has failed or not."""
        if self._known.wait(_LONGEST_S) and self._ends is not None:
            self._ends[1].wait()

    def queued(self, ends: Ends) -> None:
        self._ends = ends
        self._known.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._known.set()


class Feeder:
    """The thread; it begins with the first copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, DeviceEvent]] = []
        self._thread = Sender(lambda error: None, _LONGEST_S)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Delivery:
        """Copy the second tensor of each pair, bytes, into the first, behind `after`."""
        delivery = Delivery()

        def job() -> None:
            try:
                delivery.queued(self._copied(pairs, after))
            except Exception as error:
                delivery.failed(error)  # for the thread that waits for it

        self._thread.submit(job)
        return delivery

    def close(self) -> None:
        self._thread.close()

    def _copied(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Ends:
        ends: list[DeviceEvent] = []
        for target, source in pairs:
            parts = zip(target.split(_BUFFER_BYTES), source.split(_BUFFER_BYTES), strict=True)
            for part, data in parts:
                buffer = self._free_buffer()[: len(data)]
                buffer.copy_(data)
                ends += self._device.queue_copies([(part, buffer)], "weights", after)
                self._buffers[-1] = self._buffers[-1][0], ends[-1]
        return ends[0], ends[-1]

    def _free_buffer(self) -> Tensor:
        """The buffer that was used longest ago; the last one of the list from now on."""
        if len(self._buffers) < 2:
            memory = self._device.pinned(_BUFFER_BYTES)
            plain = torch.empty(_BUFFER_BYTES, dtype=torch.uint8) if memory is None else memory
            self._buffers.append((plain, DeviceEvent()))
        else:
            self._buffers.reverse()
            self._buffers[-1][1].wait()
        return self._buffers[-1][0]
