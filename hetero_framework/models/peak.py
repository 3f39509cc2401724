"""Memory of tensors, counted and not guessed from the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside have held at once (`most`), and hold now (`now`).
    Tensors on the meta device hold none; those that are `known`, and views of them, do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = self.made = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held: dict[int, tuple[int, int]] = {}  # bytes, and how many were made before

    def held(self, made: int) -> int:
        """Bytes now held by the first so many tensors that were made."""
        return sum(nbytes for nbytes, before in self._held.values() if before < made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._held:
            self._held[key] = (storage.nbytes(), self.made)
            self.made += 1
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._held.pop(key)[0]
