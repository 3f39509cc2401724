"""Measures copies and matrix products on the emulated device, with and without set times.

python -m tests.emulated_device.times DEVICE     # prints the best seconds of some rounds, by name
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

BYTES = 20_000_000
PRODUCTS = 30
ROUNDS = 4


class Bench:
    """Tensors of both sides, and a stream for each direction of copying beside the computing."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        module = torch.get_device_module(self.device)
        torch.accelerator.set_device_index(self.device.index)
        self.stream, self.make_event = module.stream, module.Event
        self.streams = [module.Stream(self.device) for _ in range(3)]
        self.pinned = [torch.empty(BYTES + 8, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.plain = torch.zeros(BYTES, dtype=torch.uint8)
        self.buffers = [
            torch.zeros(BYTES + 8, dtype=torch.uint8, device=self.device) for _ in range(2)
        ]
        self.matrix = torch.ones(8, 8, device=self.device)
        torch.accelerator.synchronize()

    def copy_in(self, place: int, parts: int = 4) -> None:
        """Into a part of a buffer, as numbers, in several copies: late wake-ups do not add up."""
        source = self.pinned[place][8:]
        target = self.buffers[place][8:]
        assert source.is_pinned()
        with self.stream(self.streams[place]):
            for from_, to in zip(source.chunk(parts), target.chunk(parts), strict=True):
                to.view(torch.float32).copy_(from_.view(torch.float32), non_blocking=True)

    def copy_out(self) -> None:
        with self.stream(self.streams[2]):
            self.pinned[1][8:].copy_(self.buffers[1][8:], non_blocking=True)

    def multiply(self) -> None:
        for _ in range(PRODUCTS):
            self.matrix @ self.matrix

    def multiply_each_way(self) -> None:
        """A layer forward and backward: three products, and six operations without a set time. The
        device comes to them when it has done a copy: by then the host has queued most of them."""
        self.copy_in(0)
        torch.accelerator.current_stream().wait_event(self.streams[0].record_event())
        weight = torch.ones(8, 8, device=self.device, requires_grad=True)
        for _ in range(PRODUCTS // 3):
            given = self.matrix.detach().requires_grad_()
            torch.nn.functional.linear(given, weight).relu().mul(0.5).sum().backward()

    def both(self) -> None:
        self.copy_in(0)
        self.multiply()

    def one_after_the_other(self) -> None:
        """A copy on a side stream that waits for the computing."""
        self.multiply()
        self.streams[0].wait_event(torch.accelerator.current_stream().record_event())
        self.copy_in(0)

    def one_way_twice(self) -> None:
        self.copy_in(0)
        self.copy_in(1)

    def both_ways(self) -> None:
        self.copy_in(0)
        self.copy_out()

    def from_plain(self) -> None:
        """The call has ended when all is there: nothing is left to be waited for."""
        with self.stream(self.streams[0]):
            self.buffers[0][8:].copy_(self.plain, non_blocking=True)

    def to_plain(self) -> None:
        with self.stream(self.streams[0]):
            self.plain.copy_(self.buffers[0][8:], non_blocking=True)

    def queue(self) -> float:
        """Seconds that a caller needs for copies that nobody waits for."""
        taken = self.called(self.both_ways)
        torch.accelerator.synchronize()
        return taken

    def timed_events(self) -> list[Any]:
        return [self.make_event(enable_timing=True) for _ in range(2)]

    def between_events(self) -> float:
        """Seconds of both copies one way, between events of their two streams."""
        events = self.timed_events()
        events[0].record(self.streams[0])
        self.one_way_twice()
        self.streams[1].wait_event(self.streams[0].record_event())
        events[1].record(self.streams[1])
        torch.accelerator.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1000

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds on the streams' own clocks, which a busy machine does not slow down."""
        events, current = self.timed_events(), torch.accelerator.current_stream()
        events[0].record()
        for stream in self.streams:
            stream.wait_event(events[0])
        work()
        for stream in self.streams:
            current.wait_event(stream.record_event())
        events[1].record()
        torch.accelerator.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1000

    def called(self, work: Callable[[], None]) -> float:
        """Seconds of the caller."""
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun


def written_later(bench: Bench) -> bool:
    """Whether a copy has what its source became after the call, as one at the end of its time."""
    bench.pinned[0].zero_()
    bench.copy_in(0, parts=1)
    time.sleep(0.03)
    bench.pinned[0].fill_(1)
    torch.accelerator.synchronize()
    return bool(bench.buffers[0][8:].cpu().all())


def measure(device: str) -> dict[str, Any]:
    """Seconds by name; and whether copies are made late."""
    bench = Bench(device)
    works = {
        "copy": lambda: bench.copy_in(0),
        "products": bench.multiply,
        "layers": bench.multiply_each_way,
        "both": bench.both,
        "one_after_the_other": bench.one_after_the_other,
        "one_way_twice": bench.one_way_twice,
        "both_ways": bench.both_ways,
    }
    best = {name: min(bench.timed(work) for _ in range(ROUNDS)) for name, work in works.items()}
    plain = {"from_plain": bench.from_plain, "to_plain": bench.to_plain}
    for name, work in plain.items():
        best[name] = min(bench.called(work) for _ in range(3 * ROUNDS))
    best["queue"] = min(bench.queue() for _ in range(ROUNDS))
    best["between_events"] = min(bench.between_events() for _ in range(ROUNDS))
    return {**best, "written_later": any(written_later(bench) for _ in range(ROUNDS))}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
