"""torch.distributed.pipelining over gloo as a peer: the same sleeping stages, as anyone gets it.

One process for each device, in the same places as the product's own processes; bfloat16 tensors of
the same size; stages that sleep inside autograd functions, or the same small Llama. A step is
`schedule.step()`, an all-reduce of the gradients' norm, and the optimizer.

Interleaved1F1B and ZBV need several stages on a device: the device's time is then split evenly
over two (or over the case's number of chunks). ZBV also splits each backward into halves, one for
the input's gradient and one for the weights'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machines import Machines
from benchmarks.network import Counters, Network, Place, free_ports
from benchmarks.stages import Llama, Load, Sleeper, boundary
from hetero_framework.errors import HeteroError

_STORE_PORT = 4999
_START_S = 120.0


@dataclass(frozen=True)
class Peer:
    """One of torch's schedules. `least_chunks`: stages that it needs on each device."""

    schedule: str
    least_chunks: int = 1
    v_shaped: bool = False
    splits_backward: bool = False


PEERS = {
    "torch-gpipe": Peer("ScheduleGPipe"),
    "torch-1f1b": Peer("Schedule1F1B"),
    "torch-interleaved": Peer("ScheduleInterleaved1F1B", least_chunks=2),
    "torch-zbv": Peer("ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
}


def load_for(peer: Peer, load: Load) -> Load:
    """The case cut into as many stages as the schedule takes."""
    if peer.v_shaped:
        return load.with_chunks(2)
    return load.with_chunks(1 if peer.least_chunks == 1 else max(peer.least_chunks, load.chunks))


def devices_for(peer: Peer, load: Load) -> list[int]:
    """The device of each stage of `load_for`: round and round, or there and back."""
    once = list(range(load.devices))
    return once + once[::-1] if peer.v_shaped else once * load.chunks


@dataclass
class StepTimes:
    """What one rank saw in all steps: when each ended after the one before, the seconds that each
    of its stages computed forward and backward (slept, where it sleeps), and the bytes that all
    machines sent."""

    seconds: list[float] = field(default_factory=list)
    forward_s: dict[int, float] = field(default_factory=dict)
    backward_s: dict[int, float] = field(default_factory=dict)
    bytes: int | None = None


class Ranks:
    """One process for each device; a context manager. `run` has them all do some steps."""

    def __init__(self, network: Network, load: Load) -> None:
        self._machines = Machines()
        own = network.places[0].namespace_pid is not None
        store = (network.places[0].address, _STORE_PORT if own else free_ports(1)[0])
        self._children = [
            self._machines.start(place, serve, rank, store, place, load, network.counters)
            for rank, place in enumerate(network.places)
        ]

    def __enter__(self) -> Ranks:
        for child in self._children:
            child.receive(_START_S)
        return self

    def __exit__(self, *error: Any) -> None:
        self._machines.__exit__(*error)

    def run(self, name: str, steps: int, timeout_s: float) -> list[StepTimes]:
        """`steps` steps with the schedule `name`, after one that warms up; one result per rank.

        Raises HeteroError with what every rank said when one failed.
        """
        for child in self._children:
            child.send((name, steps))
        results, failures = [], []
        for child in self._children:
            try:
                results.append(child.receive(timeout_s))
            except HeteroError as error:
                # One rank's failure makes the others fail: the cause is not always the first.
                failures.append(error.message)
        if failures:
            raise HeteroError("; ".join(failures))
        return results


def serve(
    connection: Connection,
    rank: int,
    store: tuple[str, int],
    place: Place,
    load: Load,
    counters: Counters,
) -> None:
    """One rank: joins the group, then runs what it is told until it is ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    limit = timedelta(seconds=_START_S)
    dist.init_process_group(
        "gloo",
        store=TCPStore(*store, load.devices, is_master=rank == 0, timeout=limit),
        rank=rank,
        world_size=load.devices,
        timeout=limit,
    )
    connection.send("ready")
    while True:
        name, steps = connection.recv()
        connection.send(_run(PEERS[name], load_for(PEERS[name], load), rank, steps, counters))


def _run(peer: Peer, load: Load, rank: int, steps: int, counters: Counters) -> StepTimes:
    own = [k for k, device in enumerate(devices_for(peer, load)) if device == rank]
    times = StepTimes()
    modules = [make_module(k, load, splits_backward=peer.splits_backward) for k in own]
    stages = [
        # Without examples of its tensors: torch finds their sizes out in the first step.
        _TimedStage(module, k, load.stages, torch.device("cpu"), times=times)
        for k, module in zip(own, modules, strict=True)
    ]
    make: Callable[..., Any] = getattr(schedules, peer.schedule)
    schedule = make(
        stages if peer.least_chunks > 1 else stages[0],
        load.micro_batches,
        loss_fn=loss_for(load, times),
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-4)
    batches = load.batches()
    inputs = [torch.cat([b["input_ids"] for b in batches])] if 0 in own else []
    labels = torch.cat([b["labels"] for b in batches])
    target = {"target": labels, "losses": []} if load.stages - 1 in own else {}

    def step() -> None:
        for module in modules:
            if _sleeps(module):
                module.begin()
        schedule.step(*inputs, **target, return_outputs=False)
        finish_step(optimizer)

    step()
    times.forward_s.clear()
    times.backward_s.clear()
    sleepers = {k: m.sleeper for k, m in zip(own, modules, strict=True) if _sleeps(m)}
    for sleeper in sleepers.values():
        sleeper.take()
    before = counters.read()
    last = time.perf_counter()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.seconds.append(now - last)
        last = now
    after = counters.read()
    if before is not None and after is not None:
        times.bytes = after - before
    for k, sleeper in sleepers.items():
        times.forward_s[k], times.backward_s[k] = sleeper.take()
    return times


def _sleeps(module: nn.Module) -> TypeGuard[SleepModule]:
    return isinstance(module, SleepModule)


def finish_step(optimizer: torch.optim.Optimizer) -> None:
    """Clip by the norm of all ranks' gradients, and step."""
    gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    factor = min(1.0, 1.0 / (float(squares.sqrt()) + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)
    optimizer.step()
    optimizer.zero_grad()


class _TimedStage(PipelineStage):
    """A stage of torch's that notes how long it computes."""

    def __init__(self, *args: Any, times: StepTimes) -> None:
        super().__init__(*args)
        self._times = times

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with _timed(self._times.forward_s, self.stage_index):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with _timed(self._times.backward_s, self.stage_index):
            return super().backward_maybe_with_nosync(*args, **kwargs)


@contextmanager
def _timed(seconds: dict[int, float], stage: int) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began


def loss_for(load: Load, times: StepTimes) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What the last stage does at the end; its time is that of the stage's forward."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with _timed(times.forward_s, load.stages - 1):
            if load.llama is None:
                return _apply(_Loss, output)
            logits = output[:, :-1].flatten(0, 1)
            count = load.micro_batches * (load.llama.tokens - 1)
            return nn.functional.cross_entropy(logits, target[:, 1:].flatten(), reduction="sum") / (
                count
            )

    return loss


def make_module(index: int, load: Load, *, splits_backward: bool) -> nn.Module:
    """A stage as torch wants it."""
    if load.llama is None:
        return SleepModule(index, load, splits_backward)
    return LlamaModule(load.llama, load.layers_of(index))


class LlamaModule(nn.Module):
    """Some layers of a Llama, with the embedding in front or the head at the end."""

    def __init__(self, llama: Llama, layers: range) -> None:
        super().__init__()
        config = LlamaConfig(**llama.settings())
        model = LlamaForCausalLM(config)
        self.embed = model.model.embed_tokens if layers.start == 0 else None
        self.layers = model.model.layers[layers.start : layers.stop]
        self.rotary = model.model.rotary_emb
        last = layers.stop == llama.layers
        self.head = nn.Sequential(model.model.norm, model.lm_head) if last else None

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden_BSD = self.embed(hidden_BSD)
        positions = torch.arange(hidden_BSD.shape[1]).unsqueeze(0)
        rotary = self.rotary(hidden_BSD, positions)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, position_ids=positions, position_embeddings=rotary)
        return self.head(hidden_BSD) if self.head is not None else hidden_BSD


class SleepModule(nn.Module):
    """A stage that sleeps, with one parameter so that it is trained."""

    def __init__(self, index: int, load: Load, splits_backward: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._index = index
        self._load = load
        self._splits = splits_backward
        self.sleeper = Sleeper()
        self._forwards = 0
        sizes = dict.fromkeys(load.lengths)
        self._results = {s: boundary(int(load.activation_bytes * s)) for s in sizes}

    def begin(self) -> None:
        """Begin again with the first micro-batch."""
        self._forwards = 0

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        length = self._load.length(self._forwards)
        self._forwards += 1
        forward_s = self._load.forward_s[self._index] * length
        backward_s = self._load.backward_s[self._index] * length
        if self._splits:
            backward_s /= 2
        work = _Sleep(self._results[length], forward_s, backward_s, self._load.slow_s, self.sleeper)
        if not self._splits:
            return _apply(_Work, hidden_BSD, self.weight, work)
        output = _apply(_Work, hidden_BSD, None if self._index else self.weight, work)
        return _apply(_Join, output, _apply(_WeightWork, self.weight, work))


@dataclass(frozen=True)
class _Sleep:
    """What an autograd function of a sleeping stage is to do."""

    result: torch.Tensor
    forward_s: float
    backward_s: float
    slow_s: float
    sleeper: Sleeper

    def forward(self) -> None:
        self.sleeper.sleep(self.forward_s, 0.0, self.slow_s)

    def backward(self) -> None:
        self.sleeper.sleep(0.0, self.backward_s)


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    output = function.apply(*args)  # type: ignore[no-untyped-call]
    assert isinstance(output, torch.Tensor)
    return output


class _Work(torch.autograd.Function):
    """The stage's time forward, and backward with the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BSD: torch.Tensor, weight: torch.Tensor | None, work: _Sleep
    ) -> torch.Tensor:
        ctx.work, ctx.is_float, ctx.weighs = (
            work,
            hidden_BSD.is_floating_point(),
            weight is not None,
        )
        work.forward()
        return work.result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        work: _Sleep = ctx.work
        work.backward()
        hidden = work.result.detach() if ctx.is_float else None
        return hidden, torch.zeros(()) if ctx.weighs else None, None


class _WeightWork(torch.autograd.Function):
    """The half of a backward that only the weights need."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, work: _Sleep) -> torch.Tensor:
        ctx.work = work
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.work.backward()
        return torch.zeros(()), None


class _Join(torch.autograd.Function):
    """Ties the two halves together without arithmetic."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], torch.zeros(())


class _Loss(torch.autograd.Function):
    """A loss that costs nothing; its gradient is not looked at."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.shape = output
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.shape.detach()


def stage_seconds(ranks: Sequence[StepTimes], count: int) -> tuple[list[float], list[float]]:
    """Seconds of each stage forward and backward, for one of `count` micro-batches."""
    found = []
    for name in ("forward_s", "backward_s"):
        whole = {k: seconds for rank in ranks for k, seconds in getattr(rank, name).items()}
        found.append([whole[k] / count for k in sorted(whole)])
    return found[0], found[1]
