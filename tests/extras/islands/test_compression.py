from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hetero_framework.errors import ProtocolError
from hetero_framework.extras.islands.compression import (
    Compression,
    Kind,
    Packed,
    packed_bytes,
    unpack,
)

KINDS: tuple[Kind, ...] = ("none", "bf16", "int8")
SHAPE = (3, 100)  # two blocks, and a short one


def changes(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    return {"w": torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale}


def received(packed: Packed, like: dict[str, Tensor], kind: Kind) -> Tensor:
    return unpack(packed, like, kind)["w"]


def quantum(change: Tensor, kind: Kind) -> Tensor:
    """The distance between neighbouring values of what was sent, at most, for each value."""
    if kind == "bf16":
        return change.abs() / 128
    blocks = torch.nn.functional.pad(change.flatten(), (0, 768 - change.numel())).view(-1, 256)
    scale = (blocks.abs().amax(1, keepdim=True) / 126).expand_as(blocks)
    return scale.flatten()[: change.numel()].view(change.shape)


def test_uncompressed_changes_arrive_as_they_are():
    way, change = Compression("none"), changes(0)
    packed = way.pack(change)
    assert torch.equal(received(packed, change, "none"), change["w"])
    assert packed_bytes(packed) == 4 * 300
    way.committed()
    assert way.lost == {}


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@given(scales=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_all_changes_are_sent_up_to_one_quantum(kind, scales):
    way = Compression(kind)
    meant, sent = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for seed, scale in enumerate(scales):
        change = changes(seed, scale)
        largest = change["w"] + way.lost.get("w", torch.zeros(()))
        sent += received(way.pack(change), change, kind).double()
        meant += change["w"].double()
        way.committed()
    rounding = 1e-6 * sum(scales)  # of the float32 sums in between
    assert ((sent - meant).abs() <= quantum(largest, kind) + rounding).all()


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_error_feedback_sends_small_changes_in_the_end(kind):
    small = torch.tensor([1.0, 0.003])
    way, alone = Compression(kind), torch.zeros(2)
    total = torch.zeros(2)
    for _ in range(100):
        total += received(way.pack({"w": small}), {"w": small}, kind)
        way.committed()
        alone += received(Compression(kind).pack({"w": small}), {"w": small}, kind)
    assert abs(total[1] - 0.3) < 0.008
    if kind == "int8":
        assert alone[1] == 0.0  # without what was fed back


def test_error_feedback_changes_only_on_commit():
    way, change = Compression("int8"), changes(0)
    first = way.pack(change)
    assert way.lost == {}
    again = way.pack(change)
    assert all(torch.equal(a, b) for a, b in zip(first["w"], again["w"], strict=True))
    way.committed()
    assert torch.equal(way.lost["w"], change["w"] - received(again, change, "int8"))
    resumed = Compression("int8")
    resumed.lost = dict(way.lost)
    assert all(
        torch.equal(a, b)
        for a, b in zip(way.pack(change)["w"], resumed.pack(change)["w"], strict=True)
    )


def test_int8_takes_less_than_a_byte_for_each_value():
    """Of values like those of a normal distribution; DiLoCo with 100 steps in a round then sends
    less than 1/400 of what a gradient in float32 takes in each of them."""
    change = {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(0))}
    assert packed_bytes(Compression("bf16").pack(change)) == 400_000
    assert packed_bytes(Compression("int8").pack(change)) < 0.96 * 200_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (2, 0)])
def test_empty_and_single_values_travel_too(kind, shape):
    change = {"w": torch.full(shape, 0.5)}
    assert torch.allclose(received(Compression(kind).pack(change), change, kind), change["w"], 1e-2)


def deflated(numbers: bytes) -> Tensor:
    coder = zlib.compressobj(wbits=-15)
    return torch.frombuffer(bytearray(coder.compress(numbers) + coder.flush()), dtype=torch.uint8)


def test_malformed_parts_of_another_island_are_refused():
    change = {"w": torch.ones(4)}
    good = Compression("int8").pack(change)["w"]
    bomb = deflated(b"\0" * 50_000_000)
    for parts in (
        [],
        good[:1],
        [good[0][:-1], good[1]],
        [torch.cat([good[0], good[0]]), good[1]],
        [deflated(b"\1" * 3), good[1]],
        [bomb, good[1]],
        [torch.full((9,), 255, dtype=torch.uint8), good[1]],
        [good[0], good[1].float()],
        [torch.ones(4, dtype=torch.int8), good[1]],
    ):
        with pytest.raises(ProtocolError):
            unpack({"w": parts}, change, "int8")
    for kind in KINDS:
        with pytest.raises(ProtocolError, match="other parameters"):
            unpack({}, change, kind)
        with pytest.raises(ProtocolError):
            unpack({"w": [torch.ones(5)]}, change, kind)
