"""Chains: a user's nn.Sequential as a model that is cut at its children.

A child takes what the child before it returns: a tensor, or a bundle of tensors by name. One run on
tensors without data, shaped like the first example, gives the forms of all bundles.

Shapes: B examples of a micro-batch, first in every tensor.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework import control
from hetero_framework.core.tensors import TORCH_DTYPES
from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.models.cut.side import shown_form
from hetero_framework.models.library import LIBRARY_ERRORS

INPUT, TARGET = "input", "target"
"""Names of a micro-batch's tensors, or the parts before a point in them: "target.boxes"."""
Value = Tensor | dict[str, Tensor]
"""The input and the output of a child."""
BundleForms = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape without B and type of each tensor of a bundle, by name. A tensor that is no member of a
bundle has the empty name."""
_PROBE_ROWS = 3
_known: dict[str, tuple[BundleForms, ...]] = {}


class ChainConfig(PretrainedConfig):
    """The configuration of a chain. `chain` is its name in a file of --import. `forms` holds [shape
    without B, type] of each tensor of a micro-batch, by name. `modules`: see `modules_of`."""

    model_type = "chain"

    def __init__(
        self,
        chain: str = "",
        forms: Mapping[str, Any] | None = None,
        modules: str = "",
        **kwargs: Any,
    ) -> None:
        self.chain, self.forms, self.modules = chain, dict(forms or {}), modules
        # What all configurations have.
        self.hidden_size = self.vocab_size = 1
        super().__init__(**kwargs)

    def make(self) -> nn.Sequential:
        """The chain with its weights, or without data where torch's default device is "meta".
        Raises ModelError."""
        return made(self.chain)

    def whole(self, enter: Callable[[int], None]) -> nn.Module:
        """The model in one piece, with its weights. It calls `enter` with i before child i, and
        passes tensors on as stages do (`in_order`)."""
        chain = self.make()
        for index, child in enumerate(chain):
            child.register_forward_pre_hook(lambda module, args, index=index: enter(index))
            child.register_forward_hook(lambda module, args, value: in_order(value))
        return chain

    def learn(self) -> Iterator[BundleForms]:
        """See `bundles`."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            chain = made(self.chain)
            value = part_of(examples(self, _PROBE_ROWS), INPUT)
            yield _forms(value)
            before = "what an example of the data set has"
            for name, child in zip(chain._modules, chain, strict=True):
                where = f"child {name} ({type(child).__name__}) of the chain {self.chain!r}"
                forms = ", ".join(
                    f"{key} {shown_form(*form)}".lstrip() for key, form in _forms(value).items()
                )
                refusal = f"{where} does not take {forms}, {before}"
                with control.users_code(refusal, ArchitectureError, failures=LIBRARY_ERRORS):
                    value = child(value)
                check_value(value, where)
                yield _forms(value)
                before = f"what child {name} returns for an example"

    def users_name(self, child: str, rest: str) -> str:
        """The name that a child's tensor has in the result."""
        return f"{child}.{rest}"


class ChainModel(PreTrainedModel):
    """The children of a chain, as `blocks`. Only its names, shapes and types count: it is made on
    the meta device, and a shard takes its children from the user's chain."""

    config_class = ChainConfig

    def __init__(self, config: ChainConfig) -> None:
        super().__init__(config)
        chain = config.make()
        self.names = list(chain._modules)
        self.blocks = nn.ModuleList(chain)  # `children` would leave out a child that comes again
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights; float32 if no child has float weights."""
        floats = (p.dtype for p in self.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def users_names(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by their names in the user's chain."""
        renamed = {}
        for key, tensor in state.items():
            _, index, rest = key.split(".", 2)
            renamed[self.config.users_name(self.names[int(index)], rest)] = tensor
        return renamed


def made(name: str) -> nn.Sequential:
    """A new chain with the weights that the user's file makes. It is on the meta device if that is
    torch's default. Raises ModelError."""
    chain = control.named(name)
    where = f"model.chain {name!r}"
    if chain is None:
        raise ModelError(
            f"{where}: no imported file has that name",
            hint="add --import FILE.py, with the nn.Sequential or a function that returns one, to"
            " the command on every machine",
        )
    with control.users_code(f"{where} fails", ModelError):
        chain = _copied(chain) if isinstance(chain, nn.Module) else chain()
    if not isinstance(chain, nn.Sequential) or not len(chain):
        found = "an empty one" if isinstance(chain, nn.Sequential) else type(chain).__name__
        raise ModelError(
            f"{where} has to be an nn.Sequential, or a function that returns one; it is {found}",
            hint="it is cut at its children, so each takes what the one before returns",
        )
    return chain.to("meta") if torch.get_default_device().type == "meta" else chain


