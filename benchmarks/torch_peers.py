"""torch.distributed.pipelining over gloo as a peer: the same sleeping stages, as anyone gets it.

One process for each device, in the same places as the product's own processes; bfloat16 tensors of
the same size; stages that sleep inside autograd functions. A step is `schedule.step()` and one
all-reduce of a number, which is what clipping by the global norm needs.

Interleaved1F1B and ZBV need several stages on a device: the device's time is then split evenly
over two (or over the case's number of chunks). ZBV also splits each backward into halves, one for
the input's gradient and one for the weights'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.machines import Machines
from benchmarks.network import Counters, Network, Place, free_ports
from benchmarks.stages import Load, boundary
from hetero_framework.errors import HeteroError

_STORE_PORT = 4999
_START_S = 120.0
_TOKENS = 16


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
    """What one rank saw: when each step ended after the one before, its busy seconds, and on the
    first rank the bytes that all machines sent."""

    seconds: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
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
    clock = _Clock()
    own = [k for k, device in enumerate(devices_for(peer, load)) if device == rank]
    stages = [_stage(k, load, peer, clock) for k in own]
    make: Callable[..., Any] = getattr(schedules, peer.schedule)
    schedule = make(
        stages if peer.least_chunks > 1 else stages[0], load.micro_batches, loss_fn=_loss
    )
    batch = torch.ones(load.micro_batches, _TOKENS, dtype=torch.int64)
    inputs = [batch] if 0 in own else []
    target = {"target": batch, "losses": []} if load.stages - 1 in own else {}

    def step() -> None:
        clock.begin()
        schedule.step(*inputs, **target, return_outputs=False)
        norm = torch.zeros(1)
        dist.all_reduce(norm)

    step()
    times = StepTimes()
    before = counters.read()
    last = time.perf_counter()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.seconds.append(now - last)
        times.busy_s.append(clock.busy_s)
        last = now
    after = counters.read()
    if before is not None and after is not None:
        times.bytes = after - before
    return times


def _stage(index: int, load: Load, peer: Peer, clock: _Clock) -> PipelineStage:
    # Without examples of its tensors: torch then finds the sizes out in the first step.
    module = _SleepModule(index, load, peer.splits_backward, clock)
    return PipelineStage(module, index, load.stages, torch.device("cpu"))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _apply(_Loss, output)


class _Clock:
    """Which micro-batch comes next forward, and how long this rank has been busy in the step."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.forwards: dict[int, int] = {}

    def begin(self) -> None:
        self.busy_s = 0.0
        self.forwards.clear()

    def sleep(self, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.busy_s += time.perf_counter() - began


class _SleepModule(nn.Module):
    """A stage as torch wants it, with one parameter so that it is trained."""

    def __init__(self, index: int, load: Load, splits_backward: bool, clock: _Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._index = index
        self._load = load
        self._splits = splits_backward
        self._clock = clock
        sizes = dict.fromkeys(load.lengths)
        self._results = {s: boundary(int(load.activation_bytes * s)) for s in sizes}

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        micro_batch = self._clock.forwards.get(self._index, 0)
        self._clock.forwards[self._index] = micro_batch + 1
        length = self._load.length(micro_batch)
        forward_s = self._load.forward_s[self._index] * length + self._load.slow_s
        backward_s = self._load.backward_s[self._index] * length
        play = _Play(self._clock, self._results[length], forward_s, backward_s)
        if not self._splits:
            return _apply(_Work, hidden_BSD, self.weight, play)
        half = _Play(self._clock, self._results[length], forward_s, backward_s / 2)
        output = _apply(_Work, hidden_BSD, None if self._index else self.weight, half)
        return _apply(_Join, output, _apply(_WeightWork, self.weight, half))


@dataclass(frozen=True)
class _Play:
    """What an autograd function of a sleeping stage is to do."""

    clock: _Clock
    result: torch.Tensor
    forward_s: float
    backward_s: float


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    output = function.apply(*args)  # type: ignore[no-untyped-call]
    assert isinstance(output, torch.Tensor)
    return output


class _Work(torch.autograd.Function):
    """The stage's time forward, and backward with the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BSD: torch.Tensor, weight: torch.Tensor | None, play: _Play
    ) -> torch.Tensor:
        ctx.play, ctx.is_float, ctx.weighs = (
            play,
            hidden_BSD.is_floating_point(),
            weight is not None,
        )
        play.clock.sleep(play.forward_s)
        return play.result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        play: _Play = ctx.play
        play.clock.sleep(play.backward_s)
        hidden = play.result.detach() if ctx.is_float else None
        return hidden, torch.zeros(()) if ctx.weighs else None, None


class _WeightWork(torch.autograd.Function):
    """The half of a backward that only the weights need."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, play: _Play) -> torch.Tensor:
        ctx.play = play
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.play.clock.sleep(ctx.play.backward_s)
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


def busy_shares(ranks: Sequence[StepTimes]) -> list[float]:
    """Each device's share of the time of all steps in which it was busy."""
    total = sum(ranks[0].seconds)
    return [sum(rank.busy_s) / total for rank in ranks]
