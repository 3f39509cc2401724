"""Removes everything outside a layer range from a model.

A shard's class is a subclass of the model's own. Absent blocks pass the hidden state on. Absent
weights before the blocks keep a shape without memory, so that the code around them runs. The
forward ends where it reaches the part behind the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework.config import StageSpec
from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.introspect import (
    BlockForm,
    ModelStructure,
    as_text,
    introspect,
    tied_names,
)
from hetero_framework.models.cut.language import (
    PLAIN,
    copy_plain_attributes,
    lies_in,
    meta_model,
    on_meta,
    towers,
    trains_towers,
    without_towers,
)
from hetero_framework.models.cut.side import Call
from hetero_framework.models.cut.tiny import stock_class


@dataclass(frozen=True)
class ShardRange:
    """Layers `[start, end)`. The first shard also has all before the layers, the last all after."""

    start: int
    end: int
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, stage: StageSpec) -> ShardRange:
        return cls(stage.start, stage.end, stage.is_first, stage.is_last)


def ranges_between(bounds: Sequence[int]) -> tuple[ShardRange, ...]:
    """The shards of a whole model: one from each bound to the next."""
    spans, last = enumerate(pairwise(bounds)), len(bounds) - 2
    return tuple(ShardRange(start, end, k == 0, k == last) for k, (start, end) in spans)


_skeletons: dict[str, Skeleton] = {}  # by configuration, in this process


def skeleton_of(config: PretrainedConfig) -> Skeleton:
    """The skeleton of a configuration's model, made once. Raises as `introspect` does."""
    if (asked := as_text(config)) not in _skeletons:
        _skeletons[asked] = Skeleton(config, introspect(config))
    return _skeletons[asked]


class Skeleton:
    """The whole model without its weights: names and order of everything in it."""

    apart: tuple[str, ...] = ()
    """The towers that a shard is loaded with, and that `set_apart` takes out then."""

    def __init__(self, config: PretrainedConfig, structure: ModelStructure) -> None:
        self.structure = structure
        model = meta_model(config)
        blocks: Any = model.get_submodule(structure.blocks)
        if len(blocks) != structure.num_layers:
            text = f"{type(model).__name__} has {len(blocks)} blocks"
            raise ArchitectureError(f"{text}, its tiny copy {structure.num_layers}")
        named = dict(model.named_parameters(remove_duplicate=False))
        self.parameters = [*named]
        self.constants = {name for name, p in named.items() if not p.requires_grad}
        """Parameters that the class freezes, such as tables of sines; many stages may hold them."""
        self.names = {*self.parameters, *model.state_dict()}
        self.modules = {name: index for index, (name, _) in enumerate(model.named_modules())}
        self.towers = towers(config)
        self.tied = tied_names(model)
        self.ties = self._ties_of_places()
        self._local: dict[str, int] = {}
        counts: dict[str, int] = {}
        for name in self.parameters:
            parent = name.rpartition(".")[0]
            self._local[name] = counts[parent] = counts.get(parent, -1) + 1

    sees = False
    """Whether a shard has the towers, trained or not."""

    def for_shard(self, config: PretrainedConfig, sees: bool) -> Skeleton:
        """The skeleton for a shard with all towers, or with none; parameters have the same
        places."""
        if not sees:
            return self._without_towers(config) if trains_towers(config) else self
        seeing, cls = copy.copy(self), stock_class(config)
        seeing.sees = True
        seeing.towers, seeing.apart = (), self.towers
        seeing.structure = replace(self.structure, model_class=cls)
        seeing.names = {*self.names, *on_meta(cls, config).state_dict()}
        return seeing

    def _without_towers(self, config: PretrainedConfig) -> Skeleton:
        text = copy.copy(self)
        text.structure = introspect(plain := without_towers(config))
        text.constants = {name for name in self.constants if not lies_in(name, towers(plain))}
        return text

    def parameter_index(self, name: str) -> tuple[int, ...]:
        """A parameter's position in the whole model: (module, place in it). An adapter's parameter
        follows those of the deepest module of the whole model that is in its name."""
        parts = name.split(".")
        for length in range(len(parts) - 1, -1, -1):
            module = ".".join(parts[:length])
            if module in self.modules:
                return self.modules[module], self._local.get(name, len(self.parameters))
        raise AssertionError("the root module has the empty name")

    def layer_of(self, name: str) -> int | None:
        """The block that a name lies in, or None outside the blocks."""
        prefix = f"{self.structure.blocks}."
        index = name.removeprefix(prefix).partition(".")[0]
        return int(index) if name.startswith(prefix) and index.isdigit() else None

    def _ties_of_places(self) -> dict[str, str]:
        """{target: source} of the ties to a weight of an earlier place, one target for each place,
        in the order of places."""
        targets: dict[tuple[int, str], str] = {}
        for target, source in self.tied.items():
            here, there = self._place(target), self._place(source)
            if here is not None and there is not None and there < here:
                targets.setdefault((here, source), target)
        return {target: source for (_, source), target in sorted(targets.items())}

    def _place(self, name: str) -> int | None:
        """The block that a parameter lies in; -1 before the blocks, their number behind them."""
        layer = self.layer_of(name)
        return self.structure.owner.get(name) if layer is None else layer

    def beside(self, target: str) -> list[str]:
        """The names at a target's place that are tied to the same weight, `target` among them."""
        source, place = self.ties[target], self._place(target)
        return [n for n, s in self.tied.items() if s == source and self._place(n) == place]

    def targets(self, rng: ShardRange) -> list[str]:
        """The targets of `ties` that a shard has, in the order of their places."""
        return [target for target in self.ties if self.holds(target, rng)]

    def holds(self, name: str, rng: ShardRange) -> bool:
        """Whether a shard has the parameter or module of this name."""
        layer = self.layer_of(name)
        if layer is not None:
            return rng.start <= layer < rng.end
        owner = self.structure.owner.get(name)
        if owner is None:
            inside = [o for n, o in self.structure.owner.items() if n.startswith(f"{name}.")]
            return not inside or any(self._owns(o, rng) for o in inside)
        return self._owns(owner, rng)

    @property
    def is_separable(self) -> bool:
        """Whether the model neither shares, ties nor rescales weights of its blocks."""
        tied = {*self.ties, *self.ties.values()}
        shared = self.structure.shared.keys() - tied
        tied_blocks = [name for name in tied if self.layer_of(name) is not None]
        return not (shared or tied_blocks or self.structure.reaches_into_blocks)

    def _owns(self, owner: int, rng: ShardRange) -> bool:
        if owner < 0:
            return rng.is_first
        if owner >= self.structure.num_layers:
            return rng.is_last
        return rng.start <= owner < rng.end


