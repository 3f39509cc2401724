"""Stages of a small model that are run without processes."""

from __future__ import annotations

from typing import Any

import torch

from hetero_framework.config import Config
from hetero_framework.core.devices import Device
from hetero_framework.core.planned_order import BACKWARD, FORWARD
from hetero_framework.engine.loading import load_stages
from hetero_framework.engine.stage import Stage
from hetero_framework.engine.stage_api import StatePart, StepInfo, Tensors

LAYERS = 7
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": MATRICES}
MODEL = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def configuration(
    entries: tuple[dict[str, Any], ...], *, model: dict[str, Any] | None = None, **settings: Any
) -> Config:
    """Stages of the whole model; `entries` say where each ends, and its settings."""
    start, plan = 0, []
    for entry in entries:
        plan.append({"id": "local", "start": start, **entry})
        start = entry["end"]
    machine, model = {"ip": "127.0.0.1", "device": "cpu"}, model or {"from_config": MODEL}
    return Config.from_dict(
        {"coordinator": machine, "model": model, "shard_plan": plan, **settings}
    )


def load(config: Config, device: Device | None = None) -> list[Stage]:
    stages = load_stages(config, config.plan.stages, device or Device())
    trained = False
    for stage in stages:
        stage.input_requires_grad = trained
        trained |= bool(stage.trainable())
    return stages


def train(stages: list[Stage], steps: int = 2, micro_batches: int = 3, first: int = 0) -> list[Any]:
    """Losses and norms, with the micro-batches in the order of 1F1B of the first of two stages:
    two forwards, then backwards and forwards in turn."""
    found: list[Any] = []
    for step in range(first, first + steps):
        for stage in stages:
            stage.begin(StepInfo(step, 0, True, micro_batches, 19 * micro_batches))
        waiting: list[tuple[int, Any]] = []
        for k in range(micro_batches):
            waiting.append((k, _forward(stages, step, k, found)))
            if k:
                _backward(stages, *waiting.pop(0))
        while waiting:
            _backward(stages, *waiting.pop(0))
        found += [stage.report_gradients().norms for stage in stages]
        for stage in stages:
            stage.commit(1e-2, 1.0)
    return found


def _forward(stages: list[Stage], step: int, k: int, found: list[Any]) -> Any:
    ids = torch.arange(20).view(1, 20) * (step + 3 + k) % 64
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    received: Any = ()
    for stage in stages:
        following = BACKWARD if k and not stage.is_last else FORWARD
        stage.residence.begin(FORWARD, k, following)
        if stage.is_last:
            outcome, received = stage.forward_backward(k, inputs, received)
            found.append(outcome.loss)
        else:
            received = stage.forward(k, inputs, received)
            received = tuple(t.detach().requires_grad_(t.requires_grad) for t in received)
        stage.residence.end()
    return received


def _backward(stages: list[Stage], k: int, gradients: Any) -> None:
    for stage in reversed(stages[:-1]):
        if not stage.differentiates:
            return
        stage.residence.begin(BACKWARD, k, FORWARD)
        gradients = stage.backward(k, gradients)
        stage.residence.end()


def state(stages: list[Stage]) -> Tensors:
    """Everything of a checkpoint that is a tensor."""
    return tensors_of([[*stage.snapshot(lasting=True).parts()] for stage in stages])


def tensors_of(stages: list[list[StatePart]]) -> Tensors:
    return {
        f"{k}/{name}": tensor
        for k, parts in enumerate(stages)
        for part in parts
        for name, tensor in part.tensors.items()
    }


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
