"""Optimizer states in host memory that visit the device while their group of parameters steps.

While one group steps, the states of the next group are on their way to the device, and the states
of the group before return. The device has memory for three groups, and only during the commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.engine.optimizer import load_state_tensors
from hetero_framework.engine.stage_api import States
from hetero_framework.extras.host_memory.visiting_weights import VisitingWeights
from hetero_framework.extras.host_memory.visitors import Visitors
from hetero_framework.models.sizing.streaming import STATES_GROUP_BYTES, STATES_OF_NUMBER

_SMALL_BYTES = 1024  # states that stay: counters, tables of 8-bit optimizers
_RETURNING = 1  # groups whose states return while the next one steps
_States = Mapping[Tensor, dict[str, Any]]
_Visiting = dict[tuple[Tensor, str], Tensor]


def in_groups(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters in their order, in groups that visit the device together."""
    groups: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        nbytes = STATES_OF_NUMBER * parameter.numel()
        if not groups or nbytes > room:
            groups.append([])
            room = STATES_GROUP_BYTES
        groups[-1].append(parameter)
        room -= nbytes
    return groups


class OptimizerStates(Visitors):
    """The states of one stage's optimizer. Between commits `optimizer.state` holds them in host
    memory, always in the same place."""

    def __init__(self, device: Device, weights: VisitingWeights | None = None) -> None:
        """`weights` visit with their gradients when they step."""
        super().__init__(device)
        self._weights = weights or VisitingWeights(device, [])
        self._hosts: _Visiting = {}
        self._left = 0
        """Numbers of parameters whose states have not been sent back since a step began."""
        self._returned = DeviceEvent()

    def step(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        """Do `optimizer.step`, group by group. Gradients are gone afterwards."""
        weights = self._weights
        stepping = [p for p in _parameters(optimizer) if p.grad is not None or p in weights.added]
        gradients = {p: p.grad for p in stepping}
        for parameter in gradients:
            parameter.grad = None
        states, groups = optimizer.state, in_groups(gradients)
        self._left = sum(p.numel() for p in gradients)
        following = self._fetch(states, groups[0] if groups else [])
        weights.fetch(groups[0] if groups else [])
        for group, next_group in pairwise([*groups, []]):
            self._let_go(_RETURNING)
            there, arrival = following
            following = self._fetch(states, next_group)
            weights.fetch(next_group)
            self._device.order_behind(arrival)
            for (parameter, key), tensor in there.items():
                states[parameter][key] = tensor
            for parameter in group:
                parameter.grad = gradients.pop(parameter)
            weights.enter(group, scale)
            # Some optimizers look at all states that there are, and bring them to the device.
            optimizer.state = defaultdict(dict, {p: states[p] for p in group if p in states})
            optimizer.step()
            states.update(optimizer.state)
            weights.leave(group)
            for parameter in group:
                parameter.grad = None
            self._send_back(states, group)
        optimizer.state = states
        self._let_go(0)
        weights.settle()
        self._memory.tell("optimizer states")

    def load(self, optimizer: Optimizer, names: Mapping[Any, str], state: States) -> None:
        """Do `load_state_tensors` group by group, since it loads onto the device."""
        loaded: defaultdict[Tensor, Any] = defaultdict(dict)
        self._left = sum(p.numel() for p in _parameters(optimizer))
        for group in in_groups(_parameters(optimizer)):
            part = {names[p]: state[names[p]] for p in group if names[p] in state}
            load_state_tensors(optimizer, names, part)
            self._let_go(_RETURNING)
            self._send_back(optimizer.state, group)
            loaded.update(optimizer.state)
        optimizer.state = loaded
        self._let_go(0)

    def settle(self) -> None:
        self._returned.wait()

    def _fetch(self, states: _States, group: list[Tensor]) -> tuple[_Visiting, DeviceEvent]:
        """Queue the copies of a group's states to the device, into memory of their own."""
        hosts = {
            (parameter, key): host
            for parameter in group
            for key, state in states.get(parameter, {}).items()
            if (host := self._hosts.get((parameter, key))) is state and host is not None
        }
        there = {at: torch.empty_like(host, device=at[0].device) for at, host in hosts.items()}
        # Work that was queued before may still use this memory.
        queued = self._device.record_event()
        pairs = [(tensor, hosts[at]) for at, tensor in there.items()]
        return there, self._queue("states in", pairs, queued) if pairs else queued

    def _send_back(self, states: _States, group: list[Tensor]) -> None:
        """Queue the copies of a group's states to host memory. `states` has these from now on."""
        pairs, numbers = [], sum(parameter.numel() for parameter in group)
        travelling = [
            (parameter, key, tensor)
            for parameter in group
            for key, tensor in states.get(parameter, {}).items()
            if _travels(tensor, parameter)
        ]
        nbytes = sum(tensor.nbytes for _, _, tensor in travelling)
        self._memory.expect(nbytes * self._left // max(1, numbers))
        self._left -= numbers
        for parameter, key, tensor in travelling:
            host = self._hosts.get((parameter, key))
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = self._memory.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                self._hosts[parameter, key] = host
            pairs.append((host, tensor))
            states[parameter][key] = host
        stepped = self._device.record_event()
        self._returned = self._queue("states out", pairs, stepped)
        self._leaving.append(([tensor for _, tensor in pairs], self._returned))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _travels(state: Any, parameter: Tensor) -> bool:
    """Whether a state is kept in host memory. Paged states of bitsandbytes are there already, and a
    tensor of another class may consist of several tensors."""
    return (
        type(state) is Tensor
        and state.device == parameter.device
        and state.nbytes > _SMALL_BYTES
        and state.is_contiguous()
        and not getattr(state, "is_paged", False)
    )
