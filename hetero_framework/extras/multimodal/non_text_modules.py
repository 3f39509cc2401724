"""The non-text modules of a multimodal checkpoint, copied into the results of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetero_framework import repository
from hetero_framework.errors import ModelError
from hetero_framework.extras.multimodal.towers import AbsentPart
from hetero_framework.models.cut.language import lies_in, on_meta, towers
from hetero_framework.models.cut.tiny import stock_class
from hetero_framework.models.files.export import copy_processor
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.files.weights import (
    Checkpoint,
    checkpoint_form,
    config_dtype,
    few,
    renaming,
)


class NonTextWeights:
    """The tensors of the towers in a checkpoint, under the names that the model's class saves, and
    the settings of its processor. Raises ModelError unless all tensors are there."""

    def __init__(self, source: ModelSource) -> None:
        config, checkpoint = source.config, source.checkpoint
        self._checkpoint, self._dtype = checkpoint, config_dtype(config)
        place, hint = (checkpoint.source, checkpoint.revision), "take that entry out of the file"
        repository.refuse_code(*place, repository.PROCESSORS, ModelError, hint)
        self._model = on_meta(stock_class(config), config)
        self._names = {*self._model.state_dict()}
        self._shapes, self._sources, missing = _placed(self._model, towers(config), checkpoint)
        if missing:
            raise ModelError(
                f"the checkpoint {checkpoint.source!r} lacks {len(missing)} weights that text does"
                f" not use, but that the finished model has to hold: {few(missing)}",
                hint="take a checkpoint of the whole model, or train an adapter",
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pairs (key, tensor), one at a time, with each tensor as the file holds it."""
        for key, source in sorted(self._sources.items()):
            with self._checkpoint.slices(source.__eq__, self._dtype) as slices:
                tensor = slices[source][...]
            if source != key and source in self._names:  # in the class's own form
                tensor = checkpoint_form(self._model, {source: tensor})[key]
            if (shape := tuple(tensor.shape)) != self._shapes.get(key, shape):
                raise ModelError(
                    f"{source} of the checkpoint {self._checkpoint.source!r} has the shape"
                    f" {list(shape)}; its config.json says {list(self._shapes[key])}",
                    hint="put the config.json there that belongs to these weights",
                )
            yield key, tensor

    def copy_processor(self, folder: Path) -> None:
        """Copy the settings of the processor into `folder`."""
        copy_processor(self._checkpoint.source, self._checkpoint.revision, folder)


def non_text_weights(source: ModelSource) -> NonTextWeights:
    """The non-text weights of a model. Raises ModelError as `NonTextWeights` does, and for a
    model with random weights, which has none to copy."""
    if not source.has_checkpoint:
        raise ModelError(
            f"text alone does not train {', '.join(towers(source.config))}, and model.from_config"
            " gives no weights to copy there",
            hint="name a checkpoint of the whole model, or train an adapter",
        )
    return NonTextWeights(source)


def _placed(
    model: Any, gone: tuple[str, ...], checkpoint: Checkpoint
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], list[str]]:
    """By the keys that the class saves: the shapes, and the keys in `checkpoint`. Then the missing
    names. For a part that this machine cannot build, names are unknown and shapes left out: its
    tensors keep the file's."""
    absent = [name for name, part in model.named_modules() if isinstance(part, AbsentPart)]
    left_out = {*(model._keys_to_ignore_on_save or ()), *(model.all_tied_weights_keys or ())}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if lies_in(name, gone) and name not in left_out
    }
    shapes = {key: tuple(t.shape) for key, t in checkpoint_form(model, state).items()}
    rename = renaming(model, dict.fromkeys(model.state_dict(), True))
    sources, empty = {}, set(absent)
    for source in checkpoint.parts:
        keys = {source} & shapes.keys()
        if not keys:
            name = rename(source)
            if name in state:  # another version's names
                keys = checkpoint_form(model, {name: state[name]}).keys() & shapes.keys()
            elif parts := {part for part in absent if lies_in(name, (part,))}:
                keys, empty = {source}, empty - parts
        sources.update(dict.fromkeys(keys, source))
    return shapes, sources, sorted({*shapes.keys() - sources.keys(), *empty})
