"""A device that computes behind our back, for tests on a machine that has none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.devices import Device, DeviceEvent, HostTensor, Support
from tests.waiting import WAIT_S


class QueuedEvent(DeviceEvent):
    """Reached when the test says so."""

    def __init__(self, device: QueuedDevice, number: int) -> None:
        super().__init__()
        self.number = number
        self.reached = threading.Event()
        self._device = device

    def wait(self) -> None:
        self._device.log.append(("wait", self.number))
        assert self.reached.wait(WAIT_S), f"event {self.number} is never reached"

    def done(self) -> bool:
        return self.reached.is_set()

    @property
    def at_s(self) -> float:
        assert self.done()
        return float(self.number)


class QueuedDevice(Device):
    """Its events are reached when `reach` says so; with `at_once`, when they are made.

    Every event lies one second after the one before it. Copies out fill the pool's memory, and
    copies in are copies, as on a device with memory of its own. Without `bfloat16`, it cannot
    encode.
    """

    is_async = True

    def __init__(self, *, at_once: bool = False, bfloat16: bool = True) -> None:
        super().__init__()
        self.log: list[tuple[Any, ...]] = []
        self.events: list[QueuedEvent] = []
        self.out = self.given_back = 0
        self.copied_in_by: list[str] = []
        self._at_once = at_once
        self._bfloat16 = bfloat16

    def supports(self, dtype: torch.dtype) -> Support:
        return Support(self._bfloat16 or dtype != torch.bfloat16, "as the test has it")

    def record_event(self, *tensors: torch.Tensor) -> QueuedEvent:
        event = QueuedEvent(self, len(self.events))
        self.events.append(event)
        if self._at_once:
            event.reached.set()
        return event

    def reach(self, count: int | None = None) -> None:
        """The device has come past its first `count` events (None: past all)."""
        for event in self.events[:count]:
            event.reached.set()

    def copies_out(
        self, tensors: Sequence[torch.Tensor], event: DeviceEvent, pool: BufferPool
    ) -> list[HostTensor]:
        event.wait()
        return [self._copy_out(tensor, pool) for tensor in tensors]

    def _copy_out(self, tensor: torch.Tensor, pool: BufferPool) -> HostTensor:
        buffer, give_back = pool.take(tensor.numel() * tensor.element_size())
        host = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
        host.copy_(tensor.detach())
        self.out += 1

        def release() -> None:
            self.given_back += 1
            give_back()

        return host, release

    def copies_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.copied_in_by.append(threading.current_thread().name)
        return [tensor.clone() for tensor in tensors]


class OneThreadDevice(QueuedDevice):
    """As MPS: only the computing thread may copy to it."""

    one_thread = True


class Reads(TorchDispatchMode):
    """Counts the numbers that are read off tensors: each read makes a host wait for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
