"""Copies of memory that is not pinned, by another thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hetero_framework.core.devices import Device, DeviceEvent
from hetero_framework.extras.host_memory import feeder
from hetero_framework.extras.host_memory.feeder import Feeder


class Watched(Device):
    """Notes the places of what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def queue_copies(
        self, pairs: Sequence[tuple[Tensor, Tensor]], stream: str, *after: DeviceEvent
    ) -> tuple[DeviceEvent, DeviceEvent]:
        self.read += [source.data_ptr() for _, source in pairs]
        return super().queue_copies(pairs, stream, *after)


def test_what_is_longer_than_its_buffers_comes_whole_and_the_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeder, "_BUFFER_BYTES", 1000)
    before = threading.active_count()
    device = Watched()
    feeding = Feeder(device)
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (1, 999, 1000, 4321)]
    targets = [torch.zeros_like(source) for source in sources]
    arrival = feeding.copy(list(zip(targets, sources, strict=True)), DeviceEvent())
    feeder.ends_of(arrival)[1].wait()
    assert all(map(torch.equal, targets, sources))
    # The next part is read while the last one is on its way.
    assert len({*device.read}) == 2
    assert all(a != b for a, b in pairwise(device.read))
    feeding.close()
    assert threading.active_count() == before


def test_an_error_reaches_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "_LONGEST_S", 20.0)
    feeding = Feeder(Device())
    short, long = torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="must match"):
        feeder.ends_of(feeding.copy([(short, long)], DeviceEvent()))
    feeding.close()


def test_a_disk_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder, "_LONGEST_S", 0.01)
    with pytest.raises(feeder.HeteroError, match="could not be read"):
        feeder.ends_of(Future())
