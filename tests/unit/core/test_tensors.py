from __future__ import annotations

import pytest
import torch

from hetero_framework.core.frames import DTYPES, WireTensor
from hetero_framework.core.messages import Control, Message, decode, encode
from hetero_framework.core.tensors import TORCH_DTYPES, dtype_name, from_wire, to_wire
from hetero_framework.errors import ProtocolError


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


def travel(*tensors: torch.Tensor) -> list[torch.Tensor]:
    message = Message(Control("x"), [to_wire(t) for t in tensors])
    return [from_wire(t) for t in decode(bytearray(b"".join(encode(message)))).tensors]


def test_every_wire_dtype_has_a_torch_dtype_of_its_size():
    assert {d.name: d.itemsize for d in DTYPES} == {
        name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()
    }


@pytest.mark.parametrize("name", list(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,), (2, 0, 3), (1,) * 8])
def test_tensor_arrives_with_the_same_bits(name, shape):
    sent = values(TORCH_DTYPES[name], *shape)
    (received,) = travel(sent)
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert to_wire(received).data == to_wire(sent).data


def test_nan_and_infinity_keep_their_bits():
    bits = torch.tensor([0x7FC1, 0x7F80, -128, 1], dtype=torch.int16)
    (received,) = travel(bits.view(torch.bfloat16))
    assert torch.equal(received.view(torch.int16), bits)


def test_contiguous_tensor_is_not_copied_either_way():
    sent = values(torch.bfloat16, 4, 5)
    wire = to_wire(sent)
    sent[0, 0] = 7
    assert from_wire(wire)[0, 0] == 7
    assert from_wire(wire).data_ptr() == sent.data_ptr()


@pytest.mark.parametrize(
    "tensor", [values(torch.float32, 4, 6).T, values(torch.bfloat16, 8, 8)[::2, 1:5]]
)
def test_non_contiguous_tensor_arrives_equal(tensor):
    assert not tensor.is_contiguous()
    assert torch.equal(travel(tensor)[0], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        values(torch.float32, 1, 3).T,
        values(torch.float32, 10)[5::5],
        values(torch.bfloat16, 4, 6)[1:2, 2:3],
        values(torch.float32, 3)[1],
    ],
    ids=["column", "one of many", "one of a matrix", "number"],
)
def test_dimension_of_one_may_have_any_stride(tensor):
    """torch calls such a tensor contiguous and refuses to view it as bytes."""
    assert tensor.is_contiguous()
    assert torch.equal(travel(tensor)[0], tensor)


def test_misaligned_and_read_only_bytes_are_copied():
    one, eight = travel(torch.ones(1, dtype=torch.uint8), values(torch.float64, 3))
    assert one.item() == 1
    assert eight.data_ptr() % 8 == 0
    read_only = from_wire(WireTensor("int32", (1,), memoryview(b"\x05\x00\x00\x00")))
    read_only += 1  # would write into constant memory if it were a view
    assert read_only.item() == 6


def test_tensor_with_gradient_travels_as_values():
    (received,) = travel(torch.ones(2, requires_grad=True))
    assert not received.requires_grad


def test_dtype_without_code_is_refused():
    with pytest.raises(ProtocolError, match="complex64 cannot travel"):
        dtype_name(torch.complex64)
    with pytest.raises(ProtocolError, match="cannot travel; bring it to the CPU"):
        to_wire(torch.empty(1, device="meta"))
