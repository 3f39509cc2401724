"""Chooses a run's next plan: without workers that are away, or with workers that are back.

A new plan is made from the times of the run's steps and from the memory that was free when it
began. `Coordinator._take_plan` carries it out.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from hetero_framework.cluster.cluster import Cluster, MachineFacts, free_bytes
from hetero_framework.cluster.membership import WorkerState
from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import StageSpec
from hetero_framework.core.fields import WorkerId
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.errors import PeerLostError, PlanError, UserError
from hetero_framework.extras import planner
from hetero_framework.extras.planner import FleetProfile
from hetero_framework.extras.planner.layout import Evaluated, Fleet, Part, evaluated
from hetero_framework.extras.planner.measured_fleet import LayerWork, Observed, PartBytes, median
from hetero_framework.extras.planner.planning import CHUNKS
from hetero_framework.extras.planner.profile import bytes_of_parts
from hetero_framework.extras.planner.result import host_rates
from hetero_framework.models.cut.introspect import introspect
from hetero_framework.models.cut.language import first_layers, meta_model
from hetero_framework.models.sizing.memory import StageMemory, memory_of_parts
from hetero_framework.trainer import setup
from hetero_framework.trainer.plans import PlanChange, Plans
from hetero_framework.trainer.run_checkpoint import plan_entries

_STEPS = 5
"""Steps whose medians count, so that a step slowed by something else does not."""
_ASSUMED_RATE = 12e9  # bytes a second from host memory, where nothing was measured: PCIe 3
Stages = tuple[StageSpec, ...]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenPlan(PlanChange):
    """A plan that does without the workers `away`."""

    away: tuple[WorkerId, ...]


class Replanning(Plans):
    """The plans of one run."""

    def __init__(
        self, prepared: setup.Prepared, facts: Mapping[WorkerId, MachineFacts], *, survivors: bool
    ) -> None:
        """`survivors`: the run goes on without workers that stay away."""
        super().__init__(prepared, facts)
        given = prepared.resolved.given
        self._survivors = survivors
        self.lacking: set[WorkerId] = {*given.plan.owners} - {*prepared.config.plan.owners}
        """Workers that the plan in force was made without; `Membership` knows which are here."""
        self._home = plan_entries(given)  # the plan if all workers are here
        self._observed = Observed(_model_work(prepared))
        self._last: deque[Profile] = deque(maxlen=_STEPS)

    def after_step(self, seen: Profile) -> None:
        self._last.append(seen)
        self._observed.note(self.prepared.config.plan.stages, median(self._last))

    def changes(self, cluster: Cluster) -> Iterator[PlanChange]:
        for worker, fact in cluster.returned().items():
            if fact is not None:
                self.facts[worker] = fact
        spare = cluster.members.those(WorkerState.SPARE)
        if back := [worker for worker in spare if worker in self.lacking]:
            try:
                yield self.with_back(back, cluster.members.away)
            except UserError as error:
                self.lacking.difference_update(back)
                _log.warning("worker %s is back and stays without layers: %s", back, error.message)

    def after_loss(self, lost: PeerLostError, away: Collection[WorkerId]) -> PlanChange:
        if not self._survivors:
            raise lost
        try:
            return self.without(away)
        except UserError as error:
            hint = f"the others cannot go on without it: {error.message}"
            hint = ". ".join(filter(None, [hint, lost.hint]))
            raise type(lost)(lost.message, hint=hint) from error

    def without(self, away: Collection[WorkerId]) -> ChosenPlan:
        """The best plan for the present workers. Raises PlanError if they cannot hold the model."""
        names = ", ".join(map(str, away))
        entries = self._searched(away)
        return self._change(entries, f"worker {names} stays away", tuple(away))

    def with_back(self, back: Collection[WorkerId], away: Collection[WorkerId]) -> ChosenPlan:
        """The plan for when workers have come `back` and others are still `away`. Raises
        PlanError."""
        entries = self._searched(away) if away else self._home
        names = ", ".join(map(str, back))
        return self._change(entries, f"worker {names} is back", tuple(away))

    def taken(self, change: PlanChange) -> None:
        assert isinstance(change, ChosenPlan)
        super().taken(change)
        self.lacking = set(change.away)
        if not self.lacking:
            self._home = plan_entries(change.prepared.config)
        self._last.clear()

    # -- inside ---------------------------------------------------------------------------------

    @cached_property
    def _streaming(self) -> set[WorkerId]:
        """Processes that may stream layers: those that do so in the user's plan."""
        return {entry.id for entry in self.prepared.resolved.given.shard_plan if entry.offload}

    @cached_property
    def _known_rates(self) -> dict[str, float]:
        """Measured rates of copies from host memory, by process of the user's plan."""
        return host_rates(self.prepared.resolved.given)

    @cached_property
    def _part_bytes(self) -> dict[WorkerId, PartBytes]:
        """The bytes of the parts on each process. Made when needed: it takes seconds for large
        models."""
        given, prepared = self.prepared.resolved.given, self.prepared
        memory = given.per_quantization(self.facts, lambda owner: _memory(prepared, owner))
        count = given.training.gradient_accumulation_steps
        return {
            owner: bytes_of_parts(memory[owner], count, one_memory=fact.host_free is None)
            for owner, fact in self.facts.items()
        }

    def _change(
        self, entries: setup.Entries, reason: str, away: tuple[WorkerId, ...]
    ) -> ChosenPlan:
        prepared = setup.replanned(self.prepared, entries, self.facts, reason)
        return ChosenPlan(prepared, reason, self._step_s(prepared.config.plan.stages, away), away)

    def _step_s(self, stages: Stages, away: Collection[WorkerId]) -> float | None:
        """The expected time of a plan's step, from the measured steps."""
        if self._observed.is_empty:
            return None
        step = simulated(Fleet(self._fleet(away)), stages)
        return step.seconds if step is not None else None

    def _fleet(self, away: Collection[WorkerId]) -> FleetProfile:
        config = self.prepared.config
        free = free_bytes(config, {k: fact for k, fact in self.facts.items() if k not in away})
        return self._observed.fleet(
            free,
            {owner: self._holdable(owner, free[owner]) for owner in free},
            config.training.gradient_accumulation_steps,
            relayed=config.links == "relay",
        )

    def _holdable(self, owner: WorkerId, free: float) -> PartBytes:
        """The needs of the parts on a process. Parts that are held elsewhere in another precision
        keep it, so here they need more than is free."""
        config, parts = self.prepared.config, self._part_bytes[owner]
        streams, free_there = owner in self._streaming, self.facts[owner].host_free
        if free_there and (streams or config.training.offload_optimizer):
            name = machine_of(config, config.machine(owner))
            parts = {**parts, "host_bytes": free_there, "machine": name}
            if streams:
                rate = self._known_rates.get(str(owner), _ASSUMED_RATE)
                parts = {**parts, "host_to_device_bytes_per_s": rate}
        kind = config.quantization(owner)
        others = {s.index for s in config.plan.stages if config.quantization(s.owner) != kind}
        if not others:
            return parts
        layers = [*parts["layer_bytes"]]
        for stage in (s for s in config.plan.stages if s.index in others):
            layers[stage.start : stage.end] = [2 * free] * (stage.end - stage.start)
        head = 2 * free if len(config.shard_plan) - 1 in others else parts["head_bytes"]
        return {**parts, "layer_bytes": layers, "head_bytes": head}

    def _searched(self, away: Collection[WorkerId]) -> list[dict[str, Any]]:
        """The entries of the planner's plan for the processes that are not away."""
        owners = [entry.id for entry in self.prepared.resolved.given.shard_plan]
        chunks = {CHUNKS} if len(set(owners)) < len(owners) else set()
        fleet = self._fleet(away)
        try:
            result = planner.plan(fleet, allow=chunks)
        except PlanError as error:
            if not isinstance(kinds := self.prepared.config.kinds, dict):
                raise
            kept = f"layers keep their precision ({json.dumps(kinds)}), which differs by machine"
            raise PlanError(f"{error.message}; {kept}", hint=error.hint) from error
        return self._with_settings(result.shard_plan)

    def _with_settings(self, entries: setup.Entries) -> list[dict[str, Any]]:
        """The layers of `entries` with the user's settings of each process. The run's setting
        decides on direct links. A process that may stream layers streams as few as it has to."""
        given = {entry.id: entry for entry in self.prepared.resolved.given.shard_plan}
        kept = ("gradient_checkpointing", "offload_optimizer")
        return [
            {
                **{name: entry[name] for name in ("id", "start", "end")},
                **{name: getattr(given.get(entry["id"]), name, None) for name in kept},
                "offload": "auto" if entry["id"] in self._streaming else 0,
            }
            for entry in entries
        ]


