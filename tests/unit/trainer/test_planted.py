"""Files that another user of the machine could have put into a run's directories: never loaded,
never written through. Real runs in one process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import log
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.run_id import RUN_FILE, run_id_of
from hetero_framework.config import PLAN_FILE, Config, with_saved_plan
from hetero_framework.errors import CheckpointError, ConfigError, StoppedEarly
from hetero_framework.file_trust import other_writers
from hetero_framework.trainer import signals
from hetero_framework.trainer.checkpoint import MANIFEST, CheckpointStore, durable_store
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.metrics import StepLines
from hetero_framework.trainer.outputs import OWNER_FILE, RunDirectories
from tests import pools
from tests.installed import needs
from tests.planting import STRANGER, plant

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes, links need a right")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
FILE = "stage-0.0.safetensors"
ADAPTER = {"r": 4, "target_modules": "all-linear"}


class Notes(pools.Notes):
    """What was said; the run is told to stop after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.stop_after = stop_after

    def step(self, line: dict[str, Any]) -> None:
        self.steps.append(line["step"])
        if line["step"] == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


# Where, how, what is said.
PLANTED: dict[str, tuple[str, str, str]] = {
    "directory of another user": ("", "owner", f"belongs to user {STRANGER}"),
    "file of another user": (FILE, "owner", f"belongs to user {STRANGER}"),
    "manifest of another user": (MANIFEST, "owner", f"belongs to user {STRANGER}"),
    "directory for everybody": ("", "mode", r"changed by everybody \(mode 777\)"),
    "file for everybody": (FILE, "mode", r"changed by everybody \(mode 666\)"),
    "directory for a group": ("", "group", rf"changed by group {STRANGER} \(mode 770\)"),
    "directory that is a link": ("", "link", "is a symbolic link"),
    "file that is a link": (FILE, "link", "is a symbolic link"),
    "manifest that is a link": (MANIFEST, "link", "is a symbolic link"),
    "file with another name": (FILE, "names", "has 2 names"),
    "changed byte": (FILE, "flip", "does not have the sha256"),
    "changed byte of the manifest": (MANIFEST, "flip", "is damaged: manifest"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the run that was cut short is kept; made by the first test that needs it."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def cut_short(alone, kept, tmp_path, monkeypatch):
    """A run that was stopped after step 3 and saved nothing at its end, and its durable step; with
    checkpoints of all steps if `training` says so."""

    def make(**training: Any) -> tuple[Config, Path]:
        monkeypatch.setattr(signals.StopRequest, "wants_checkpoint", lambda *_: False)
        config = alone(adapter=ADAPTER, training={"replicate_steps": 1, **training})
        place = kept / ("saved" if training else "unsaved")
        if place.exists():
            shutil.copytree(place, config.output_dir)
        else:
            with pytest.raises(StoppedEarly):
                train(config, progress=Notes(stop_after=3))
            shutil.copytree(config.output_dir, place)
        (step,) = durable_store(config).root.iterdir()
        return config, step

    return make


def spoil(place: Path, how: str, elsewhere: Path) -> None:
    flip(place) if how == "flip" else plant(place, how, elsewhere)


@pytest.mark.parametrize("resume", [None, "latest"])
@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_durable_step_is_refused_by_name(cut_short, tmp_path, case, resume):
    config, step = cut_short()
    name, how, said = PLANTED[case]
    spoil(step / name, how, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=said) as refused:
        train(config, resume=resume)
    number = step.name.removeprefix("step_")
    assert refused.value.message.startswith(f"checkpoint {number} is ")


@pytest.mark.parametrize("resume", [None, "latest"])
@pytest.mark.parametrize("case", ["nothing", "file of another user", "directory that is a link"])
def test_a_planted_durable_step_is_passed_over_for_a_checkpoint(cut_short, tmp_path, case, resume):
    config, earlier = cut_short(save_strategy="steps", save_steps=1)
    shutil.rmtree(earlier)
    for place in config.checkpoints.glob("step_[3-9]"):
        shutil.rmtree(place)
    step = (config.checkpoints / "step_2").rename(earlier.with_name("step_2"))
    if case != "nothing":
        plant(step / PLANTED[case][0], PLANTED[case][1], tmp_path / "elsewhere")
    notes = Notes()
    assert train(config, resume=resume, progress=notes).steps == 4
    refused = sum("2 is not read, others may have made it" in line for line in notes.lines)
    assert refused == (case != "nothing")
    assert notes.steps == ([3, 4] if case == "nothing" else [2, 3, 4])


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_checkpoint_that_is_asked_for_is_an_error(cut_short, tmp_path, case):
    config, _ = cut_short(save_strategy="steps", save_steps=1)
    name, how, said = PLANTED[case]
    spoil(config.checkpoints / "step_2" / name, how, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=said):
        train(config, resume=2)


@as_root
def test_a_file_for_a_group_in_a_directory_for_the_owner_is_taken(cut_short):
    """A checkpoint that was written under umask 002."""
    config, _ = cut_short(save_strategy="steps", save_steps=1)
    plant(config.checkpoints / "step_2" / FILE, "group", Path())
    assert train(config, resume=2).steps == 4


def precious(tmp_path: Path, name: str) -> Path:
    """Something of this user, which a link leads to."""
    place = tmp_path / "precious"
    if name in (".durable", "logs", "adapter"):
        place.mkdir()
        for kept in ("config.json", "coordinator.log", "adapter_config.json"):
            (place / kept).write_text("mine")
    else:
        place.write_text("mine")
    return place


def content(place: Path) -> dict[str, str]:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return {file.name: file.read_text() for file in files}


def link(config: Config, name: str, target: Path) -> None:
    place = config.output_dir / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


PICTURES = ("timeline.json", "architecture.svg", "architecture.mmd")


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        ".durable",
        ".lock",
        "logs",
        "logs/coordinator.log",
        "logs/worker-1.log",
        "metrics.jsonl",
        "events.jsonl",
        *(pytest.param(name, marks=needs("observe")) for name in PICTURES),
    ],
)
def test_a_link_in_place_of_a_runs_file_is_refused(alone, tmp_path, name, fresh):
    config = alone()
    before = content(target := precious(tmp_path, name))
    link(config, name, target)
    with pytest.raises(ConfigError, match=rf"output_dir: .*{name} is a symbolic link"):
        train(config, fresh=fresh)
    assert content(target) == before


