from typing import Protocol

from hetero_framework.engine.pipeline import Pipeline


class ReplicaGroup(Protocol):
    """The replicas of a model that take every step together.

    All replicas call the same methods in the same order, so each may wait for the others' values.
    """

    def num_items(self, local: int) -> int:
        """The number of items that a step's loss is a mean over, from this replica's `local`."""

    def reduce(self, gradients: Pipeline) -> None:
        """Add the other replicas' gradients to those that lie in the stages of the pipeline.

        Called when every backward is done and no norm has been taken. Called again where a link
        broke and the step's gradients were computed anew, so it must not count anything twice.
        """

    def should_commit(self, finite: bool) -> bool:
        """Whether this step changes the weights; `finite` is what this replica says of its own.

        The answer must be the same in every replica: with it the step is decided.
        """

    def after_commit(self, step: int) -> None:
        """Step number `step` (from 1) has changed the weights."""


class Single:
    """A replica by itself: its numbers are the group's."""

    def num_items(self, local: int) -> int:
        return local

    def reduce(self, gradients: Pipeline) -> None:
        pass

    def should_commit(self, finite: bool) -> bool:
        return finite

    def after_commit(self, step: int) -> None:
        pass
