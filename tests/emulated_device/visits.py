"""Programs for `mutations.py`: trained layers, optimizer states and stored inputs that visit.

    python -m tests.emulated_device.visits DEVICE

For a process with HETERO_EMULATED_COPY_RATE and HETERO_EMULATED_KERNEL_US: prints one JSON object,
the seconds of a step of the optimizer (`step_s`) and of copying its states one way (`copies_s`), of
tasks that store their inputs (`stored_s`) and of the same tasks that keep them (`resident_s`), and
the most device memory of both, in bytes.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hetero_framework.config import StageSpec
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.engine.stage_api import Residence
from hetero_framework.extras.host_memory import (
    optimizer_states,
    residence,
    stored_inputs,
    streamed_layers,
    visiting_weights,
    visitors,
)
from hetero_framework.models.cut.introspect import BlockForm
from hetero_framework.models.cut.reuse import ReusableModules

_ROUNDS = 9
_WIDTH = 48
_LAYERS = 8


class _Ahead:
    """Has the device wait for delayed copies, while the host queues what follows."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pairs: list[tuple[Tensor, Tensor]] = []
        if device.is_async:
            source = device.pinned(64)
            assert source is not None
            target = torch.empty(64, dtype=torch.uint8, device=device.torch_device)
            self._pairs = [(target, source)] * 16

    def run(self) -> None:
        self._device.order_behind(self._device.queue_copies(self._pairs, "ahead")[1])


def visiting_states(device: Device) -> int:
    """Parameters that step in groups, against the same ones whose states are on the CPU. States
    are read behind every third step, and loaded once."""
    draw = torch.Generator().manual_seed(0)
    sizes = [2048] * 7  # memory that one group gives back is the next one's
    optimizer_states.STATES_GROUP_BYTES, ahead = 8 * sizes[0], _Ahead(device)
    optimizer_states.OptimizerStates.__bases__ = (visitors.Visitors,)  # a mistake makes it anew

    def outcomes(place: torch.device, states: Any) -> list[Tensor]:
        draw.manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(n, generator=draw).to(place)) for n in sizes]
        names = {p: str(k) for k, p in enumerate(parameters)}
        optimizer: Any = torch.optim.AdamW(parameters, lr=0.1)
        step = optimizer.step if states is None else lambda: states.step(optimizer)
        found: list[Tensor] = []
        for k in range(_ROUNDS):
            for parameter in parameters:
                drawn = torch.randn(parameter.numel(), generator=draw).to(place)
                parameter.grad = (drawn + parameter.detach()) * 0.5
            ahead.run()
            step()
            if k % 3 == 2:
                if states is not None:
                    states.settle()
                kept = [optimizer.state[p][key] for p in parameters for key in optimizer.state[p]]
                found += [tensor.clone() for tensor in kept]
            if k == 4:
                if states is not None:
                    states.settle()
                state = {
                    names[p]: {key: t.cpu().clone() for key, t in values.items()}
                    for p, values in optimizer.state.items()
                }
                load = optimizer_states.load_state_tensors if states is None else states.load
                load(optimizer, names, state)
        return found + [parameter.detach() for parameter in parameters]

    right = outcomes(torch.device("cpu"), None)
    found = outcomes(device.torch_device, optimizer_states.OptimizerStates(device))
    pairs = zip(found, right, strict=True)
    return sum(not torch.equal(device.to_host(tensor), other) for tensor, other in pairs)


class _Block(torch.nn.Module):
    """It takes little time, in which copies would have to be done."""

    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(_WIDTH, generator=draw))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(hidden) * self.scale


