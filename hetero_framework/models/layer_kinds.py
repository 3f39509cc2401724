"""Which layers of a model are alike, so that one of each kind can stand for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig

from hetero_framework.models.introspect import introspect
from hetero_framework.models.language import meta_model

_PER_LAYER = re.compile(r".*(layer|block)_?types?$")


def layer_kinds(config: PretrainedConfig) -> list[int]:
    """For each layer the first one of its kind: of the same modules, with weights of the same
    shapes and types, and of the same type where the configuration lists one for every layer. Raises
    ArchitectureError. Nothing is loaded."""
    structure = introspect(config)
    blocks = meta_model(config).get_submodule(structure.blocks)
    assert isinstance(blocks, nn.ModuleList)
    listed = list(_listed(config, len(blocks)))
    first: dict[tuple[object, ...], int] = {}
    found = []
    for index, block in enumerate(blocks):
        shapes = tuple((name, p.shape, p.dtype) for name, p in block.named_parameters())
        kind = (repr(block), shapes, *(str(values[index]) for values in listed))
        found.append(first.setdefault(kind, index))
    return found


def _listed(config: PretrainedConfig, num_layers: int) -> Iterator[list[object]]:
    """What the configuration says of every single layer's type."""
    for name, value in config.get_text_config().to_dict().items():
        if _PER_LAYER.match(name) and isinstance(value, list) and len(value) == num_layers:
            yield value
