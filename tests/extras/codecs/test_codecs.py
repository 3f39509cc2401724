from __future__ import annotations

import math
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codecs import measure
from hetero_framework.config import WireConfig
from hetero_framework.core.codecs import CODECS, Codec
from hetero_framework.core.tensors import to_wire
from hetero_framework.errors import ConfigError, ProtocolError
from hetero_framework.extras.codecs.codecs import BLOCK

INT8, BF16, NONE = CODECS["int8"], CODECS["bf16"], CODECS["none"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [
    (codec, dtype) for codec in CODECS.values() for dtype in FLOATS if codec.supports(dtype).ok
]
IDS = [f"{codec.name}-{str(dtype).removeprefix('torch.')}" for codec, dtype in PAIRS]
SHAPES = [(), (1,), (63,), (64,), (65,), (3, 5, 7), (2, 64), (2, 3, 130), (0,), (2, 0, 3)]


def values(*shape: int, seed: int = 3, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def travel(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(to_wire(tensor).data)


def block_peaks(tensor: torch.Tensor) -> torch.Tensor:
    """For each element of the flattened tensor, the largest magnitude in its block."""
    blocks = tensor.double().abs().flatten().split(BLOCK)
    return torch.cat([block.amax().expand(len(block)) for block in blocks])


def int8_bound(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """What `Int8.error` allows, per element: the step, then half a unit of its type."""
    kind = torch.finfo(sent.dtype)
    smallest = kind.tiny * kind.eps
    rounding = received.double().abs().flatten() * kind.eps / 2 + smallest / 2
    return block_peaks(sent).div(252).clamp_min(1.2e-38) + rounding


def assert_within(sent: torch.Tensor, received: torch.Tensor, bound: torch.Tensor) -> None:
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    error = (received.double() - sent.double()).abs().flatten()
    assert bool((error <= bound).all()), (error - bound).max()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Finite tensors of every magnitude; blocks of a tensor differ in theirs."""
    dtype = draw(st.sampled_from(FLOATS))
    kind = torch.finfo(dtype)
    if draw(st.booleans()):
        count, seed = draw(st.integers(1, 300)), draw(st.integers(0, 2**32))
        low, high = math.log2(kind.tiny * kind.eps), math.log2(kind.max)
        exponents = draw(st.lists(st.floats(low, high), min_size=1, max_size=5))
        size = torch.tensor(exponents, dtype=torch.float64).exp2().repeat_interleave(BLOCK)
        size = size.repeat(-(-count // len(size)))[:count]
        drawn = values(count, seed=seed).double() * size
    else:
        width = {torch.float16: 16}.get(dtype, 32)
        finite = st.floats(allow_nan=False, allow_infinity=False, width=width)
        drawn = torch.tensor(draw(st.lists(finite, min_size=1, max_size=130)), dtype=torch.float64)
    return drawn.clamp(-0.99 * kind.max, 0.99 * kind.max).to(dtype)


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_int8_error_is_the_stated_one(sent):
    received = travel(INT8, sent)
    assert_within(sent, received, int8_bound(sent, received))
    assert bool((received[sent == 0] == 0).all())


@given(tensors())
@settings(max_examples=200, deadline=None)
def test_bf16_error_is_the_stated_one(sent):
    sent = sent.float()
    assert_within(sent, travel(BF16, sent), (sent.double().abs() / 256).clamp_min(1e-40))
    halved = sent.to(torch.bfloat16)
    assert bits(travel(BF16, halved)) == bits(halved)


@given(tensors())
@settings(max_examples=50, deadline=None)
def test_none_keeps_the_bits(sent):
    assert bits(travel(NONE, sent)) == bits(sent)


@given(tensors(), st.data())
@settings(max_examples=100, deadline=None)
def test_non_finite_values_never_become_finite(sent, data):
    place = data.draw(st.integers(0, sent.numel() - 1))
    sent[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    for codec, dtype in PAIRS:
        if dtype == sent.dtype:
            assert not bool(travel(codec, sent)[place].isfinite())
    received = travel(INT8, sent).isfinite()
    spoilt = torch.arange(sent.numel()) // BLOCK == place // BLOCK
    assert not bool(received[spoilt].any())
    assert bool(received[~spoilt].all())


@pytest.mark.parametrize("magnitude", [1.0, 0.995, 0.5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_arrive_near_or_infinite(dtype, magnitude):
    largest = torch.finfo(dtype).max
    received = travel(INT8, torch.tensor([largest * magnitude, -1.0], dtype=dtype)).double()
    assert received[0] == pytest.approx(largest * magnitude, rel=0.01) or received[0] == math.inf
    if magnitude < 0.99:
        assert bool(received.isfinite().all())


@pytest.mark.parametrize(("codec", "dtype"), PAIRS, ids=IDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_comes_back(codec, dtype, shape):
    sent = values(*shape).to(dtype)
    parts = codec.encode(sent)
    assert all(part.is_contiguous() for part in parts)
    assert codec.layout(shape, dtype) == tuple((p.dtype, tuple(p.shape)) for p in parts)
    assert codec.nbytes(shape, dtype) == sum(to_wire(part).data.nbytes for part in parts)
    received = codec.decode(parts, shape, dtype)
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.allclose(received, sent, rtol=0.01, atol=0.02)


def test_int8_needs_66_bytes_for_64_values():
    assert INT8.nbytes((8, 1024, 1024), torch.bfloat16) == 8 * 1024 * 1024 * 66 // 64
    assert INT8.nbytes((65,), torch.float32) == 65 + 2 * 2
    assert BF16.nbytes((3, 5), torch.float32) == 30
    assert NONE.nbytes((3, 5), torch.float32) == 60


def test_int8_uses_both_signs_alike_and_rounds_ties_to_even():
    block = torch.tensor([127.0, -127.0, 0.5, 1.5, -0.5, -2.5, -0.0])
    quantized, scales = INT8.encode(block)
    assert quantized.tolist() == [127, -127, 0, 2, 0, -2, 0]
    assert scales.tolist() == [1.0]
    assert torch.equal(travel(INT8, -block), -travel(INT8, block))


def test_the_largest_of_a_block_always_becomes_127():
    """Wherever bfloat16 rounds the scale to: no value wraps around, and no level is given away."""
    peaks = (0x3F800000 + 2**7 * torch.arange(2**16, dtype=torch.int32)).view(torch.float32)
    blocks = torch.zeros(len(peaks), BLOCK)
    blocks[:, 0], blocks[:, 1] = peaks, -peaks
    quantized = INT8.encode(blocks)[0].view(-1, BLOCK)
    assert bool((quantized[:, 0] == 127).all())
    assert bool((quantized[:, 1] == -127).all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-36])
def test_a_scale_has_a_finite_reciprocal(magnitude):
    """Else the values would become infinite or NaN before they become integers."""
    _, scales = INT8.encode(torch.full((3,), magnitude))
    assert scales.tolist() == [torch.finfo(torch.float32).tiny]


def test_blocks_are_coded_independently():
    tensor = values(5, BLOCK)
    tensor[1] *= 1e6
    tensor[3] *= 1e-6
    whole = travel(INT8, tensor)
    assert all(bits(whole[i]) == bits(travel(INT8, tensor[i])) for i in range(5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_and_threads_do_not_change_a_bit(dtype, monkeypatch):
    sent = values(3, 200_003).to(dtype)
    parts = INT8.encode(sent)
    received = bits(INT8.decode(parts, sent.shape, dtype))
    monkeypatch.setattr("hetero_framework.extras.codecs.codecs._CPU_RUN", 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = INT8.encode(sent)
        assert [bits(part) for part in again] == [bits(part) for part in parts]
        assert bits(INT8.decode(again, sent.shape, dtype)) == received
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("codec", "dtype"), PAIRS, ids=IDS)
def test_the_tensor_that_is_sent_is_left_alone(codec, dtype):
    """It is needed for the backward pass, so it may require a gradient; and it may be strided."""
    sent = values(70, 30).to(dtype).requires_grad_()
    before = bits(sent)
    received = travel(codec, sent.transpose(0, 1))
    assert not received.requires_grad
    assert bits(sent) == before
    assert bits(received) == bits(travel(codec, sent.detach().transpose(0, 1).contiguous()))


def test_a_dtype_that_a_codec_lacks_is_refused_with_advice():
    with pytest.raises(ConfigError, match=r"bf16: float16 .* use none or int8"):
        BF16.encode(torch.zeros(3, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"int8: int64 .* use none"):
        INT8.encode(torch.zeros(3, dtype=torch.int64))
    assert not BF16.supports(torch.float16)
    assert NONE.supports(torch.int64)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_parts_of_another_tensor_are_refused(codec):
    parts = codec.encode(values(130))
    for wrong in ([], parts[:-1], parts + parts, [part[:-1] for part in parts]):
        with pytest.raises(ProtocolError, match=r"a tensor of \(130,\) torch.float32 comes as"):
            codec.decode(wrong, (130,), torch.float32)
    with pytest.raises(ProtocolError):
        codec.decode([part.to(torch.int16) for part in parts], (130,), torch.float32)
    with pytest.raises(ProtocolError):
        codec.decode(parts, (300,), torch.float32)
    with pytest.raises(ProtocolError):
        codec.decode(parts, (-10, -13), torch.float32)


def test_the_configuration_names_every_codec():
    for field in WireConfig.model_fields.values():
        assert list(typing.get_args(field.annotation)) == list(CODECS)
    assert all(codec.error.endswith(".") for codec in CODECS.values())


def test_a_codec_that_is_slowed_shows_in_the_benchmark():
    tensor = values(1000)
    plain, slowed = measure(INT8, tensor, 5), measure(INT8, tensor, 5, slow_ms=20)
    assert slowed["encode_ms"]["min"] >= 20 > plain["encode_ms"]["min"]
    assert plain["bytes"] == 1000 + 2 * 16
