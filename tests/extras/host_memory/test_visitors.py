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
    memory.expect(1_000_000)
    sizes = [300_000, 20_480, 540_000, 1, 100_000, 540_000, 700_000, 4096]
    taken = [memory.take(size) for size in sizes]
    assert [len(tensor) for tensor in taken] == sizes
    assert all(tensor.storage_offset() % 512 == 0 for tensor in taken)  # of any type
    spans = sorted((tensor.data_ptr(), len(tensor)) for tensor in taken)
    for (begin, length), (following, _) in itertools.pairwise(spans):
        assert begin + length <= following
    assert sum(sizes) <= memory.nbytes <= sum(sizes) + 512 * len(sizes)


@pytest.mark.parametrize("layers", [5, 32])
@pytest.mark.parametrize("bytes_of_number", [2, 4])
@pytest.mark.parametrize(
    ("hidden", "inner", "keys"), [(4096, 14336, 1024), (5120, 27648, 1024), (8192, 28672, 1024)]
)
def test_less_than_a_layer_is_lost_to_powers_of_two(hidden, inner, keys, bytes_of_number, layers):
    """Layers of Llama 8B, Qwen 32B and Llama 70B."""
    square, narrow, wide = hidden * hidden, hidden * keys, hidden * inner
    sizes = [square, narrow, narrow, square, wide, wide, wide, hidden, hidden]
    layer = [bytes_of_number * size for size in sizes]
    device = Pinning(1 << 50, "meta")
    memory = HostTensors(device)
    memory.expect(layers * sum(layer))
    for nbytes in layers * layer:
        memory.take(nbytes)
    assert device.taken - memory.nbytes < sum(layer)  # as StageMemory.host counts


def test_what_cannot_be_pinned_is_plain_and_said(caplog):
    device = Pinning(1 << 20)
    memory = HostTensors(device)
    memory.expect(1_500_000)
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
