"""Changes of a run's plan, between two steps or after a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hetero_framework import registry
from hetero_framework.cluster.cluster import Cluster, MachineFacts
from hetero_framework.config import Config, with_saved_plan
from hetero_framework.core.fields import WorkerId
from hetero_framework.engine.schedule.simulator import Profile
from hetero_framework.errors import PeerLostError
from hetero_framework.security.access import Access
from hetero_framework.trainer.outputs import UNFINISHED_FILE
from hetero_framework.trainer.setup import Prepared


def planned(config: Config, access: Access, *, resume: int | str | None, fresh: bool) -> Config:
    """The configuration, with "auto" replaced by the continued run's plan or by a new plan."""
    is_unfinished = (config.output_dir / UNFINISHED_FILE).exists() and not fresh
    if resume or config.resume_step or is_unfinished:
        config = with_saved_plan(config)
    if config.is_planned:
        return config
    plan = registry.needed("planners", "auto", 'shard_plan "auto"')
    made: Config = plan(config, access)
    return made


@dataclass(frozen=True)
class PlanChange:
    """A plan that is ready to be loaded, and the reason to take it. `planned_s` is the expected
    seconds of a step, by measurements under earlier plans; None where they do not fit."""

    prepared: Prepared
    reason: str
    planned_s: float | None

    @property
    def layers(self) -> str:
        """The layers of each process: "layers 0-3 on coordinator, no layers on worker 1"."""
        stages = self.prepared.config.plan.stages
        return ", ".join(f"{stage.layers} on {stage.process}" for stage in stages)


class Plans:
    """The plans of one run. This class keeps the plan that the run begins with."""

    def __init__(self, prepared: Prepared, facts: Mapping[WorkerId, MachineFacts]) -> None:
        """`prepared` has the plan in force, and `facts` describe its processes."""
        self.prepared, self.facts = prepared, dict(facts)
        self.planned_s: float | None = None
        """Expected seconds of a step under the plan in force, if they are known."""
        self.memory = _memory_by_owner(prepared)
        """Estimated bytes of memory by process."""

    def after_step(self, seen: Profile) -> None:
        """Note that a step was done, with these times of stages and edges."""

    def changes(self, cluster: Cluster) -> Iterator[PlanChange]:
        """Yield plans to take now, between two steps. Each is taken before the next is made."""
        return iter(())

    def after_loss(self, lost: PeerLostError, away: Collection[WorkerId]) -> PlanChange:
        """The plan for the workers that are not `away`. Raises `lost` if there is none."""
        raise lost

    def taken(self, change: PlanChange) -> None:
        """Note that this plan is in force."""
        self.prepared, self.planned_s = change.prepared, change.planned_s
        self.memory = _memory_by_owner(change.prepared)


def _memory_by_owner(prepared: Prepared) -> Counter[WorkerId]:
    totals: Counter[WorkerId] = Counter()
    for memory in prepared.memory:
        totals[memory.stage.owner] += memory.total
    return totals
