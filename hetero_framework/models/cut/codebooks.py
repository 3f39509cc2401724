"""Models whose tokens have several ids each, one of every codebook (the audio codes of Musicgen).

A micro-batch has one row of ids per sample, with the ids of a token side by side. Such a model
takes and predicts a separate row for each codebook of a sample.

Shapes: B samples, S tokens, C ids per token; a row of a micro-batch has up to S x C ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from hetero_framework.data.examples import IGNORE_INDEX

# The padding of a row's last token: masked, and no label.
_FILLING = {"input_ids": 0, "labels": IGNORE_INDEX}


def ids_per_token(model: PreTrainedModel) -> int:
    """C: the number of embeddings that the model adds up for a token; 1 for models of text."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # a class that does not name its embeddings
        return 1
    return len(embeddings) if isinstance(embeddings, nn.ModuleList) else 1


def for_model(inputs: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch as a model with `count` ids a token takes them: ids and labels
    [B x C, S], all others [B, S] with the values at the first id of each token."""
    if count == 1:
        return dict(inputs)
    return {
        name: _by_codebook(tensor, count, _FILLING[name])
        if name in _FILLING
        else tensor[:, ::count]
        for name, tensor in inputs.items()
    }


def _by_codebook(ids_BT: torch.Tensor, count: int, filling: int) -> torch.Tensor:
    filled = nn.functional.pad(ids_BT, (0, -ids_BT.shape[1] % count), value=filling)
    each: torch.Tensor = filled.unflatten(1, (-1, count))
    return each.transpose(1, 2).flatten(0, 1)
