"""The predicted times of a run's plan, saved beside the results and read when the run begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero_framework.config import PLAN_FILE, Config
from hetero_framework.core.files import write_json
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.errors import ResourceError
from hetero_framework.extras.planner.result import Result


@dataclass(frozen=True)
class Planned:
    """Seconds of a step, and those of the stages and edges that it was simulated with."""

    step_s: float
    pipeline: Profile


def save_plan(config: Config, result: Result) -> None:
    """Write the plan that `config` now has into its output_dir, with the predicted times. Raises
    ResourceError."""
    kept = {
        **result.to_dict(),
        "shard_plan": config.to_dict()["shard_plan"],
        "pipeline": asdict(result.pipeline),
        "predicted_for": _conditions(config),
    }
    write_json(config.output_dir / PLAN_FILE, kept, ResourceError)


def planned(config: Config) -> Planned | None:
    """The prediction for the plan of `config`; None without one, and for another plan or other
    micro-batches."""
    try:
        kept = json.loads((config.output_dir / PLAN_FILE).read_bytes())
        entries = config.to_dict()["shard_plan"]
        if kept["shard_plan"] != entries or kept["predicted_for"] != _conditions(config):
            return None
        profile = _profile(kept["pipeline"])
        fits = profile.num_stages == len(entries) == len(profile.edges) + 1
        return Planned(float(kept["predicted_step_s"]), profile) if fits else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _profile(raw: Mapping[str, Any]) -> Profile:
    edges = [Edge(**edge) for edge in raw["edges"]]
    return Profile.of(raw["forward_s"], raw["backward_s"], devices=raw["devices"], edges=edges)


def _conditions(config: Config) -> dict[str, Any]:
    """The settings, besides the plan, that determine the seconds of a micro-batch."""
    config.require("model")
    assert config.model is not None
    training = config.training
    return {
        "model": {**config.model.model_dump(mode="json"), "quantization": config.kinds},
        "adapter": config.adapter.model_dump(mode="json") if config.adapter is not None else None,
        "rows": training.per_device_train_batch_size,
        "micro_batches": training.gradient_accumulation_steps,
        "max_length": config.data.max_length if config.data is not None else None,
        "types": [training.bf16, training.fp16],
        "checkpointing": training.gradient_checkpointing,
    }
