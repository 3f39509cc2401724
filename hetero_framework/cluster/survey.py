"""What a worker's machine takes for the parts of a model, when `hetero plan --measure` asks.

Importing this module registers the answer.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PretrainedConfig

from hetero_framework import control
from hetero_framework.config import Config, ModelConfig
from hetero_framework.core.devices import open_device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.engine.measuring import ModelCost, measure
from hetero_framework.models.shard import load_model_config

MEASURE = "hetero.measure"


def question(number: int, config: Config, model: PretrainedConfig, worker: WorkerId) -> Message:
    """Asks a worker what `model`, that of `config`, takes there. Nothing that they name is read."""
    adapter = config.adapter
    raw = config.to_dict()
    if adapter is not None:
        raw["adapter"]["init_from"] = None
    data = {"config": raw, "model": json.loads(model.to_json_string()), "worker": worker}
    return control.request(number, MEASURE, data)


def cost(answer: Message) -> ModelCost:
    """What the worker found. Raises UserError with its reason if it could not."""
    return ModelCost.from_dict(control.result(answer))


@control.on(MEASURE)
def _measure(data: Any) -> dict[str, Any]:
    config = Config.from_dict(data["config"])
    assert config.model is not None
    named = config.model.model_dump(mode="json")
    kept = {name: named[name] for name in ("attn_implementation", "dtype")}
    section = ModelConfig(from_config=data["model"], tokenizer="none", **kept)
    model = load_model_config(section, config.base_dir)
    device = open_device(config.worker(data["worker"]).device)
    return measure(config, model, device).to_dict()
