"""The text part of a multimodal model, without the other parts.

A multimodal class holds more than its language model: vision and audio encoders, projections of
their output, speech decoders. One forward of a tiny copy over token ids alone shows which weights
text uses; the modules without one are taken out after construction. The rest is still the original
class, with its forward, its names and its checkpoint. Nothing here knows an architecture.

A *tower* is such a module, or a parameter beside modules that are used.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework.errors import ArchitectureError
from hetero_framework.models.cut.codebooks import for_model, ids_per_token
from hetero_framework.models.cut.missing_parts import AbsentPart, Placed, stand_in
from hetero_framework.models.cut.side import tensors_at
from hetero_framework.models.cut.tiny import probe_inputs, shrink, stock_class
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library

PLAIN = (str, int, float, bool)

# Asking a weight for its shape or type is no use of the weight.
_QUERIES = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "element_size"}

_LISTED = "docs/architectures.md lists the architectures that can be cut"

_towers: dict[str, tuple[str, ...]] = {}  # by the tiny configurations that this process has met


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration's language model: the stock one (`stock_class`), without its
    towers. Raises ArchitectureError as `towers`."""
    return _without(stock_class(config), towers(config))


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The language model on torch's meta device: names, shapes and types at no cost, in full
    precision. Raises ArchitectureError as `model_class`."""
    return on_meta(model_class(config), config)


def on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model of this class on torch's meta device, in full precision."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = cls._from_config(config)
    return model


def towers(config: PretrainedConfig) -> tuple[str, ...]:
    """Modules of the stock model that a forward over text does not use; empty for a model of one
    part. Raises ArchitectureError where no tiny copy runs on text alone, or transformers has no
    class."""
    cls = stock_class(config)
    if not config.sub_configs:
        return ()
    try:
        tiny = shrink(config)
        key = json.dumps([cls.__name__, tiny.to_dict()], sort_keys=True, default=str)
        if key not in _towers:
            with quiet_library(), torch.random.fork_rng(devices=[]):
                _towers[key] = tuple(_unused(_tiny_model(cls, tiny), tiny))
        return _towers[key]
    except LIBRARY_ERRORS as error:
        raise no_tiny_copy(config, error) from error


def _tiny_model(cls: Any, tiny: PretrainedConfig) -> PreTrainedModel:
    """Raises ArchitectureError where the library cannot build it."""
    try:
        try:
            model: PreTrainedModel = cls._from_config(tiny)
        except ImportError:
            if not stand_in(tiny):
                raise
            model = cls._from_config(tiny)
        return model
    except LIBRARY_ERRORS as error:
        raise no_tiny_copy(tiny, error, built=False) from error


def tower_lines(config: PretrainedConfig) -> list[str]:
    """A note on the towers of a model."""
    if not (gone := towers(config)):
        return []
    return [
        f"text does not use {', '.join(gone)}: neither loaded nor sent, and the same in the result"
    ]


def no_tiny_copy(
    config: PretrainedConfig, error: BaseException, *, built: bool = True
) -> ArchitectureError:
    """The refusal of a model whose tiny copy does not run."""
    on_text = " on text alone" if config.sub_configs else ""
    text, hint, more = f"no tiny copy of a {config.model_type} model runs{on_text}", _LISTED, ""
    if not built:
        text = f"the installed transformers builds no tiny copy of a {config.model_type} model"
        more = "; its config.json, or another version of transformers, would have to let it be"
    elif on_text:
        hint = "its class has to run without pictures and sound; " + hint
    if isinstance(error, ImportError):
        hint = "install on every machine what its class asks for"
    return ArchitectureError(
        f"{text}, so that its cut cannot be verified: {briefly(error)}{more}", hint=hint
    )


def run_on_text(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    """A forward of a tiny model without labels. Raises ArchitectureError where text will not do."""
    try:
        model(**inputs, use_cache=False)
    except LIBRARY_ERRORS as error:
        raise ArchitectureError(
            f"a {model.config.model_type} model does not run on text alone: what else it takes"
            " would have to come with the data and go to the stages that read it"
            f" ({briefly(error)})",
            hint=f"its class has to run without pictures and sound; {_LISTED}",
        ) from error


def lies_in(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a name is one of `modules`, or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def pattern(modules: tuple[str, ...]) -> str:
    """A regular expression for all names that `lies_in` finds."""
    return "|".join(rf"{re.escape(module)}(\..*)?" for module in modules)


class WeightUses(TorchFunctionMode):
    """Sees, by name, every weight that an operation takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names: dict[int, list[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(weight), []).append(name)
        self.used: set[str] = set()

    def on_use(self, name: str) -> None:
        """Called at every use of a weight."""
        self.used.add(name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _QUERIES:
            for _, tensor in tensors_at((args, kwargs)):
                for name in self._names.get(id(tensor), ()):
                    self.on_use(name)
        return func(*args, **(kwargs or {}))


def _unused(model: PreTrainedModel, config: PretrainedConfig) -> Iterator[str]:
    """The towers of a tiny stock model, in the fewest names."""
    model.train(False)
    watch = WeightUses(model)
    called: set[nn.Module] = set()
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: called.add(module))
    count = ids_per_token(model)
    inputs = for_model(probe_inputs(config, ids_per_token=count), count)
    with torch.no_grad(), watch:
        try:
            model(**inputs, use_cache=False)
        except LIBRARY_ERRORS:  # its own loss may not run on text; see `loss_counts_items`
            del inputs["labels"]
            run_on_text(model, inputs)
    yield from _unused_in("", model, watch.used, called)


def _unused_in(
    path: str, module: nn.Module, used: set[str], called: set[nn.Module]
) -> Iterator[str]:
    if isinstance(module, nn.ModuleList):
        return  # some of a list is used: blocks, or experts that these few tokens did not choose
    prefix = f"{path}." if path else ""
    for name, _ in module.named_parameters(recurse=False):
        if prefix + name not in used:
            yield prefix + name
    for name, child in module.named_children():
        weights = {f"{prefix}{name}.{inner}" for inner, _ in child.named_parameters()}
        if weights & used or child in called:
            yield from _unused_in(prefix + name, child, used, called)
        elif weights or isinstance(child, AbsentPart):
            yield prefix + name


class _Tower(Placed):
    """Stands for a tower. What models read of it stays: its plain attributes, and where it is."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        copy_plain_attributes(tower, self)
        if isinstance(tower, PreTrainedModel):
            self.place(tower.dtype)


def copy_plain_attributes(source: nn.Module, target: Any) -> None:
    """Give `target` the numbers, texts and switches of a module that it stands for."""
    for name, value in vars(source).items():
        if isinstance(value, PLAIN) and not hasattr(target, name):
            setattr(target, name, value)


def _without(cls: type[PreTrainedModel], gone: tuple[str, ...]) -> type[PreTrainedModel]:
    """The class whose models have lost the towers `gone` after construction."""
    if not gone:
        return cls

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        for tower in gone:
            _take_out(self, tower)
        self.all_tied_weights_keys = {
            target: source
            for target, source in (self.all_tied_weights_keys or {}).items()
            if not (lies_in(target, gone) or lies_in(source, gone))
        }

    # The library tells its own models from others by module and name.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {"__init__": __init__, **names})


def _take_out(model: nn.Module, tower: str) -> None:
    path, _, name = tower.rpartition(".")
    parent = model.get_submodule(path)
    if name in parent._parameters:
        weight = parent._parameters.pop(name)
        setattr(parent, name, None if weight is None else weight.detach().to("meta"))
    else:
        setattr(parent, name, _Tower(parent.get_submodule(name)))
