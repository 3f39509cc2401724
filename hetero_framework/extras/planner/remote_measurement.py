"""Cost of a model's parts on a worker's machine, measured for `hetero plan --measure`.

Each machine caches its results by device, model, settings and versions.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from hetero_framework import control, versions
from hetero_framework._version import __version__
from hetero_framework.cluster.model_allowlist import MEASURE
from hetero_framework.config import Config, ModelConfig, effects
from hetero_framework.config.section import TIMELESS
from hetero_framework.core import cache
from hetero_framework.core.devices import Device, open_device
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message
from hetero_framework.errors import ProtocolError, ResourceError
from hetero_framework.extras.planner.measuring import ModelCost, measure
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.sizing.memory import memory_of_parts

_KIND = "costs"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """The parts' cost, the seconds that the measurement took, and whether it was cached."""

    cost: ModelCost
    seconds: float
    was_known: bool


def model_costs(
    config: Config, model: PretrainedConfig, device: Device, *, anew: bool
) -> Measurement:
    """The cost of `model`, held as in `config` (see `Config.held_by`), on a device of this machine.
    A cached cost is returned unless `anew`. Raises as `measure` does."""
    began = time.monotonic()
    asked = _question_of(config, model, device)
    if not anew and (known := cache.recall(_KIND, asked)) is not None:
        return Measurement(ModelCost.from_dict(known), time.monotonic() - began, True)
    cost = measure(config, model, device)
    cache.remember(_KIND, asked, cost.to_dict())
    return Measurement(cost, time.monotonic() - began, False)


def _question_of(config: Config, model: PretrainedConfig, device: Device) -> str:
    """The key of a cached cost: all that the cost depends on."""
    assert config.model is not None
    libraries = {name: versions.installed(name) for name in versions.LIBRARIES}
    training = config.training.model_dump(mode="json")
    return json.dumps(
        {
            "machine": platform.node(),
            "device": [device.name, device.label, device.memory().total, torch.get_num_threads()],
            "versions": {**libraries, "hetero_framework": __version__},
            "model": json.loads(model.to_json_string()),
            "section": [
                config.model.dtype,
                *(config.model.quantization, config.quantizes),
                config.model.attn_implementation,
            ],
            "link": not device.one_memory,
            "adapter": config.adapter.model_dump(mode="json") if config.adapter else None,
            "rows": config.data and [config.data.max_length, config.data.one_row],
            "training": {
                name: value
                for name, value in training.items()
                if f"training.{name}" not in effects.marked(TIMELESS, type(config))
            },
        },
        sort_keys=True,
    )


def question(
    number: int, config: Config, model: PretrainedConfig, worker: WorkerId, *, anew: bool = False
) -> Message:
    """The request to a worker to measure `model`, of `config`. No weights are read for it."""
    adapter = config.adapter
    raw = config.to_dict()
    if adapter is not None:
        raw["adapter"]["init_from"] = None
    fields = json.loads(model.to_json_string())
    data = {"config": raw, "model": fields, "worker": worker, "anew": anew}
    return control.request(number, MEASURE, data)


def answer_of(worker: WorkerId, message: Message) -> Measurement:
    """The worker's measurement. Raises UserError with its reason if it failed."""
    raw = control.result(message)
    try:
        return Measurement(ModelCost.from_dict(raw["cost"]), raw["seconds"] + 0.0, raw["was_known"])
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise ProtocolError(f"worker {worker} gives no measurement: {error!r}") from error


def left_out(data: Any) -> None:
    """A worker's answer to LEFT_OUT."""
    why = f": {data}" if data else ""
    _log.info("this machine is not needed: the plan has no layers for it%s", why)


def measured(data: Any) -> dict[str, Any]:
    """A worker's answer to MEASURE: the cost of the model of `data["config"]`, which this machine's
    file permits. If this machine has the model's folder, the settings in it replace those that were
    sent."""
    config = data["config"]
    assert isinstance(config, Config)
    config = config.held_by(data["worker"])
    assert config.model is not None
    section, here = config.model, config.model.name_or_path
    if here is not None and not os.path.isdir(config.path(here)):
        named = section.model_dump(mode="json")
        kept = {name: named[name] for name in ("attn_implementation", "dtype")}
        section = ModelConfig(from_config=data["model"], tokenizer="none", **kept)
    model = ModelSource(section, config.base_dir).config
    device = open_device(config.worker(data["worker"]).device)
    _check_size(config, model, device)
    costs = model_costs(config, model, device, anew=bool(data.get("anew")))
    return {"cost": costs.cost.to_dict(), "seconds": costs.seconds, "was_known": costs.was_known}


def _check_size(config: Config, model: PretrainedConfig, device: Device) -> None:
    """Raise ResourceError if a part of the model is larger than the device's memory."""
    parts = memory_of_parts(config, model, introspect(model).num_layers)
    largest, there = max(part.weights for part in parts), device.memory().total
    if largest > there:
        raise ResourceError(
            f"a part of the model takes {largest >> 20} MiB, and {device.label} has {there >> 20}"
        )