def check_cut(config: PretrainedConfig, whole: Skeleton, rng: ShardRange) -> None:
    """Raise ArchitectureError for an unknown routers' loss, for layers that are skipped at random,
    and for weights that layers on both sides of a cut share."""
    text = config.get_text_config()
    structure = whole.structure
    if getattr(text, "output_router_logits", False):
        lacks = None if structure.reports else "transformers makes no loss of its routers' logits"
        if not structure.loss_counts_items:
            lacks = "its loss is not a sum over tokens and what the routers add"
        if lacks is not None:
            raise ArchitectureError(
                f"output_router_logits is set, but of a {config.model_type} model {lacks}",
                hint="set output_router_logits to false in the model's configuration",
            )
    for name in ("layerdrop", "layer_dropout"):
        if getattr(text, name, 0.0):
            raise ArchitectureError(
                f"{name} = {getattr(text, name)} skips layers at random, over all stages",
                hint=f"set {name} to 0 in the model's configuration",
            )
    if rng.is_first and rng.is_last:
        return
    tied = {*whole.tied, *whole.tied.values()}
    for name, layers in sorted(structure.shared.items()):
        inside = [rng.start <= layer < rng.end for layer in layers]
        if name not in tied and any(inside) and not all(inside):
            shared = f"{name} is shared by layers {list(layers)} of different stages"
            raise ArchitectureError(shared)


class Captured(Exception):
    """Ends a forward once the hidden state has left the last block of a shard."""


