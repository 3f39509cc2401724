"""A checkpoint is written while its n-th system call is the last one, or fails; for every n.

Each case is a fork of this process, which has torch loaded. What a resume finds afterwards is the
state before or the state after, byte for byte. A reader of a bad disk gets one of them or an error.

    python -m tests.faults.checkpoint_sweep [every n-th point]
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from hetero_framework.errors import CheckpointError, ResourceError
from hetero_framework.trainer.checkpoint import CheckpointStore
from tests.faults.syscalls import KILL, LOOKS, Call, unsupported, watch

WRITTEN, WRITTEN_AGAIN, REFUSED = 0, 10, 11
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


class PowerCut:
    """What the disk holds when the power fails: of files and names that are new, only those that
    were waited for (fsync)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known = {path.stat().st_ino for path in root.rglob("*")} if root.exists() else set()
        self._synced: dict[int, set[str]] = {}
        self._pending: tuple[int, set[str]] | None = None

    def note(self, call: Call) -> None:
        """`call` comes next, so the one before has been done."""
        if self._pending is not None:
            self._synced[self._pending[0]] = self._pending[1]
            self._pending = None
        if call.name in ("fsync", "fdatasync"):
            names = {path.name for path in call.path.iterdir()} if call.path.is_dir() else set()
            self._pending = call.inode, names
        elif call.name in ("write", "pwrite64", "writev", "ftruncate"):
            self._synced.pop(call.inode, None)
            self._known.discard(call.inode)

    def fall(self) -> None:
        for path in sorted(self._root.rglob("*")):
            if not path.is_file() or (inode := path.stat().st_ino) in self._known:
                continue
            if path.name not in self._synced.get(path.parent.stat().st_ino, ()):
                path.unlink()
            elif inode not in self._synced:
                os.truncate(path, 0)


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


def attempt(root: Path, step: int) -> int:
    """Save as a run does: one that fails is tried again later."""
    for result in (WRITTEN, WRITTEN_AGAIN):
        with contextlib.suppress(ResourceError):
            save(root, step, 3)
            return result
    return REFUSED


MODES = ("kill", "power cut", "ENOSPC", "EIO", "ENOSPC from then on", "EIO from then on")
_GROWS = ("write", "pwrite64", "writev", "fsync", "mkdir", "mkdirat", "fallocate")


def sweep_writing(base: Path, every: int) -> dict[str, Counter[str]]:
    """Every scene, every point, every mode: how often a resume finds the old and the new step."""
    results: dict[str, Counter[str]] = {}
    for scene, (prepare, step) in SCENES.items():
        start, done = base / "start", base / "done"
        prepare(start)
        prepare(done)
        before = CheckpointStore(start)
        old = tree(before.resolve("latest").directory) if before.complete_steps() else None
        save(done, step, 3)
        new = tree(done / f"step_{step}")
        for mode in MODES:
            counts = results.setdefault(f"{scene}: {mode}", Counter())
            number = 1
            while True:
                where = f"{scene}, {mode} at call {number}"
                root = base / "case"
                if start.exists():
                    shutil.copytree(start, root)
                try:
                    reached, outcome = _case(root, step, old, new, mode, number)
                except (AssertionError, CheckpointError, ResourceError) as error:
                    reached, outcome = True, f"{where}: {error}"
                shutil.rmtree(root, ignore_errors=True)
                if not reached:
                    break
                counts["points"] += 1
                counts[outcome] += 1
                number += every
        shutil.rmtree(start, ignore_errors=True)
        shutil.rmtree(done)
    return results


def _case(
    root: Path, step: int, old: Tree | None, new: Tree, mode: str, number: int
) -> tuple[bool, str]:
    """Whether the child got as far as that call, and what a resume finds."""
    cut = PowerCut(root)
    reached: list[Call] = []
    changes = 0

    def answer(call: Call) -> int | None:
        nonlocal changes
        cut.note(call)
        if call.name in LOOKS:
            return errno.EIO if mode == "EIO from then on" and reached else None
        changes += 1
        if changes < number or (changes > number and not mode.endswith("from then on")):
            return None
        reached.append(call)
        if mode in ("kill", "power cut"):
            return KILL
        if mode == "ENOSPC from then on" and call.name not in _GROWS:
            return None
        return int(getattr(errno, mode.split()[0]))

    result = watch(root, lambda: attempt(root, step), answer)
    if not reached:
        assert result == WRITTEN
        return False, ""
    if mode == "power cut":
        cut.fall()
    if result is not None and not mode.endswith("from then on"):
        assert result in (WRITTEN, WRITTEN_AGAIN), "the save after the failed one fails, too"
    outcome = found(root, old, new)
    assert outcome == "new" or result not in (WRITTEN, WRITTEN_AGAIN), "said to be written"
    save(root, 9, 9)  # the next run goes on
    assert not [path.name for path in root.iterdir() if "." in path.name]
    return True, outcome


def sweep_reading(base: Path, every: int) -> dict[str, Counter[str]]:
    """Every call of a resume fails: it finds the new step, says that it takes the old one, or ends
    with an error. A step that was asked for by number is found or not; none stands in for it."""
    root = base / "checkpoints"
    two_steps(root)
    steps = [tree(root / f"step_{step}") for step in (1, 2)]
    results: dict[str, Counter[str]] = {}
    for which in ("latest", 2):
        for mode in MODES[2:]:
            counts = results[f"resume {which}: {mode}"] = Counter()
            number = 1
            while (outcome := _read_case(root, which, mode, number)) is not None:
                counts["points"] += 1
                is_right = outcome in ("new", "error") or (outcome == "old" and which == "latest")
                counts[outcome if is_right else f"call {number}: {outcome}"] += 1
                number += every
    assert steps == [tree(root / f"step_{step}") for step in (1, 2)]
    shutil.rmtree(root)
    return results


def _read_case(root: Path, which: int | str, mode: str, number: int) -> str | None:
    """What a resume comes to whose call of this number fails; None where it makes fewer."""
    reached = False

    def answer(call: Call) -> int | None:
        nonlocal reached
        if call.number < number or (call.number > number and not mode.endswith("from then on")):
            return None
        reached = True
        return int(getattr(errno, mode.split()[0]))

    try:
        outcome = _RESUMED[watch(root, lambda: _resume(root, which), answer) or 0]
    except AssertionError as error:
        outcome = str(error)
    return outcome if reached else None


_RESUMED = {
    0: "killed",
    1: "old",
    2: "new",
    3: "error",
    4: "old without a word",
    5: "said to be empty",
}


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


def main() -> None:
    if problem := unsupported():
        sys.exit(problem)
    logging.getLogger("hetero_framework").addHandler(logging.NullHandler())
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    began = time.monotonic()
    # In memory, where there is that: the waits for a disk are counted, not measured.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        results = sweep_writing(Path(base).resolve(), every)
        results |= sweep_reading(Path(base).resolve(), every)
    for name, counts in results.items():
        print(json.dumps({"case": name, **counts}))
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
