"""Optimizers and learning-rate schedules of transformers, made as its Trainer makes them.

A stage builds its optimizer over its own parameters only. That is exact for every optimizer that
updates each parameter by itself (`config.optimizers`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from hetero_framework.config import TrainingConfig
from hetero_framework.errors import ConfigError

# The Trainer imports PEFT, bitsandbytes, datasets and pandas, in half the time of torch's import.
# So its rules for usual optimizers and schedules are repeated here; tests compare the two.
_TORCH_ADAMW: dict[str, dict[str, Any]] = {"adamw_torch": {}, "adamw_torch_fused": {"fused": True}}
_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(
    training: TrainingConfig, model: nn.Module, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """The Trainer's optimizer over `parameters`, in its two groups: with and without decay. Names
    of parameters and layer types of `model`, the stage's module, decide the group."""
    decayed_names = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    named = {name: p for name, p in model.named_parameters() if name in decayed_names}
    named = getattr(model, "users_names", dict)(named)  # a chain's children have names of their own
    rules = "|".join(_NOT_DECAYED)
    decayed = {id(p) for name, p in named.items() if not re.search(rules, name.lower())}
    with_decay = [p for p in parameters if id(p) in decayed]
    without = [p for p in parameters if id(p) not in decayed]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((with_decay, training.weight_decay), (without, 0.0))
        if params
    ]
    cls, kwargs = _class_and_settings(training)
    optimizer: torch.optim.Optimizer = cls(groups, **kwargs)
    if "bitsandbytes" in str(cls):
        is_narrow = kwargs.get("optim_bits") == 8
        _keep_exceptions_apart(optimizer, model if is_narrow else nn.Module())
    return optimizer


def _keep_exceptions_apart(optimizer: Any, model: nn.Module) -> None:
    """Keep the optimizer state of `model`'s embeddings in 32 bits, as the Trainer does.
    bitsandbytes has one list of such exceptions per process, by position in the optimizer: a
    process's stages would share it."""
    manager: Any = type(optimizer.mng)
    optimizer.mng = manager.__new__(manager)
    optimizer.mng.initialize()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})


def _class_and_settings(training: TrainingConfig) -> tuple[Any, dict[str, Any]]:
    extra = _TORCH_ADAMW.get(training.optim)
    if extra is not None and training.optim_args is None:
        betas = (training.adam_beta1, training.adam_beta2)
        settings = {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon}
        return torch.optim.AdamW, settings | extra
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused",
        report_to="none",
        optim=training.optim,
        optim_args=training.optim_args,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
    )
    try:
        return Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError) as error:
        what = f"training.optim: {training.optim!r}"
        raise ConfigError(f"{what} is not usable here: {error}") from error


def _usual_factor(kind: str, step: int, warmup: int, total: int) -> float:
    """The learning-rate factor of a schedule of _SCHEDULES after `step` commits. The operations are
    the same as in transformers.optimization, so that the bits are equal."""
    if kind == "constant":
        return 1.0
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "linear":
        return max(0.0, (total - step) / max(1, total - warmup))
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


class LearningRate:
    """The one learning-rate schedule of a run, owned by the coordinator."""

    def __init__(self, training: TrainingConfig, total_steps: int) -> None:
        self._training = training
        self._total_steps = total_steps
        self._is_usual = training.lr_scheduler_type in _SCHEDULES and not (
            training.lr_scheduler_kwargs
        )
        if not self._is_usual:
            self._start()

    def rate(self, committed_steps: int) -> float:
        """The learning rate of the commit after `committed_steps`; skipped steps do not count."""
        training, total = self._training, self._total_steps
        if self._is_usual:
            kind, warmup = training.lr_scheduler_type, training.warmup(total)
            return training.learning_rate * _usual_factor(kind, committed_steps, warmup, total)
        if committed_steps < self._position:
            self._start()
        while self._position < committed_steps:
            # It has no gradients: stepping it only keeps torch's check of the order quiet.
            self._optimizer.step()
            self._scheduler.step()
            self._position += 1
        return float(self._optimizer.param_groups[0]["lr"])

    def _start(self) -> None:
        from transformers import get_scheduler  # it imports PEFT and torch's compiler

        training, total_steps = self._training, self._total_steps
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
        try:
            self._scheduler = get_scheduler(
                training.lr_scheduler_type,
                optimizer=self._optimizer,
                num_warmup_steps=training.warmup(total_steps),
                num_training_steps=total_steps,
                scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs or {}),
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"training.lr_scheduler_type: {error}") from error
        self._position = 0


def state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str]
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Optimizer state by parameter name: (tensors, plain values). Omits parameters without any."""
    result = {}
    for parameter, values in optimizer.state.items():
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        plain = {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
        result[names[parameter]] = (tensors, plain)
    return result


def load_state_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], state: dict[str, dict[str, Any]]
) -> None:
    """Load state, {parameter name: {key: value}}, through the optimizer's own loading."""
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    packed["state"] = {
        index: dict(state[names[parameter]])
        for index, parameter in enumerate(order)
        if names[parameter] in state
    }
    optimizer.load_state_dict(packed)
