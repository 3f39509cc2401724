"""Some children of a chain as a shard.

Shapes: B examples of a micro-batch, first in every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hetero_framework import control
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.extras.chains.chain import (
    INPUT,
    ChainConfig,
    ChainModel,
    Value,
    bundles,
    check_value,
    in_order,
    joined,
    members,
    part_of,
    statistics,
)
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import on_meta
from hetero_framework.models.cut.partition import ShardRange, Skeleton
from hetero_framework.models.cut.shard import Inputs, Shard, put_back
from hetero_framework.models.cut.side import Bundle, as_inner, shown_form
from hetero_framework.models.rng import seed_cpu


def build_chain(
    config: ChainConfig, rng: ShardRange, *, dtype: torch.dtype, device: torch.device, seed: int
) -> ChainShard:
    """A shard of the children that `rng` names, which the user's file makes from `seed`. On the
    device "meta" they have no data. Raises ModelError, ArchitectureError."""
    model: Any = on_meta(ChainModel, config)
    blocks, here = model.blocks, range(rng.start, rng.end)
    if device.type == "meta":
        model.to(dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            seed_cpu(seed)
            children = list(config.make())
        _refuse_shared(children, here)
        for index in here:
            blocks[index] = children[index].to(device, dtype)
    for index in set(range(len(blocks))) - set(here):
        blocks[index] = nn.Identity()
    return ChainShard(model, config, Skeleton(config, introspect(config)), rng)


def _refuse_shared(children: Sequence[nn.Module], here: range) -> None:
    """Raise ArchitectureError for a weight or buffer that a child outside `here` has too."""
    mine = {id(t) for k in here for t in children[k].state_dict(keep_vars=True).values()}
    for index in set(range(len(children))) - set(here):
        for name, tensor in children[index].state_dict(keep_vars=True).items():
            if id(tensor) in mine:
                raise ArchitectureError(
                    f"{name} of child {index} of the chain is also that of another stage",
                    hint="hold all children that share it on one stage",
                )


class ChainShard(Shard):
    """Children of a chain. `on_enter` gets i before child i, and "head" before the loss."""

    def _install(self) -> None:
        self._blocks = list(self.model.blocks)
        for index in range(self.range.start, self.range.end):
            self._forwards[index] = self._blocks[index].forward

    @property
    def statistics(self) -> dict[str, Tensor]:
        return statistics(self.model)

    def forward(self, inputs: Inputs, received: Bundle, cache: Any = None) -> Bundle:
        """The output of the last child here."""
        if self.range.is_first:
            value = part_of(inputs, INPUT)
        else:
            names = self._bundles[self.range.start]
            value = joined(dict(zip(names, as_inner(received), strict=True)))
        for index in range(self.range.start, self.range.end):
            if self._recomputes and self.model.training and torch.is_grad_enabled():
                value = cast(Value, self._checkpointed(index, value))
            else:
                value = self._child(index, value)
        return tuple(members(value).values())

    def output(self, inputs: Inputs, received: Bundle) -> Value:
        """The last shard's output, for the loss."""
        left = self.forward(inputs, received)
        if self.on_enter is not None:
            self.on_enter("head")
        return joined(dict(zip(self._bundles[-1], left, strict=True)))

    def arrival_problem(self, forms: Any, size: tuple[int, int] | None) -> str | None:
        expected = self._bundles[self.range.start]
        if len(forms) != len(expected):
            return f"{len(forms)} tensors came, expected {len(expected)}"
        rows = forms[0][0][0] if forms[0][0] else 0
        for name, (shape, dtype, _) in zip(expected, forms, strict=True):
            form, kind = expected[name]
            alike = dtype == kind or (dtype.is_floating_point and kind.is_floating_point)
            if tuple(shape) != (rows, *form) or not alike:
                wanted = shown_form((rows, *form), kind)
                return f"{name or 'the tensor'} is {shown_form(shape, dtype)}, expected {wanted}"
        return None

    @property
    def _bundles(self) -> Any:
        return bundles(cast(ChainConfig, self.config))

    def _child(self, index: int, value: Value) -> Value:
        if self.on_enter is not None:
            self.on_enter(index)
        what = f"child {index} ({type(self._blocks[index]).__name__}) of the chain fails"
        with control.users_code(what, ModelError, failures=control.FAILURES):
            left = self._forwards[index](value)
        expected = self._bundles[index + 1]
        if {n: tuple(t.shape[1:]) for n, t in members(left).items()} != {
            name: shape for name, (shape, _) in expected.items()
        }:
            check_value(left, f"child {index} of the chain")
            raise ArchitectureError(
                f"child {index} of the chain returns tensors of other shapes than for the first"
                " example",
                hint="all examples have to have one shape: pad, crop or scale them",
            )
        return in_order(left)

    def _checkpointed(self, index: int, value: Value) -> Any:
        block = self._blocks[index]
        return checkpoint(
            self._child,
            index,
            value,
            use_reentrant=False,
            preserve_rng_state=self.on_enter is None,
            context_fn=lambda: (nullcontext(), _unchanged(block)),
        )


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the buffers, so that a recomputed forward does not count twice in running means."""
    kept = {name: buffer.clone() for name, buffer in statistics(module).items()}
    try:
        yield
    finally:
        put_back(statistics(module), kept)
