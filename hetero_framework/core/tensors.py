"""torch tensors to and from the wire without copying.

Wire and machine are little-endian, so the memory of a contiguous tensor is its wire form.
"""

from __future__ import annotations

import sys

import torch

from hetero_framework.core.frames import DTYPES, WireTensor
from hetero_framework.errors import ProtocolError

if sys.byteorder != "little":
    raise ImportError("hetero_framework needs a little-endian machine")

TORCH_DTYPES: dict[str, torch.dtype] = {d.name: getattr(torch, d.name) for d in DTYPES}
_WIRE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype. Raises ProtocolError when it has none."""
    if dtype not in _WIRE_NAMES:
        raise ProtocolError(f"{dtype} cannot travel (known: {', '.join(TORCH_DTYPES)})")
    return _WIRE_NAMES[dtype]


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """The wire form of a CPU tensor: a view of its memory where it is contiguous, else a copy.
    Raises ProtocolError for a dtype without a wire code and for a tensor on another device."""
    name = dtype_name(tensor.dtype)
    if tensor.device.type != "cpu":
        raise ProtocolError(f"a tensor on {tensor.device} cannot travel; bring it to the CPU first")
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return WireTensor(name, shape, memoryview(b""))
    # Viewed as uint8, because numpy has no bfloat16. Each torch call here delays a transfer: after
    # a stage's work, torch's code is no longer in the processor's caches.
    whole = tensor.detach()
    if not shape or whole.stride(-1) != 1 or not whole.is_contiguous():
        # A dimension of size 1 may have any stride and is contiguous, but has no view as uint8.
        whole = whole.contiguous().as_strided((whole.numel(),), (1,))
    return WireTensor(name, shape, whole.view(torch.uint8).numpy().data.cast("B"))


def from_wire(wire: WireTensor) -> torch.Tensor:
    """The torch tensor of `wire`. It shares writable, aligned bytes and is then void after the
    message's `release`; other bytes are copied."""
    dtype = TORCH_DTYPES[wire.dtype]
    if not wire.data.nbytes:
        return torch.empty(wire.shape, dtype=dtype)
    data = bytearray(wire.data) if wire.data.readonly else wire.data
    flat = torch.frombuffer(data, dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # typed loads want aligned memory
    return flat.view(wire.shape)
