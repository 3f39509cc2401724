"""The whole model without its weights: names, shapes and types at no cost."""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hetero_framework.models.tiny import model_class


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The stock model on torch's meta device, in full precision whatever the checkpoint holds.

    Raises ArchitectureError when transformers has no causal language model for `config`.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return model_class(config)._from_config(config)
