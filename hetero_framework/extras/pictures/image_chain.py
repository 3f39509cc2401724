"""Image classifiers of transformers as chains of parts, each with one block at most.

There is a part in front of the blocks, one for each block, and one behind them. Each is a model of
the original class and runs its whole forward, in which the blocks of other parts return outputs
without data (on the meta device). So the sizes and switches that a block gets, and all that code
around blocks computes from shapes, are as in the whole model. A part behind the first block gets
the hidden state as the output of the block before, so code between blocks runs, too. A tensor that
goes around the blocks would meet a tensor without data: such a model is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from hetero_framework.config import ModelConfig, TrainingConfig
from hetero_framework.errors import ArchitectureError, DataError, ModelError
from hetero_framework.extras.chains.chain import (
    INPUT,
    TARGET,
    BundleForms,
    ChainConfig,
    tensor_in_order,
)
from hetero_framework.extras.chains.chain_family import Chains, forms_of
from hetero_framework.extras.chains.chain_objective import ChainLoss
from hetero_framework.extras.classification.heads import set_labels
from hetero_framework.models.cut.language import WeightUses
from hetero_framework.models.cut.side import Way, put_at, tensors_at
from hetero_framework.models.cut.tiny import config_for, stock_class
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.library import LIBRARY_ERRORS, briefly, quiet_library
from hetero_framework.units import plural

_META = torch.device("meta")
_PROBE_ROWS = 31  # a first axis that is a multiple of this prime is taken for the pictures


class ImageConfig(ChainConfig):
    """The configuration of a classifier as a chain. `classifier` is transformers' own
    configuration, as JSON types. The weights come from `source`; without it they are random."""

    model_type = "image-classification"

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
        """transformers' own configuration, which names the model's class."""
        fields = dict(self.classifier)
        return config_for(
            AutoConfig.for_model(fields.pop("model_type"), **fields), "image-classification"
        )

    def make(self) -> nn.Sequential:
        """The parts, with weights unless the meta device is torch's default."""
        empty, weights = self._empty(), None
        blocks, calls = _blocks_of(empty, self._pixels)
        owners = _owners(empty, blocks, calls)
        if torch.get_default_device() != _META:
            model, new = self._loaded()
            weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            if lost := sorted(name for name in new if owners[name] != calls.count + 1):
                raise ModelError(
                    f"the checkpoint {self.source!r} lacks {plural(len(lost), 'weight')} that its"
                    f" config.json asks for: {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}"
                )
        parts = range(calls.count + 2)
        held = [{name for name, owner in owners.items() if owner == k} for k in parts]
        made = (ImagePart(empty, blocks, k, held[k], weights, calls) for k in parts)
        return nn.Sequential(*made)

    def whole(self, enter: Callable[[int], None]) -> nn.Module:
        blocks, _ = _blocks_of(self._empty(), self._pixels)
        return _Whole(self._loaded()[0], blocks, enter)

    def learn(self) -> Iterator[BundleForms]:
        model = self._empty()
        _, calls = _blocks_of(model, self._pixels)
        for tensor in (calls.pixels, calls.received, *calls.left, calls.logits):
            if len(tensor) != _PROBE_ROWS or not tensor.is_floating_point():
                raise ArchitectureError(
                    f"blocks of {type(model).__name__} return a tensor whose first axis is not that"
                    " of the pictures"
                )
            yield {"": (tuple(tensor.shape[1:]), torch.float32)}

    def users_name(self, child: str, rest: str) -> str:
        return rest.removeprefix("model.")

    def new_weights(self) -> list[str]:
        """The weights that the checkpoint lacks, so that they begin at random."""
        return self._loaded()[1]

    @property
    def _pixels(self) -> tuple[int, ...]:
        shape, _ = self.forms["input"]
        return tuple(shape)

    def _empty(self) -> Any:
        cls: Any = stock_class(self.of_classifier)
        try:
            with quiet_library(), _META:
                return cls._from_config(self.of_classifier)
        except LIBRARY_ERRORS as error:
            raise ArchitectureError(f"{cls.__name__} cannot be made: {briefly(error)}") from error

    def _loaded(self) -> tuple[Any, list[str]]:
        """The model, and the names of its weights that the checkpoint lacks or has for other
        labels."""
        config = self.of_classifier
        cls: Any = stock_class(config)
        with quiet_library():
            if self.source is None:
                return cls._from_config(config), []
            model, report = cls.from_pretrained(
                self.source,
                revision=self.revision or "main",
                config=config,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # a head for other labels is a new one
                output_loading_info=True,
            )
        unlike = (name for name, *_ in report["mismatched_keys"])
        return model, sorted({*report["missing_keys"], *unlike})


