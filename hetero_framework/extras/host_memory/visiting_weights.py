"""Trained weights whose home is host memory, and their gradients there.

A gradient goes home as soon as a backward has made it. The next micro-batch's backward fetches the
sum so far, adds to it, and sends it back: the same additions in the same order as on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.extras.host_memory.visitors import Visitors

_LEAVING = 8  # tensors on their way home, while others are computed


class VisitingWeights(Visitors):
    """The trained weights of one stage's streamed layers."""

    def __init__(self, device: Device, layers: Sequence[Mapping[Parameter, Tensor]]) -> None:
        """`layers` have the home of each weight, by layer in the order of use."""
        super().__init__(device)
        self.homes = {p: home for layer in layers for p, home in layer.items()}
        self._memory.expect(sum(home.nbytes for home in self.homes.values()))
        self.added: dict[Parameter, DeviceEvent] = {}
        """Weights with a gradient of this step, and when that is at home."""
        self._layers = [list(layer) for layer in layers]
        self._sums: dict[Parameter, Tensor] = {}
        self._ahead: dict[Parameter, tuple[Tensor, DeviceEvent]] = {}
        self._stepping: dict[Any, tuple[Tensor, DeviceEvent]] = {}
        self._slots: dict[Any, Tensor] = {}
        self._written = DeviceEvent()
        hook = self._add
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.homes]

    def expect(self, layer: int) -> None:
        """Fetch the gradients of a layer, to which its backward adds."""
        for parameter in self._layers[layer] if 0 <= layer < len(self._layers) else ():
            if parameter in self.added and parameter not in self._ahead:
                self._ahead[parameter] = self._gradient(parameter)

    def gradient(self, parameter: Parameter) -> Tensor | None:
        """See `Residence.gradient`."""
        if parameter not in self.added:
            return parameter.grad
        gradient, arrival = self._gradient(parameter)
        self._device.order_behind(arrival)
        return gradient

    def put_gradient(self, parameter: Parameter, gradient: Tensor) -> None:
        """See `Residence.put_gradient`."""
        if parameter not in self.homes:
            parameter.grad = gradient
            return
        if parameter not in self._sums:
            home = self.homes[parameter]
            nbytes = home.nbytes
            self._sums[parameter] = self._memory.take(nbytes).view(home.dtype).view(home.shape)
        made, read = self._device.record_event(), self._ahead.pop(parameter, None)
        after = (made, read[1]) if read is not None else (made,)
        left = self._queue("gradients out", [(self._sums[parameter], gradient)], *after)
        self.added[parameter] = left
        self._leaving.append(([gradient, *(read or ())[:1]], left))
        self._let_go(_LEAVING)

    def forget_gradients(self) -> None:
        """See `Residence.forget_gradients`."""
        self._leaving.extend(([gradient], there) for gradient, there in self._ahead.values())
        self._let_go(0)
        self._ahead, self.added = {}, {}
        self._memory.tell("gradients")

    def fetch(self, group: Iterable[Tensor]) -> None:
        """Queue the copies of the weights of a group that steps next."""
        for parameter in group:
            if (home := self.homes.get(parameter)) is not None:  # type: ignore[call-overload]
                there, queued = self._room_for(parameter), self._device.record_event()
                self._stepping[parameter] = there, self._queue("states in", [(there, home)], queued)

    def enter(self, group: Iterable[Tensor], scale: float) -> None:
        """Have a group's weights and gradients on the device, for its step."""
        for parameter in group:
            if parameter in self._stepping:
                weight, arrival = self._stepping.pop(parameter)
                self._device.order_behind(arrival)
                gradient = self.gradient(parameter)  # type: ignore[arg-type]
                assert gradient is not None
                self._slots[parameter], parameter.data = parameter.data, weight
                parameter.grad = gradient.mul_(scale) if scale != 1.0 else gradient

    def leave(self, group: Iterable[Tensor]) -> None:
        """Send a group's weights home."""
        for parameter in group:
            if parameter in self._slots:
                weight, parameter.data = parameter.data, self._slots.pop(parameter)
                home, stepped = self.homes[parameter], self._device.record_event()  # type: ignore[index]
                self._written = self._queue("states out", [(home, weight)], stepped)
                self._leaving.append(([weight], self._written))
                self.added.pop(parameter)  # type: ignore[call-overload]
        self._let_go(_LEAVING)

    def settle(self) -> None:
        """Wait until all weights are at home."""
        self._written.wait()

    def close(self) -> None:
        self.forget_gradients()
        for hook in self._hooks:
            hook.remove()
        self.homes, self._layers, self._sums, self._hooks = {}, [], {}, []

    def _add(self, parameter: Tensor) -> None:
        """Add a backward's gradient to the sum of those before, and send it home."""
        assert isinstance(parameter, Parameter)
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if parameter in self.added:
            fetched = self._ahead.pop(parameter, None) or self._gradient(parameter)
            self._device.order_behind(fetched[1])
            gradient = fetched[0].add_(gradient)
        self.put_gradient(parameter, gradient)

    def _gradient(self, parameter: Parameter) -> tuple[Tensor, DeviceEvent]:
        there, queued = self._room_for(parameter), self._device.record_event()
        pairs = [(there, self._sums[parameter])]
        return there, self._queue("gradients in", pairs, queued, self.added[parameter])

    def _room_for(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, requires_grad=False)
