"""Copies memory that is not pinned to the device, in a thread of its own.

A copy from such memory blocks the thread that asks for it until the device has come to the copy. So
another thread reads the bytes, from memory or a file, into two pinned buffers in turn, and queues
the buffers' copies to the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.engine.boundary_io import Sender
from hetero_framework.errors import HeteroError

_BUFFER_BYTES = 16 << 20
_LONGEST_S = 600.0

Ends = tuple[DeviceEvent, DeviceEvent]
"""Beginning and end of a copy."""


def ends_of(delivery: Future[Ends]) -> Ends:
    """The beginning and end of a copy. Waits until it is queued, and raises what reading raised."""
    try:
        return delivery.result(_LONGEST_S)
    except TimeoutError:
        raise HeteroError(
            f"a layer could not be read from host memory or its file within {_LONGEST_S:.0f} s",
            hint="look at the disk that holds the model",
        ) from None


def settle(deliveries: Iterable[Future[Ends]]) -> None:
    """Wait until copies are over. Errors of copies are not raised: their frames hold the slots."""
    for delivery in wait(deliveries, _LONGEST_S).done:
        if delivery.exception() is None:
            delivery.result()[1].wait()


class Feeder:
    """The thread that copies; it begins with the first copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = Sender(lambda error: None, _LONGEST_S)
        self._buffers = deque((device.host_bytes(_BUFFER_BYTES), DeviceEvent()) for _ in range(2))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Future[Ends]:
        """Copy the second tensor of each pair into the first, after `after`. Both are bytes."""
        delivery = Future[Ends]()

        def job() -> None:
            try:
                delivery.set_result(self._copied(pairs, after))
            except Exception as error:
                delivery.set_exception(error)  # for the thread that waits for it

        self._thread.submit(job)
        return delivery

    def close(self) -> None:
        self._thread.close()

    def _copied(self, pairs: Sequence[tuple[Tensor, Tensor]], after: DeviceEvent) -> Ends:
        ends: list[DeviceEvent] = []
        for target, source in pairs:
            parts = zip(target.split(_BUFFER_BYTES), source.split(_BUFFER_BYTES), strict=True)
            for part, data in parts:
                memory, copied = self._buffers[0]
                copied.wait()
                buffer = memory[: len(data)]
                buffer.copy_(data)
                ends += self._device.queue_copies([(part, buffer)], "weights", after)
                self._buffers[0] = memory, ends[-1]
                self._buffers.rotate()
        return ends[0], ends[-1]
