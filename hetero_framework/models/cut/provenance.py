"""The origin of each tensor in a forward: independent of the cut, the token ids, or the weights
before and in the blocks.

A dispatch mode sees every operation, also those inside autograd functions and compiled scripts. It
records origins by storage, so that views and writes in place need no special care.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IDS = -2
"""The level of tensors computed from the token ids alone, without weights."""

# Operations whose results have the shape of a tensor and none of its numbers.
_SHAPE_ONLY = {
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "empty_like",
    "full_like",
    "ones_like",
    "zeros_like",
}


class Provenance(TorchDispatchMode):
    """The levels of all tensors of one forward.

    A level is the last part of the model that computed on a tensor: -1 the part before the blocks,
    i block i; None: it depends on neither ids nor trained weights. `phase` is where the forward
    stands: 2 i while block i runs, 2 i + 1 after it and before the next, -1 before the first.
    Tensors made in block i have the level i, even a mask: only a shard with the block can make
    them. Tensors made after block i of the hidden state that it `received` have the level i, too.
    """

    def __init__(self, ids: torch.Tensor, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = -1
        self._weights = {_storage(weight) for weight in weights}
        self._levels = {_storage(ids): IDS}
        self._read: dict[int, set[int]] = {}
        self._received: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no storage's address is used again

    def received(self, hidden_BSD: torch.Tensor, block: int) -> None:
        """Note that a block begins, with this hidden state."""
        self._received[_storage(hidden_BSD)] = block

    def level(self, tensor: torch.Tensor) -> int | None:
        """The level of a tensor; see the class."""
        return self._levels.get(_storage(tensor))

    def is_read(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether an operation in this block takes the tensor, or another view of its memory."""
        return _storage(tensor) in self._read.get(2 * block, ())

    def is_read_after(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether an operation after this block, the last one, takes the tensor."""
        return any(
            phase > 2 * block and _storage(tensor) in read for phase, read in self._read.items()
        )

    @staticmethod
    def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two tensors are views of one memory."""
        return _storage(one) == _storage(other)

    def is_held(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether the model's own code uses the tensor after this block. Then the tensor in the
        model's variable has to be replaced, not the block's argument."""
        return any(
            phase > 2 * block and phase % 2 and _storage(tensor) in read
            for phase, read in self._read.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = [_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._alive += made
        inside = self.phase >= 0 and self.phase % 2 == 0
        changed = set(map(_storage, made)) - set(read) | self._written(func, args, kwargs)
        if inside or changed:  # a view that the model takes between its blocks is not yet a use
            self._read.setdefault(self.phase, set()).update(read)
        shape_only = func._schema.name.removeprefix("aten::") in _SHAPE_ONLY
        levels = [] if shape_only else [level for s in read if (level := self._of(s)) is not None]
        if inside:
            levels.append(self.phase // 2)
        if levels:
            for storage in changed:
                self._levels[storage] = max(self._levels.get(storage, IDS), *levels)
        return result

    def _of(self, storage: int) -> int | None:
        # A weight between the blocks belongs to the block before it; see `ModelStructure.owner`.
        if storage in self._weights:
            return self.phase // 2
        level = self._levels.get(storage)
        return level if level is None else max(level, self._received.get(storage, level))

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """The storages that an operation changes."""
        storages = set()
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                storages |= {_storage(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
        return storages


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