class PassThrough(nn.Module):
    """Stands for an absent block: returns the hidden state it is given. Attributes that models read
    of their blocks stay: plain ones (`attention_type`), and tensors without memory
    (`mamba.mup_vector`). Methods that a model calls on all blocks do nothing. The modules named in
    `reporting` stay without weights, and return what `report` is given."""

    def __init__(self, block: nn.Module, form: BlockForm, reporting: Sequence[str] = ()) -> None:
        super().__init__()
        self._form = form
        # Not among the modules yet: loading and quantising must not see them.
        self._reporting = {name: _without_weights(block.get_submodule(name)) for name in reporting}
        self._block_class = type(block)
        # Set by the shard: what to do with the hidden state, and the call, on their way through.
        self.on_call: Callable[[torch.Tensor, Call], torch.Tensor] | None = None
        _copy_outline(block, self)

    def __getattr__(self, name: str) -> Any:
        of_class = getattr(self.__dict__.get("_block_class"), name, None)
        if isinstance(of_class, PLAIN):
            return of_class
        if callable(of_class):
            return lambda *args, **kwargs: None
        return super().__getattr__(name)

    def let_report(self) -> None:
        """Put the reporting modules in their places, where the model looks for them."""
        for name in sorted(self._reporting):  # outer modules come first
            path, _, child = name.rpartition(".")
            parent: nn.Module = self
            for step in path.split(".") if path else ():
                parent = _inner(parent, step)
            if parent._modules.get(child) is None:
                vars(parent).pop(child, None)
                parent.add_module(child, self._reporting[name])

    def report(self, module: str, output: Any) -> None:
        """Have a reporting module return this output, with all that the model has hooked to it."""
        reporting = self._reporting[module]
        reporting.forward = lambda: output
        try:
            reporting()
        finally:
            del reporting.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_BSD = self._form.hidden(args, kwargs)
        if self.on_call is not None:
            hidden_BSD = self.on_call(hidden_BSD, (args, kwargs))
        return self._form.wrap(hidden_BSD)


def _without_weights(module: nn.Module) -> nn.Module:
    """Turn the tensors of a module into attributes without memory. Returns the module."""
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            taken = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            for name, tensor in taken.items():
                del tensors[name]
                setattr(inner, name, tensor.detach().to("meta"))
    return module


def _inner(parent: nn.Module, name: str) -> nn.Module:
    """The module of this name in an absent block, made of its outline if need be."""
    module = parent._modules.get(name)
    if module is None:
        outline = vars(parent).pop(name, None)
        module = nn.Module()
        vars(module).update(vars(outline) if isinstance(outline, SimpleNamespace) else {})
        parent.add_module(name, module)
    return module


