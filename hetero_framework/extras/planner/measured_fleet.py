"""The profile of a run's fleet, from the measured times of its steps.

Steps show the times of whole stages. The time of a layer or the head on any device is its work, in
a unit common to all layers, times the device's time per unit. Seconds are per micro-batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

from hetero_framework.config import StageSpec
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.extras.planner.profile import FleetProfile

WorkerId = int | str
PartBytes = Mapping[str, Any]  # fields of a `DeviceProfile`: needs of a model's parts
_BYTES = 1e6  # a nominal tensor: seconds were measured, not bytes
_LEAST_S = 1e-9  # least of a tensor on a link, so that rates are finite
_FORWARD = 1 / 3  # share of forward in the time, if no stage shows it


@dataclass(frozen=True)
class LayerWork:
    """The work of a model's layers and of its head, and the fewest layers of the first stage."""

    layer_work: tuple[float, ...]
    head_work: float
    first_layers: int = 0

    def of(self, stage: StageSpec) -> float:
        """Work of a stage; the embedding counts as none."""
        layers = sum(self.layer_work[stage.start : stage.end])
        return layers + (self.head_work if stage.is_last else 0.0)


class Observed:
    """Times of a run's devices and links, from its steps under any plans."""

    def __init__(self, work: LayerWork) -> None:
        self._work = work
        self._pace_s: dict[WorkerId, float] = {}  # forward and backward of a unit of work
        self._wire_s: dict[tuple[WorkerId, WorkerId], float] = {}
        self._latency_s: dict[frozenset[WorkerId], float] = {}
        self._forward = _FORWARD

    def note(self, stages: Sequence[StageSpec], seen: Profile) -> None:
        """Take in the times of a plan's stages and edges."""
        busy_s: dict[WorkerId, float] = {}
        work: dict[WorkerId, float] = {}
        for stage, forward_s, backward_s in zip(
            stages, seen.forward_s, seen.backward_s, strict=True
        ):
            busy_s[stage.owner] = busy_s.get(stage.owner, 0.0) + forward_s + backward_s
            work[stage.owner] = work.get(stage.owner, 0.0) + self._work.of(stage)
        self._pace_s |= {d: busy_s[d] / work[d] for d in busy_s if work[d] > 0}
        # The last stage does forward and backward at once.
        told = [k for k, stage in enumerate(stages[:-1]) if stage.end > stage.start]
        both_s = sum(seen.forward_s[k] + seen.backward_s[k] for k in told)
        if both_s > 0:
            self._forward = sum(seen.forward_s[k] for k in told) / both_s
        for (before, after), edge in zip(pairwise(stages), seen.edges, strict=True):
            if before.owner == after.owner:
                continue
            # A relayed tensor was timed from the coordinator to its receiver.
            one = before.owner if edge.relay is None else "local"
            other = after.owner if edge.relay is None else "local"
            wires = {(one, after.owner): edge.forward_s, (other, before.owner): edge.backward_s}
            self._wire_s |= {pair: seconds for pair, seconds in wires.items() if seconds > 0}
            self._latency_s[frozenset((before.owner, after.owner))] = edge.latency_s

    @property
    def is_empty(self) -> bool:
        """Whether no step was measured yet."""
        return not self._pace_s

    def fleet(
        self,
        memory_bytes: Mapping[WorkerId, float],
        parts: Mapping[WorkerId, PartBytes],
        micro_batches: int,
        *,
        relayed: bool,
    ) -> FleetProfile:
        """The profile of the devices of `memory_bytes`, which has the free bytes of each. A device
        without measurements counts as the median of all. `relayed`: workers have no links."""
        devices = [self._device(d, free, parts[d]) for d, free in memory_bytes.items()]
        pairs: Iterable[tuple[WorkerId, WorkerId]] = permutations(memory_bytes, 2)
        links = [
            {
                "from": one,
                "to": other,
                "bytes_per_s": _BYTES / max(_LEAST_S, self._link_s(one, other)),
                "latency_s": self._latency_s.get(frozenset((one, other)), 0.0),
            }
            for one, other in pairs
            if "local" in (one, other) or not relayed
        ]
        return FleetProfile.from_dict(
            {
                "version": 1,
                "layers": len(self._work.layer_work),
                "first_layers": self._work.first_layers,
                "micro_batches": micro_batches,
                "activation_bytes": _BYTES,
                "gradient_bytes": _BYTES,
                "devices": devices,
                "links": links,
            },
            name="what the steps have shown",
        )

    def _device(self, device: WorkerId, free_bytes: float, parts: PartBytes) -> dict[str, object]:
        known = self._pace_s.values()
        pace_s = self._pace_s.get(device, statistics.median(known) if known else 1.0)
        forward_s, backward_s = pace_s * self._forward, pace_s * (1 - self._forward)
        return {
            "id": device,
            "memory_bytes": free_bytes,
            "layer_forward_s": [forward_s * work for work in self._work.layer_work],
            "layer_backward_s": [backward_s * work for work in self._work.layer_work],
            "head_forward_s": forward_s * self._work.head_work,
            "head_backward_s": backward_s * self._work.head_work,
            **parts,
        }

    def _link_s(self, one: WorkerId, other: WorkerId) -> float:
        """Seconds of a tensor from `one` to `other`: measured, else by the slower of both NICs."""
        if (seconds := self._wire_s.get((one, other), self._wire_s.get((other, one)))) is not None:
            return seconds
        return max(self._nic_s(one), self._nic_s(other))

    def _nic_s(self, device: WorkerId) -> float:
        """The least time in which a device sent or received a tensor."""
        times = [seconds for pair, seconds in self._wire_s.items() if device in pair]
        known = times or self._wire_s.values()
        return min(known, default=0.0)


def median(profiles: Sequence[Profile]) -> Profile:
    """The profile with the median times of profiles that differ only in times."""

    def of(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    def edge(same: Sequence[Edge]) -> Edge:
        times = [(e.forward_s, e.backward_s, e.latency_s) for e in same]
        forward_s, backward_s, latency_s = of(times)
        return Edge(forward_s, backward_s, latency_s, same[-1].relay)

    edges = tuple(map(edge, zip(*(p.edges for p in profiles), strict=True)))
    forward_s, backward_s = (
        of([p.forward_s for p in profiles]),
        of([p.backward_s for p in profiles]),
    )
    return Profile(forward_s, backward_s, profiles[-1].devices, edges)
