"""The checkpoints that a run has on its disk at once."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.config import TrainingConfig
from hetero_framework.trainer.run_checkpoint import checkpoints_at_once, warn_of_a_small_disk
from hetero_framework.units import size


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
def test_one_more_than_the_limit_is_there_while_it_is_written(settings, most):
    assert checkpoints_at_once(TrainingConfig(**settings), 23, steps_per_epoch=10) == most


def test_states_in_host_memory_are_part_of_a_checkpoint(tmp_path, monkeypatch, logged):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    training = TrainingConfig(save_strategy="epoch")
    prepared: Any = SimpleNamespace(
        config=SimpleNamespace(training=training),
        data=SimpleNamespace(total_steps=1, steps_per_epoch=1),
        memory=[SimpleNamespace(trained_bytes=1 << 20, states=2 << 20)],
    )
    store: Any = SimpleNamespace(complete_steps=list, root=tmp_path)
    warn_of_a_small_disk(prepared, store, 0)
    assert logged[0].startswith(f"a checkpoint takes about {size(3 << 20)}")