def _copied(chain: nn.Module) -> nn.Module:
    """A copy with data, even in a fake tensor mode: the tensors in the user's file are real."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"):
        return copy.deepcopy(chain)


def modules_of(name: str) -> str:
    """A digest of a chain's modules and shapes, and of its weights unless a function makes them.
    Files of --import that differ in these have different digests. Raises ModelError."""
    with torch.device("meta"):
        chain = made(name)
    shapes = [(key, tuple(t.shape), str(t.dtype)) for key, t in chain.state_dict().items()]
    digest = hashlib.sha256(repr((chain, shapes)).encode())
    if isinstance(given := control.named(name), nn.Module):
        for tensor in given.state_dict().values():
            digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def bundles(config: ChainConfig) -> tuple[BundleForms, ...]:
    """The forms of all children's inputs in order, and of the last child's output. Raises
    ArchitectureError for a child that does not run, or whose output cannot cross a boundary."""
    key = config.to_json_string()
    if key not in _known:
        talk = logging.getLogger("torch._subclasses.fake_tensor")  # a traceback for each refusal
        before, talk.disabled = talk.disabled, True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _known[key] = tuple(config.learn())
        finally:
            talk.disabled = before
    return _known[key]


def examples(config: ChainConfig, rows: int) -> dict[str, Tensor]:
    """A micro-batch of zeros."""
    return {
        name: torch.zeros(rows, *shape, dtype=TORCH_DTYPES[dtype])
        for name, (shape, dtype) in config.forms.items()
    }


def _forms(value: Value) -> BundleForms:
    return {name: (tuple(t.shape[1:]), t.dtype) for name, t in members(value).items()}


def check_value(value: Any, where: str) -> None:
    """Raise ArchitectureError for a value that cannot go from one machine to the next."""
    problem = None
    tensors = list(value.values()) if isinstance(value, Mapping) else [value]
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or not tensors:
        kinds = sorted({type(part).__name__ for part in tensors if not isinstance(part, Tensor)})
        problem = f"holds {', '.join(kinds) or 'nothing'}"
        if not isinstance(value, Mapping):
            problem = f"is a {kinds[0]}"
    elif isinstance(value, Mapping) and not all(name and isinstance(name, str) for name in value):
        problem = "has a member whose name is no text"
    elif not tensors[0].is_floating_point():
        problem = f"begins with a tensor of {tensors[0].dtype}, which has no gradient"
    elif any(not tensor.dim() or tensor.shape[0] != tensors[0].shape[0] for tensor in tensors):
        problem = "has tensors whose first axis is not that of the examples"
    if problem is not None:
        raise ArchitectureError(
            f"what {where} returns cannot go to the next one on another machine: it {problem}",
            hint="return a tensor, or a dictionary of tensors by name, a floating-point one first;"
            " the first axis of each is that of the examples",
        )


def members(value: Value) -> dict[str, Tensor]:
    """The tensors of a value, by name."""
    return {"": value} if isinstance(value, Tensor) else dict(value)


def joined(tensors: dict[str, Tensor]) -> Value:
    """The value whose `members` these tensors are."""
    return tensors[""] if tensors.keys() == {""} else tensors


class _Contiguous(torch.autograd.Function):
    """Makes a tensor and its gradient contiguous, as they arrive over a wire."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def in_order(value: Value) -> Value:
    """The value with contiguous tensors, as they arrive over a wire. Matrix products round by the
    order in memory, so this gives the next child the same order under every cut."""
    return joined({name: tensor_in_order(t) for name, t in members(value).items()})


def tensor_in_order(tensor: Tensor) -> Tensor:
    """`in_order` of one tensor."""
    ordered: Tensor = _Contiguous.apply(tensor)  # type: ignore[no-untyped-call]
    return ordered


def part_of(batch: Mapping[str, Tensor], role: str) -> Value:
    """The part of a micro-batch for the first child (INPUT), or for the loss (TARGET)."""
    names = [name.partition(".") for name in batch]
    return joined({rest: batch[f"{of}{dot}{rest}"] for of, dot, rest in names if of == role})


def child_flops(config: ChainConfig, index: int, rows: int) -> int:
    """Floating-point operations of the matrix products and convolutions in a child's forward for
    `rows` examples."""
    from torch.utils.flop_counter import FlopCounterMode

    forms = bundles(config)[index].items()
    with torch.device("meta"):
        child = config.make()[index].to("meta")
        value = joined({n: torch.zeros(rows, *shape, dtype=t) for n, (shape, t) in forms})
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            child(value)
    return int(counter.get_total_flops())


def statistics(module: nn.Module) -> dict[str, Tensor]:
    """The buffers in a state_dict, by name: training changes some (running means of BatchNorm)."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
