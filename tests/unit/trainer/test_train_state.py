"""A run's state is a value: its successor after a step, and its way into a checkpoint and back."""

from __future__ import annotations

import json

import pytest

from hetero_framework.engine.loss_scale import LossScale
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.step_outcome import StepOutcome
from hetero_framework.trainer.train_state import TrainState

STATE = TrainState(7, 5, 2, 900, LossScale(1024.0, 3))


def test_state_dict_through_json_gives_the_same_state():
    assert TrainState.load_state_dict(json.loads(json.dumps(STATE.state_dict()))) == STATE
    assert TrainState.load_state_dict(TrainState().state_dict()) == TrainState()


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"tokens": 1.5}, {"loss_scale": 1024.0}, {"due": 3}, {"other": 1}]
)
def test_what_is_no_position_of_a_run_is_refused(change):
    with pytest.raises(CheckpointError, match="is no position of a run"):
        TrainState.load_state_dict({**STATE.state_dict(), **change})


@pytest.mark.parametrize(
    ("skip", "after"),
    [
        (None, TrainState(8, 6, 0, 1000, LossScale(1024.0, 4))),
        ("overflow", TrainState(8, 5, 2, 1000, LossScale(512.0, 0))),
        ("non-finite", TrainState(8, 5, 3, 1000, LossScale(512.0, 0), skipped=1)),
        ("rule", TrainState(8, 5, 2, 1000, LossScale(1024.0, 3))),
    ],
)
def test_each_outcome_changes_its_own_counts(skip, after):
    """A skip holds the schedule; only what is not finite counts, and a rule leaves the scale."""
    assert STATE.after(StepOutcome(skip), 100) == after


def test_an_earlier_state_is_untouched_by_later_steps():
    before = STATE.state_dict()
    STATE.after(StepOutcome(), 1).after(StepOutcome("non-finite"), 1)
    assert STATE.state_dict() == before
