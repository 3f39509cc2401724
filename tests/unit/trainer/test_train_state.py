"""A run's state is a value: its successor after a step, and its way into a checkpoint and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero_framework.engine.loss_scale import LossScale
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

STATE = TrainState(7, 5, 2, 900, LossScale(1024.0, 3))


def test_state_dict_through_json_gives_the_same_state() -> None:
    assert TrainState.load_state_dict(json.loads(json.dumps(STATE.state_dict()))) == STATE
    assert TrainState.load_state_dict(TrainState().state_dict()) == TrainState()


def test_load_state_dict_reads_the_position_of_an_earlier_version() -> None:
    """As the first release wrote it into manifest.json."""
    position = {
        "step": 7,
        "committed_steps": 5,
        "skipped_in_a_row": 2,
        "loss_scale": 1024.0,
        "loss_scale_good_steps": 3,
        "tokens": 900,
    }
    assert TrainState.load_state_dict(position) == TrainState(7, 5, 2, 900, LossScale(1024.0, 3))


@pytest.mark.parametrize(
    ("skip", "after"),
    [
        (None, TrainState(8, 6, 0, 1000, LossScale(1024.0, 4))),
        ("overflow", TrainState(8, 5, 2, 1000, LossScale(512.0, 0))),
        ("non-finite", TrainState(8, 5, 3, 1000, LossScale(512.0, 0), skipped=1)),
        ("rule", TrainState(8, 5, 2, 1000, LossScale(1024.0, 3))),
    ],
)
def test_each_outcome_changes_its_own_counts(skip: Any, after: TrainState) -> None:
    """A skip holds the schedule; only what is not finite counts, and a rule leaves the scale."""
    assert STATE.after(StepOutcome(skip), 100) == after


def test_an_earlier_state_is_untouched_by_later_steps() -> None:
    before = STATE.state_dict()
    STATE.after(StepOutcome(), 1).after(StepOutcome("non-finite"), 1)
    assert STATE.state_dict() == before
