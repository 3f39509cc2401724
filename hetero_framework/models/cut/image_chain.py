"""Image classifiers of transformers as chains: the part in front of their blocks, each block, and
the part behind them.

Each part is the model's own class and runs its own forward. Weights of other parts are on the meta
device, where they cost nothing: sizes and switches that a block is given, and all that the code
around blocks makes of their outputs' shapes, are those of that forward. A tensor that goes around
the blocks would meet one without data, and such a model is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig

from hetero_framework.errors import ArchitectureError, ModelError
from hetero_framework.models.cut.chain import BundleForms, ChainConfig
from hetero_framework.models.cut.language import WeightUses
from hetero_framework.models.cut.side import Way, put_at, tensors_at
from hetero_framework.models.library import LIBRARY_ERRORS, one_line, quiet_library
from hetero_framework.units import plural

_META = torch.device("meta")
_PROBE_ROWS = 3


class ImageConfig(ChainConfig):
    """The configuration of a classifier as a chain: `classifier` is transformers' own, as JSON
    types; its weights are those of `source`, or random without one."""

    model_type = "image_chain"

    def __init__(
        self,
        classifier: dict[str, Any] | None = None,
        source: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.classifier, self.source, self.revision = classifier or {}, source, revision
        super().__init__(**kwargs)

    @property
    def of_classifier(self) -> PretrainedConfig:
        """transformers' own, which names its class."""
        fields = dict(self.classifier)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        cls: Any = AutoModelForImageClassification._model_mapping[type(config)]
        config.architectures = [cls.__name__]
        return config

    def make(self) -> nn.Sequential:
        """The parts, with weights unless the meta device is torch's default."""
        empty, weights = self._empty(), None
        blocks, calls = _blocks_of(empty, self._pixels)
        owners = _owners(empty, blocks, calls)
        if torch.get_default_device() != _META:
            weights, new = self._loaded()
            if lost := sorted(name for name in new if owners[name] != calls.count + 1):
                raise ModelError(
                    f"the checkpoint {self.source!r} lacks {plural(len(lost), 'weight')} that its"
                    f" config.json asks for: {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}"
                )
        parts = range(calls.count + 2)
        held = [{name for name, owner in owners.items() if owner == k} for k in parts]
        made = (ImagePart(empty, blocks, k, held[k], weights, self._pixels) for k in parts)
        return nn.Sequential(*made)

    def learn(self) -> Iterator[BundleForms]:
        empty = self._empty()
        _, calls = _blocks_of(empty, self._pixels)
        for tensor in (calls.pixels, *calls.received, calls.left, calls.logits):
            yield {"": (tuple(tensor.shape[1:]), torch.float32)}

    def users_name(self, child: str, rest: str) -> str:
        return rest.removeprefix("model.")

    @property
    def _pixels(self) -> tuple[int, ...]:
        shape, _ = self.forms["input"]
        return tuple(shape)

    def _empty(self) -> Any:
        with quiet_library(), _META:
            return AutoModelForImageClassification.from_config(self.of_classifier)

    def new_weights(self) -> list[str]:
        """The weights that the checkpoint lacks, so that they begin at random."""
        return self._loaded()[1]

    def _loaded(self) -> tuple[dict[str, Tensor], list[str]]:
        """All parameters and buffers, by name, and the names that the checkpoint lacks or has for
        other labels."""
        model: Any
        new: list[str] = []
        with quiet_library():
            if self.source is None:
                model = AutoModelForImageClassification.from_config(self.of_classifier)
            else:
                model, report = AutoModelForImageClassification.from_pretrained(
                    self.source,
                    revision=self.revision or "main",
                    config=self.of_classifier,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # a head for other labels is a new one
                    output_loading_info=True,
                )
                unlike = (name for name, *_ in report["mismatched_keys"])
                new = sorted({*report["missing_keys"], *unlike})
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}, new


