"""`Result`: the answer of `hetero plan`, and the prediction with which a run compares its steps.
A run saves it with its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetero_framework.config import PLAN_FILE, Config, devices_of
from hetero_framework.core.files import write_json
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import TunedSchedule
from hetero_framework.errors import ResourceError

WorkerId = int | str


@dataclass(frozen=True)
class DeviceUse:
    """One process of a plan. `busy` is the share of the step in which it computes, `memory_bytes`
    its whole need, and `free_bytes` the rest. `limit` is the reason why it does not do more:
    "compute", "streaming", "memory" or "link". `streamed` of its layers are in `host_bytes` of its
    machine's memory (0: in files), which makes its work in a step `streaming_s` longer. In that
    memory are also `stored_bytes` of optimizer states and inputs."""

    id: WorkerId
    busy: float
    memory_bytes: int
    limit: str
    layers: int
    free_bytes: int
    streamed: int = 0
    host_bytes: int = 0
    streaming_s: float = 0.0
    stored_bytes: int = 0


@dataclass(frozen=True)
class Alone:
    """The fastest process that could hold everything by itself, and the seconds of its step."""

    id: WorkerId
    step_s: float


@dataclass(frozen=True)
class Limit:
    """What bounds a process, in use or not: one of the limits of `DeviceUse`, its figure, and what
    would help."""

    id: WorkerId
    by: str
    figure: str
    help: str


@dataclass(frozen=True)
class Result:
    """A plan with its prediction. `changes` are allowed changes of other settings that it needs.
    `schedule` is the simulated schedule, and `in_flight` the most forwards that each stage stores
    in it. `seconds` is the time of the search. `host_rates` are bytes per second from the memory of
    each process's machine to its device."""

    shard_plan: tuple[Mapping[str, Any], ...]
    max_in_flight: int
    predicted_step_s: float
    devices: tuple[DeviceUse, ...]
    unused: tuple[WorkerId, ...]
    limits: tuple[Limit, ...]
    alone: Alone | None
    changes: Mapping[str, Any]
    seconds: float
    schedule: TunedSchedule = field(repr=False)
    in_flight: tuple[int, ...] = ()
    host_rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def pipeline(self) -> Profile:
        """The times that were simulated."""
        return self.schedule.profile

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule of this plan can beat."""
        return self.schedule.bound_s

    def to_dict(self) -> dict[str, Any]:
        """The fields without `schedule`, and the lower bound, in JSON types."""
        raw = {n: value for n, value in vars(self).items() if n != "schedule"}
        bounded = {**raw, "lower_bound_s": self.lower_bound_s}
        found: dict[str, Any] = json.loads(json.dumps(bounded, default=vars))
        return found


@dataclass(frozen=True)
class Planned:
    """Seconds of a step, and the times of stages and edges that it was simulated with."""

    step_s: float
    pipeline: Profile


def save_plan(config: Config, result: Result) -> None:
    """Write the plan that `config` now has into its output_dir, with the predicted times. Raises
    ResourceError."""
    kept = {
        **result.to_dict(),
        "shard_plan": config.to_dict()["shard_plan"],
        "planned_for": devices_of(config),
        "pipeline": asdict(result.pipeline),
        "predicted_for": _conditions(config),
    }
    write_json(config.output_dir / PLAN_FILE, kept, ResourceError)


def planned(config: Config) -> Planned | None:
    """The saved prediction for the plan of `config`; None if there is none, or if it is for another
    plan or other micro-batches."""
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


def host_rates(config: Config) -> dict[str, float]:
    """Measured bytes per second from host memory to each process's device. Empty if the run's plan
    was not made for measured machines."""
    try:
        kept = json.loads((config.output_dir / PLAN_FILE).read_bytes())
        return {owner: float(rate) for owner, rate in kept["host_rates"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


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
