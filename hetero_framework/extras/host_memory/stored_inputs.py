"""Keeps stored inputs of recomputed layers in host memory until their backward.

An input leaves the device when its layer is computed, and returns while the layer above is computed
again. The first input of a backward returns while the task before that backward runs.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
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
from hetero_framework.extras.host_memory.visitors import Visitors
from hetero_framework.models.cut.shard import Shard

_LEAVING = 2  # inputs on their way out that the device holds


@dataclass(eq=False)
class _Stored:
    """The input of one layer. `there` holds it while it is on the device, or on its way there."""

    at: tuple[int, int]  # micro-batch, minus the layer: sorts in the order of backwards
    there: list[Tensor]
    memory: Tensor
    host: Tensor
    arrival: DeviceEvent | None = None


class StoredInputs(Visitors):
    """The stored inputs of one stage's layers."""

    def __init__(self, device: Device, spec: StageSpec) -> None:
        super().__init__(device)
        # The last layer's backward follows at once; a received input is kept for its gradient.
        self._staying = [spec.end - 1] * spec.is_last + [spec.start] * (not spec.is_first)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._stored: dict[tuple[int, int], _Stored] = {}
        self._micro_batch, self._following = 0, FORWARD

    def accompany(self, shard: Shard) -> None:
        shard.storing = self.storing

    def begin(self, kind: str, micro_batch: int, following: str) -> None:
        self._micro_batch, self._following = micro_batch, following
        self._let_go(0)
        if kind == FORWARD:
            self._fetch_next()

    def abort(self) -> None:
        self._let_go(0)
        for stored in self._stored.values():
            self._free_host(stored)
        self._stored = {}
        self._memory.tell("stored inputs of layers")

    @contextmanager
    def storing(self, index: int, hidden: Tensor) -> Iterator[None]:
        """Surrounds the call of a recomputed layer. Its inputs other than `hidden` belong to all
        layers, and the call's own hooks hide what is stored inside. Raises ArchitectureError for
        an input that is changed in place, which autograd does not see behind hooks."""
        version = hidden._version
        # A stored tensor holds its hooks, so the hooks must not hold the input.
        with saved_tensors_hooks(partial(self._pack, index, weakref.ref(hidden)), self._unpack):
            yield
        if hidden._version != version:
            raise ArchitectureError(
                f"layer {index} changes its input in place, so that it cannot be computed again",
                hint="set gradient_checkpointing to false",
            )

    def _pack(self, index: int, hidden: weakref.ref[Tensor], tensor: Tensor) -> Any:
        at = self._micro_batch, -index
        stays = index in self._staying or at in self._stored or not tensor.is_contiguous()
        if stays or tensor is not hidden():
            return tensor
        self._let_go(_LEAVING - 1)
        source, free = tensor.detach(), self._free[size_class(tensor.nbytes)]
        memory = free.pop() if free else self._memory.take(size_class(tensor.nbytes))
        host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        computed = self._device.record_event()
        left = self._queue("inputs out", [(host, source)], computed)
        self._stored[at] = stored = _Stored(at, [source], memory, host)
        self._leaving.append((stored.there, left))
        return stored

    def _unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = self._take(packed) if isinstance(packed, _Stored) else packed
        self._fetch_next()
        return tensor

    def _take(self, stored: _Stored) -> Tensor:
        """The input, on the device. Its host memory becomes free."""
        self._fetch(stored)
        self._free_host(stored)
        del self._stored[stored.at]
        [tensor], stored.there = stored.there, []
        return tensor

    def _free_host(self, stored: _Stored) -> None:
        """Free an input's host memory. Work queued from now on finds the input on the device."""
        if stored.arrival is not None:
            self._device.order_behind(stored.arrival)
        self._free[len(stored.memory)].append(stored.memory)

    def _fetch_next(self) -> None:
        """Fetch the next input for this backward, or for the backward that follows this task."""
        first = min(self._stored, default=None)
        if first is not None and (first[0] == self._micro_batch or self._following == BACKWARD):
            self._fetch(self._stored[first])

    def _fetch(self, stored: _Stored) -> None:
        if not stored.there:
            stored.there = [torch.empty_like(stored.host, device=self._device.torch_device)]
            # Queued work may still use the memory. It also comes after the end of the copy out.
            queued = self._device.record_event()
            pairs = [(stored.there[0], stored.host)]
            stored.arrival = self._queue("inputs in", pairs, queued)
