"""What may differ between a checkpoint and the run that takes it up, without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.resolved import Resolved
from hetero_framework.trainer.run_checkpoint import check_identity, identity
from tests.unit.trainer.conftest import Alone


def checkpoint(resolved: Resolved) -> Any:
    settings = {"settings": resolved.config.to_dict()}
    return SimpleNamespace(
        step=10, manifest={"identity": identity(resolved, "data"), "config": settings}
    )


def test_a_setting_that_may_change_on_the_way_is_said(alone: Alone, logged: list[str]) -> None:
    reader = checkpoint(Resolved.start(alone()))
    check_identity(reader, Resolved.start(alone()), "data")
    assert logged == []
    check_identity(
        reader, Resolved.start(alone(training={"learning_rate": 0.1, "log_level": "ERROR"})), "data"
    )
    assert logged == [
        "training.learning_rate was 0.01 at checkpoint 10, now it is 0.1; the run goes on with that"
    ]


def test_another_precision_of_a_layer_is_refused(alone: Alone) -> None:
    config = alone().with_changes(
        adapter={"r": 2},
        model={"name_or_path": "model", "from_config": None, "quantization": "nf4"},
        workers=[{"id": 1, "ip": "127.0.0.1", "port": 1, "quantization": "none"}],
        shard_plan=[{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}],
    )
    reader = checkpoint(Resolved.start(config))
    check_identity(reader, Resolved.start(config), "data")
    alike = config.with_changes(coordinator={"quantization": "none"})
    with pytest.raises(CheckpointError, match=r'"none": "layer 1 \+ head"}, now it is null'):
        check_identity(reader, Resolved.start(alike), "data")


def test_a_setting_that_may_not_change_is_refused(alone: Alone) -> None:
    reader = checkpoint(Resolved.start(alone()))
    with pytest.raises(CheckpointError, match=r"another run: training\.seed was 42, now it is 7"):
        check_identity(reader, Resolved.start(alone(training={"seed": 7})), "data")
