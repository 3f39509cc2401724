"""Pausing a worker for the owner of its machine: the files through which `hetero pause` and a
supervisor communicate, in the user's cache directory.

A supervisor holds a worker's lock for its whole life and keeps the worker's state in a file beside
it. A third file exists while the owner wants the worker to pause, so the pause survives a restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_framework.core import timeouts
from hetero_framework.core.cache import cache_directory
from hetero_framework.core.files import write_file
from hetero_framework.errors import UserError
from hetero_framework.file_trust import read_own


class PauseState(Enum):
    """State of a supervised worker."""

    RUNNING = "running"
    LEAVING = "leaving"
    PAUSED = "paused"


@dataclass(frozen=True)
class PausableWorker:
    """Content of a worker's state file; `freed_bytes` is the memory that it had before the
    pause."""

    id: str
    address: str
    pid: int
    state: str = PauseState.RUNNING.value
    freed_bytes: int = 0
    machine: str = field(default_factory=platform.node)  # homes may be shared by machines


class PauseFile:
    """The lock, the state and the request to pause of one worker of this machine."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._lock = FileLock(directory / f"{name}.lock", mode=0o600)
        self._state = directory / f"{name}.json"
        self._wish = directory / f"{name}.pause"

    # -- the supervisor's side ------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, worker: PausableWorker) -> Iterator[None]:
        """Be the supervisor of this worker within the block. Raises UserError when it has another
        supervisor. Where the directory cannot be written, the worker cannot be paused."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._lock.acquire(timeout=timeouts.LOCK_S)
        except Timeout:
            other = self.worker()
            who = f"process {other.pid}" if other is not None else "another process"
            raise UserError(
                f"worker {worker.id} at {worker.address} is served on this machine already ({who})",
                hint="one is enough; end that one first",
            ) from None
        except (OSError, NotImplementedError):  # the latter where the file system has no locks
            yield
            return
        try:
            self.tell(worker)
            yield
        finally:
            with contextlib.suppress(OSError):
                self._state.unlink(missing_ok=True)
            self._lock.release()

    def tell(self, worker: PausableWorker) -> None:
        """Write the worker's present state."""
        with contextlib.suppress(OSError):
            write_file(self._state, json.dumps(asdict(worker)).encode())
            self._state.chmod(0o600)

    def is_pause_wanted(self) -> bool:
        return self._wish.exists()

    # -- the owner's side -----------------------------------------------------------------------

    def worker(self) -> PausableWorker | None:
        """The state that the supervisor wrote last; None where the file is absent or damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return PausableWorker(**json.loads(read_own(self._state)))
        return None

    def is_held(self) -> bool:
        """Whether the worker's supervisor lives."""
        try:
            with self._lock.acquire(timeout=0):
                return False
        except Timeout:
            return True
        except (OSError, NotImplementedError):
            return False

    def want_pause(self, wanted: bool) -> bool:
        """Ask for a pause, or withdraw the request; return whether that changes anything. Raises
        OSError."""
        before = self._wish.exists()
        if wanted and not before:
            os.close(os.open(self._wish, os.O_CREAT | os.O_WRONLY, 0o600))
        elif not wanted:
            self._wish.unlink(missing_ok=True)
        return before is not wanted


def pause_file_of(worker: PausableWorker) -> PauseFile | None:
    """The pause file of a worker of this machine; None without a cache directory."""
    if (directory := cache_directory()) is None:
        return None
    key = json.dumps([worker.machine, worker.id, worker.address])
    return PauseFile(directory / "workers", hashlib.sha256(key.encode()).hexdigest()[:32])


def supervised(worker_id: str) -> list[tuple[PauseFile, PausableWorker]]:
    """The workers with this id whose supervisors run on this machine, for this user."""
    directory, machine = cache_directory(), platform.node()
    workers = []
    for path in sorted((directory / "workers").glob("*.json")) if directory is not None else ():
        pause_file = PauseFile(path.parent, path.stem)
        worker = pause_file.worker()
        if worker is not None and (worker.id, worker.machine) == (worker_id, machine):
            workers.append((pause_file, worker))
    return [(pause_file, worker) for pause_file, worker in workers if pause_file.is_held()]
