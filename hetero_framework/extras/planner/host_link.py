"""Measures the link between a device and its machine's memory.
It times copies each way, both ways at once, and computing meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch

from hetero_framework.core.devices import Device
from hetero_framework.errors import is_out_of_memory

_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 26
_COPIES_S = 0.05  # about the seconds that a measurement of copies takes
_RUNS = 3
_MOST_S = 3.0  # seconds after which no measurement is repeated
_MOST_COPIES = 4096
Rate = Annotated[float, 1.0, 1e15]
Times = Annotated[float, 1.0, 1e3]


@dataclass(frozen=True)
class HostLink:
    """Bytes per second between a device and pinned memory of its machine, each way by itself.
    `both_ways` and `copy_slowdown` are how many times as long copies take both ways at once, and
    computing during copies. The names are those of `DeviceProfile`."""

    host_to_device_bytes_per_s: Rate
    device_to_host_bytes_per_s: Rate
    both_ways: Times
    copy_slowdown: Times


def measured_link(device: Device, compute: Callable[[], object]) -> HostLink | None:
    """The link of a device; None if the device shares the machine's memory, memory is full, or
    copies take seconds. `compute` queues the work that is timed during copies. Memory that the
    system does not pin is measured as it is."""
    nbytes = 0 if device.one_memory else _MOST_BYTES
    while nbytes >= _FIRST_BYTES:
        try:
            return _measured(device, compute, nbytes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            nbytes //= 8
    return None


def _measured(device: Device, compute: Callable[[], object], most_bytes: int) -> HostLink | None:
    most = [device.host_bytes(most_bytes) for _ in range(2)]
    ends = time.monotonic() + _MOST_S
    there = [torch.zeros(most_bytes, dtype=torch.uint8, device=device.torch_device) for _ in most]
    ways = {"in": (there[0], most[0]), "out": (most[1], there[1])}

    def queue(way: str, nbytes: int, count: int = 1) -> None:
        target, source = ways[way]
        device.queue_copies([(target[:nbytes], source[:nbytes])] * count, way)

    def seconds(nbytes: int, *chosen: str) -> float:
        device.synchronize()
        began = time.perf_counter()
        for way in chosen:
            queue(way, nbytes)
        device.synchronize()
        return max(time.perf_counter() - began, 1e-9)

    seconds(_FIRST_BYTES, *ways)  # warms up
    if time.monotonic() > ends:
        return None
    least_s = partial(_least_s, ends)
    rate = _FIRST_BYTES / least_s(lambda: seconds(_FIRST_BYTES, *ways))
    nbytes = int(max(_FIRST_BYTES, min(most_bytes, rate * _COPIES_S)))
    there_s, back_s, both_s = (
        least_s(partial(seconds, nbytes, *chosen)) for chosen in (("in",), ("out",), ("in", "out"))
    )

    def computing_s(copies: int) -> float:
        device.synchronize()
        if copies:
            queue("in", nbytes, copies)
        began = device.record_event()
        compute()
        ended = device.record_event()
        device.synchronize()
        return max(began.until_s(ended), 1e-9)

    alone_s = least_s(lambda: computing_s(0))
    copies = min(_MOST_COPIES, 2 + math.ceil(2 * alone_s / there_s))  # longer than the computing
    beside_s = least_s(lambda: computing_s(copies))
    return HostLink(
        nbytes / there_s,
        nbytes / back_s,
        max(1.0, both_s / max(there_s, back_s)),
        max(1.0, beside_s / alone_s),
    )


def _least_s(ends: float, measure: Callable[[], float]) -> float:
    """The least of a few measurements; of one, if the clock has passed `ends`."""
    times = [measure()]
    while len(times) < _RUNS and time.monotonic() < ends:
        times.append(measure())
    return min(times)
