"""Start the worker processes of one machine: the coordinator's own, and those of supervisor.py.

A child's standard input is its life line: a pipe that only the parent holds open. When the parent
ends in whatever way, on any system, it closes, and the child ends too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import hetero_framework
from hetero_framework import control
from hetero_framework.cluster import kernel_word
from hetero_framework.cluster.restarts import MAX_DEATHS, RestartPolicy, is_crash
from hetero_framework.cluster.roles import threads_for
from hetero_framework.config import Config
from hetero_framework.core import addresses, timeouts
from hetero_framework.core.files import write_file
from hetero_framework.errors import PeerLostError, ResourceError, StoppedEarly
from hetero_framework.log import event

WorkerId = int | str
PROGRAM = (sys.executable, "-m", "hetero_framework", "worker")
_log = logging.getLogger(__name__)
_TAIL_LINES = 12
_TAIL_BYTES = 16 * 1024


def watch_parent(
    on_gone: Callable[[], None] | None = None,
    on_order: Callable[[str], None] = lambda reason: None,
) -> threading.Thread:
    """In a supervised worker: call `on_gone` when the parent is gone (default: end the process),
    and `on_order` with each line that the parent writes: why this process is to end."""

    def wait() -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := os.read(0, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_order(line.decode("utf-8", "replace"))
        if on_gone is None:
            os._exit(PeerLostError.exit_code)  # the main thread may be deep inside a computation
        on_gone()

    thread = threading.Thread(target=wait, name="watch-parent", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class WorkerExit:
    """A worker process that ended by itself: exit code, or minus the number of a signal."""

    worker_id: WorkerId
    code: int
    last_lines: tuple[str, ...]
    why: str | None = None

    def __str__(self) -> str:
        text = f"worker {self.worker_id} ended with {describe_exit(self.code)}"
        text += f" ({self.why})" if self.why else ""
        end = "; the end of its log:" if self.last_lines else ""
        return "\n    ".join([text + end, *self.last_lines])


def describe_exit(code: int) -> str:
    """`exit code 2`, or `signal SIGKILL` for a negative number as subprocess gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class LocalWorkers:
    """The workers that a coordinator starts; each writes to output_dir/logs/worker-<id>.log."""

    def __init__(
        self,
        config: Config,
        worker_ids: Iterable[WorkerId],
        *,
        debug: bool = False,
        run_id: str | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """With `run_id` the workers serve that run alone."""
        self._config = config
        self._ids = tuple(worker_ids)
        self._debug = debug
        self._program = [*program, *(["--run-id", run_id] if run_id else [])]
        self._children: dict[WorkerId, _Child] = {}
        self._policies = {worker_id: RestartPolicy() for worker_id in self._ids}
        self._spawner: _Spawner | None = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the workers that are not there, or not any more. Raises ResourceError."""
        try:
            self._spawner = _Spawner(self._config, self._program, debug=self._debug)
            for worker_id in self._ids:
                self._start(worker_id, self._spawner)
        except OSError as error:
            self.stop()
            raise ResourceError(f"cannot start the workers of this machine: {error}") from error

    def revive(self, worker_id: WorkerId, stop: threading.Event) -> None:
        """Start a worker again that was started here and has died; waits before the next try where
        it dies again and again, or until `stop`. Raises PeerLostError when it has died too often or
        ended for a reason that a new process would meet again."""
        ended = next((e for e in self.exited() if e.worker_id == worker_id), None)
        if ended is None:
            return
        pause_s = self._policies[worker_id].died(time.monotonic())
        in_order = ended.code in (0, StoppedEarly.exit_code)  # it was told to, on this machine
        if not (in_order or is_crash(ended.code)) or pause_s is None:
            too_often = "" if pause_s is not None else f"it died {MAX_DEATHS} times; "
            raise PeerLostError(f"worker {worker_id} is gone: {too_often}{ended}")
        stop.wait(pause_s)
        assert self._spawner is not None  # of `start`
        try:
            self._start(worker_id, self._spawner)
        except OSError as error:
            raise ResourceError(f"cannot start worker {worker_id} again: {error}") from error
        what = f"it ended with {describe_exit(ended.code)}"
        said = event("worker restarted", worker=worker_id, reason=what)
        _log.warning("worker %s: %s; started again", worker_id, what, extra=said)

    def was_killed(self, worker_id: WorkerId) -> bool:
        """Whether a worker that was started here was ended by a signal."""
        return any(e.worker_id == worker_id and e.code < 0 for e in self.exited())

    def kill(self, worker_id: WorkerId) -> bool:
        """End a worker that does not answer, at once, if it was started here; whether it was.
        `revive` starts it again."""
        if (child := self._children.get(worker_id)) is None:
            return False
        _log.warning("worker %s does not answer; its process is killed", worker_id)
        child.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            child.process.wait(timeouts.STOP_S)
        return True

    def _start(self, worker_id: WorkerId, spawner: _Spawner) -> None:
        running = self._children.get(worker_id)
        if running is not None:
            if running.process.poll() is None:
                return
            _stop([running.process], 0.0)  # closes its life line
        worker = self._config.worker(worker_id)
        ip, port = worker.ip, worker.port
        taken = port is not None and not addresses.port_is_free(ip, port)
        if taken and addresses.is_local_address(ip):
            return  # what listens there is used
        log = spawner.log_dir / f"worker-{worker_id}.log"
        with log.open("ab") as output:
            begin = output.tell()
            process = spawner.spawn(worker_id, output)
        self._children[worker_id] = _Child(process, log, begin, kernel_word.out_of_memory_kills())

    def report(self) -> None:
        """Say which processes were started: who starts them early has no log yet."""
        for worker_id in self._ids:
            if (child := self._children.get(worker_id)) is not None:
                text = f"started as process {child.process.pid}; its log is {child.log}"
            else:
                worker = self._config.worker(worker_id)
                text = f"something already listens at {worker.address}; using it"
            _log.info("worker %s: %s", worker_id, text)

    def starts(self, worker_id: WorkerId) -> bool:
        """Whether the process of this worker was started here."""
        return worker_id in self._children

    def exited(self) -> list[WorkerExit]:
        """The workers that ended by themselves, with the end of their logs."""
        return [
            WorkerExit(worker_id, child.process.returncode, child.tail(), child.why())
            for worker_id, child in self._children.items()
            if child.process.poll() is not None
        ]

    def exit_text(self, worker_id: WorkerId, within_s: float = 0.0) -> str | None:
        """How a worker ended that was started here; None while it lives, and for the others. Of
        one that is just ending the links break first: `within_s` is how long to wait for it."""
        if within_s and (child := self._children.get(worker_id)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(within_s)
        return next((str(ended) for ended in self.exited() if ended.worker_id == worker_id), None)

    def stop(self, grace_s: float = timeouts.EXIT_S) -> None:
        """End all workers: close the life lines, wait `grace_s`, then kill. Safe to call twice."""
        processes = [child.process for child in self._children.values()]
        self._children = {}
        _stop(processes, grace_s)


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    log: Path
    begin: int  # bytes of the log that earlier processes wrote
    kills_before: int | None  # for memory, by the kernel

    def why(self) -> str | None:
        """What is known of an end by SIGKILL; None for other ends."""
        if self.process.returncode != -getattr(signal, "SIGKILL", 9):
            return None
        return kernel_word.on_kill(self.process.pid, self.kills_before)

    def tail(self) -> tuple[str, ...]:
        """The last lines that this process wrote."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.begin, end - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]
        return ()


class _Spawner:
    """Starts worker processes that read exactly this configuration, overrides included."""

    def __init__(self, config: Config, program: Sequence[str], *, debug: bool) -> None:
        self.config = config
        self.log_dir = config.output_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        snapshot = self.log_dir / "config.json"
        write_file(snapshot, json.dumps(config.to_dict(), indent=2).encode() + b"\n")
        self._command = [*program, "--supervised", "--config", str(snapshot)]
        self._command += ["--base-dir", str(config.base_dir)] + ["--debug"] * debug
        for file in control.imported_files():
            self._command += ["--import", str(file)]

    def spawn(self, worker_id: WorkerId, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        """A worker process in a session of its own, so that Ctrl-C reaches the parent alone."""
        package_parent = str(Path(hetero_framework.__file__).parents[1])
        paths = [package_parent, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            "OMP_NUM_THREADS": str(threads_for(self.config, worker_id)),
        }
        return subprocess.Popen(
            [*self._command, "--worker-id", str(worker_id)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=os.name != "nt",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(timeouts.STOP_S)
