"""Bad checkpoints, row by row: the step that a run resumes from, or the reason why it does not; one
message, an exit code, no traceback. The numbers are those of the bad inputs that the project
lists."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_framework import file_trust
from hetero_framework.cli import main
from hetero_framework.trainer import run_checkpoint
from hetero_framework.trainer.checkpoint import MANIFEST, CheckpointStore
from hetero_framework.trainer.outputs import RunDirectories

FILE = "stage-0.0.safetensors"
Tensors = dict[str, torch.Tensor]


def edit(step: Path, **changes: Any) -> None:
    """Change a manifest by hand."""
    path = step / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remake(
    step: Path, change: Callable[[Tensors], object], number: int | None = None, **manifest: Any
) -> None:
    """The checkpoint of someone who knows how they are made, with other content or of a step with
    another number."""
    store = CheckpointStore(step.parent)
    reader = store.open(int(step.name.removeprefix("step_")))
    tensors = dict(reader.read(reader.names()))
    change(tensors)
    kept = {k: v for k, v in reader.manifest.items() if k not in ("format_version", "step")}
    with store.begin(number or reader.step) as writer:
        writer.add(0, 0, tensors)
        writer.commit(kept | manifest)


def flip(step: Path) -> None:
    path = step / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def weight(tensors: Tensors, kind: str = "weights") -> str:
    return next(name for name in sorted(tensors) if name.startswith(f"{kind}/"))


def misshape(kind: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        name = weight(tensors, kind)
        tensors[name] = tensors[name].flatten()[:3].clone()

    return change


def forget_the_optimizer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("optimizer/")]:
        del tensors[name]


def link_to(step: Path, name: str = "") -> None:
    """A link in the place of the directory or of a file in it."""
    place, elsewhere = step / name, step.parents[1] / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


def left_overs(step: Path) -> None:
    shutil.copytree(step, step.with_name("step_7.tmp"))
    shutil.copytree(step, step.with_name("step_8.trash"))


def misname(*names: str) -> Callable[[Path], None]:
    def make(step: Path) -> None:
        for name in names:
            shutil.copytree(step, step.with_name(name))

    return make


@dataclass(frozen=True)
class Row:
    """What is done to checkpoint 2 of 1 and 2, what is asked for, the exit code, what is said."""

    name: str
    damage: Callable[[Path], object]
    said: tuple[str, ...]
    resume: str = "latest"
    code: int = 2

    def __str__(self) -> str:
        return self.name


GOES_ON = {"code": 0}
PLANTED = "checkpoint 2 is not read, others may have made it: "
ROWS = [
    Row(
        "87 no manifest",
        lambda step: (step / MANIFEST).unlink(),
        (f"checkpoint 2 is incomplete: it has no {MANIFEST}; using checkpoint 1",),
        **GOES_ON,
    ),
    Row(
        "87 edited manifest",
        lambda step: edit(step, position={"step": 5}),
        ("checkpoint 2 is damaged: manifest.json was changed after it was", "using checkpoint 1"),
        **GOES_ON,
    ),
    Row("87 wrong hash", flip, (f"damaged: {FILE} does not have", "using checkpoint 1"), **GOES_ON),
    Row("87 wrong hash, asked for", flip, (FILE, "sha256", "complete in", ": 1"), "2"),
    Row(
        "89 missing tensor",
        lambda step: remake(step, lambda t: t.pop(weight(t))),
        ("checkpoint 2 lacks 1 of", "weights/"),
    ),
    Row(
        "89 extra tensor",
        lambda step: remake(step, lambda t: t.update({"weights/model.more": torch.ones(1)})),
        ("checkpoint 2 has 1 tensors that no stage trains: model.more",),
    ),
    Row(
        "89 misshapen tensor",
        lambda step: remake(step, misshape("weights")),
        ("weights/", "the checkpoint has shape (3,), the model ("),
    ),
    Row(
        "89 misshapen optimizer state",
        lambda step: remake(step, misshape("optimizer/exp_avg")),
        ("optimizer/exp_avg/", "the checkpoint has shape (3,), the model ("),
    ),
    Row(
        "90 another step than its name says",
        lambda step: step.rename(step.with_name("step_9")),
        ("step_9 holds the checkpoint of step 2; using checkpoint 1",),
        **GOES_ON,
    ),
    Row(
        "90 another step than its name says, asked for",
        lambda step: step.rename(step.with_name("step_9")),
        ("step_9 holds the checkpoint of step 2", "rename it to step_2"),
        "9",
    ),
    Row(
        "90 another step than its position says",
        lambda step: remake(step, lambda t: None, position=position(step, 1)),
        ("checkpoint 2 is damaged: it says that 1 steps were done",),
    ),
    Row(
        "90 a step beyond the run",
        lambda step: remake(step, lambda t: None, 10**17, position=position(step, 10**17)),
        ("checkpoint 100000000000000000 lies beyond the 3 steps of this run: nothing is left",),
        **GOES_ON,
    ),
    Row(
        "90 names that are none",
        misname("step_" + "9" * 30, "step--1", "step_02", "checkpoint-2"),
        tuple(
            f"ignored {name} in "
            for name in ("step_" + "9" * 30, "step--1", "step_02", "checkpoint-2")
        ),
        **GOES_ON,
    ),
    Row(
        "91 what a kill left",
        left_overs,
        ("removed step_7.tmp, left by an interrupted", "removed step_8.trash, left by an"),
        **GOES_ON,
    ),
    Row(
        "92 newer format",
        lambda step: edit(step, format_version=2, versions={"hetero_framework": "9.8"}),
        ("checkpoint 2 was made by hetero_framework 9.8", "this is 0", "upgrade"),
    ),
    Row(
        "93 no optimizer state",
        lambda step: remake(step, forget_the_optimizer),
        ("checkpoint 2 has no optimizer state", "hetero export --checkpoint", "step_2"),
    ),
    Row("94 linked directory", link_to, (PLANTED, "step_2 is a symbolic link", "put what it")),
    Row("94 linked file", lambda s: link_to(s, FILE), (PLANTED, f"{FILE} is a symbolic link")),
    Row(
        "94 linked manifest",
        lambda step: link_to(step, MANIFEST),
        (PLANTED, f"{MANIFEST} is a symbolic link"),
    ),
    Row(
        "94 hard link",
        lambda step: os.link(step / FILE, step.parents[1] / "second"),
        (PLANTED, f"{FILE} has 2 names (hard links)", "cp -r"),
    ),
    Row(
        "94 mode 666",
        lambda step: (step / FILE).chmod(0o666),
        (PLANTED, f"{FILE} can be changed by everybody (mode 666)", "chmod -R go-w"),
    ),
    Row(
        "94 mode 777, asked for",
        lambda step: step.chmod(0o777),
        (PLANTED, "step_2 can be changed by everybody (mode 777)", "chmod -R go-w"),
        "2",
    ),
    Row("95 absent", lambda step: None, ("no checkpoint 500 in", "complete in", ": 1, 2"), "500"),
    Row("95 nothing there", lambda s: shutil.rmtree(s.parent), ("there is no checkpoint in",)),
]


def position(step: Path, number: int) -> dict[str, Any]:
    """That of the checkpoint, but for the number of its step."""
    return {**CheckpointStore(step.parent).open(2).manifest["position"], "step": number}


SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the run with checkpoints 1 and 2 is kept; made by the first test that needs it."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def resume(alone, trained, tmp_path, capsys):
    """`hetero train --resume` in a copy of the run, in which checkpoint 2 has been damaged: exit
    code and everything that it said."""
    file = tmp_path / "config.json"

    def settings(**training: Any) -> Path:
        file.write_text(json.dumps(alone(training={**SAVING, **training}).to_dict()))
        return file

    if not (trained / "run").exists():
        assert main(["train", "--config", str(settings(max_steps=2))]) == 0
        shutil.copytree(tmp_path / "run", trained / "run")
        shutil.copy(tmp_path / "texts.jsonl", trained)
    else:
        shutil.copytree(trained / "run", tmp_path / "run")

    def run(which: str, **training: Any) -> tuple[int, str]:
        capsys.readouterr()
        config = settings(**{"max_steps": 3, **training})
        code = main(["train", "--config", str(config), "--resume", which])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes, and links need a privilege")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_checkpoint(row, resume, tmp_path):
    row.damage(tmp_path / "run" / "checkpoints" / "step_2")
    code, said = resume(row.resume)
    assert code == row.code, said
    assert "Traceback" not in said
    for text in row.said:
        assert said.count(text) == 1, (text, said)
    assert ("hetero: error: " in said) == (row.code != 0), said
    if row.code == 0:
        names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
        assert not any(name.endswith((".tmp", ".trash")) for name in names)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no user numbers")
def test_94_a_checkpoint_of_another_user(resume, monkeypatch):
    own = os.geteuid()
    monkeypatch.setattr(file_trust.os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(file_trust, "_hides_owners", lambda directory, entry: False)
    if own == 0:  # root's files are trusted, as root could do anything
        assert resume("latest")[0] == 0
        return
    code, said = resume("latest")
    assert code == 2, said
    assert f"belongs to user {own}, and this is user {own + 1}" in said
    assert f"chown -R {own + 1}" in said


@pytest.mark.skipif(not hasattr(os, "chown") or os.geteuid() != 0, reason="chown is for root")
def test_94_a_checkpoint_that_somebody_else_put_there(resume, tmp_path):
    planted = tmp_path / "run" / "checkpoints" / "step_2" / FILE
    os.chown(planted, 54321, -1)
    code, said = resume("latest")
    assert code == 2, said
    assert f"{PLANTED}{planted} belongs to user 54321, and this is user 0" in said
    assert "chown -R 0" in said


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_94_a_checkpoint_on_a_disk_without_modes_is_read(resume, tmp_path, monkeypatch):
    """FAT and some network disks show 777 for all files, also for those of this run."""
    (tmp_path / "new").touch()
    (tmp_path / "new").chmod(0o777)
    monkeypatch.setattr(
        file_trust.tempfile, "TemporaryFile", lambda dir: (tmp_path / "new").open("rb")
    )
    (tmp_path / "run" / "checkpoints" / "step_2" / FILE).chmod(0o777)
    assert resume("latest")[0] == 0


# 88, a checkpoint of another run, is in test_continuation.py and integration/test_resume.py.
Usage = namedtuple("Usage", ["total", "used", "free"])


def test_96_a_disk_for_less_than_two_checkpoints_is_reported(resume, tmp_path, monkeypatch):
    usage = Usage(1 << 20, 0, 100_000)
    monkeypatch.setattr(run_checkpoint.shutil, "disk_usage", lambda path: usage)
    code, said = resume("latest", save_total_limit=1)
    assert code == 0
    found = re.search(r"takes about (\d+) KiB, and the run writes up to 2 beside each other", said)
    assert found, said
    assert f"{2 * int(found[1])} KiB are needed, 97.7 KiB are free in" in said
    written = (tmp_path / "run" / "checkpoints" / "step_3").glob("*.safetensors")
    assert sum(file.stat().st_size for file in written) / 1024 == pytest.approx(
        int(found[1]), rel=0.05
    )


def test_101_a_directory_in_use_names_process_and_host(resume, alone):
    config = alone()
    with RunDirectories(config, CheckpointStore(config.checkpoints)):
        code, said = resume("latest")
    assert code == 2
    assert f"training.output_dir: process {os.getpid()} on {platform.node()} is writing" in said
    code, said = resume("latest")
    assert code == 0, said