class _Calls:
    """The calls of the blocks in one forward on the meta device: the hidden state that the first
    block gets, each block's output, and the hidden state in that output."""

    def __init__(self, model: Any, blocks: list[nn.Module], pixels: tuple[int, ...]) -> None:
        self.pixels = torch.empty(_PROBE_ROWS, *pixels, device=_META)
        self.order: list[int] = []
        self.received = self.pixels
        self.outputs: list[Any] = []
        self.left: list[Tensor] = []
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
            if not self.order:
                self.received = _first((args, kwargs))[1]
            self._phase = 2 * index
            self.order.append(index)

        return before

    def _after(self, index: int) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._phase = 2 * index + 1
            self.outputs.append(output)
            self.left.append(_first(output)[1])

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
                f" {briefly(error)}",
                hint="the data set has to give what its image processor makes",
            ) from error
        if calls.order == list(range(len(blocks))):
            return path, calls
    raise ArchitectureError(
        f"{name} has no list of blocks that run once each, in order",
        hint="only models whose layers form one chain can be cut",
    )


def _owners(model: Any, blocks: str, calls: _Calls) -> dict[str, int]:
    """The part of each parameter and buffer. Raises ArchitectureError where two parts use one."""
    owners = {}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        prefix, _, rest = name.partition(f"{blocks}.")
        inside = {1 + int(rest.partition(".")[0])} if not prefix else set[int]()
        # Code between two blocks belongs to the later block's part.
        parts = inside | {0 if p < 0 else (p + 1) // 2 + 1 for p in calls.phases.get(name, ())}
        if len(parts) > 1:
            raise ArchitectureError(
                f"{type(model).__name__} uses {name} in several places among its blocks ({blocks}),"
                " and each part of a chain has its own weights"
            )
        owners[name] = parts.pop() if parts else 0
    return owners


class _Whole(nn.Module):
    """A classifier in one piece; see `ChainConfig.whole`."""

    def __init__(self, model: Any, blocks: str, enter: Callable[[int], None]) -> None:
        super().__init__()
        self.model, self._enter = model, enter
        for index, block in enumerate(model.get_submodule(blocks)):
            if index == 0:
                block.register_forward_pre_hook(self._first_entered, with_kwargs=True)
            block.register_forward_hook(self._left(index + 2))

    def forward(self, pixels: Tensor) -> Any:
        self._enter(0)
        return tensor_in_order(self.model(pixel_values=pixels).logits)

    def _first_entered(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        way, hidden = _first((args, kwargs))
        self._enter(1)
        return put_at((args, dict(kwargs)), way, tensor_in_order(hidden))

    def _left(self, part: int) -> Any:
        def left(module: nn.Module, args: Any, output: Any) -> Any:
            way, hidden = _first(output)
            self._enter(part)
            return put_at(output, way, tensor_in_order(hidden))

        return left


class _Absent(nn.Module):
    """Stands in for a block of another part: `output` gives what the block would return, and the
    model's code finds the block's attributes."""

    def __init__(self, block: nn.Module, output: Any) -> None:
        super().__init__()
        self._block = (block,)  # in a tuple, so no submodule
        self.forward = output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_block":
                raise
            return getattr(self._block[0], name)


class _Left(Exception):
    """Ends a forward at the end of a part."""


class ImagePart(nn.Module):
    """Part `number` of a classifier: 0 is in front of its blocks, k is block k - 1, and the last is
    behind them."""

    def __init__(
        self,
        empty: Any,
        blocks: str,
        number: int,
        held: set[str],
        weights: dict[str, Tensor] | None,
        calls: _Calls,
    ) -> None:
        super().__init__()
        self._number, self._calls, self._hidden = number, calls, torch.empty(0)
        # The device of absent weights: "meta", or a pretended one where sizes are counted.
        self._nowhere = torch.empty(0, device=_META)
        stand_ins = {
            id(block): _Absent(block, partial(self._output_of, index))
            for index, block in enumerate(empty.get_submodule(blocks))
            if index != number - 1
        }
        self.model: Any = copy.deepcopy(empty, stand_ins)
        for path, module in self.model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name in [n for n, tensor in tensors.items() if tensor is not None]:
                    full = f"{path}.{name}".lstrip(".")
                    if full not in held:
                        setattr(module, name, tensors.pop(name).detach())
                    elif weights is not None:
                        tensors[name] = weights[full]
        places = list(self.model.get_submodule(blocks))
        if number <= 1:
            places[0].register_forward_pre_hook(self._entered, with_kwargs=True)
        if 0 < number <= len(places):
            places[number - 1].register_forward_hook(self._left)

    def forward(self, value: Tensor) -> Tensor:
        """Turns pictures or hidden states into hidden states or logits."""
        self._hidden = pixels = value
        if self._number:
            pixels = self._without_data(self._calls.pixels)
        try:
            logits: Tensor = self.model(pixel_values=pixels).logits
        except _Left:
            logits = self._hidden
        finally:
            del self._hidden
        return logits

    def _without_data(self, probe: Tensor) -> Tensor:
        """A tensor without data, shaped like the probe's for the pictures of this micro-batch."""
        shape = list(probe.shape)
        if shape and shape[0] % _PROBE_ROWS == 0:
            shape[0] = shape[0] // _PROBE_ROWS * len(self._hidden)
        return torch.empty(shape, dtype=probe.dtype, device=self._nowhere.device)

    def _output_of(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """What an absent block returns. The block just before this part returns the real input."""
        output = tree_map_only(Tensor, self._without_data, self._calls.outputs[index])
        if index == self._number - 2:
            output = put_at(output, _first(output)[0], self._hidden)
        return output

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called before the first block. Part 0 ends here; part 1 puts its own input there."""
        way, hidden = _first((args, kwargs))
        if self._number == 0:
            self._hidden = hidden
            raise _Left
        return put_at((args, dict(kwargs)), way, self._hidden)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = _first(output)[1]
        raise _Left


class Pictures(Chains):
    """Cuts a classifier as a chain: the part in front of its blocks, each block, and the rest."""

    def read(self, model: ModelConfig, base_dir: Path) -> ImageConfig:
        source = ModelSource(model, base_dir)
        if type(config := source.stated) not in AutoModelForImageClassification._model_mapping:
            raise ArchitectureError(
                f"transformers has no class for image-classification of model type"
                f" {config.model_type!r}",
                hint="choose another model, or another training.objective",
            )
        set_labels(config, model)
        place = None if model.name_or_path is None else source.place
        return ImageConfig(config.to_dict(), place, model.revision, forms=forms_of(model))

    def tiny(self, config: PretrainedConfig) -> ImageConfig:
        """A classifier with random weights, for pictures of the configuration's size."""
        size = getattr(config, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else size
        shape = (getattr(config, "num_channels", 3), *sides)
        forms = {INPUT: (shape, "float32"), TARGET: ((), "int64")}
        return ImageConfig(config.to_dict(), forms=forms)

    def new_weights(self, config: Any) -> list[str]:
        return list(config.new_weights())

    def compare(self, config: Any, ranges: Any) -> Any:
        name = config.classifier["model_type"]
        subject = "the model itself" if config.source else "the classifier with random weights"
        result = super().compare(config, ranges)
        return replace(result, model_type=name, subject=subject, task="image-classification")

    def saved(self, config: Any) -> PretrainedConfig:
        """The classifier's own configuration."""
        classifier: PretrainedConfig = config.of_classifier
        return classifier

    def loading(self, weights: Path) -> str | None:
        return None

    def processor(self, config: Any) -> tuple[str, str | None] | None:
        return (config.source, config.revision) if config.source is not None else None


class ImageLoss(ChainLoss):
    """The loss of transformers' image classifiers, for pictures with one class, several labels or
    measures."""

    averages_means, predicts = False, True

    def __init__(self, training: TrainingConfig, id_layers: frozenset[int] = frozenset()) -> None:
        super().__init__(training, id_layers)
        self.metric_names = ("accuracy",)

    def called(
        self, config: PretrainedConfig, output: Any, target: Any
    ) -> tuple[Tensor, list[Tensor]]:
        classifier = cast(ImageConfig, config).of_classifier
        try:
            loss = ForSequenceClassificationLoss(target, output, classifier)
        except (IndexError, ValueError, RuntimeError) as error:
            raise DataError(
                f"the targets do not fit the model's {classifier.num_labels} labels: {error}",
                hint="set model.num_labels, or correct the data set",
            ) from error
        if target.is_floating_point():  # several labels, or measures
            return loss, []
        return loss, [(output.argmax(-1) == target).float().mean()]


PICTURES = Pictures()