def test_no_worker_is_started_with_logs_elsewhere(alone, tmp_path):
    """They are started before the run looks at its directories."""
    config = alone()
    before = content(target := precious(tmp_path, "logs"))
    link(config, "logs", target)
    with pytest.raises(ConfigError, match="logs is a symbolic link"):
        LocalWorkers(config, ()).start()
    assert content(target) == before


@pytest.mark.parametrize("name", [".run", ".unfinished", ".lock.json", PLAN_FILE, "adapter"])
def test_a_link_in_place_of_a_replaced_file_is_not_followed(alone, tmp_path, name):
    config = alone(adapter=ADAPTER, training={"max_steps": 1})
    before = content(target := precious(tmp_path, name))
    link(config, name, target)
    assert train(config, fresh=True).steps == 1
    assert content(target) == before
    assert (config.output_dir / "adapter" / "adapter_model.safetensors").is_file()


def test_a_link_planted_later_is_not_followed(tmp_path, caplog):
    target = precious(tmp_path, "")
    place = tmp_path / "metrics.jsonl"
    place.symlink_to(target)
    with caplog.at_level(logging.WARNING):
        StepLines(place).write({"step": 1, "loss": 1.0})
    assert f"cannot write {place}" in caplog.text
    with pytest.raises(OSError, match="symbolic"):
        log.append_line(place, "text")
    assert target.read_text() == "mine"


def test_the_owner_file_of_checkpoints_is_replaced_atomically(alone, tmp_path):
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    config.checkpoints.mkdir()
    (config.checkpoints / OWNER_FILE).symlink_to(tmp_path / "made")
    with RunDirectories(config, CheckpointStore(config.checkpoints)) as directories:
        directories.own_checkpoints()
    assert not (tmp_path / "made").exists()
    assert not (config.checkpoints / OWNER_FILE).is_symlink()


@pytest.mark.parametrize("how", ["owner", "mode", "link", "pipe", "path"])
def test_an_id_that_another_user_may_have_written_is_not_taken(tmp_path, how):
    first = run_id_of(tmp_path)
    file = tmp_path / RUN_FILE
    if how == "pipe":  # reading it would wait for ever
        file.unlink()
        os.mkfifo(file)
    elif how == "path":
        file.write_text(file.read_text().replace(first, "/../../x"))
    else:
        plant(file, how, tmp_path / "elsewhere")
    second = run_id_of(tmp_path)
    assert second != first
    assert len(bytes.fromhex(second)) == 8
    assert run_id_of(tmp_path) == second


@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_plan_that_another_user_may_have_made_is_refused(alone, tmp_path, how):
    config = alone().with_changes(shard_plan="auto")
    config.output_dir.mkdir()
    file = config.output_dir / PLAN_FILE
    file.write_text('{"shard_plan": [{"id": "local", "start": 0, "end": 1}]}')
    assert with_saved_plan(config).is_planned
    plant(file, how, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"plan\.json is not read, others may have made it"):
        with_saved_plan(config)


@pytest.mark.parametrize(("mode", "whom"), [(0o777, "everybody"), (0o770, f"group {STRANGER}")])
@pytest.mark.parametrize("setting", ["training.output_dir", "checkpoint_dir"])
@as_root
def test_a_directory_that_others_may_write_into_is_reported(
    alone, tmp_path, logged, setting, mode, whom
):
    config = alone(checkpoint_dir=str(tmp_path / "elsewhere"))
    place = {"checkpoint_dir": config.checkpoints}.get(setting, config.output_dir)
    place.mkdir()
    os.chown(place, -1, STRANGER)
    place.chmod(mode)
    with RunDirectories(config, CheckpointStore(config.checkpoints)):
        assert logged == [
            f"{setting}: {whom} may write into {place}: what they put there is not all noticed"
        ]


@as_root
def test_other_writers_of_a_directory_are_known(tmp_path):
    assert other_writers(tmp_path) is None
    tmp_path.chmod(0o770)  # root's own group
    assert other_writers(tmp_path) is None
    plant(tmp_path, "owner", Path())
    assert other_writers(tmp_path) == f"user {STRANGER}, whose it is"


@as_root
def test_checkpoints_go_through_a_link_of_ones_own_only(alone, tmp_path):
    config = alone()
    (tmp_path / "disk").mkdir()
    link(config, "checkpoints", tmp_path / "disk")
    with RunDirectories(config, CheckpointStore(config.checkpoints)):
        pass
    os.lchown(config.checkpoints, STRANGER, -1)
    refused = pytest.raises(ConfigError, match=f"checkpoints is a symbolic link of user {STRANGER}")
    with refused, RunDirectories(config, CheckpointStore(config.checkpoints)):
        pass
