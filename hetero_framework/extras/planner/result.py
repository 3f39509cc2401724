"""`Result`: the answer of `hetero plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.engine.schedule.tuning import TunedSchedule

WorkerId = int | str


@dataclass(frozen=True)
class DeviceUse:
    """One process of a plan: `busy` is the share of the step in which it computes, `memory_bytes`
    its need in all, `free_bytes` the rest, and `limit` the reason why it does not do more:
    "compute", "memory" or "link"."""

    id: WorkerId
    busy: float
    memory_bytes: int
    limit: str
    layers: int
    free_bytes: int


@dataclass(frozen=True)
class Alone:
    """The fastest process that could hold everything by itself, and the seconds of its step."""

    id: WorkerId
    step_s: float


@dataclass(frozen=True)
class Result:
    """A plan with its prediction. `changes` are the allowed changes of settings that it needs
    besides; `schedule` is the simulated one, `in_flight` the most forwards that each stage stores
    in it, and `seconds` the time of the search."""

    shard_plan: tuple[Mapping[str, Any], ...]
    gradient_checkpointing: Mapping[str, bool]
    max_in_flight: int
    predicted_step_s: float
    devices: tuple[DeviceUse, ...]
    unused: tuple[WorkerId, ...]
    why: str
    advice: tuple[str, ...]
    alone: Alone | None
    changes: Mapping[str, Any]
    seconds: float
    schedule: TunedSchedule = field(repr=False)
    in_flight: tuple[int, ...] = ()

    @property
    def pipeline(self) -> Profile:
        """The simulated times."""
        return self.schedule.profile

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule of this plan can beat."""
        return self.schedule.bound_s

    def to_dict(self) -> dict[str, Any]:
        """All but `schedule`, and the bound, in JSON types."""
        return {
            "shard_plan": [dict(entry) for entry in self.shard_plan],
            "gradient_checkpointing": dict(self.gradient_checkpointing),
            "max_in_flight": self.max_in_flight,
            "predicted_step_s": self.predicted_step_s,
            "lower_bound_s": self.lower_bound_s,
            "devices": [
                {
                    "id": use.id,
                    "busy": use.busy,
                    "memory_bytes": use.memory_bytes,
                    "free_bytes": use.free_bytes,
                    "limit": use.limit,
                    "layers": use.layers,
                }
                for use in self.devices
            ],
            "unused": list(self.unused),
            "why": self.why,
            "advice": list(self.advice),
            "alone": vars(self.alone) if self.alone else None,
            "changes": dict(self.changes),
            "in_flight": list(self.in_flight),
            "seconds": self.seconds,
        }
