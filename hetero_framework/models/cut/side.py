"""Side tensors: inputs of a block beside the hidden state that only an earlier part can make.

A boundary carries a bundle: the hidden state, then the side tensors that blocks behind it read and
parts before it made. Introspection finds them (`ModelStructure.sides`); a shard collects them where
absent blocks would have received them, and puts them in at the entries of its own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Step = tuple[type, Any]  # a container's type, and the key or position in it
Way = tuple[Step, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]

Form = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and type of a tensor that crosses a boundary, and whether a gradient comes back for it."""
Bundle = tuple[torch.Tensor, ...]
"""The bundle of a boundary: the hidden state, then side tensors in the order of `sides`. Backward:
the gradients of the hidden state and of side tensors that want one. Empty if nothing crosses."""


@dataclass(frozen=True)
class Side:
    """A tensor of one forward. `maker` is the last part that computed on it (-1: the part before
    the blocks, i: block i). `places` are the blocks that read it, and where they receive it; a
    place behind the last block is the part after the blocks (`Report`). `is_held`: the model's own
    code uses it, too. `shape` and `dtype` are those in the tiny copy. The tensor wants a gradient
    where one of the `weights` that it depends on is trained."""

    name: str
    maker: int
    places: tuple[tuple[int, Way], ...]
    is_held: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: frozenset[str]

    def crosses(self, boundary: int) -> bool:
        """Whether the tensor is in the bundle at the entry of block `boundary`."""
        return self.maker < boundary <= self.places[-1][0]


@dataclass(frozen=True)
class Report:
    """A call of a module in a block whose output the model uses behind all blocks, such as a
    router's logits in the loss. `module` is the module's name in the block, `form` the output
    without its tensors. `parts` are the tensors that are used, with the way to each in the output.
    """

    block: int
    module: str
    form: Any
    parts: tuple[tuple[Way, Side], ...]


def hollow(value: Any) -> Any:
    """The same nested tuples, lists and mappings, with None for every other value."""
    kind: Any = type(value)
    if isinstance(value, Mapping):
        return kind({key: hollow(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        items = [hollow(item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return None


def tensors_at(value: Any, path: Way = ()) -> Iterator[tuple[Way, torch.Tensor]]:
    """All tensors in nested tuples, lists and mappings, with the way to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, tuple, list)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from tensors_at(item, (*path, (type(value), key)))


def tensor_at(call: Any, path: Way) -> torch.Tensor:
    """The tensor at a place of a call or of an output. Raises LookupError where there is none."""
    value: Any = call
    for _, key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            value = None
    if not isinstance(value, torch.Tensor):
        raise LookupError(f"no tensor comes as {path[-1][1]!r} where the layers before are absent")
    return value


def put_at(value: Any, path: Way, tensor: torch.Tensor) -> Any:
    """`value` with the tensor at a place: lists and mappings are changed, tuples made anew, and
    missing containers created."""
    if not path:
        return tensor
    (kind, key), rest = path[0], path[1:]
    if issubclass(kind, tuple):
        items = [*(value or ()), *[None] * (key + 1 - len(value or ()))]
        items[key] = put_at(items[key], rest, tensor)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if value is None:
        value = kind()
    if isinstance(value, list):
        value += [None] * (key + 1 - len(value))
        value[key] = put_at(value[key], rest, tensor)
    else:
        value[key] = put_at(value.get(key), rest, tensor)
    return value


def crossing(left: Bundle) -> Bundle:
    """The output of a part of the model, without its graph; a side tensor that wants a gradient has
    `requires_grad`."""
    hidden_BSD, *sides = left
    marked = [side.detach().requires_grad_(side.requires_grad) for side in sides]
    return (hidden_BSD.detach(), *marked)


def as_leaves(received: Bundle) -> Bundle:
    """Inputs as leaves that get a gradient: the hidden state, and side tensors that want one."""
    hidden_BSD, *sides = received
    leaves = [side.detach().requires_grad_(side.requires_grad) for side in sides]
    return (hidden_BSD.detach().requires_grad_(), *leaves)


def as_inner(received: Bundle) -> Bundle:
    """Inputs as the model inside sees them: none is a leaf, as none is in the whole model. Autocast
    caches the narrow copy of a float32 leaf: all readers would share the copy, and round the sum of
    their gradients."""
    return tuple(t.view_as(t) if t.requires_grad else t for t in received)


def returning(left: Bundle) -> Bundle:
    """The outgoing tensors that get a gradient from behind: always the hidden state."""
    return tuple(t for place, t in enumerate(left) if place == 0 or t.requires_grad)


def differentiate(left: Bundle, gradients: Bundle) -> None:
    """Run backward from all outgoing tensors at once, with the gradients of `returning(left)`. A
    gradient from behind is then the first term of every sum, as in the whole model, where later
    layers are differentiated first."""
    pairs = zip(returning(left), gradients, strict=True)
    # Where only side tensors were made of trained weights, the hidden state has no graph.
    if roots := [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]:
        tensors, root_gradients = zip(*roots, strict=True)
        torch.autograd.backward(tensors, root_gradients)


def described(*tensors: torch.Tensor) -> str:
    """The forms of tensors in words, as in "4 x 128 x 64 of float32", with commas between."""
    return ", ".join(shown_form(t.shape, t.dtype, t.requires_grad) for t in tensors) or "nothing"


def shown_form(shape: Sequence[int], dtype: torch.dtype, wants_gradient: bool = False) -> str:
    """One form in words, see `described`."""
    sizes = " x ".join(map(str, shape)) or "a single number"
    wants = " that wants a gradient" if wants_gradient else ""
    return f"{sizes} of {str(dtype).removeprefix('torch.')}{wants}"


def gradients_of(leaves: Bundle) -> Bundle:
    """The gradients of leaves that want one; zeros where the result does not depend on them."""
    return tuple(
        torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for leaf in leaves
        if leaf.requires_grad
    )
