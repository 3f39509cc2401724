"""What surrounds a step when several coordinators, each with a whole model, train together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetero_framework.engine.stage_api import StageInterface, StepInfo


class ReplicaGroup(Protocol):
    """The replicas of a model that take every step together; by itself, a group of one.

    In each step the methods are called in the order in which they stand here. All replicas call
    the same ones, so each may wait for the others' values.
    """

    def num_items(self, local: int) -> int:
        """The number of items that a step's loss is a mean over, from this replica's `local`."""
        return local

    def reduce(self, info: StepInfo, stages: Sequence[StageInterface]) -> bool:
        """Add the other replicas' gradients to those in the stages of this process: a
        `stage_host.Reduce`. False while that is under way."""
        return True

    def should_commit(self, finite: bool) -> bool:
        """Whether this step changes the weights, the same answer in every replica; `finite` is what
        this one says of its own loss and gradients."""
        return finite

    def after_commit(self, step: int) -> None:
        """Step number `step` (from 1) has changed the weights."""
        return


class Single(ReplicaGroup):
    """A replica by itself: its numbers are the group's. What every run has today."""
