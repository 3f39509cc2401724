"""The checkpoints that a run has on its disk at once."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import TrainingConfig
from hetero_framework.trainer.disk_space import checkpoints_at_once


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"save_strategy": "steps", "save_steps": 5}, 5),  # the last one at the end, after 23 steps
        ({"save_strategy": "steps", "save_steps": 0.5}, 2),
        ({"save_strategy": "steps", "save_steps": 5, "save_total_limit": 3}, 4),  # and the new one
        ({"save_strategy": "epoch"}, 3),
        ({"save_strategy": "epoch", "save_total_limit": 9}, 3),
        ({"save_strategy": "steps", "save_steps": 100}, 2),
    ],
)
def test_one_more_than_the_limit_is_there_while_it_is_written(
    settings: dict[str, Any], most: int
) -> None:
    assert checkpoints_at_once(TrainingConfig(**settings), 23, steps_per_epoch=10) == most
