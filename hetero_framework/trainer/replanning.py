"""Which plan a run takes next, and why: without workers that are away, with those that are back.

What the steps have shown of devices and links, and what was free when the run began, is all that a
new plan is made of. Taking it is `Coordinator._take_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_framework import planner
from hetero_framework.cluster.assembly import Assembly, MachineFacts
from hetero_framework.cluster.roles import machine_of
from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.models.introspect import introspect
from hetero_framework.models.memory import memory_of_parts
from hetero_framework.planner.observed import ModelParts, Observed
from hetero_framework.planner.planning import CHUNKS
from hetero_framework.trainer import setup
from hetero_framework.trainer.run_checkpoint import plan_entries


def absence_s(config: Config) -> float:
    """How long a run that can go on without a worker waits for it."""
    return min(config.training.rejoin_wait_s, timeouts.REPLAN_S)


@dataclass(frozen=True)
class PlanChange:
    """A plan to take, ready to be loaded, and why. `away` are workers that it does without."""

    parts: setup.Prepared
    reason: str
    away: tuple[WorkerId, ...] = ()

    @property
    def layers(self) -> str:
        """Who holds what: "coordinator 0-3, worker 1 4-5"."""
        stages = self.parts.config.plan.stages
        return ", ".join(f"{s.process} {s.layers.split(maxsplit=1)[-1]}" for s in stages)


class Replanning:
    """The plans of one run. `parts` are those of the plan in force."""

    def __init__(
        self, parts: setup.Prepared, facts: Mapping[WorkerId, MachineFacts], *, survivors: bool
    ) -> None:
        """`survivors`: the run goes on without workers that stay away."""
        self.survivors = survivors
        self.facts = dict(facts)
        self.missing: set[WorkerId] = {*parts.resolved.given.plan.owners} - {
            *parts.config.plan.owners
        }
        """Workers that the plan in force does without because they were away."""
        self._parts = parts
        self._home = plan_entries(parts.resolved.given)  # the plan when everybody is here
        self._observed = Observed(_model_parts(parts))

    def note(self, assembly: Assembly) -> None:
        """A step has been done."""
        self._observed.note(self._parts.config.plan.stages, assembly.profile())

    def without(self, away: Collection[WorkerId]) -> PlanChange:
        """The best plan of those that are here. Raises PlanError where they cannot hold it all."""
        names = ", ".join(map(str, away))
        entries = self._searched(away)
        return self._change(entries, f"worker {names} stays away", tuple(away))

    def with_back(self, back: Collection[WorkerId], away: Collection[WorkerId]) -> PlanChange:
        """The plan for when workers have come `back` and others are still `away`. Raises
        PlanError."""
        entries = self._searched(away) if away else self._home
        names = ", ".join(map(str, back))
        return self._change(entries, f"worker {names} is back", tuple(away))

    def taken(self, change: PlanChange) -> None:
        """This plan is in force."""
        self._parts, self.missing = change.parts, set(change.away)

    def _change(
        self, entries: setup.Entries, reason: str, away: tuple[WorkerId, ...]
    ) -> PlanChange:
        return PlanChange(setup.replanned(self._parts, entries, self.facts, reason), reason, away)

    def _searched(self, away: Collection[WorkerId]) -> list[dict[str, Any]]:
        """The planner's answer for the processes that are here. Where tensors go directly is the
        run's setting, and what the user said of a process's checkpointing stays."""
        config = self._parts.config
        profile = self._observed.fleet(
            _free_bytes(config, self.facts, away),
            config.training.gradient_accumulation_steps,
            relayed=config.links == "relay",
        )
        given = self._parts.resolved.given
        owners = [entry.id for entry in given.shard_plan]
        chunks = {CHUNKS} if len(set(owners)) < len(owners) else set()
        found = planner.plan(profile, allow=chunks)
        said = {entry.id: entry.gradient_checkpointing for entry in given.shard_plan}
        return [
            {
                **{name: entry[name] for name in ("id", "start", "end")},
                "gradient_checkpointing": said.get(entry["id"]),
            }
            for entry in found.shard_plan
        ]


def _free_bytes(
    config: Config, facts: Mapping[WorkerId, MachineFacts], away: Collection[WorkerId]
) -> dict[WorkerId, float]:
    """What each process that is here may fill; those that share a device share what is free."""
    places = {
        d: (machine_of(config, config.machine(d)), fact.device)
        for d, fact in facts.items()
        if d not in away
    }
    sharers = Counter(places.values())
    return {d: facts[d].memory_free / sharers[place] for d, place in places.items()}


def _model_parts(parts: setup.Prepared) -> ModelParts:
    """Work is the number of weights: what a matrix product costs for a token."""
    layers = introspect(parts.model_config).num_layers
    config, tokens = parts.config, parts.data.row_tokens
    if config.training.gradient_checkpointing:  # "auto": wherever it takes that
        config = config.with_changes(training={"gradient_checkpointing": True})
    embedding, *blocks, head = memory_of_parts(
        config, parts.model_config, layers, parts.adapter_plan, tokens
    )
    return ModelParts(
        tuple(float(block.parameters) for block in blocks),
        float(head.parameters),
        tuple(float(block.kept) for block in blocks),
        float(embedding.kept),
        float(head.kept + head.logits),
        tuple(float(block.per_micro_batch) for block in blocks),
    )