def simulated(fleet: Fleet, stages: Stages) -> Evaluated | None:
    """A plan on these devices, direct where it can be and with the fewest streamed layers that fit,
    with the schedule that a run would use; None where it does not fit."""
    index = {owner: d for d, owner in enumerate(fleet.ids)}
    devices = [index[stage.owner] for stage in stages]
    direct = [False, *(fleet.can_go_direct(a, b) for a, b in pairwise(devices))]
    parts = (
        Part(d, stage.start, stage.end, False, is_direct)
        for d, stage, is_direct in zip(devices, stages, direct, strict=True)
    )
    return evaluated(fleet, fleet.streamed(tuple(parts))[0])


def _model_work(prepared: setup.Prepared) -> LayerWork:
    """The work of layers and head in numbers of weights; products cost in proportion."""
    model = meta_model(prepared.model_config)
    blocks = model.get_submodule(introspect(prepared.model_config).blocks)
    layers = [sum(p.numel() for p in block.parameters()) for block in blocks.children()]
    head = model.get_output_embeddings()
    head_work = sum(p.numel() for p in head.parameters()) if head is not None else 0
    fewest = first_layers(prepared.config, prepared.model_config)
    return LayerWork(tuple(map(float, layers)), float(head_work), fewest)


def _memory(prepared: setup.Prepared, owner: WorkerId) -> list[StageMemory]:
    layers = introspect(prepared.model_config).num_layers
    config, data = prepared.config.held_by(owner), prepared.data
    if config.training.gradient_checkpointing:  # "auto": wherever it is needed
        config = config.with_changes(training={"gradient_checkpointing": True})
    about = (prepared.adapter_plan, data.row_tokens, data.pictures)
    return memory_of_parts(config, prepared.model_config, layers, *about)
