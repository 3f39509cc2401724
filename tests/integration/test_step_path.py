"""The way of a step through the coordinator's modules: short to the engine, and without detours."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, cast

import pytest

import hetero_framework
from hetero_framework.config import Config
from hetero_framework.engine.pipeline import Pipeline
from hetero_framework.trainer.coordinator import Coordinator, train
from tests.pools import Notes, Pool
from tests.samples import save_texts

pytestmark = pytest.mark.xdist_group("pool")
ROOT = str(Path(hetero_framework.__file__).parent)
MOST_MOVES = 900
"""Measured: 854 to 880 (1,750 once); a busy machine polls its links a little more often."""


def way_from(function: FunctionType, frame: FrameType) -> tuple[str, ...]:
    """The package's files through which this function has led to a frame, each once."""
    files: list[str] = []
    while True:
        files.append(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())
        if frame.f_code is function.__code__ or frame.f_back is None:
            return tuple(dict.fromkeys(reversed(files)))
        frame = frame.f_back


def test_a_step_reaches_the_engine_through_four_modules(
    pool: Pool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: set[tuple[str, ...]] = set()
    step, run = Coordinator.train_step, Pipeline.run
    moves: list[str] = []

    def watched(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and moves[-1:] != [file]:
            moves.append(file)

    def counted(self: Coordinator) -> None:
        if self._state.step == 2:
            sys.setprofile(watched)
        try:
            step(self)
        finally:
            sys.setprofile(None)

    def noted(self: Pipeline, batches: Any) -> list[float]:
        ways.add(way_from(cast(FunctionType, step), sys._getframe(1)))
        return run(self, batches)

    monkeypatch.setattr(Coordinator, "train_step", counted)
    monkeypatch.setattr(Pipeline, "run", noted)
    raw = pool.config(
        tmp_path / "run",
        [3],
        model={"name_or_path": str(llama)},
        data={"train": str(save_texts(tmp_path / "texts.jsonl", 32)), "max_length": 32},
        training={"max_steps": 4, "timeline_steps": 0, "probe_longest_batch": False},
    )
    train(Config.from_dict(raw), progress=Notes())
    assert ways == {("trainer/coordinator.py", "cluster/recovery.py", "cluster/loaded_pipeline.py")}
    assert 200 < len(moves) <= MOST_MOVES
