from __future__ import annotations

import itertools
import logging

import pytest
import torch

from hetero_framework.core.devices import Device
from hetero_framework.extras.host_memory.visitors import HostTensors, in_pieces


class Pinning(Device):
    """Pins powers of two, as torch does, up to a limit."""

    def __init__(self, limit: int, where: str = "cpu") -> None:
        super().__init__()
        self.limit, self.taken, self.where = limit, 0, where

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        assert nbytes & (nbytes - 1) == 0
        if nbytes > self.limit:
            return None
        self.limit -= nbytes
        self.taken += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self.where)


def test_tensors_share_pieces_and_no_byte():
    memory = HostTensors(Pinning(1 << 30))
    sizes = [300_000, 20_480, 540_000, 1, 100_000, 540_000, 700_000, 4096]
    taken = [memory.take(size) for size in sizes]
    assert [len(tensor) for tensor in taken] == sizes
    assert all(tensor.storage_offset() % 512 == 0 for tensor in taken)  # of any type
    spans = sorted((tensor.data_ptr(), len(tensor)) for tensor in taken)
    for (begin, length), (following, _) in itertools.pairwise(spans):
        assert begin + length <= following
    assert sum(sizes) <= memory.nbytes <= sum(sizes) + 512 * len(sizes)


def test_little_is_lost_to_powers_of_two():
    device = Pinning(1 << 40)
    memory = HostTensors(device)
    for _ in range(100):
        memory.take(540_000)
    assert device.taken <= 1.2 * memory.nbytes
    device = Pinning(1 << 40, "meta")
    HostTensors(device).take(3 << 30)
    assert device.taken == 4 << 30


def test_what_cannot_be_pinned_is_plain_and_said(caplog):
    device = Pinning(1 << 20)
    memory = HostTensors(device)
    assert len(memory.take(200_000)) == 200_000
    assert device.taken == 1 << 20
    assert len(memory.take(5_000_000)) == 5_000_000
    assert device.taken == 1 << 20
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            memory.tell("states")
        memory.take(100)
        memory.tell("states")
    assert caplog.messages == [
        "states in host memory: 4.96 MiB, 4.77 MiB of it not pinned, which is slower"
    ]


@pytest.mark.parametrize(("limit", "plain"), [(1 << 20, 0), (1 << 16, 34_464), (0, 100_000)])
def test_pieces_have_each_byte_once_and_as_many_pinned_as_there_may_be(limit, plain):
    device = Pinning(limit)
    pieces, unpinned = in_pieces(device, 100_000)
    assert (device.taken, unpinned) == (min(limit, 1 << 17), plain)
    ends = itertools.accumulate(len(piece) for _, piece in pieces)
    assert [begin for begin, _ in pieces] == [0, *ends][:-1]
    assert sum(len(piece) for _, piece in pieces) == 100_000
