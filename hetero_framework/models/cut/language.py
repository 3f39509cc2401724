"""The language model of a configuration: its class, and a copy without weights.

A multimodal class also has modules that text does not use: its *towers*
(extras/multimodal/towers.py). They are taken out of the class, unless a run trains them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework import registry
from hetero_framework.config import Config
from hetero_framework.config.objectives import shows_pictures
from hetero_framework.errors import ArchitectureError, ConfigError
from hetero_framework.models.cut.side import tensors_at
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.library import LIBRARY_ERRORS, briefly

PLAIN = (str, int, float, bool)

# Asking a weight for its shape or type does not count as a use of the weight.
_QUERIES = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "element_size"}

_TRAINED = "trained_towers"  # in a configuration: true, or names of modules
_LISTED = "docs/architectures.md lists the architectures that can be cut"


def train_towers(config: PretrainedConfig, which: bool | Sequence[str]) -> None:
    """Enter in a configuration that the towers are a part of the model that is trained: all, or the
    modules in them with these names."""
    setattr(config, _TRAINED, which if isinstance(which, bool) else [*which])


def trains_towers(config: PretrainedConfig) -> bool:
    """Whether the towers are a part of the model that is trained."""
    return bool(getattr(config, _TRAINED, False))


def without_towers(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model alone, without the mark of `train_towers`."""
    plain = copy.deepcopy(config)
    if hasattr(plain, _TRAINED):
        delattr(plain, _TRAINED)
    return plain


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration's language model: the stock class (`stock_class`) without its
    towers, unless they are trained. Raises ArchitectureError as `towers`."""
    cls, gone = stock_class(config), towers(config)
    return registry.find("multimodal", "class")(cls, gone) if gone else cls


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The language model on torch's meta device: names, shapes and types at no cost, in full
    precision. What is not trained of its towers is frozen. Raises ArchitectureError as
    `model_class`, and ConfigError for the name of a tower's module that it does not have."""
    model = on_meta(model_class(config), config)
    if isinstance(names := getattr(config, _TRAINED, None), list):
        _freeze_others(model, all_towers(config), names)
    return model


def _freeze_others(model: PreTrainedModel, gone: tuple[str, ...], names: list[str]) -> None:
    """Freeze what is in the towers, except the modules with these names."""
    modules = {name for name, _ in model.named_modules() if lies_in(name, gone)}
    trained = set[str]()
    for name in names:
        if not (found := {m for m in modules if f".{m}".endswith(f".{name}")}):
            leaves = sorted({leaf for m in modules if not (leaf := m.rpartition(".")[2]).isdigit()})
            raise ConfigError(
                f"model.train_towers: no module that sees is called {name!r}",
                hint=f"modules that can be named: {', '.join(leaves)}",
            )
        trained |= found
    for name, parameter in model.named_parameters():
        if lies_in(name, gone) and not lies_in(name, (*trained,)):
            parameter.requires_grad_(False)


def on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model of this class on torch's meta device, in full precision."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = cls._from_config(config)
    return model


def towers(config: PretrainedConfig) -> tuple[str, ...]:
    """The towers that are no part of the model that is trained. Raises as `all_towers`."""
    return () if trains_towers(config) else all_towers(config)


def all_towers(config: PretrainedConfig) -> tuple[str, ...]:
    """Modules of the stock model that a forward over text does not use; empty for a model of one
    part. Raises ArchitectureError where no tiny copy runs on text alone, or transformers has no
    class, and ConfigError where the extra for models of several parts is absent."""
    cls = stock_class(config)
    if not config.sub_configs:
        return ()
    what = f"a {config.model_type} model, which has several parts,"
    found: tuple[str, ...] = registry.needed("multimodal", "towers", what)(cls, config)
    return found


def seeing_layers(config: PretrainedConfig) -> int:
    """How many of its first layers the model adds pictures to, past the towers (DeepStack)."""
    vision = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def first_layers(config: Config, model: PretrainedConfig) -> int:
    """The fewest layers of a run's first stage."""
    return seeing_layers(model) if shows_pictures(config.training.data_kind) else 0


def tower_lines(config: PretrainedConfig, *, sees: bool = False) -> list[str]:
    """A note on the towers of a model; `sees` says whether the data have pictures."""
    if not (gone := all_towers(config)):
        return []
    names = ", ".join(gone)
    if trains_towers(config):
        which = getattr(config, _TRAINED)
        trained = "all" if which is True else ", ".join(which)
        return [f"the first stage has {names}; to be trained of them: {trained}"]
    if sees:
        return [f"the first stage has {names}: frozen, and the same in the result"]
    return [f"text does not use {names}: neither loaded nor sent, and the same in the result"]


def set_apart(model: PreTrainedModel, gone: tuple[str, ...]) -> list[nn.Module]:
    """Take the towers out of a whole model's modules and parameters, which are those of training,
    and leave them where its forward finds them. Returns the towers that are modules, frozen."""
    modules = []
    for name in gone:
        path, _, own = name.rpartition(".")
        parent = model.get_submodule(path)
        tower = getattr(parent, own)
        if isinstance(tower, nn.Module):
            modules.append(tower.requires_grad_(False))
        delattr(parent, own)
        vars(parent)[own] = tower.detach() if isinstance(tower, torch.Tensor) else tower
    return modules


def tower_layers(tower: nn.Module) -> list[nn.Module]:
    """The layers of a tower, which run one after another: its largest list of modules."""
    lists = [part for part in tower.modules() if isinstance(part, nn.ModuleList)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in lists]
    return [*max(zip(sizes, lists, strict=True), key=lambda pair: pair[0], default=(0, ()))[1]]


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
    """Run a tiny model forward, without labels. Raises ArchitectureError if text is not enough."""
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


def copy_plain_attributes(source: nn.Module, target: Any) -> None:
    """Give `target` the numbers, texts and switches of a module that it stands for."""
    for name, value in vars(source).items():
        if isinstance(value, PLAIN) and not hasattr(target, name):
            setattr(target, name, value)
