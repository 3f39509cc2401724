"""Hooks around a step for data-parallel replicas: several coordinators, each with a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hetero_framework.data.batches import MicroBatch
from hetero_framework.data.train_data import TrainData
from hetero_framework.engine.stage_api import GradientSum
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

CountItems = Callable[[Sequence[MicroBatch]], int]
"""Counts the items by which a step's loss is divided."""


@dataclass(frozen=True)
class StepPart:
    """This replica's part of a step. `number` is the step in the data's order, which random numbers
    follow from. `samples` has the numbers of each batch's samples in the data. `num_items` counts
    the step's items on all replicas. With `group`, gradients are summed over the replicas, and
    `first_micro_batch` micro-batches of other replicas come before the ones here."""

    number: int
    batches: list[MicroBatch]
    samples: Sequence[Iterable[int]]
    num_items: int
    group: GradientSum | None = None
    first_micro_batch: int = 0


class ReplicaGroup(Protocol):
    """The replicas of a model; this class is a group of one. In each step the methods are called in
    the order of their definition. All but `ready` may raise ReplicasChanged."""

    is_alone: bool = False
    """Whether this replica is the whole group."""
    agrees: bool = True
    """Whether all replicas have this replica's state."""
    saves: bool = True
    """Whether this replica writes the group's checkpoints, and `agrees`."""

    def ready(self, state: TrainState) -> TrainState:
        """The state that the next step begins with: `state`, unless this replica has taken over
        another replica's state."""
        return state

    def part(self, state: TrainState, data: TrainData, count_items: CountItems) -> StepPart:
        """This replica's part of the next step."""
        batches = data.step_batches(state.position)
        samples = data.order.step_indices(state.position)
        return StepPart(state.position, batches, samples, count_items(batches))

    def losses(self, local: list[float]) -> list[float]:
        """The losses of the step's micro-batches on all replicas, given the `local` ones."""
        return local

    def decide(self, outcome: StepOutcome, norm: Tensor) -> tuple[StepOutcome, Tensor]:
        """The step's outcome and the norm of its gradients, equal in every replica, given this
        replica's `outcome` and `norm`."""
        return outcome, norm

    def elsewhere(self) -> tuple[str, ...]:
        """After a step skipped as non-finite: the other replicas with non-finite losses or
        gradients; empty if this replica has such values itself."""
        return ()

    def after_step(self, before: TrainState, state: TrainState) -> TrainState:
        """The state to go on with after a step that led from `before` to `state`."""
        return state

    def metrics(self) -> Mapping[str, Any]:
        """Metrics for the step's line."""
        return {}

    def went_back(self, state: TrainState) -> None:
        """Note that this replica is back at an earlier state; a call of `ready` with it follows."""
        return

    def finished(self, state: TrainState) -> TrainState:
        """The state that the run ends with after all steps, equal in every replica."""
        return state

    def close(self, reason: str) -> None:
        """End this replica, its steps done or not. Safe to call more than once."""
        return


class Single(ReplicaGroup):
    """A replica by itself: its numbers are the group's."""

    is_alone = True