def visiting_inputs(device: Device) -> int:
    """Layers that are computed again, over several micro-batches in the order of 1F1B, whose inputs
    leave, against the same ones on the CPU. One attempt is broken off."""
    draw = torch.Generator().manual_seed(0)
    blocks, ahead = [_Block(draw) for _ in range(_LAYERS)], _Ahead(device)
    entering = torch.randn(_ROUNDS, 4, _WIDTH, generator=draw)
    tasks = [FORWARD, FORWARD, *([BACKWARD, FORWARD] * (_ROUNDS - 2)), BACKWARD, BACKWARD, FORWARD]

    def outcomes(blocks: list[_Block], place: torch.device, inputs: Any) -> list[Tensor]:
        found: list[Tensor] = []
        waiting: deque[tuple[Tensor, Tensor]] = deque()
        begun = {FORWARD: 0, BACKWARD: 0}

        def storing(k: int, hidden: Tensor) -> AbstractContextManager[None]:
            return nullcontext() if inputs is None else inputs.storing(k, hidden)

        for kind, following in pairwise(tasks):
            if inputs is not None:
                ahead.run()
                inputs.begin(kind, begun[kind], following)
            if kind == FORWARD:
                first = entering[begun[kind]].to(place).requires_grad_()
                hidden = first * 1.0
                for k, block in enumerate(blocks):
                    with storing(k, hidden):
                        hidden = checkpoint(block, hidden, use_reentrant=False)
                waiting.append((first, hidden))
            else:
                first, hidden = waiting.popleft()
                hidden.backward(torch.ones_like(hidden))
                assert first.grad is not None
                found += [hidden.detach(), first.grad]
            begun[kind] += 1
        gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
        return found + [gradient for gradient in gradients if gradient is not None]

    def abandoned(blocks: list[_Block], place: torch.device, inputs: Any) -> None:
        for kind, following in pairwise(tasks[:3]):
            inputs.begin(kind, 0, following)
            hidden = entering[0].to(place) * 3.0
            for k, block in enumerate(blocks):
                with inputs.storing(k, hidden):
                    hidden = checkpoint(block, hidden, use_reentrant=False)
            inputs.abort()

    there = [copy.deepcopy(block).to(device.torch_device) for block in blocks]
    right = outcomes(blocks, torch.device("cpu"), None)
    spec = StageSpec(index=0, owner="local", start=0, end=_LAYERS, is_first=True, is_last=False)
    stored_inputs.StoredInputs.__bases__ = (visitors.Visitors,)
    inputs = stored_inputs.StoredInputs(device, spec)
    abandoned(there, device.torch_device, inputs)
    found = outcomes(there, device.torch_device, inputs)
    pairs = zip(found, right, strict=True)
    return sum(not torch.equal(device.to_host(tensor), other) for tensor, other in pairs)


class _Trained(torch.nn.Module):
    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(_WIDTH, _WIDTH, generator=draw) / _WIDTH)
        self.scale = torch.nn.Parameter(torch.randn(_WIDTH, generator=draw))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(hidden @ self.up) * self.scale


def trained_layers(device: Device) -> int:
    """Trained layers that visit with their gradients and states, against the same ones on the CPU:
    steps of micro-batches in the order of 1F1B. Gradients are read and halved before each step,
    weights are read behind every other one, and written once."""
    draw, ahead = torch.Generator().manual_seed(0), _Ahead(device)
    blocks = [_Trained(draw) for _ in range(_LAYERS)]
    entering = torch.randn(4, 4, _WIDTH, generator=draw)
    optimizer_states.STATES_GROUP_BYTES = 16 * _WIDTH * _WIDTH
    # A mistake makes these classes anew.
    weights, states = visiting_weights.VisitingWeights, optimizer_states.OptimizerStates
    weights.__bases__ = states.__bases__ = (visitors.Visitors,)
    streamed_layers.VisitingWeights = weights  # type: ignore[misc]
    right = _steps(blocks, blocks, entering, Residence(), ahead)
    draw.manual_seed(0)
    there = [_Trained(draw).to(device.torch_device) for _ in range(_LAYERS)]
    memory = visitors.HostTensors(device)
    hosts = {k: streamed_layers.HostLayer(device, b, (), memory) for k, b in enumerate(there)}
    layers = streamed_layers.StreamedLayers(device, hosts, is_last=False)
    form = BlockForm(entry=0, exit=None, exit_length=0)
    forwards = [layers.around(k, form, block) for k, block in enumerate(there)]
    here = residence.HostMemory(layers, states(device, layers.weights), None)
    found = _steps(there, forwards, entering.to(device.torch_device), here, ahead)
    here.dissolve(ReusableModules())
    pairs = zip(map(device.to_host, found), right, strict=True)
    return layers.misses + sum(not torch.equal(tensor, other) for tensor, other in pairs)


