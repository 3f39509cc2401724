"""Stored inputs of recomputed layers in host memory, until their backward.

An input leaves when its layer is computed, and is on its way back while the layer above is computed
again: from the last one of a backward to the first one of the next, while the task before runs.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetero_framework.config import StageSpec
from hetero_framework.core.buffers import size_class
from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.host_memory.pinned import MOST_TRANSFERS, HostTensors, Transfers

_LEAVING = 2  # inputs on their way out that the device holds


@dataclass(eq=False)
class _Stored:
    """The input of one layer. `tensor` is it on the device, while it is there or on its way."""

    at: tuple[int, int]  # micro-batch, layer
    tensor: Tensor | None
    memory: Tensor
    host: Tensor
    left: DeviceEvent
    arrival: DeviceEvent | None = None


class StoredInputs:
    """The stored inputs of one stage's layers. For its computing thread, and the one that runs its
    backward meanwhile."""

    def __init__(self, device: Device, spec: StageSpec) -> None:
        self._device = device
        # The last layer's backward follows at once; what was received is kept for its gradient.
        self._staying = [spec.end - 1] * spec.is_last + [spec.start] * (not spec.is_first)
        self._memory = HostTensors(device)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._stored: dict[int, dict[int, _Stored]] = {}  # by micro-batch and layer
        self._leaving: deque[tuple[_Stored, Tensor]] = deque()
        self._micro_batch, self._following = 0, FORWARD
        self.transfers = Transfers(maxlen=MOST_TRANSFERS)

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        self._micro_batch, self._following = micro_batch, following
        self._let_go(0)
        if kind == FORWARD:
            self._fetch_next()

    def abort(self) -> None:
        self._let_go(0)
        for layers in self._stored.values():
            for stored in layers.values():
                self._free_host(stored)
        self._stored = {}
        self._memory.tell("stored inputs of layers")

    @contextmanager
    def storing(self, index: int, hidden: Tensor) -> Iterator[None]:
        """Around the call of a layer that is computed again. Others of its inputs are of all
        layers; what is stored within the call is hidden by hooks of its own. Raises
        ArchitectureError, as autograd would, which sees no change behind hooks."""
        version = hidden._version
        # What is stored holds its hooks, which must not hold the input.
        with saved_tensors_hooks(partial(self._pack, index, weakref.ref(hidden)), self._unpack):
            yield
        if hidden._version != version:
            raise ArchitectureError(
                f"layer {index} changes its input in place, so that it cannot be computed again",
                hint="set gradient_checkpointing to false",
            )

    def _pack(self, index: int, hidden: weakref.ref[Tensor], tensor: Tensor) -> Any:
        layers = self._stored.setdefault(self._micro_batch, {})
        if (
            tensor is not hidden()
            or index in (*layers, *self._staying)
            or not tensor.is_contiguous()
        ):
            return tensor
        self._let_go(_LEAVING - 1)
        source, free = tensor.detach(), self._free[size_class(tensor.nbytes)]
        memory = free.pop() if free else self._memory.take(size_class(tensor.nbytes))
        host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        computed = self._device.record_event()
        began, left = self._device.queue_copies([(host, source)], "inputs out", computed)
        self.transfers.append(("inputs out", began, left))
        layers[index] = _Stored((self._micro_batch, index), source, memory, host, left)
        self._leaving.append((layers[index], source))
        return layers[index]

    def _unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = self._take(packed) if isinstance(packed, _Stored) else packed
        self._fetch_next()
        return tensor

    def _take(self, stored: _Stored) -> Tensor:
        """The input on the device; its host memory is free."""
        self._fetch(stored)
        self._free_host(stored)
        micro_batch, index = stored.at
        del self._stored[micro_batch][index]
        tensor, stored.tensor = stored.tensor, None
        assert tensor is not None
        return tensor

    def _free_host(self, stored: _Stored) -> None:
        """Give host memory back. All that is queued from now on finds the input on the device."""
        if stored.arrival is not None:
            self._device.order_behind(stored.arrival)
        self._free[len(stored.memory)].append(stored.memory)

    def _fetch_next(self) -> None:
        """Have the next input of the backward on its way, or of the one that follows this task."""
        self._stored = {k: layers for k, layers in self._stored.items() if layers}
        first = min(self._stored, default=None)
        if first is not None and (first == self._micro_batch or self._following == BACKWARD):
            self._fetch(self._stored[first][max(self._stored[first])])

    def _fetch(self, stored: _Stored) -> None:
        if stored.tensor is not None:
            return
        stored.tensor = torch.empty_like(stored.host, device=self._device.torch_device)
        pairs = [(stored.tensor, stored.host)]
        # Work that is queued may use the memory; and it is behind the end of the copy out.
        queued = self._device.record_event()
        began, stored.arrival = self._device.queue_copies(pairs, "inputs in", queued)
        self.transfers.append(("inputs in", began, stored.arrival))

    def _let_go(self, most: int) -> None:
        """Free the device's memory of all inputs on their way out but the last `most`."""
        while len(self._leaving) > most:
            stored, _ = self._leaving[0]
            # What takes the memory next is queued on this thread's stream.
            self._device.order_behind(stored.left)
            self._leaving.popleft()
            stored.tensor = None
