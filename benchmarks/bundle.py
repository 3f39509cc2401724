"""What bundles cost a boundary that carries the hidden state alone, as nearly all do.

    python -m benchmarks.bundle --save

One process trains a small Llama of two shards. What crosses between them goes into a frame and
comes out of it, forward and back, in turn as the product does it and as it would be done for one
tensor, without side tensors, their forms and the choice of those that want a gradient. The frames
must be the same, byte for byte. Prints one JSON object per size of the boundary, of CPU time and of
the quickest rounds, which what else the machine does disturbs least: `bundle_us` and `alone_us` of
a boundary there and back, without what the shards compute; `ratio` of whole steps; and `share`, the
difference of the boundaries in a step, which is smaller than the ratio's noise.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.environment import describe, save
from benchmarks.machines import run_program
from benchmarks.stages import Llama
from hetero_framework.config import WireConfig
from hetero_framework.core.devices import Device
from hetero_framework.core.messages import Backward, Forward, Message, decode, encode
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.engine.boundary_io import BoundaryIO, unpack
from hetero_framework.engine.expectation import Expectation
from hetero_framework.engine.stage_api import Arrival, Outcome, StepInfo
from hetero_framework.errors import HeteroError
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import Shard, build_shard
from hetero_framework.models.cut.side import (
    Bundle,
    as_leaves,
    crossing,
    differentiate,
    gradients_of,
)

CASES = {"0.26 MB": Llama(4, 256, 256), "1 MB": Llama(4, 512, 512)}
_THERE, _BACK = Forward(0, 0, 1, 0), Backward(0, 0, 0, 0)


class Wire:
    """In place of a link: every message becomes a frame, and is read from it."""

    def __init__(self) -> None:
        self.frame = bytearray()

    def post(self, message: Message, done: Callable[[], None] | None = None) -> None:
        self.frame = bytearray().join(encode(message))

    def outcome(self, info: StepInfo, micro_batch: int, outcome: Outcome) -> None:
        raise AssertionError("no loss is sent here")

    def finished(self, info: StepInfo, micro_batch: int) -> None:
        raise AssertionError("no step is finished here")

    def failed(self, error: Exception) -> None:
        raise error

    def received(self) -> Message:
        return decode(self.frame)


class Bundled:
    """A boundary as the product has it."""

    def __init__(self) -> None:
        self.wire, self._device = Wire(), Device()
        self._io = BoundaryIO(
            self._device,
            WireConfig(),
            self.wire,
            Expectation([]),
            outcome_is_awaited=False,
            flush_timeout_s=1.0,
        )

    def forward(self, left: Bundle) -> Bundle:
        self._io.send(_THERE, crossing(left))
        return as_leaves(self._arrived())

    def backward(self, left: Bundle, received: Bundle) -> None:
        self._io.send(_BACK, gradients_of(received))
        differentiate(left, self._arrived())

    def _arrived(self) -> Bundle:
        arrival = unpack(self.wire.received(), self._device)
        assert isinstance(arrival, Arrival)
        return arrival.tensors


class Alone:
    """A boundary for the hidden state and nothing else."""

    def __init__(self) -> None:
        self.wire = Wire()

    def forward(self, left: Bundle) -> Bundle:
        self.wire.post(Message(_THERE, (to_wire(left[0].detach()),)))
        return (self._arrived().requires_grad_(),)

    def backward(self, left: Bundle, received: Bundle) -> None:
        gradient = received[0].grad
        assert gradient is not None
        self.wire.post(Message(_BACK, (to_wire(gradient),)))
        left[0].backward(self._arrived())

    def _arrived(self) -> torch.Tensor:
        return from_wire(self.wire.received().tensors[0])


Way = Bundled | Alone


def crossing_there_and_back(way: Way, hidden_BSD: torch.Tensor) -> tuple[bytearray, bytearray]:
    """The two frames; the shards' part is one addition."""
    left = (hidden_BSD + 1.0,)
    received = way.forward(left)
    there = way.wire.frame
    received[0].grad = received[0].detach()
    way.backward(left, received)
    return there, way.wire.frame


def step(way: Way, shards: list[Shard], inputs: dict[str, torch.Tensor]) -> None:
    """A micro-batch, forward and backward."""
    items = torch.tensor(float(inputs["labels"].numel()))
    left = shards[0].forward(inputs, ())
    received = way.forward(left)
    shards[1].loss(inputs, received, items).backward()
    way.backward(left, received)


def in_turn(works: list[Callable[[], object]], rounds: int, times: int) -> list[list[float]]:
    """CPU seconds of each work, once for each round, the mean of so many times in a row."""
    seconds: list[list[float]] = [[] for _ in works]
    jobs = list(zip(works, seconds, strict=True))
    for work in works:
        work()
    for _ in range(rounds):
        for work, into in jobs:
            began = time.process_time()
            for _ in range(times):
                work()
            into.append((time.process_time() - began) / times)
        jobs.reverse()  # whoever is second may gain from what the first has left in caches
    return seconds


def measure(llama: Llama, rounds: int) -> dict[str, Any]:
    """The figures of one size. Raises HeteroError where the two ways send other bytes."""
    ways: list[Way] = [Bundled(), Alone()]
    hidden_BSD = torch.randn(1, llama.tokens, llama.hidden_size, requires_grad=True)
    frames = [crossing_there_and_back(way, hidden_BSD) for way in ways]
    if frames[0] != frames[1]:
        raise HeteroError("a bundle of one is not sent as the hidden state alone is")
    crossings = [functools.partial(crossing_there_and_back, way, hidden_BSD) for way in ways]
    bundle, alone = map(min, in_turn([*crossings], rounds, 50))
    settings = dict(llama.settings())
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    ranges = ranges_between([0, llama.layers // 2, llama.layers])
    shards = [build_shard(config, None, rng, dtype=torch.float32) for rng in ranges]
    inputs = llama.batches(1)[0]
    steps = in_turn([functools.partial(step, way, shards, inputs) for way in ways], rounds, 1)
    bundled, plain = map(min, steps)
    return {
        "frame_bytes": sum(map(len, frames[0])),
        "bundle_us": round(1e6 * bundle, 1),
        "alone_us": round(1e6 * alone, 1),
        "step_ms": round(1e3 * plain, 2),
        "ratio": round(bundled / plain, 4),
        "share": round((bundle - alone) / plain, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for name, llama in CASES.items():
        cases.append({"case": name, **measure(llama, options.rounds)})
        print(json.dumps(cases[-1]), flush=True)
    if options.save:
        result = {"benchmark": "bundle", "rounds": options.rounds, "cases": cases}
        print(save("bundle", {**result, "environment": describe()}))


if __name__ == "__main__":
    run_program(main)
