"""A run's results made from one of its checkpoints, without its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hetero_framework.core.devices import open_device
from hetero_framework.models.adapters.trainable import (
    attach_adapter,
    export_parts,
    trainable_parameters,
)
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.partition import ranges_between
from hetero_framework.models.cut.shard import load_model_config, load_shard
from hetero_framework.models.files.export import Tensors

if TYPE_CHECKING:
    from hetero_framework.config import ModelConfig
    from hetero_framework.models.adapters.adapter_plan import AdapterPlan

Read = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]


def finished_tensors(
    settings: ModelConfig, base_dir: Path, plan: AdapterPlan | None, read: Read
) -> Iterator[Tensors]:
    """The tensors of the finished artefact; `read` gives trained weights by parameter name. Nothing
    of the base is read for an adapter that leaves the embeddings alone, else block by block."""
    if plan is not None and not plan.embedding_tensors:
        from hetero_framework.models.adapters.lora import tensors_of_plan

        yield tensors_of_plan(load_model_config(settings, base_dir), plan, read(plan.trainable))
        return
    settings = settings.quantized(None)
    count = introspect(load_model_config(settings, base_dir)).num_layers
    for span in ranges_between(range(count + 1)):
        shard = load_shard(settings, base_dir, span, open_device("cpu"), seed=0)
        attach_adapter(shard, plan, seed=0)
        own = dict(trainable_parameters(shard))
        for name, tensor in read(own).items():
            own[name].data = tensor
        yield dict(export_parts(shard))
