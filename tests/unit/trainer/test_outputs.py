"""A run's directories: probed, locked, and never those of another run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.trainer import outputs
from hetero_framework.trainer.checkpoint import CheckpointStore
from hetero_framework.trainer.outputs import RunDirectories
from tests.alone import Alone


@contextmanager
def entered(config: Config) -> Iterator[RunDirectories]:
    with RunDirectories(config, CheckpointStore(config.checkpoints)) as directories:
        yield directories


def save(config: Config, step: int) -> None:
    with CheckpointStore(config.checkpoints).begin(step) as writer:
        writer.add(0, 0, {"weights/a": torch.zeros(2)})
        writer.commit({})


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_a_fresh_start_moves_its_own_earlier_results(alone: Alone, logged: list[str]) -> None:
    config = alone()
    with entered(config) as first:
        first.set_aside()
        save(config, 2)
        (config.output_dir / "metrics.jsonl").write_text("{}\n")
        assert logged == []
    with entered(config) as second:
        assert second.run_id == first.run_id
        second.set_aside()
    assert names(config.output_dir / "previous-1") == ["checkpoints", "metrics.jsonl"]
    assert names(config.output_dir / "previous-1" / "checkpoints") == ["step_2"]
    assert names(config.checkpoints) == []
    assert len(logged) == 1


def test_checkpoints_of_another_run_are_refused_and_untouched(alone: Alone, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    one, two = alone("one", checkpoint_dir=shared), alone("two", checkpoint_dir=shared)
    with entered(one) as directories:
        directories.set_aside()
        save(one, 2)
        (tmp_path / "shared" / "step_4.tmp").mkdir()
    before = names(tmp_path / "shared")
    refused = pytest.raises(ConfigError, match=r"holds checkpoints of .*one")
    with entered(two) as directories, refused:
        directories.set_aside()
    assert names(tmp_path / "shared") == before
    with entered(one) as directories:  # the owner may
        directories.set_aside()
    assert names(one.output_dir / "previous-1" / "checkpoints") == ["step_2", "step_4.tmp"]


def test_checkpoints_elsewhere_without_a_run_id_are_refused(alone: Alone, tmp_path: Path) -> None:
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    save(config, 2)
    with entered(config) as directories, pytest.raises(ConfigError, match="of another run"):
        directories.check_fresh()


def test_a_resumed_run_takes_the_checkpoints_over(alone: Alone, tmp_path: Path) -> None:
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    save(config, 2)
    save(config, 4)
    with entered(config) as directories:
        directories.own_checkpoints()
        directories.set_later_aside(2)
    with entered(config) as directories:
        directories.check_fresh()
    assert names(config.output_dir / "previous-1") == ["step_4"]


@pytest.mark.parametrize("where", ["output_dir", "inside", "elsewhere"])
def test_only_own_tensorboard_events_are_moved(alone: Alone, tmp_path: Path, where: str) -> None:
    config = alone()
    places = {"inside": config.output_dir / "tb", "elsewhere": tmp_path / "elsewhere"}
    logging_dir = places.get(where, config.output_dir)
    config = alone(training={"logging_dir": str(logging_dir), "report_to": "tensorboard"})
    with entered(config) as directories:
        directories.set_aside()
        own = f"events.out.tfevents.1.host.1.0.{directories.run_id}"
        for name in (own, "events.out.tfevents.1.host.1.0.0ther", "notes.txt"):
            (logging_dir / name).parent.mkdir(exist_ok=True)
            (logging_dir / name).write_text("x")
        directories.set_aside()
    moved = {own} if where == "elsewhere" else {own, "events.out.tfevents.1.host.1.0.0ther"}
    assert set(names(config.output_dir / "previous-1" / "tensorboard")) == moved
    assert "notes.txt" in names(logging_dir)


@pytest.mark.parametrize("setting", ["output_dir", "checkpoint_dir", "logging_dir"])
def test_a_directory_in_use_is_refused_by_its_setting(
    alone: Alone, tmp_path: Path, setting: str
) -> None:
    shared = str(tmp_path / "shared")

    def config(name: str) -> Config:
        if setting == "checkpoint_dir":
            return alone(name, checkpoint_dir=shared)
        training = {setting: shared, "report_to": "tensorboard"}
        return alone(name, training=training)

    refused = pytest.raises(
        ConfigError, match=rf"{setting}: process {os.getpid()} on .* is writing"
    )
    with entered(config("one")), refused, entered(config("two")):
        pass
    with entered(config("two")):
        pass


@pytest.mark.parametrize("setting", ["checkpoint_dir", "logging_dir"])
def test_a_directory_inside_a_running_output_dir_is_in_use(
    alone: Alone, tmp_path: Path, setting: str
) -> None:
    """The other run has no checkpoint there yet: nothing but its lock says whose it is."""
    inside = str(tmp_path / "one" / "checkpoints")
    training = {"logging_dir": inside, "report_to": "tensorboard"}
    two = (
        alone("two", checkpoint_dir=inside)
        if setting == "checkpoint_dir"
        else alone("two", training=training)
    )
    refused = pytest.raises(
        ConfigError, match=rf"{setting}: process {os.getpid()} on .* into .*one"
    )
    with entered(alone("one")), refused, entered(two):
        pass
    with entered(two):
        pass


@pytest.mark.parametrize("setting", ["output_dir", "checkpoint_dir", "logging_dir"])
def test_a_directory_that_is_a_file_is_refused_by_its_setting(
    alone: Alone, tmp_path: Path, setting: str
) -> None:
    (tmp_path / "file").write_text("x")
    place = str(tmp_path / "file")
    config = (
        alone(checkpoint_dir=place)
        if setting == "checkpoint_dir"
        else alone(training={setting: place, "report_to": "tensorboard"})
    )
    refused = pytest.raises(ConfigError, match=rf"{setting}: cannot write into .*it is a file")
    with refused, entered(config):
        pass


@pytest.mark.parametrize("operation", ["mkdtemp", "replace", "unlink"])
def test_a_directory_is_probed_with_a_runs_own_operations(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:

    elsewhere = tmp_path / "elsewhere"
    module = outputs.tempfile if operation == "mkdtemp" else os
    real = getattr(module, operation)

    def refuse(*args: object, **kwargs: object) -> object:
        if "elsewhere" in f"{args}{kwargs}":
            raise OSError(30, "Read-only file system")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, operation, refuse)
    refused = pytest.raises(ConfigError, match=r"checkpoint_dir: cannot write .*Read-only file")
    with refused, entered(alone(checkpoint_dir=str(elsewhere))):
        pass


def test_a_run_without_tensorboard_leaves_logging_dir_alone(alone: Alone, tmp_path: Path) -> None:
    with entered(alone(training={"logging_dir": str(tmp_path / "logs")})):
        assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("setting", ["output_dir", "result", "checkpoint_dir", "logging_dir"])
def test_the_base_model_is_no_place_to_write_into(
    alone: Alone, tmp_path: Path, setting: str
) -> None:
    base = tmp_path / "run" / "model" if setting == "result" else tmp_path / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    sections = {
        "output_dir": {"training": {"output_dir": str(base / ".." / "base")}},
        "result": {},
        "checkpoint_dir": {"checkpoint_dir": str(base)},
        "logging_dir": {"training": {"logging_dir": str(base), "report_to": "tensorboard"}},
    }[setting]
    config = alone(model={"name_or_path": str(base)}, **sections)
    refused = pytest.raises(ConfigError, match=r"directory of its base model.*\n.*--output-dir")
    with refused, entered(config):
        pass
    assert names(base) == ["config.json"]
