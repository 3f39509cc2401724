"""Hooks around a step for data-parallel replicas: several coordinators, each with a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hetero_framework.data import MicroBatch, TrainData
from hetero_framework.engine.stage_api import GradientSum
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

CountItems = Callable[[Sequence[MicroBatch]], int]
"""The label tokens that a step's loss is a mean over."""


@dataclass(frozen=True)
class StepPart:
    """This replica's part of a step. `number` is the step of the data's order that its random
    numbers follow from, `samples` are those of each of its `batches`, by their numbers in the data,
    `num_items` the label tokens of the step on all replicas; with `group` the gradients are summed
    over them, whose micro-batches, `first_micro_batch` of them, come first."""

    number: int
    batches: list[MicroBatch]
    samples: Sequence[Iterable[int]]
    num_items: int
    group: GradientSum | None = None
    first_micro_batch: int = 0


class ReplicaGroup(Protocol):
    """The replicas of a model; by itself, a group of one. In each step the methods are called in
    the order in which they stand here; all but the first may raise ReplicasChanged."""

    is_alone: bool = False
    """Whether this replica is the whole group."""
    saves: bool = True
    """Whether this replica writes the checkpoints, and all agree on its state."""

    def ready(self, state: TrainState) -> TrainState:
        """Before a step: the state that it begins with, which is that of `state` unless this
        replica has taken over another one's."""
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
        """The step's outcome, the same in every replica, and the norm of the gradients, given those
        of this replica."""
        return outcome, norm

    def elsewhere(self) -> tuple[str, ...]:
        """After a step that is skipped as non-finite: the other replicas whose losses or gradients
        are not finite; none where this one's are not."""
        return ()

    def after_step(self, before: TrainState, state: TrainState) -> TrainState:
        """After the step, which led from `before` to `state`: the state to go on with."""
        return state

    def metrics(self) -> Mapping[str, Any]:
        """Metrics for the step's line."""
        return {}

    def went_back(self, state: TrainState) -> None:
        """Note that this replica has returned to an earlier state; `ready` with it follows."""
        return

    def finished(self, state: TrainState) -> TrainState:
        """After all steps: the state that the run ends with, which all replicas have."""
        return state

    def close(self, reason: str) -> None:
        """End this replica, whose steps may be done; safe to call more than once."""
        return


class Single(ReplicaGroup):
    """A replica by itself: its numbers are the group's."""

    is_alone = True
