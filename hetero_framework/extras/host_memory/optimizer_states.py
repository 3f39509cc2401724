"""Optimizer states in host memory: those of a layer visit the device while it steps."""

from __future__ import annotations

from torch.optim import Optimizer

from hetero_framework.core.devices import Device


class OptimizerStates:
    """The states of one stage's optimizer."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def settle(self) -> None:
        pass
