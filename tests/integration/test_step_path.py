"""The way of a step through the coordinator's modules: short to the engine, and without detours."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, cast

import hetero_framework
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.trainer.coordinator import Coordinator, train
from hetero_framework.trainer.metrics import StepReport
from tests.pools import Notes

ROOT = str(Path(hetero_framework.__file__).parent)
MOST_MOVES = 350
"""Measured: 312 to 321, the same in every run: one process polls no links."""


def way_from(function: FunctionType, frame: FrameType) -> tuple[str, ...]:
    """The package's files through which this function has led to a frame, each once."""
    files: list[str] = []
    while True:
        files.append(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())
        if frame.f_code is function.__code__ or frame.f_back is None:
            return tuple(dict.fromkeys(reversed(files)))
        frame = frame.f_back


def test_a_step_reaches_the_engine_through_four_modules(alone, monkeypatch):
    ways: set[tuple[str, ...]] = set()
    step, record, run = Coordinator.train_step, Coordinator._record, Pipeline.run
    moves: list[list[str]] = []

    def watched(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and moves[-1][-1:] != [file]:
            moves[-1].append(file)

    def counted(self: Coordinator) -> StepReport | None:
        moves.append([])
        sys.setprofile(watched)
        try:
            return step(self)
        finally:
            sys.setprofile(None)

    def counted_on(self: Coordinator, report: StepReport) -> None:
        sys.setprofile(watched)
        try:
            record(self, report)
        finally:
            sys.setprofile(None)

    def noted(self: Pipeline, batches: Any) -> list[float]:
        ways.add(way_from(cast(FunctionType, step), sys._getframe(1)))
        return run(self, batches)

    monkeypatch.setattr(Coordinator, "train_step", counted)
    monkeypatch.setattr(Coordinator, "_record", counted_on)
    monkeypatch.setattr(Pipeline, "run", noted)
    training = {"max_steps": 8, "timeline_steps": 0, "probe_longest_batch": False}
    train(alone(training=training), progress=Notes())
    assert ways == {("trainer/coordinator.py", "cluster/recovery.py", "cluster/cluster.py")}
    # The schedule follows what steps 1, 2, 4, ... took, in the next step.
    usual = [len(of_step) for k, of_step in enumerate(moves) if k & (k - 1)]
    assert all(200 < count <= MOST_MOVES for count in usual), usual
    assert max(map(len, moves[1:])) <= MOST_MOVES + 100
