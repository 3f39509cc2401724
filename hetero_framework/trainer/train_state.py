"""The position of a run, without weights and optimizer: one value that each step replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetero_framework.engine.loss_scale import LossScale
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.step_outcome import StepOutcome


@dataclass(frozen=True)
class TrainState:
    """The state that goes on from step to step.

    `step` counts the steps done, also skipped steps. `committed_steps` counts the steps that
    changed the weights: the position in the learning-rate schedule. `skipped_in_a_row` and
    `skipped` (in all) count only steps with non-finite values. `tokens` counts all tokens trained
    on. `group` is what a group of replicas has to remember, as JSON data. `jumped` counts the steps
    of the data left out because a callback ended an epoch early. `due` names what is due after the
    last step (`Due`), if known: a run may be cut short before that is done.
    """

    step: int = 0
    committed_steps: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)
    skipped: int = 0
    group: Mapping[str, Any] = field(default_factory=dict)
    jumped: int = 0
    due: tuple[str, ...] | None = None

    @property
    def position(self) -> int:
        """The next step of the data."""
        return self.step + self.jumped

    def after(self, outcome: StepOutcome, tokens: int) -> TrainState:
        """The state after a step of `tokens` tokens."""
        commits, scale, is_fault = outcome.commits, self.loss_scale, outcome.skip == "non-finite"
        if outcome.skip != "rule":  # it says nothing about the scale
            scale = scale.after(finite=commits)
        return replace(
            self,
            step=self.step + 1,
            committed_steps=self.committed_steps + commits,
            skipped_in_a_row=0 if commits else self.skipped_in_a_row + is_fault,
            skipped=self.skipped + is_fault,
            tokens=self.tokens + tokens,
            loss_scale=scale,
            due=None,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON data, for `load_state_dict`."""
        return asdict(self)

    @classmethod
    def load_state_dict(cls, state: Mapping[str, Any]) -> TrainState:
        """The TrainState that `state_dict` described. Raises CheckpointError for anything else."""
        try:
            due = None if state["due"] is None else tuple(state["due"])
            made = cls(**{**state, "loss_scale": LossScale(**state["loss_scale"]), "due": due})
            counts = (made.step, made.committed_steps, made.skipped_in_a_row, made.skipped)
            numbers = (*counts, made.tokens, made.jumped)
            valid = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
            valid = valid and made.loss_scale.value > 0
        except (KeyError, TypeError):
            valid = False
        if not valid:
            raise CheckpointError(f"{dict(state)!r:.200} is no position of a run")
        return made