class Lender(nn.Module):
    """Stands for an absent block while a shard is loaded. It has the modules of the block that
    targets in this shard are tied to. Then `stand_in` takes its place."""

    stand_in: PassThrough

    def __init__(self, stand_in: PassThrough, lent: dict[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["stand_in"] = stand_in  # not among the modules: nothing is loaded into it
        for path, module in lent.items():
            parent: nn.Module = self
            *steps, child = path.split(".")
            for step in steps:
                parent = _inner(parent, step)
            parent.add_module(child, module)


def _lent_modules(
    block: nn.Module, prefix: str, present: Callable[[str], bool]
) -> dict[str, nn.Module]:
    """The modules of a block, by path, that have a `present` parameter of their own."""
    return {
        path: module
        for path, module in block.named_modules()
        if any(present(f"{prefix}.{path}.{n}") for n, _ in module.named_parameters(recurse=False))
    }


class AbsentLinear(nn.Module):
    """Stands for an absent projection before the blocks; its output is not used."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.out_features: int
        copy_plain_attributes(linear, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


class AfterBlocks(nn.Module):
    """Stands for an absent module after the blocks: reaching it ends the forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        copy_plain_attributes(module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Captured


def _copy_outline(source: nn.Module, target: Any) -> None:
    """Give `target` plain attributes and tensors' shapes of a module and of the modules in it."""
    copy_plain_attributes(source, target)
    tensors = [*source.named_parameters(recurse=False), *source.named_buffers(recurse=False)]
    for name, tensor in tensors:
        setattr(target, name, tensor.detach().to("meta"))
    for name, child in source.named_children():
        setattr(target, name, _outline(child))


def _outline(module: nn.Module) -> Any:
    if isinstance(module, nn.ModuleList):
        return [_outline(child) for child in module]
    if isinstance(module, nn.ModuleDict):
        return {name: _outline(child) for name, child in module.items()}
    outline = SimpleNamespace()
    _copy_outline(module, outline)
    return outline


def shard_class(whole: Skeleton, present: Callable[[str], bool]) -> type[PreTrainedModel]:
    """A subclass of the model's class that after construction takes out all that is not `present`.
    `present` tests the names of blocks and of the parameters outside blocks."""
    base = whole.structure.model_class

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        _prune(self, whole, present)

    # The library tells its own models from others by module and name.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {"__init__": __init__, **names})


def _prune(model: Any, whole: Skeleton, present: Callable[[str], bool]) -> None:
    structure = whole.structure
    blocks = model.get_submodule(structure.blocks)
    for index, form in enumerate(structure.forms):
        if not present(f"{structure.blocks}.{index}"):
            reporting = [report.module for report in structure.reports if report.block == index]
            block = blocks[index]
            lent = _lent_modules(block, f"{structure.blocks}.{index}", present)
            blocks[index] = PassThrough(block, form, reporting)
            if lent:
                blocks[index] = Lender(blocks[index], lent)
    absent: dict[str, list[str]] = {}
    for name in structure.owner:
        if not present(name):
            path, _, attribute = name.rpartition(".")
            absent.setdefault(path, []).append(attribute)
    model._hetero_absent = []
    for path, attributes in absent.items():
        owner = structure.owner[f"{path}.{attributes[0]}".lstrip(".")]
        _take_out(model, path, attributes, after=owner >= structure.num_layers)
    _restrict_tying(model, present)
    # Weights of other stages are expected. Older versions of transformers have a list here.
    as_set = isinstance(model._keys_to_ignore_on_load_unexpected, set)
    model._keys_to_ignore_on_load_unexpected = {".*"} if as_set else [".*"]


def _take_out(model: Any, path: str, attributes: list[str], *, after: bool) -> None:
    """Remove parameters of the module at `path`, leaving shapes without memory behind."""
    module = model.get_submodule(path)
    weights = {name: module._parameters.pop(name) for name in attributes}
    leaf = path and not any(True for _ in module.children())
    emptied = not any(p is not None for p in module._parameters.values())
    if leaf and emptied and (after or isinstance(module, nn.Linear)):
        parent_path, _, child = path.rpartition(".")
        module = AfterBlocks(module) if after else AbsentLinear(module)
        setattr(model.get_submodule(parent_path), child, module)
    for name, weight in weights.items():
        setattr(module, name, weight.detach())
        model._hetero_absent.append((module, name))


def _restrict_tying(model: Any, present: Callable[[str], bool]) -> None:
    """Take ties out of the library's tables unless both ends are here."""
    for prefix, submodule in model.named_modules():
        if isinstance(submodule, PreTrainedModel):
            module: Any = submodule
            dot = f"{prefix}." if prefix else ""
            module._tied_weights_keys = None
            module.all_tied_weights_keys = {
                target: source
                for target, source in (module.all_tied_weights_keys or {}).items()
                if present(dot + target) and present(dot + source)
            }


def fill_absent(model: Any) -> None:
    """Give absent weights that a forward may still touch a shape but no memory (zero stride)."""
    device, dtype = model.device, model.dtype
    for module, name in model._hetero_absent:
        shape = getattr(module, name).shape
        setattr(module, name, torch.zeros((), dtype=dtype, device=device).expand(shape))
    del model._hetero_absent


def outside(
    model: Any, whole: Skeleton, rng: ShardRange, wanted: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """The `wanted` modules of a shard before and after its blocks, by name: modules without inner
    modules whose parameters are all the shard's."""
    owned = {name for name in whole.structure.owner if whole.holds(name, rng)}
    modules = {}
    for path in sorted({name.rpartition(".")[0] for name in owned} - {""}):
        module = model.get_submodule(path)
        names = {f"{path}.{name}" for name, _ in module.named_parameters()}
        if names and names <= owned and not any(True for _ in module.children()) and wanted(module):
            modules[path] = module
    return modules


def untie(model: Any, whole: Skeleton, rng: ShardRange, targets: Sequence[str]) -> None:
    """Make these targets separate parameters, so that each place collects its own gradient, and
    take out the lent modules. All tied weights that are here keep one storage."""
    weights = {whole.ties[target]: model.get_parameter(whole.ties[target]) for target in targets}
    for target in targets:
        weight = weights[whole.ties[target]]
        parameter = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        for name in whole.beside(target):
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, parameter)
            model.all_tied_weights_keys.pop(name, None)
    blocks = model.get_submodule(whole.structure.blocks)
    for index, block in enumerate(blocks):
        if isinstance(block, Lender):
            blocks[index] = block.stand_in
    model._hetero_absent = []
    for source in weights:
        if not whole.holds(source, rng) and whole.layer_of(source) is None:
            path, _, attribute = source.rpartition(".")
            _take_out(model, path, [attribute], after=False)
    fill_absent(model)
