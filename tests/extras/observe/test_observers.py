"""Observers that draw a run cost it nothing."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ProtocolError
from hetero_framework.extras.observe.observers import RunPictures, TimelineFile
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.observers import Placement, Watched
from hetero_framework.trainer.setup import Prepared
from hetero_framework.trainer.train_state import TrainState


def watched(config: Config) -> Watched:
    placed = Placement(cast(Prepared, SimpleNamespace(config=config)), {})
    return Watched(placed, CheckpointStore(config.checkpoints), lambda: False)


def test_an_error_that_ends_a_run_is_not_replaced_by_its_timelines(alone):
    for failed, raised in ((True, nullcontext()), (False, pytest.raises(ProtocolError))):
        file = TimelineFile(watched(alone()))
        file._timeline.add("local", [{"kind": "x"}])
        with raised:
            file.close(failed)


def test_a_run_goes_on_where_its_curves_cannot_be_drawn(alone, logged):
    config = alone(training={"visualize": True})
    curves, metrics = config.output_dir / "curves.png", config.output_dir / "metrics.jsonl"
    drawn = RunPictures(watched(config))
    drawn.exported(TrainState())
    assert "the curves are not drawn: there is no metrics.jsonl" in logged.pop()
    config.output_dir.mkdir()
    metrics.write_text('{"step": 1, "loss": 2.0, "learning_rate": 0.1, "grad_norm": null}\n')
    curves.mkdir()
    drawn.exported(TrainState())
    assert "cannot write the picture" in logged.pop()
    curves.rmdir()
    drawn.exported(TrainState())
    assert logged == []
    assert drawn.leaves()["curves"] == curves
    assert curves.exists()


@pytest.mark.parametrize("refused", [errno.ENOSPC, errno.EACCES])
def test_a_run_goes_on_where_its_diagram_cannot_be_written(refused, alone, monkeypatch):
    def write(path: Path, content: bytes) -> None:
        raise OSError(refused, os.strerror(refused), str(path))

    config = alone(training={"visualize": True, "max_steps": 1})
    monkeypatch.setattr("hetero_framework.extras.observe.pictures.write_file", write)
    assert train(config).steps == 1
    said = (config.output_dir / "logs" / "coordinator.log").read_text(encoding="utf-8")
    for what in ("the diagram of the machines is", "the curves are"):
        assert f"{what} not drawn: cannot write the picture {config.output_dir}" in said
