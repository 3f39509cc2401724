"""A run's state is a value: its successor after a step, and its way into a checkpoint and back."""

from __future__ import annotations

import json

import pytest

from hetero_framework.engine.loss_scale import LossScale
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


def test_after_commit_counts_the_step_and_ends_a_row_of_skips() -> None:
    assert STATE.after_commit(100) == TrainState(8, 6, 0, 1000, LossScale(1024.0, 4))


@pytest.mark.parametrize(("overflow", "in_a_row"), [(True, 2), (False, 3)])
def test_after_skip_holds_the_schedule_and_counts_unexplained_skips(
    overflow: bool, in_a_row: int
) -> None:
    after = STATE.after_skip(100, overflow=overflow)
    assert after == TrainState(8, 5, in_a_row, 1000, LossScale(512.0, 0), int(not overflow))


def test_an_earlier_state_is_untouched_by_later_steps() -> None:
    before = STATE.state_dict()
    STATE.after_commit(1).after_skip(1, overflow=False)
    assert STATE.state_dict() == before
