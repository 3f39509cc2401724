"""The weights that a shard trains and exports: all weights, or an adapter over frozen weights.

PEFT is imported for adapters alone, since its import takes a third as long as torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from hetero_framework.errors import ConfigError
from hetero_framework.models.files.export import export_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hetero_framework.config import Config
    from hetero_framework.models.adapters.adapter_plan import AdapterPlan
    from hetero_framework.models.cut.shard import Shard


def attach_adapter(shard: Shard, plan: AdapterPlan | None, seed: int) -> None:
    """Decide what `shard` trains, in place: an adapter's parameters, or (None) every weight
    that its class does not freeze. Raises ConfigError for full training of a quantised model, and
    for float16 weights to train."""
    if plan is not None:
        from hetero_framework.models.adapters.lora import attach_plan

        attach_plan(shard, plan, seed)
        for name in tied_parameters(shard):
            raise ConfigError(
                f"the adapter would train {name}, which is one weight with {shard.ties[name]}",
                hint='set "adapter.bias" to "none"',
            )
    elif shard.is_quantized:
        raise ConfigError(
            "a quantised model cannot be trained in full",
            hint='set "adapter" (QLoRA), or "model.quantization": null with a full-precision model',
        )
    else:
        for name, parameter in shard.model.named_parameters():
            trains = parameter.is_floating_point() and name not in shard.constants
            parameter.requires_grad_(trains)
    for name, parameter in shard.model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            # Adam's epsilon is zero in float16: weights without a gradient would become NaN.
            raise ConfigError(
                f"{name} would be trained in float16, whose range is too small for an optimizer",
                hint='set "model.dtype": "float32" (with "training.fp16": true for float16 '
                'products) or "bfloat16"; an adapter alone can train over float16 weights',
            )


def trainable_parameters(shard: Shard) -> list[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) trained by this shard, in the whole model's order. A parameter
    tied to a weight of an earlier place is not trained by itself."""
    named = [(n, p) for n, p in shard.model.named_parameters() if p.requires_grad]
    named = [(name, parameter) for name, parameter in named if name not in shard.ties]
    return sorted(named, key=lambda item: shard.parameter_index(item[0]))


def tied_parameters(shard: Shard) -> dict[str, nn.Parameter]:
    """The trained parameters here that are tied to a weight of an earlier place, by name, in the
    order of places."""
    named = dict(shard.model.named_parameters())
    tied = {name: named[name] for name in shard.ties if name in named}
    return {name: parameter for name, parameter in tied.items() if parameter.requires_grad}


def export_parts(shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, CPU tensor) of the finished artefact's part in this shard: the adapter file's tensors
    where an adapter is attached, else a Hugging Face checkpoint's, copied layer by layer."""
    if shard.adapter is not None:
        from hetero_framework.models.adapters.lora import adapter_tensors

        for key, tensor in adapter_tensors(shard).items():
            yield key, tensor.detach().to("cpu").contiguous()
        return
    for tensors in export_layers(shard):
        yield from tensors.items()


def adapter_plan_of(config: Config, model_config: PretrainedConfig) -> AdapterPlan | None:
    """The plan of a configuration's adapter; None without one. Raises as `plan_adapter`."""
    if config.adapter is None:
        return None
    from hetero_framework.models.adapters.lora import plan_adapter  # imports PEFT

    return plan_adapter(model_config, config.adapter, config.base_dir)
