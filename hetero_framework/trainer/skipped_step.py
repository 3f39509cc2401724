"""Skipped steps: the reason, the first non-finite value and its samples, and limits on skips."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetero_framework.config import Config, StageSpec, TrainingConfig
from hetero_framework.config.asked_extras import asked
from hetero_framework.engine.stage_api import GradientReport
from hetero_framework.errors import NumericError
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

Rule = Callable[[TrainState, float, TrainingConfig], str | None]
RULES: list[Rule] = []
"""Rules that skip steps whose numbers are finite. More stand in the registry's table "rules", where
a name is a condition on the settings. A rule gets the state before the step, the norm of all
gradients and the settings; it returns the reason to skip the step, or None."""
_SHOWN = 16
_MOST_SKIPPED = 0.01
"""Largest share of a run's steps that may be skipped as non-finite."""


def judged(
    state: TrainState, losses: Sequence[float], loss: float, norm: Tensor, config: Config
) -> StepOutcome:
    """The outcome of a step, from its micro-batches' losses, their sum and the gradients' norm."""
    if not (math.isfinite(loss) and bool(norm.isfinite())):
        return StepOutcome("overflow" if state.loss_scale.explains(losses) else "non-finite")
    rules = (*RULES, *asked("rules", config))
    reasons = (rule(state, float(norm), config.training) for rule in rules)
    reason = next(filter(None, reasons), None)
    return StepOutcome() if reason is None else StepOutcome("rule", reason)


@dataclass(frozen=True)
class NonFinite:
    """The place of a step's first non-finite value. `stage` is None if each stage by itself is
    finite, `micro_batch` is None for a gradient, the sum of all. `samples` are numbers in the data.
    If the value came from other islands, only `islands` is set."""

    stage: StageSpec | None
    micro_batch: int | None
    samples: tuple[int, ...] = ()
    islands: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.islands:
            return f"non-finite losses or gradients of island {', '.join(self.islands)}"
        shown = ", ".join(map(str, self.samples[:_SHOWN]))
        if len(self.samples) > _SHOWN:
            shown += f" and {len(self.samples) - _SHOWN} more"
        if self.stage is None:
            return f"the norm of all gradients together is not finite, samples {shown}"
        owner = "the coordinator" if self.stage.owner == "local" else f"worker {self.stage.owner}"
        place = f"stage {self.stage.index} ({owner}, {self.stage.layers})"
        if self.micro_batch is None:
            return f"non-finite gradients first in {place}, samples {shown}"
        what = f"non-finite values in micro-batch {self.micro_batch}"
        return f"{what}, first out of {place}, samples {shown}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the event for events.jsonl."""
        return {
            "stage": self.stage and self.stage.index,
            "owner": self.stage and self.stage.owner,
            "micro_batch": self.micro_batch,
            "samples": list(self.samples),
            **({"islands": list(self.islands)} if self.islands else {}),
        }


def find(
    stages: Sequence[StageSpec],
    losses: Sequence[float],
    reports: Sequence[GradientReport],
    samples: Sequence[Iterable[int]],
    elsewhere: tuple[str, ...] = (),
) -> NonFinite:
    """Find the first non-finite value of a step. `samples` are the samples of each micro-batch
    here; `elsewhere` are other islands with such values, if this island has none."""
    places = [(k, stage) for stage, report in enumerate(reports) for k in report.nonfinite]
    places += [(k, len(stages) - 1) for k, loss in enumerate(losses) if not math.isfinite(loss)]
    if places:
        micro_batch, stage = min(places)
        return NonFinite(stages[stage], micro_batch, tuple(map(int, samples[micro_batch])))
    if elsewhere:
        return NonFinite(None, None, islands=elsewhere)
    everything = tuple(int(sample) for part in samples for sample in part)
    # Backward goes from the last stage to the first.
    bad = [k for k, report in enumerate(reports) if not bool(report.norms.isfinite().all())]
    return NonFinite(stages[max(bad)] if bad else None, None, everything)


def check_not_too_many(
    state: TrainState, total_steps: int, training: TrainingConfig, last: str
) -> None:
    """Raise NumericError after too many skipped steps in a row, or in all."""
    in_a_row, limit = state.skipped_in_a_row, training.max_skipped_steps
    hint = (
        "lower training.learning_rate, look at the data of these steps, or use bf16 instead of fp16"
    )
    if in_a_row > limit:
        raise NumericError(
            f"{in_a_row} steps in a row had non-finite losses or gradients; the last: {last}",
            hint=f"{hint}; training.max_skipped_steps sets the limit",
        )
    if state.skipped > max(limit, _MOST_SKIPPED * total_steps):
        raise NumericError(
            f"{state.skipped} of the run's {total_steps:,} steps had non-finite losses or "
            f"gradients; the last: {last}",
            hint=f"{hint}; training.max_skipped_steps raises the limit of {_MOST_SKIPPED:.0%}",
        )
