"""Codecs write a boundary tensor in fewer bytes. Pure torch, on any device.

`CODECS` has all codecs by the names of the configuration's `wire` section; those that change a
tensor are in an extra. A codec turns a tensor into parts (contiguous tensors on the same device)
and back. The types and shapes of the parts depend on those of the tensor alone. The same input
gives the same bits in any process and with any number of threads, since IEEE 754 defines the result
of every operation used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from hetero_framework import registry
from hetero_framework.core.devices import Support
from hetero_framework.errors import ConfigError, ProtocolError

Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Codec(ABC):
    """One way to write a tensor. `error` states how decoded values differ from the original."""

    name: str
    error: str

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> Support:
        """Whether tensors of `dtype` can be encoded, and why not."""

    @abstractmethod
    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        """Type and shape of each part of an encoded tensor."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of an encoded tensor."""
        return sum(kind.itemsize * math.prod(size) for kind, size in self.layout(shape, dtype))

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts, as in `layout`; may share the tensor's memory. ConfigError if unsupported."""
        support = self.supports(tensor.dtype)
        if not support:
            raise ConfigError(f"codec {self.name}: {support.reason}")
        return self._encode(tensor.detach().contiguous())

    def decode(
        self, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor of `shape` and `dtype` whose `encode` gave `parts`; it may share their memory.
        Raises ProtocolError when the parts are not those of such a tensor."""
        self.check([(part.dtype, tuple(part.shape)) for part in parts], shape, dtype)
        return self._decode(parts, tuple(shape), dtype)

    def check(
        self,
        parts: Sequence[tuple[torch.dtype, tuple[int, ...]]],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Raise ProtocolError unless `parts` is the `layout` of a tensor of `shape` and `dtype`."""
        layout, expected = tuple(parts), self.layout(shape, dtype)
        if layout != expected or any(size < 0 for size in shape):
            raise ProtocolError(
                f"codec {self.name}: a tensor of {tuple(shape)} {dtype} comes as {_text(expected)},"
                f" not as {_text(layout)}"
            )

    @abstractmethod
    def _encode(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...

    @abstractmethod
    def _decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor: ...


class Unchanged(Codec):
    """The tensor as it is."""

    name = "none"
    error = "Every value arrives with the same bits."

    def supports(self, dtype: torch.dtype) -> Support:
        return Support(True, "tensors travel as they are")

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        return ((dtype, tuple(shape)),)

    def _encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def _decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return parts[0]


def dtype_text(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch." in front."""
    return str(dtype).removeprefix("torch.")


def _text(layout: Layout) -> str:
    return (
        " and ".join(f"{list(shape)} {dtype_text(dtype)}" for dtype, shape in layout) or "nothing"
    )


class _Codecs(Mapping[str, Codec]):
    """The codecs of the registry. Raises ConfigError for a codec whose extra is not installed."""

    def __getitem__(self, name: str) -> Codec:
        codec: Codec = registry.find("codecs", name)
        return codec

    def __iter__(self) -> Iterator[str]:
        return iter(registry.installed("codecs"))

    def __len__(self) -> int:
        return len(registry.installed("codecs"))


UNCHANGED = Unchanged()
CODECS = _Codecs()