def as_saved(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration that a result has: that of the classifier, where it is one of images."""
    return config.of_classifier if isinstance(config, ImageConfig) else config


class _Calls:
    """The calls of the blocks in one forward on the meta device."""

    def __init__(self, model: Any, blocks: list[nn.Module], pixels: tuple[int, ...]) -> None:
        self.pixels = torch.empty(_PROBE_ROWS, *pixels, device=_META)
        self.order: list[int] = []
        self.received: list[Tensor] = []
        self.left = self.pixels
        self.phases: dict[str, set[int]] = {}
        self._phase = -1
        handles = []
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._before(index), with_kwargs=True))
            handles.append(block.register_forward_hook(self._after(index)))
        watch = _Uses(model, self)
        try:
            with torch.no_grad(), watch:
                self.logits: Tensor = model(pixel_values=self.pixels).logits
        finally:
            for handle in handles:
                handle.remove()

    @property
    def count(self) -> int:
        return len(self.order)

    def note(self, name: str) -> None:
        self.phases.setdefault(name, set()).add(self._phase)

    def _before(self, index: int) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._phase = 2 * index
            self.order.append(index)
            self.received.append(_first((args, kwargs))[1])

        return before

    def _after(self, index: int) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._phase = 2 * index + 1
            self.left = _first(output)[1]

        return after


class _Uses(WeightUses):
    """Tells `calls` the use of each parameter and buffer."""

    def __init__(self, model: nn.Module, calls: _Calls) -> None:
        super().__init__(model)
        for name, buffer in model.named_buffers():
            self._names.setdefault(id(buffer), []).append(name)
        self._calls = calls

    def on_use(self, name: str) -> None:
        self._calls.note(name)


def _first(value: Any) -> tuple[Way, Tensor]:
    """The hidden state of a block's call or output: its first tensor."""
    return next(iter(tensors_at(value)))


def _blocks_of(model: Any, pixels: tuple[int, ...]) -> tuple[str, _Calls]:
    """The heaviest list of blocks that run once each, in order. Raises ArchitectureError."""
    lists = [
        (sum(p.numel() for p in module.parameters()), name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    name = type(model).__name__
    for _, path, blocks in sorted(lists, key=lambda found: -found[0]):
        try:
            calls = _Calls(model, blocks, pixels)
        except LIBRARY_ERRORS as error:
            raise ArchitectureError(
                f"{name} does not run on pictures of {' x '.join(map(str, pixels))}:"
                f" {one_line(error)}",
                hint="the data set has to give what its image processor makes",
            ) from error
        if calls.order == list(range(len(blocks))):
            return path, calls
    raise ArchitectureError(
        f"{name} has no list of blocks that run once each, in order",
        hint="only models whose layers form one chain can be cut",
    )


def _owners(model: Any, blocks: str, calls: _Calls) -> dict[str, int]:
    """The part of each parameter and buffer. Raises ArchitectureError for one of two parts."""
    last, owners = 2 * calls.count - 1, {}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, _ in named:
        prefix, _, rest = name.partition(f"{blocks}.")
        if not prefix:
            owners[name] = 1 + int(rest.partition(".")[0])
            continue
        phases = calls.phases.get(name, {-1})
        if min(phases) >= last or max(phases) < 0:
            owners[name] = 0 if max(phases) < 0 else calls.count + 1
            continue
        raise ArchitectureError(
            f"{type(model).__name__} uses {name} between or beside its blocks ({blocks}), and each"
            " part of a chain has its own weights"
        )
    return owners


class _Left(Exception):
    """Ends a forward at the end of a part."""


class ImagePart(nn.Module):
    """Part `number` of a classifier: 0 is in front of its blocks, k is block k - 1, and the last is
    behind them."""

    def __init__(
        self,
        empty: nn.Module,
        blocks: str,
        number: int,
        held: set[str],
        weights: dict[str, Tensor] | None,
        pixels: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.model: Any = copy.deepcopy(empty)
        self._number, self._pixels = number, pixels
        self._absent: list[tuple[nn.Module, str]] = []
        for path, module in self.model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name in [n for n, tensor in tensors.items() if tensor is not None]:
                    full = f"{path}.{name}".lstrip(".")
                    if full not in held:
                        setattr(module, name, tensors.pop(name).detach())
                        self._absent.append((module, name))
                    elif weights is not None:
                        tensors[name] = weights[full]
        # Beside the modules: theirs are in the model already.
        self._blocks: tuple[Any, ...] = tuple(self.model.get_submodule(blocks).children())
        self._hidden: Any = None
        self._outputs: dict[tuple[int, int], Any] = {}
        for index, block in enumerate(self._blocks):
            if index != number - 1:
                block.forward = partial(self._absent_block, index, block.forward)
            enters, leaves = self._entering(index), self._leaving(index)
            block.register_forward_pre_hook(enters, with_kwargs=True)
            block.register_forward_hook(leaves)

    def forward(self, value: Tensor) -> Tensor:
        """Pictures or hidden states to hidden states, or to logits."""
        self._hidden, pixels = value, value
        if self._number:
            module, name = self._absent[0]
            device = getattr(module, name).device  # a pretended one where sizes are counted
            pixels = torch.empty(len(value), *self._pixels, device=device)
        try:
            logits: Tensor = self.model(pixel_values=pixels).logits
        except _Left:
            logits = self._hidden
        finally:
            self._hidden = None
        return logits

    def _absent_block(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """The output of a block without data, made once for each size of a micro-batch."""
        key = index, len(_first((args, kwargs))[1])
        if key not in self._outputs:
            self._outputs[key] = forward(*args, **kwargs)
        return copy.copy(self._outputs[key])

    def _entering(self, index: int) -> Any:
        def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._number == 0:
                self._hidden = _first((args, kwargs))[1]
                raise _Left
            if index == self._number - 1:
                way, _ = _first((args, kwargs))
                return put_at((args, dict(kwargs)), way, self._hidden)
            return None

        return entering

    def _leaving(self, index: int) -> Any:
        def leaving(module: nn.Module, args: Any, output: Any) -> Any:
            if index == self._number - 1:
                self._hidden = _first(output)[1]
                raise _Left
            if index == len(self._blocks) - 1:
                way, _ = _first(output)
                return put_at(output, way, self._hidden)
            return None

        return leaving