def _steps(
    blocks: list[_Trained], forwards: list[Any], entering: Tensor, here: Residence, ahead: _Ahead
) -> list[Tensor]:
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    optimizer, found = torch.optim.AdamW(parameters, lr=0.1), list[Tensor]()
    tasks = [FORWARD, FORWARD, *[BACKWARD, FORWARD] * (len(entering) - 2), BACKWARD, BACKWARD]
    for step in range(4):
        waiting, inputs = deque[tuple[Tensor, Tensor]](), iter(entering * (step + 1))
        for kind, following in pairwise([*tasks, FORWARD]):
            if here.streams:
                ahead.run()
            here.begin(kind, 0, following)
            if kind == FORWARD:
                first = hidden = next(inputs).requires_grad_()
                for forward in forwards:
                    hidden = forward(hidden)
                waiting.append((first, hidden))
            else:
                first, hidden = waiting.popleft()
                hidden.backward(torch.ones_like(hidden))
                assert first.grad is not None
                found += [hidden.detach(), first.grad]
            here.end()
        for parameter in parameters:
            gradient = here.gradient(parameter)
            assert gradient is not None
            found.append(gradient.clone())
            here.put_gradient(parameter, gradient.mul_(0.5))
            if not here.streams:
                gradient.mul_(0.25)
        here.step(optimizer, 0.25)
        here.forget_gradients()
        optimizer.zero_grad()
        if step % 2:
            homes = [here.home(parameter) for parameter in parameters]
            found += [home.clone() for home in homes]
            for home in homes if step == 1 else ():
                home.mul_(0.5)
            here.changed()
    return found


PROGRAMS: tuple[Callable[[Device], int], ...] = (visiting_states, visiting_inputs, trained_layers)


def step_seconds(device: Device) -> tuple[float, float]:
    """Of a step whose states are in host memory, and of their copies one way."""
    count, numbers = 40, 1 << 18
    nbytes = 2 * 4 * numbers
    optimizer_states.STATES_GROUP_BYTES = nbytes
    new = torch.empty(0, device=device.torch_device).new_ones
    parameters = [torch.nn.Parameter(new(numbers)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    states = optimizer_states.OptimizerStates(device)
    seconds = []
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        device.synchronize()
        began = device.record_event()
        states.step(optimizer)
        ended = device.record_event()
        device.synchronize()
        seconds.append(began.until_s(ended))
    return min(seconds[1:]), count * nbytes / float(os.environ["HETERO_EMULATED_COPY_RATE"])


class _Products(torch.nn.Module):
    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64, device=place) / 64)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = hidden + torch.relu(hidden @ self.weight)
        return hidden


def task_figures(device: Device, *, stores: bool) -> tuple[float, int]:
    """Seconds and most bytes of micro-batches in the order of 1F1B, six of them waiting at once."""
    count, waiting = 8, deque[Tensor]()
    blocks = [_Products(device.torch_device) for _ in range(count)]
    spec = StageSpec(index=0, owner="local", start=0, end=count, is_first=True, is_last=False)
    inputs = stored_inputs.StoredInputs(device, spec) if stores else None
    tasks = [FORWARD] * 6 + [BACKWARD, FORWARD] * 4 + [BACKWARD] * 6 + [FORWARD]
    begun = {FORWARD: 0, BACKWARD: 0}
    device.synchronize()
    device.reset_peak_memory()
    began = device.record_event()
    for kind, following in pairwise(tasks):
        if inputs is not None:
            inputs.begin(kind, begun[kind], following)
        begun[kind] += 1
        if kind == BACKWARD:
            waiting.popleft().sum().backward()
            continue
        hidden = torch.ones(800, 64, device=device.torch_device).requires_grad_() * 1.0
        for k, block in enumerate(blocks):
            with nullcontext() if inputs is None else inputs.storing(k, hidden):
                hidden = checkpoint(block, hidden, use_reentrant=False)
        waiting.append(hidden)
    ended = device.record_event()
    device.synchronize()
    return began.until_s(ended), device.peak_memory()


def main(name: str) -> None:
    device = open_device(name)
    step_s, copies_s = step_seconds(device)
    device.empty_cache()
    resident_s, resident_bytes = task_figures(device, stores=False)
    stored_s, stored_bytes = task_figures(device, stores=True)
    print(
        json.dumps(
            {
                **{"step_s": step_s, "copies_s": copies_s},
                **{"resident_s": resident_s, "stored_s": stored_s},
                **{"resident_bytes": resident_bytes, "stored_bytes": stored_bytes},
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
