"""metrics.jsonl is strict JSON and equal to that of an uninterrupted run after a resume."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.errors import DataError, ResourceError
from hetero_framework.trainer import metrics as metrics_module
from hetero_framework.trainer.metrics import METRICS_FILE, StepLines


def metrics_of(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 4,
        "loss": 1 / step,
        "grad_norm": 0.1 * step,
        "learning_rate": 1e-4,
        "tokens": 100,
        "tokens_per_second": 50.0,
        "step_seconds": 2.0,
        "stages": [{"index": 0, "busy_s": 1.5}],
        **changes,
    }


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def lines_of(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def write_steps(directory: Path, first: int, last: int) -> None:
    lines = StepLines(directory / METRICS_FILE)
    lines.resume(first - 1)
    for step in range(first, last + 1):
        lines.write(metrics_of(step))
        if step % 2 == 0:
            lines.write({"step": step, "eval_loss": 1.0})


def test_each_line_is_on_disk_at_once_and_exact(tmp_path):
    lines = StepLines(tmp_path / "new" / "folder" / METRICS_FILE)
    for step in (1, 2, 3):
        lines.write(metrics_of(step, loss=0.1 + 0.2))
        assert len(lines_of(tmp_path / "new" / "folder")) == step
    assert lines_of(tmp_path / "new" / "folder")[2] == metrics_of(3, loss=0.1 + 0.2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_lacks_become_null(tmp_path, value):
    lines = StepLines(tmp_path / METRICS_FILE)
    lines.write(metrics_of(1, loss=value, stages=[{"index": 0, "busy_s": value}]))
    lines.write(metrics_of(2, grad_norm=value))
    lines.write(metrics_of(3, tokens_per_second=value))
    first, second, third = lines_of(tmp_path)
    assert (first["loss"], first["stages"][0]["busy_s"]) == (None, None)
    assert (second["grad_norm"], second["loss"]) == (None, 0.5)
    assert third["tokens_per_second"] is None


@pytest.mark.parametrize("resumed_step", [0, 1, 4, 5, 9])
def test_resumed_file_equals_the_uninterrupted_one(tmp_path, resumed_step):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write_steps(whole, 1, 9)
    write_steps(resumed, 1, 9)
    with (resumed / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 10, "lo')  # the crash cut this line off
    write_steps(resumed, resumed_step + 1, 9)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [path.name for path in resumed.iterdir()] == ["metrics.jsonl"]


def test_resume_refuses_a_file_that_is_not_ours(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2: this is not a line of metrics"):
        StepLines(tmp_path / METRICS_FILE).resume(1)


def test_resume_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_steps(tmp_path, 1, 5)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics_module.os, "fsync", fail)
    with pytest.raises(ResourceError, match="No space left"):
        StepLines(tmp_path / METRICS_FILE).resume(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


class Disk:
    """Files whose writes end after `room` bytes, as on a full disk; the rest is the real thing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if disk.room <= 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = super().write(data[: disk.room])
                disk.room -= written
                return written

        def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            return File(path, "ab") if mode == "ab" else open(path, mode, *args, **kwargs)

        monkeypatch.setattr(metrics_module, "open", open_, raising=False)


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_line_without_room_is_lost_and_later_ones_are_written(tmp_path, monkeypatch, caplog, cut):
    disk = Disk(monkeypatch, room=10_000)
    lines = StepLines(tmp_path / METRICS_FILE)
    with caplog.at_level(logging.WARNING):
        lines.write(metrics_of(1))
        disk.room = cut  # the line of step 2 is cut off after so many bytes
        for step in (2, 3, 4):
            lines.write(metrics_of(step))
        disk.room = 10_000
        for step in (5, 6):
            lines.write(metrics_of(step))
    assert lines_of(tmp_path) == [metrics_of(1), metrics_of(5), metrics_of(6)]
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1, 0]
    assert "3 lines are lost" in caplog.records[1].getMessage()
    StepLines(tmp_path / METRICS_FILE).resume(5)
    assert lines_of(tmp_path) == [metrics_of(1), metrics_of(5)]


def test_output_dir_that_becomes_a_file_ends_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    lines = StepLines(tmp_path / "file" / METRICS_FILE)
    with caplog.at_level(logging.WARNING):
        lines.write(metrics_of(1))
        lines.write(metrics_of(2))
    assert len(caplog.records) == 1
