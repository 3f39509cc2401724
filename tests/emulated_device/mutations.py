"""Mistakes in the order of streams and in handing buffers over, planted one at a time in the
package, and programs that see them.

    python -m tests.emulated_device.mutations       # in a process with the emulated device

Prints one JSON object for each mistake and seed, up to the first that sees it: its name, and how
many tensors were wrong. The name "none" is the package as it is. A seed is a new `Device`, whose
streams are delayed otherwise.
"""

from __future__ import annotations

import copy
import json
import socket
import sys
import tempfile
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks import mixed_up
from hetero_framework.config import WireConfig
from hetero_framework.core import devices
from hetero_framework.core import link as links
from hetero_framework.core.devices import Device, HostTensor
from hetero_framework.core.messages import Backward, Forward, Message
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.core.stream import PlainStream
from hetero_framework.core.tensors import from_wire
from hetero_framework.engine import boundary_io, wire_forms
from hetero_framework.engine.expectation import Expectation
from hetero_framework.engine.stage_api import Outcome, StepInfo
from hetero_framework.extras.host_memory import (
    optimizer_states,
    stored_inputs,
    streamed_layers,
    visiting_weights,
    visitors,
)
from hetero_framework.models.cut.introspect import BlockForm
from hetero_framework.models.cut.reuse import ReusableModules
from tests.emulated_device import visits

SEEDS = (0, 1, 2)
_ROUNDS = 12
_ELEMENTS = 4096
_WAIT_S = 30.0


