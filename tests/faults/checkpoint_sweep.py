"""Writing a checkpoint, with its n-th system call failing or killing the process, for every n.

Each case is a fork of this process, which has torch loaded. What a resume finds afterwards is the
state before or the state after, byte for byte. A reader of a bad disk gets one of them or an error.

    python -m tests.faults.checkpoint_sweep [every n-th point]
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.checkpoint import CheckpointStore
from tests.faults.syscall_sweep import (
    MODES,
    WRITTEN,
    WRITTEN_AGAIN,
    Counts,
    disturbed,
    failing,
    points,
    run,
)
from tests.faults.syscalls import Call, watch

Tree = dict[str, bytes]


def save(root: Path, step: int, value: int) -> None:
    store = CheckpointStore(root, save_total_limit=2)
    with store.begin(step) as writer:
        writer.add(0, 0, {"weights/a": torch.full((64,), float(value))})
        writer.add(1, 0, {"weights/b": torch.full((64,), float(value))})
        writer.commit({"value": value})


def two_steps(root: Path) -> None:
    save(root, 1, 1)
    save(root, 2, 2)


def with_left_overs(root: Path) -> None:
    two_steps(root)
    shutil.copytree(root / "step_1", root / "step_3.tmp")
    shutil.copytree(root / "step_1", root / "step_0.trash")
    (root / "step_2").rename(root / "step_2.old")


# What is there before, and the step that is written.
SCENES: dict[str, tuple[Callable[[Path], None], int]] = {
    "the first step": (lambda root: None, 3),
    "a new step": (two_steps, 3),
    "the same step": (two_steps, 2),
    "a new step after a kill": (with_left_overs, 3),
}


def tree(directory: Path) -> Tree:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def found(root: Path, old: Tree | None, new: Tree) -> str:
    """Which of the two a resume finds. AssertionError for anything else."""
    store = CheckpointStore(root)
    if old is None and not (root / "step_3").exists():
        return "old"
    reader = store.resolve("latest")
    list(reader.read(reader.names()))
    content = tree(reader.directory)
    assert content in (old, new), f"step {reader.step} is neither the old nor the new one"
    return "new" if content == new else "old"


def sweep_writing(base: Path, every: int) -> Counts:
    """Every scene, every point, every mode: how often a resume finds the old and the new step."""
    results: Counts = {}
    for scene, (prepare, step) in SCENES.items():
        start, done, root = base / "start", base / "done", base / "case"
        prepare(start)
        prepare(done)
        before = CheckpointStore(start)
        old = tree(before.resolve("latest").directory) if before.complete_steps() else None
        save(done, step, 3)
        new = tree(done / f"step_{step}")
        for mode in MODES:
            case = partial(_write_case, root, step, old, new, mode)
            results[f"{scene}: {mode}"] = points(start, root, every, case)
        shutil.rmtree(start, ignore_errors=True)
        shutil.rmtree(done)
    return results


def _write_case(
    root: Path, step: int, old: Tree | None, new: Tree, mode: str, number: int
) -> str | None:
    """What a resume finds after that call went wrong; None where there was none."""
    reached, result = disturbed(root, lambda: save(root, step, 3), mode, number)
    if not reached:
        return None
    outcome = found(root, old, new)
    assert outcome == "new" or result not in (WRITTEN, WRITTEN_AGAIN), "said to be written"
    save(root, 9, 9)  # the next run goes on
    assert not [path.name for path in root.iterdir() if "." in path.name]
    return outcome


def sweep_reading(base: Path, every: int) -> Counts:
    """Every call of a resume fails: it finds the new step, says that it takes the old one, or ends
    with an error. A step that was asked for by number is found or not; none stands in for it."""
    start, root = base / "checkpoints", base / "case"
    two_steps(start)
    steps = [tree(start / f"step_{step}") for step in (1, 2)]
    results = {
        f"resume {which}: {mode}": points(
            start, root, every, partial(_read_case, root, steps, which, mode)
        )
        for which in ("latest", 2)
        for mode in MODES[2:]
    }
    shutil.rmtree(start)
    return results


def _read_case(
    root: Path, steps: list[Tree], which: int | str, mode: str, number: int
) -> str | None:
    """What a resume comes to whose call of this number fails; None where it makes fewer."""
    reached = False

    def answer(call: Call) -> int | None:
        nonlocal reached
        reached = reached or call.number == number
        return failing(call, number, call.number, mode)

    outcome = _RESUMED[watch(root, lambda: _resume(root, which), answer) or 0]
    if not reached:
        return None
    assert steps == [tree(root / f"step_{step}") for step in (1, 2)], "it was written"
    assert outcome in ("new", "error") or (outcome == "old" and which == "latest"), outcome
    return outcome


_RESUMED = ("killed", "old", "new", "error", "old without a word", "said to be empty")


def _resume(root: Path, which: int | str) -> int:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hetero_framework").addHandler(handler)
    try:
        reader = CheckpointStore(root).resolve(which)
        tensors = dict(reader.read(reader.names()))
    except CheckpointError as error:
        return 5 if error.message == f"there is no checkpoint in {root}" else 3
    assert all(bool((tensor == reader.step).all()) for tensor in tensors.values())
    return 4 if reader.step == 1 and not said else reader.step


if __name__ == "__main__":
    run(sweep_writing, sweep_reading)
