"""The whole model without its weights: names, shapes and types at no cost."""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hetero_framework.models.introspect import introspect
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


def trainer_counts_first_labels(config: PretrainedConfig) -> bool:
    """Whether transformers' Trainer counts the first label of each row, which nothing predicts.

    It leaves that label out of the number that the loss is divided by only where it knows the loss
    from the name of the class, and `GPT2LMHeadModel` is none of these. Counting as it does makes
    the steps of such models equal its steps.
    """
    loss = LOSS_MAPPING.get(getattr(meta_model(config), "loss_type", None) or "")
    return loss is not ForCausalLMLoss and introspect(config).loss_counts_items
