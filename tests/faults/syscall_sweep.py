"""Shared parts of the sweeps over the n-th system call of a write, for every n."""

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

from hetero_framework.errors import CheckpointError, IdentityError, ResourceError
from tests.faults.syscalls import KILL, LOOKS, Call, unsupported, watch

WRITTEN, WRITTEN_AGAIN, REFUSED = 0, 10, 11
MODES = ("kill", "power cut", "ENOSPC", "EIO", "ENOSPC from then on", "EIO from then on")
_GROWS = ("write", "pwrite64", "writev", "fsync", "mkdir", "mkdirat", "fallocate")
Counts = dict[str, Counter[str]]
"""Of each case, how often what was found."""


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


def attempt(write: Callable[[], None]) -> int:
    """Write as a run does: what fails is tried again later."""
    for result in (WRITTEN, WRITTEN_AGAIN):
        with contextlib.suppress(ResourceError, IdentityError):
            write()
            return result
    return REFUSED


def failing(call: Call, number: int, nth: int, mode: str) -> int | None:
    """The answer to a call, the `nth` of its kind, where that of this number fails."""
    if nth < number or (nth > number and not mode.endswith("from then on")):
        return None
    if mode == "ENOSPC from then on" and nth > number and call.name not in _GROWS:
        return None
    return int(getattr(errno, mode.split()[0]))


def disturbed(
    root: Path, write: Callable[[], None], mode: str, number: int
) -> tuple[bool, int | None]:
    """`attempt` in a fork, where the call of this number that changes something goes wrong: whether
    there was such a call, and the result; None when killed. AssertionError when the second attempt
    after a fault that was over fails, too."""
    cut = PowerCut(root)
    reached = False
    changes = 0

    def answer(call: Call) -> int | None:
        nonlocal changes, reached
        cut.note(call)
        if call.name in LOOKS:
            return errno.EIO if mode == "EIO from then on" and reached else None
        changes += 1
        reached = reached or changes == number
        if mode in ("kill", "power cut"):
            return KILL if changes == number else None
        return failing(call, number, changes, mode)

    result = watch(root, lambda: attempt(write), answer)
    if not reached:
        assert result == WRITTEN
        return False, result
    if mode == "power cut":
        cut.fall()
    if result is not None and not mode.endswith("from then on"):
        assert result in (WRITTEN, WRITTEN_AGAIN), "the attempt after the failed one fails, too"
    return True, result


def points(start: Path, root: Path, every: int, case: Callable[[int], str | None]) -> Counter[str]:
    """What `case(number)` finds in `root`, each time a copy of `start`, for every n-th number until
    it is None: there are no more calls. What it raises is counted under its text."""
    counts: Counter[str] = Counter()
    number = 1
    while True:
        if start.exists():
            shutil.copytree(start, root)
        try:
            outcome = case(number)
        except (AssertionError, CheckpointError, IdentityError, ResourceError) as error:
            outcome = f"call {number}: {error}"
        shutil.rmtree(root, ignore_errors=True)
        if outcome is None:
            return counts
        counts["points"] += 1
        counts[outcome] += 1
        number += every


def run(*sweeps: Callable[[Path, int], Counts]) -> None:
    """The program: every n-th point (its argument) of these sweeps, one JSON line per case."""
    if problem := unsupported():
        sys.exit(problem)
    logging.getLogger("hetero_framework").addHandler(logging.NullHandler())
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    began = time.monotonic()
    # In memory, where there is that: the waits for a disk are counted, not measured.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        for sweep in sweeps:
            for name, counts in sweep(Path(base).resolve(), every).items():
                print(json.dumps({"case": name, **counts}))
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