@dataclass(frozen=True)
class Mutation:
    """`old` in the source of `module` becomes `new`."""

    name: str
    module: types.ModuleType
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "a slot is filled while a kernel still reads it",
        streamed_layers,
        'queue_copies(copies, "weights", queued)',
        'queue_copies(copies, "weights")',
    ),
    Mutation(
        "a slot is filled before the work with its layer is queued",
        streamed_layers,
        "            output = forward",
        "            self._done(position)\n            output = forward",
    ),
    Mutation(
        "a layer is used before it is there",
        streamed_layers,
        "            self._device.order_behind(there)\n",
        "            pass\n",
    ),
    Mutation(
        "a slot is filled before its layer's backward",
        streamed_layers,
        "entered.register_hook(lambda _: self._done(position))",
        "left.register_hook(lambda _: self._done(position))",
    ),
    Mutation(
        "a gradient leaves before it is made",
        visiting_weights,
        ", gradient)], *after)",
        ", gradient)])",
    ),
    Mutation(
        "a gradient is added to a sum that has not come",
        visiting_weights,
        "            self._device.order_behind(fetched[1])\n",
        "",
    ),
    Mutation(
        "a sum comes before it is at home",
        visiting_weights,
        "pairs, queued, self.added[parameter])",
        "pairs, queued)",
    ),
    Mutation(
        "a sum comes into memory that queued work still uses",
        visiting_weights,
        "pairs, queued, self.added[parameter])",
        "pairs, self.added[parameter])",
    ),
    Mutation(
        "a gradient is read before it is there",
        visiting_weights,
        "        self._device.order_behind(arrival)\n        return gradient\n",
        "        return gradient\n",
    ),
    Mutation(
        "a weight steps before it is there",
        visiting_weights,
        "                self._device.order_behind(arrival)\n",
        "",
    ),
    Mutation(
        "a weight comes into memory that queued work still uses",
        visiting_weights,
        "(there, home)], queued)",
        "(there, home)])",
    ),
    Mutation(
        "a weight goes home before its step",
        visiting_weights,
        "[(home, weight)], stepped)",
        "[(home, weight)])",
    ),
    Mutation(
        "weights are read before they are at home",
        visiting_weights,
        "        self._written.wait()\n",
        "        pass\n",
    ),
    Mutation(
        "a layer of the last step is used again",
        streamed_layers,
        "        self._arriving, self._there = {}, {}\n",
        "",
    ),
    Mutation(
        "states are used before they are there",
        optimizer_states,
        "            self._device.order_behind(arrival)\n",
        "",
    ),
    Mutation(
        "states are fetched into memory that queued work still uses",
        optimizer_states,
        '"states in", pairs, queued)',
        '"states in", pairs)',
    ),
    Mutation(
        "states are written back before the step",
        optimizer_states,
        '"states out", pairs, stepped)',
        '"states out", pairs)',
    ),
    Mutation(
        "states are freed while they are written back, and inputs while they leave",
        visitors,
        "            self._device.order_behind(left)\n",
        "",
    ),
    Mutation(
        "states are fetched before the last step has written them back",
        optimizer_states,
        "        optimizer.state = states\n        self._let_go(0)\n",
        "        optimizer.state = states\n        self._leaving.clear()\n",
    ),
    Mutation(
        "states are read before they are written back",
        optimizer_states,
        "        self._returned.wait()\n",
        "        pass\n",
    ),
    Mutation(
        "an input leaves before it is computed",
        stored_inputs,
        ", computed)",
        ")",
    ),
    Mutation(
        "an input is used before it is back",
        stored_inputs,
        "            self._device.order_behind(stored.arrival)\n",
        "            pass\n",
    ),
    Mutation(
        "an input comes back into memory that queued work still uses",
        stored_inputs,
        '"inputs in", pairs, queued)',
        '"inputs in", pairs)',
    ),
    Mutation(
        "host memory is given to another input before this one is back",
        stored_inputs,
        '"inputs in", pairs, queued)\n',
        '"inputs in", pairs, queued)\n'
        "            self._free[len(stored.memory)].append(stored.memory)\n",
    ),
    Mutation(
        "a buffer is filled before its copy is done",
        streamed_layers,
        "                copied.wait()\n",
        "",
    ),
    Mutation(
        "a copy of another thread does not wait for the work with what is there",
        streamed_layers,
        '"weights", after)',
        '"weights")',
    ),
    Mutation(
        "the beginning of a layer is taken for all of it",
        streamed_layers,
        "return ends[0], ends[-1]",
        "return ends[0], ends[1]",
    ),
    Mutation(
        "work goes on before an event",
        devices,
        "        self._computing_stream().wait_event(event.native)\n",
        "        assert event.native\n",
    ),
    Mutation(
        "a copy out does not wait for the computing",
        devices,
        "            stream.wait_event(event.native)\n",
        "",
    ),
    Mutation(
        "a copy out is read before it is complete",
        devices,
        "is not needed.\n        copied.synchronize()\n",
        "is not needed.\n",
    ),
    Mutation(
        "a buffer is given back before it is read",
        devices,
        "                copies.append((host, release))\n",
        "                release()\n                copies.append((host, _nothing))\n",
    ),
    Mutation(
        "the allocator is not told who uses an arrival",
        devices,
        "            tensor.record_stream(computing)\n",
        "            pass\n",
    ),
    Mutation(
        "an arrival is handed on before it is there",
        devices,
        "        copied.synchronize()\n        return there\n",
        "        return there\n",
    ),
    Mutation(
        "an arrival is copied into memory that queued work still uses",
        devices,
        "there = [tensor.to(self.torch_device, non_blocking=True) for tensor in tensors]\n",
        "there = []\n"
        "            for tensor in tensors:\n"
        "                with self._within(computing):\n"
        "                    there.append(torch.empty_like(tensor, device=self.torch_device))\n"
        "                there[-1].copy_(tensor, non_blocking=True)\n",
    ),
    Mutation(
        "an event is recorded on another stream",
        devices,
        "native.record(self._computing_stream())",
        'native.record(self._side_stream("out"))',
    ),
    Mutation(
        "an event is recorded before the last operation",
        devices,
        "        tensor = tensor.detach().contiguous()\n"
        "        event = self._device.record_event(tensor)\n",
        "        event = self._device.record_event(tensor)\n"
        "        tensor = tensor.detach().contiguous()\n",
    ),
    Mutation(
        "the host reads a tensor without waiting",
        devices,
        'return tensor.detach().to("cpu")',
        'return tensor.detach().to("cpu", non_blocking=True)',
    ),
    Mutation(
        "a tensor is sent before it is encoded",
        boundary_io,
        "            parts = _encoded(tensors, codecs) if here else list(tensors)\n"
        "            later = [None] * len(parts) if here else codecs\n"
        "            event = self._device.record_event(*parts)\n",
        "            event = self._device.record_event(*tensors)\n"
        "            parts = _encoded(tensors, codecs) if here else list(tensors)\n"
        "            later = [None] * len(parts) if here else codecs\n",
    ),
    Mutation(
        "a copy is given back when it is posted, not when it is written",
        boundary_io,
        "        self._sink.post(_message(body, _encoded(hosts, codecs)), release)\n",
        "        self._sink.post(_message(body, _encoded(hosts, codecs)))\n        release()\n",
    ),
    Mutation(
        "a receive buffer is given back before it is copied",
        boundary_io,
        "    parts = [from_wire(tensor) for tensor in message.tensors]\n",
        "    parts = [from_wire(tensor) for tensor in message.tensors]\n    message.release()\n",
    ),
    Mutation(
        "inputs stay in the receive buffer", wire_forms, "else tensor.clone()\n", "else tensor\n"
    ),
    Mutation(
        "a loss stays in the buffer of its copy",
        boundary_io,
        "there.append(host.clone())",
        "there.append(host)",
    ),
    Mutation(
        "several tensors stay in the buffers of their copies",
        devices,
        "hosts.append(host if release is _nothing else host.clone())",
        "hosts.append(host)",
    ),
    Mutation(
        "a frame is told to be written when its last piece is begun",
        links,
        "                self._write_segment(outgoing, segment)\n",
        "                if outgoing.done is not None:\n"
        "                    outgoing.done()\n"
        "                    outgoing.done = None\n"
        "                self._write_segment(outgoing, segment)\n",
    ),
    Mutation(
        "a frame is told to be written when it is queued",
        links,
        "        self._queue.add(outgoing, urgent)\n",
        "        self._queue.add(outgoing, urgent)\n"
        "        if outgoing.done is not None:\n"
        "            outgoing.done()\n"
        "            outgoing.done = None\n",
    ),
    Mutation(
        "a receive buffer is given back when its message is handed on",
        links,
        "                self._on_message(message)\n",
        "                message.release()\n                self._on_message(message)\n",
    ),
)


