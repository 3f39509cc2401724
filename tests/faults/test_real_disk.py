"""A disk that is really full, or really read-only: a small file system of its own, for root."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ResourceError
from hetero_framework.trainer import run_checkpoint
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.progress import Progress
from tests.alone import Alone, alone, alone_model  # noqa: F401

pytestmark = pytest.mark.faults
STEPS = 8


@pytest.fixture
def disk(tmp_path):
    """A file system of 1,200 KiB in memory; a checkpoint takes about 350."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a file system needs Linux and root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(place)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Watch(Progress):
    """Keeps the lines, and does something when a save fails for the n-th time."""

    def __init__(self, at: int = 0, act=lambda: None) -> None:
        super().__init__()
        self.failed: list[str] = []
        self.lines: list[str] = []
        self._at, self._act = at, act

    def message(self, text: str) -> None:
        self.lines.append(text)
        if "could not be written" in text:
            self.failed.append(text)
            if len(self.failed) == self._at:
                self._act()


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Temporary files have a place of their own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(run_checkpoint.tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def on_disk(alone, disk):  # noqa: F811
    """Runs of eight steps that save each of them on the small disk, and what they should come
    to."""
    training = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS}
    train(alone("whole", training=training))

    def make(**changes: object) -> Config:
        place = str(disk / "checkpoints")
        return alone("run", training={**training, **changes}, checkpoint_dir=place)

    return make


@contextmanager
def read_only_after_step_3(place: Path) -> Iterator[Watch]:
    """Remounted as such, while the file system itself stays busy: the run holds a lock on it. The
    run ends with an error, and with what the folder held then."""

    class ReadOnly(Watch):
        def step(self, line) -> None:
            super().step(line)
            if line["step"] == 3:  # the checkpoint of step 2 is there
                self.before = hashes(place)
                subprocess.run(["mount", "--bind", place, place], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)

    try:
        with pytest.raises(ResourceError, match="Read-only file system") as raised:
            yield (watch := ReadOnly())
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    watch.raised = raised
    assert raised.value.exit_code == 6


def named(raised: pytest.ExceptionInfo[ResourceError]) -> str:
    """Where all work was saved, by the command that is said to go on from there."""
    found = re.search(r"--resume latest --set checkpoint_dir=(\S+)", str(raised.value))
    assert found, str(raised.value)
    return found[1]


def hashes(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    files = [path for path in files if path.name != "README.md"]  # a card has a run's last figures
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def losses(metrics: Path) -> list[float]:
    lines = metrics.read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def assert_is_the_undisturbed_run(config: Config) -> None:
    whole = config.output_dir.with_name("whole")
    assert hashes(config.result_dir) == hashes(whole / "model")


def figures(name: str, watch: Watch, config: Config) -> None:
    steps = CheckpointStore(config.checkpoints).complete_steps()
    print(f"\n{name}: {len(watch.failed)} failed saves, checkpoints left {steps}")


def test_f24_a_disk_that_is_full_for_a_while_costs_checkpoints_only(on_disk, disk):
    ballast = disk / "ballast"
    config = on_disk(save_total_limit=2)
    watch = Watch(2, ballast.unlink)
    ballast.write_bytes(b"\0" * (800 << 10))
    summary = train(config, progress=watch)
    assert summary.steps == STEPS
    assert len(watch.failed) == 2
    assert all("no space for checkpoint" in line for line in watch.failed)
    assert_is_the_undisturbed_run(config)
    figures("full for a while", watch, config)


def test_f24_a_disk_that_stays_full_ends_the_run_with_all_work_saved(on_disk, disk):
    config = on_disk()
    watch = Watch()
    with pytest.raises(ResourceError, match="no space for checkpoint 6") as raised:
        train(config, progress=watch)
    assert raised.value.exit_code == 6
    assert len(watch.failed) >= 3
    kept = CheckpointStore(config.checkpoints)
    assert kept.complete_steps() == [1, 2, 3]
    for step in kept.complete_steps():
        kept.resolve(step)  # whole, by its hashes
    assert not [path.name for path in config.checkpoints.iterdir() if "." in path.name[1:]]
    figures("stays full", watch, config)
    again = config.with_changes(checkpoint_dir=named(raised))
    assert train(again, resume="latest").steps == STEPS
    assert_is_the_undisturbed_run(config)


def test_f24_a_disk_that_becomes_read_only_keeps_its_checkpoints(on_disk, disk):
    config = on_disk(save_total_limit=2)
    with read_only_after_step_3(config.checkpoints) as watch:
        train(config, progress=watch)
    assert len(watch.failed) >= 3
    assert hashes(config.checkpoints) == watch.before
    whole = config.output_dir.with_name("whole") / "metrics.jsonl"
    assert losses(config.output_dir / "metrics.jsonl") == losses(whole)[:5]
    figures("read-only", watch, config)


def test_f24_a_read_only_output_dir_ends_the_run_with_all_work_saved(on_disk):
    """Remounted in order, with everything in it: logs and metrics, too."""
    config = on_disk()
    config = config.with_changes(checkpoint_dir=str(config.output_dir / "checkpoints"))
    with read_only_after_step_3(config.output_dir) as watch:
        train(config, progress=watch)
    train(config.with_changes(checkpoint_dir=named(watch.raised)), resume="latest")
    assert_is_the_undisturbed_run(config)


def test_f24_a_result_that_does_not_fit_leaves_the_old_one(alone, disk):  # noqa: F811
    output = {"output_dir": str(disk / "run"), "max_steps": 1}
    train(alone(training=output))
    config = alone(training=output)
    before = hashes(config.result_dir)
    (disk / "ballast").write_bytes(b"\0" * (disk_free(disk) - (64 << 10)))
    with pytest.raises(ResourceError, match="the result could not be written") as raised:
        train(alone(training={**output, "max_steps": 2}))
    assert raised.value.exit_code == 6
    assert hashes(config.output_dir / "previous-1" / config.result_dir.name) == before
    place = named(raised)
    (disk / "ballast").unlink()
    train(alone(training={**output, "max_steps": 2}, checkpoint_dir=place), resume="latest")
    assert hashes(config.result_dir) != before
    print("\nresult on a full disk: the old one stays, the next command writes the new one")


def disk_free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
