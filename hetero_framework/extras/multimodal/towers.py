"""The text part of a multimodal model, without the other parts.

A multimodal class holds more than its language model: vision and audio encoders, projections of
their output, speech decoders. One forward of a tiny copy over token ids alone shows which weights
text uses. Modules without such a weight are taken out after construction. The rest is still the
original class, with its forward, its names and its checkpoint. Nothing here knows an architecture.

A *tower* is such a module, or a parameter beside modules that are used.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from hetero_framework.models.cut.codebooks import for_model, ids_per_token
from hetero_framework.models.cut.language import (
    WeightUses,
    copy_plain_attributes,
    lies_in,
    no_tiny_copy,
    run_on_text,
)
from hetero_framework.models.cut.tiny import probe_inputs, shrink
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library

_found: dict[str, tuple[str, ...]] = {}  # by the tiny configurations that this process has met


class Placed(nn.Module):
    """A module without weights that has a device and a number type, for which models ask."""

    def place(self, dtype: torch.dtype) -> None:
        """Give the module its type; to be called by its constructor."""
        self.register_buffer("_place", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.get_buffer("_place").device

    @property
    def dtype(self) -> torch.dtype:
        return self.get_buffer("_place").dtype


class AbsentPart(Placed, PreTrainedModel):
    """Stands for a part whose package is absent. Text alone does not call it. A call raises
    ImportError with the text `why`."""

    why = ""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.place(torch.get_default_dtype())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(self.why)


def stand_in(config: PretrainedConfig) -> bool:
    """Register an `AbsentPart`, in this process, for each part of a composite configuration whose
    own class needs a package that is absent (timm for Gemma 3n's vision tower). transformers builds
    parts by the types of their configurations. Returns whether there was such a part."""
    registered = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is None or type(part) not in AutoModel._model_mapping:
            continue
        try:
            with torch.device("meta"):
                AutoModel.from_config(copy.deepcopy(part))
        except ImportError as error:
            fields = {"config_class": type(part), "why": briefly(error), "__module__": __name__}
            absent: Any = type("AbsentPart", (AbsentPart,), fields)
            AutoModel.register(type(part), absent, exist_ok=True)
            registered = True
    return registered


def find_towers(cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[str, ...]:
    """The towers of a stock model of `cls`, which a forward over text does not use. Raises
    ArchitectureError where no tiny copy runs on text alone."""
    try:
        tiny = shrink(config)
        key = json.dumps([cls.__name__, tiny.to_dict()], sort_keys=True, default=str)
        if key not in _found:
            with quiet_library(), torch.random.fork_rng(devices=[]):
                _found[key] = tuple(_unused(_tiny_model(cls, tiny), tiny))
        return _found[key]
    except LIBRARY_ERRORS as error:
        raise no_tiny_copy(config, error) from error


def _tiny_model(cls: Any, tiny: PretrainedConfig) -> PreTrainedModel:
    """A tiny model of the class. Raises ArchitectureError where the library cannot build it."""
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
    """Stands for a tower, with what models read of it: its plain attributes, device and type."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        copy_plain_attributes(tower, self)
        if isinstance(tower, PreTrainedModel):
            self.place(tower.dtype)


def without(cls: type[PreTrainedModel], gone: tuple[str, ...]) -> type[PreTrainedModel]:
    """A subclass whose models lose the towers `gone` after construction."""

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
