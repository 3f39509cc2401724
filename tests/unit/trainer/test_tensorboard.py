"""TensorBoard gets the numbers of steps and evaluations, and its failures end no run."""

from __future__ import annotations

import errno
import logging
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hetero_framework.trainer.observers import Due, Observers
from hetero_framework.trainer.tensorboard import TensorBoard
from tests.unit.trainer.test_metrics import metrics_of


def board_in(directory: Path, run_id: str = "5eed") -> TensorBoard:
    """One of a run that begins."""
    config = SimpleNamespace(logging_dir=directory)
    run: Any = SimpleNamespace(placed=SimpleNamespace(prepared=SimpleNamespace(config=config)))
    board = TensorBoard(run)
    start: Any = SimpleNamespace(run_id=run_id)
    board.begin(state(0), start, Due())
    return board


def state(step: int) -> Any:
    return SimpleNamespace(step=step)


def read_events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_it_gets_the_curves(tmp_path):
    board = board_in(tmp_path)
    board.step_end(state(1), metrics_of(1), Due())
    board.step_end(state(2), metrics_of(2, loss=math.nan), Due())
    board.evaluated(state(2), {"step": 2, "eval_loss": 3.0, "eval_perplexity": 20.0}, Due())
    board.close(failed=False)
    found = read_events(tmp_path)
    assert found["train/loss"] == [(1, 1.0)]
    assert found["train/grad_norm"] == [(1, 0.1), (2, 0.2)]
    numbers = {"epoch", "loss", "grad_norm", "learning_rate", "tokens"}
    numbers |= {"tokens_per_second", "step_seconds"}
    assert {tag.removeprefix("train/") for tag in found if tag.startswith("train/")} == numbers
    assert found["train/tokens"] == [(1, 100.0), (2, 100.0)]
    assert (found["eval/loss"], found["eval/perplexity"]) == ([(2, 3.0)], [(2, 20.0)])
    assert [path.name[-5:] for path in tmp_path.iterdir()] == [".5eed"]


def test_steps_that_are_repeated_are_there_once(tmp_path):
    board = board_in(tmp_path)
    for step in (1, 2, 3):
        board.step_end(state(step), metrics_of(step), Due())
    board.went_back(state(1))
    board.step_end(state(2), metrics_of(2, loss=7.0), Due())
    board.close(failed=False)
    assert read_events(tmp_path)["train/loss"] == [(1, 1.0), (2, 7.0)]


def test_a_directory_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        board = board_in(tmp_path / "tensorboard")
        for step in (1, 2):
            board.step_end(state(step), metrics_of(step), Due())
        board.close(failed=False)
    assert caplog.text.count("cannot write TensorBoard events") == 1


def test_a_full_disk_ends_it_with_a_line(tmp_path, monkeypatch, caplog):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    hook = threading.excepthook
    with caplog.at_level(logging.WARNING), Observers() as observers:
        assert threading.excepthook != hook
        observers.watch([board_in(tmp_path)])
        for step in (1, 2):
            observers.tell(TensorBoard.step_end, state(step), metrics_of(step), Due())
    assert threading.excepthook == hook
    assert "cannot write: [Errno 28] No space left on device; the run goes on" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_missing_package_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING):
        board_in(tmp_path).step_end(state(1), metrics_of(1), Due())
    assert "not installed" in caplog.text
    assert [*tmp_path.iterdir()] == []