def arrivals_and_results(device: Device) -> int:
    """One thread receives, one computes, one sends."""
    return mixed_up(device, 4 * _ROUNDS, _ELEMENTS, width=64)


def kept_copies(device: Device) -> int:
    """Several copies out, each valid until it is given back."""
    pool, wrong = device.buffers(), 0
    for step in range(_ROUNDS):
        copies: list[tuple[int, HostTensor]] = []
        for k in range(4):
            tensor = torch.full((_ELEMENTS,), float(k), device=device.torch_device) + step
            event = device.record_event(tensor)
            copies.append((k, device.copy_out(tensor, event, pool)))
        for k, (host, release) in copies:
            wrong += not torch.equal(host, torch.full_like(host, float(k + step)))
            release()
    return wrong


def host_copies(device: Device) -> int:
    """Tensors whose layout has to be changed, in memory that is kept, and plain ones."""
    kept, wrong = devices.HostCopy(device), 0
    for step in range(_ROUNDS):
        rows = torch.arange(64.0) + step
        tensor = (torch.arange(64.0, device=device.torch_device) + step).expand(32, 64).t()
        wrong += not torch.equal(kept.of(tensor), rows.expand(32, 64).t())
        both = zip(device.all_to_host([tensor + 1.0, tensor + 2.0]), (1.0, 2.0), strict=True)
        wrong += sum(not torch.equal(host, rows.expand(32, 64).t() + k) for host, k in both)
        wrong += not torch.equal(device.to_host(tensor * 2.0), rows.expand(32, 64).t() * 2.0)
    return wrong


class _Posts:
    """The sink of what leaves a process: keeps copies of the parts."""

    def __init__(self) -> None:
        self.parts: list[list[torch.Tensor]] = []

    def post(self, message: Message, release: Callable[[], None] = lambda: None) -> None:
        self.parts.append([from_wire(tensor).clone() for tensor in message.tensors])
        release()

    def failed(self, error: Exception) -> None:
        raise error


