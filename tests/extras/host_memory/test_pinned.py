from __future__ import annotations

import itertools
import logging

import pytest
import torch

from hetero_framework.core.devices import Device
from hetero_framework.extras.host_memory.pinned import HostBytes, HostTensors


class Pinning(Device):
    """Pins powers of two, as torch does, up to a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        assert nbytes & (nbytes - 1) == 0
        if nbytes > self.limit:
            return None
        self.limit -= nbytes
        return torch.empty(nbytes, dtype=torch.uint8)


def test_tensors_share_pieces_and_no_byte() -> None:
    memory = HostTensors(Pinning(1 << 30))
    sizes = [300_000, 20_480, 540_000, 1, 100_000, 540_000, 700_000, 4096]
    taken = [memory.take(size) for size in sizes]
    assert [len(tensor) for tensor in taken] == sizes
    spans = sorted((tensor.data_ptr(), len(tensor)) for tensor in taken)
    for (begin, length), (following, _) in itertools.pairwise(spans):
        assert begin + length <= following
    assert sum(sizes) <= memory.nbytes <= sum(sizes) + 512 * len(sizes)


def test_little_is_lost_to_powers_of_two() -> None:
    memory = HostTensors(Pinning(1 << 40))
    for _ in range(100):
        memory.take(540_000)
    assert memory.pinned_bytes <= 1.2 * memory.nbytes
    large = HostTensors(Pinning(1 << 40))
    large._device.pinned = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="meta")  # type: ignore[method-assign]
    large.take(3 << 30)
    assert large.pinned_bytes == 4 << 30


def test_what_cannot_be_pinned_is_plain_and_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostTensors(Pinning(1 << 20))
    assert len(memory.take(200_000)) == 200_000
    assert memory.pinned_bytes == 1 << 20
    assert len(memory.take(5_000_000)) == 5_000_000
    assert memory.pinned_bytes == 1 << 20
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            memory.tell("states")
        memory.take(100)
        memory.tell("states")
    assert caplog.messages == [
        "states in host memory: 4.96 MiB, 4.77 MiB of it not pinned, which is slower"
    ]


def test_no_more_than_its_bytes_are_copied() -> None:
    pairs = HostBytes(Device(), 100_000).copies_to(torch.zeros(200_000, dtype=torch.uint8))
    assert sum(len(part) for part, _ in pairs) == 100_000
    assert all(len(part) == len(piece) for part, piece in pairs)