def encoded_tensors(device: Device) -> int:
    """Hidden states that an int8 codec writes on the device, against those that it writes here."""
    sink = _Posts()
    sender = boundary_io.BoundaryIO(
        device,
        WireConfig(activations="int8"),
        sink,  # type: ignore[arg-type]
        Expectation([]),
        outcome_is_awaited=False,
        flush_timeout_s=30.0,
    )
    draw, hidden = torch.Generator().manual_seed(0), []
    for k in range(_ROUNDS):
        hidden.append(torch.randn(4, _ELEMENTS // 4, generator=draw))
        sender.send(Forward(1, 1, k, 1), (hidden[k].to(device.torch_device),))
    sender.flush()
    sender.close()
    codec = boundary_io.CODECS["int8"]
    pairs = zip(sink.parts, map(codec.encode, hidden), strict=True)
    return sum(not all(map(torch.equal, found, right)) for found, right in pairs)


class _Waiting(PlainStream):
    """Writes nothing before `go`: all frames wait in their queue."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.go = threading.Event()

    def try_write(self, buffers: deque[memoryview], room: int) -> int:
        return 0

    def write(self, buffers: deque[memoryview]) -> int:
        self.go.wait(_WAIT_S)
        return super().write(buffers)


class _Sink(_Posts):
    """Sends what is posted over a link, and keeps the outcomes."""

    def __init__(self, link: links.Link) -> None:
        super().__init__()
        self._link = link
        self.outcomes: list[Outcome] = []

    def post(self, message: Message, release: Callable[[], None] = lambda: None) -> None:
        self._link.send(message, release)

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def between_processes(device: Device) -> int:
    """What one end of a link sends, from the device, onto the device of the other end: inputs,
    hidden states that are encoded, gradients that are not, and losses."""
    arrived: dict[tuple[str, int], Any] = {}
    ended = threading.Event()
    near, far = socket.socketpair()
    stream = _Waiting(near)
    sending = links.Link(stream, "there", lambda message: None, lambda reason: None)

    def take(message: Message) -> None:
        body = message.body
        arrived[body.spec.name, body.micro_batch] = boundary_io.unpack(message, device)

    receiving = links.Link(
        PlainStream(far), "here", take, lambda reason: ended.set(), pool=device.buffers()
    )
    sink = _Sink(sending)
    sender = boundary_io.BoundaryIO(
        device,
        WireConfig(activations="int8"),
        sink,  # type: ignore[arg-type]
        Expectation([]),
        outcome_is_awaited=True,
        flush_timeout_s=_WAIT_S,
    )
    sending.start()
    receiving.start()
    info, draw = StepInfo(1, 1, True, _ROUNDS, 1), torch.Generator().manual_seed(0)
    codec, expected = boundary_io.CODECS["int8"], {}
    for k in range(_ROUNDS):
        picture, hidden, gradient = torch.randn(3, 4, _ELEMENTS // 4, generator=draw)
        packed = wire_forms.pack_inputs({"picture": picture})
        sending.send(wire_forms.inputs_message(info, 1, k, packed))
        sender.send(Forward(1, 1, 1, k), (hidden.to(device.torch_device) * 1.0,))
        sender.send(Backward(1, 1, 1, k), (gradient.to(device.torch_device) * 1.0,))
        loss = torch.tensor(float(k), device=device.torch_device) + 1.0
        sender.outcome(info, k, Outcome(loss, {"twice": loss * 2.0}))
        decoded = codec.decode(codec.encode(hidden), hidden.shape, hidden.dtype)
        expected |= {("INPUTS", k): picture, ("FORWARD", k): decoded, ("BACKWARD", k): gradient}
    sender.flush()
    stream.go.set()
    sending.close(_WAIT_S)
    ended.wait(_WAIT_S)
    receiving.close()
    sender.close()
    losses = [(o.loss, float(o.named["twice"])) for o in sink.outcomes]
    wrong = sum(found != (k + 1.0, 2.0 * k + 2.0) for k, found in enumerate(losses))
    for key, right in expected.items():
        found = arrived.get(key)
        there = [*found.values()] if isinstance(found, dict) else [*found.tensors] if found else []
        there += [tensor._hetero_host for tensor in there if hasattr(tensor, "_hetero_host")]
        hosts = [device.to_host(tensor) for tensor in there]
        wrong += not hosts or not all(torch.equal(host, right) for host in hosts)
    return wrong


class _Block(torch.nn.Module):
    """A frozen matrix that a layer of half as many numbers follows; `long` takes its time."""

    def __init__(self, draw: torch.Generator, width: int) -> None:
        super().__init__()
        for name, size in (("up", 2 * width), ("down", width)):
            weight = torch.randn(3 * width - size, size, generator=draw) / width
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.relu(hidden @ self.up) @ self.down


def visiting_layers(device: Device) -> int:
    """Layers that visit the device, over several micro-batches in the order of 1F1B, against the
    same layers that are all on the CPU."""
    width, count, draw = 48, 6, torch.Generator().manual_seed(0)
    blocks = [_Block(draw, width) for _ in range(count)]
    entering = torch.randn(_ROUNDS, 4, width, generator=draw)
    form, tasks = BlockForm(entry=0, exit=None, exit_length=0), [FORWARD, FORWARD]
    tasks += [BACKWARD, FORWARD] * (_ROUNDS - 2) + [BACKWARD, BACKWARD, FORWARD]

    def outcomes(entering: torch.Tensor, layers: Any, forwards: Sequence[Any]) -> list[Any]:
        found, waiting, entered = [], deque[Any](), iter(entering)
        for kind, following in pairwise(tasks):
            if layers is not None:
                layers.begin(kind, 0, following)
            if kind == FORWARD:
                first = hidden = next(entered).clone().requires_grad_()
                for forward in forwards:
                    hidden = forward(hidden)
                waiting.append((first, hidden))
            else:
                first, hidden = waiting.popleft()
                hidden.backward(torch.ones_like(hidden))
                found += [hidden.detach(), first.grad]
            if layers is not None:
                layers.end()
        return found

    right = outcomes(entering, None, blocks)
    wrong, unpinned = 0, copy.copy(device)
    unpinned.pinned = lambda nbytes: None  # type: ignore[method-assign]
    streamed_layers._BUFFER_BYTES = 2000
    for memory in (device, unpinned):
        there = [copy.deepcopy(block).to(device.torch_device) for block in blocks]
        hosts = {k: streamed_layers.HostLayer(memory, block) for k, block in enumerate(there)}
        layers = streamed_layers.StreamedLayers(device, hosts, is_last=False)
        forwards = [layers.around(k, form, block) for k, block in enumerate(there)]
        found = outcomes(entering.to(device.torch_device), layers, forwards)
        pairs = zip(map(device.to_host, found), right, strict=True)
        wrong += layers.misses + sum(not torch.equal(*pair) for pair in pairs)
        layers.dissolve(ReusableModules())
    return wrong


PROGRAMS = [
    *(arrivals_and_results, kept_copies, host_copies, encoded_tensors, between_processes),
    visiting_layers,
    *visits.PROGRAMS,
]


def wrong_tensors() -> int:
    """Run the programs until one finds wrong tensors, and return how many it found. Each run is on
    a new `Device`, whose streams have delays of their own. The program that found some goes first
    next time, since the next mistake is often similar."""
    device = devices.open_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    for program in PROGRAMS:
        if wrong := program(device):
            PROGRAMS.remove(program)
            PROGRAMS.insert(0, program)
            return wrong
    return 0


def planted(mutation: Mutation) -> Iterator[tuple[int, int]]:
    """Each seed, with the tensors that were wrong while the mistake was there, until it is seen."""
    source = Path(str(mutation.module.__file__)).read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        raise RuntimeError(f"the place of the mistake has changed: {mutation.name}")
    before = dict(vars(mutation.module))
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "changed.py"
        changed.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
        SourceFileLoader(mutation.module.__name__, str(changed)).exec_module(mutation.module)
        try:
            for seed in SEEDS:
                yield seed, (wrong := wrong_tensors())
                if wrong:
                    return
        finally:
            vars(mutation.module).update(before)


def main() -> None:
    for seed in SEEDS:
        print(json.dumps({"name": "none", "seed": seed, "wrong": wrong_tensors()}), flush=True)
    for mutation in MUTATIONS:
        for seed, wrong in planted(mutation):
            print(json.dumps({"name": mutation.name, "seed": seed, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
