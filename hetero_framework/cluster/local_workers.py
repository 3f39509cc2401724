"""The worker processes of this machine, as children of a coordinator or of `hetero worker`.

A worker that crashed is started again. A worker that ended for a reason that would recur is not.
All end with their parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Self

from hetero_framework import control, log
from hetero_framework.cluster import oom_killer
from hetero_framework.cluster.child import PROGRAM, describe_end, end_processes, environment, start
from hetero_framework.cluster.roles import threads_for
from hetero_framework.cluster.stop_signals import signals_passed_to, stopped_by
from hetero_framework.config import Config
from hetero_framework.core import addresses, timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.files import write_file
from hetero_framework.errors import (
    HeteroError,
    PeerLostError,
    ResourceError,
    StoppedEarly,
    UserError,
    in_words,
)
from hetero_framework.file_trust import not_through_links, refuse_link
from hetero_framework.log import event, one_line

_log = logging.getLogger(__name__)
_IN_ORDER = (0, StoppedEarly.exit_code)
_TAIL_LINES = 12
_TAIL_BYTES = 16 * 1024
Tail = Callable[[], str]
"""The last lines of a process, to be put behind how it ended."""
MAX_DEATHS = 5
"""Deaths within DEATHS_S after which a restart is no cure."""


def is_crash(code: int) -> bool:
    """Whether a restart may help a process that ended with this exit code (minus the number of a
    signal): it was killed, or met a bug. A process that ended in order, or for wrong input, for its
    identity or for lack of memory would end in the same way again."""
    return code < 0 or code == HeteroError.exit_code or code > 255  # on Windows


class RestartPolicy:
    """The deaths of one process within the last DEATHS_S; older ones do not count. The first death
    is followed by a restart at once, the next ones by pauses of 1, 2 and 4 s."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()

    def died(self, now_s: float) -> float | None:
        """Note a death; return the seconds to wait before the restart, or None for no restart.
        `now_s` is the time of a monotonic clock."""
        while self._recent and now_s - self._recent[0] > timeouts.DEATHS_S:
            self._recent.popleft()
        self._recent.append(now_s)
        count = len(self._recent)
        if count >= MAX_DEATHS:
            return None
        return 2.0 ** (count - 2) if count > 1 else 0.0


@dataclass(frozen=True)
class _Child:
    """One process of a worker."""

    process: subprocess.Popen[bytes]
    kills: int | None
    """`out_of_memory_kills` before its start."""
    tail: Tail

    def code(self, within_s: float = 0.0) -> int | None:
        """Exit code, or minus the number of a signal; None if it does not end within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.returncode

    @property
    def how(self) -> str:
        """How it ended, as "exit code 2"."""
        return describe_end(self.process.pid, self.process.returncode, self.kills)


@dataclass(eq=False)
class Children(ABC):
    """Worker processes that read exactly this configuration, overrides included."""

    config: Config
    ids: Sequence[WorkerId]
    program: Sequence[str] = PROGRAM
    run_id: str | None = None
    """The only run that the workers serve; None: any."""
    keep: bool = False
    debug: bool = False
    _children: dict[WorkerId, _Child] = field(default_factory=dict, init=False)
    _policies: dict[WorkerId, RestartPolicy] = field(default_factory=dict, init=False)

    @property
    def _logs(self) -> Path:
        return self.config.output_dir / "logs"

    def start(self) -> None:
        """Start the workers that do not run, or do not run any more. Raises ResourceError."""
        try:
            refuse_link(self._logs)
            self._logs.mkdir(parents=True, exist_ok=True)
            settings = json.dumps(self.config.to_dict(), indent=2) + "\n"
            write_file(self._logs / "config.json", settings.encode())
            for worker_id in self.ids:
                self._start(worker_id)
        except OSError as error:
            self.stop()
            raise ResourceError(
                f"cannot start the workers of this machine: {in_words(error)}"
                + f" ({error.filename})" * bool(error.filename)
            ) from error

    @abstractmethod
    def _start(self, worker_id: WorkerId) -> None:
        """Start a worker that does not run. Raises OSError."""

    def _spawn(
        self, worker_id: WorkerId, output: IO[bytes] | int, env: dict[str, str], tail: Tail = str
    ) -> subprocess.Popen[bytes]:
        """Start a worker's process, which writes to `output`."""
        env["OMP_NUM_THREADS"] = str(threads_for(self.config, worker_id))
        command = [*self.program, "--supervised", *["--keep"] * self.keep]
        command += ["--debug"] * self.debug
        command += ["--run-id", self.run_id] if self.run_id else []
        command += ["--config", str(self._logs / "config.json")]
        command += ["--base-dir", str(self.config.base_dir), "--worker-id", str(worker_id)]
        command += [word for file in control.imported_files() for word in ("--import", str(file))]
        kills = oom_killer.out_of_memory_kills()
        process = start(command, env, output, subprocess.STDOUT)
        self._children[worker_id] = _Child(process, kills, tail)
        return process

    def _pause_s(self, worker_id: WorkerId, how: str, tail: str = "") -> float:
        """Note and report that a worker has died; the seconds to wait before its restart. Raises
        PeerLostError when it has died too often."""
        policy = self._policies.setdefault(worker_id, RestartPolicy())
        pause_s = policy.died(time.monotonic())
        if pause_s is None:
            text = f"worker {worker_id} has died {MAX_DEATHS} times in ten minutes; it {how}"
            raise PeerLostError(text + tail)
        when = f"in {pause_s:.0f} s" if pause_s else "at once"
        restarted = event("worker restarted", worker=worker_id, reason=f"it {how}", pause_s=pause_s)
        text = "worker %s: it %s; it is started again %s"
        _log.warning(text, worker_id, how, when, extra=restarted)
        return pause_s

    def _forget(self, worker_id: WorkerId) -> None:
        if (child := self._children.pop(worker_id, None)) is not None:
            end_processes([child.process], 0.0)  # closes its life line

    def stop(self, grace_s: float = timeouts.EXIT_S) -> None:
        """End all workers: close the life lines, wait `grace_s`, then kill. Safe to call twice."""
        processes = [child.process for child in self._children.values()]
        self._children = {}
        end_processes(processes, grace_s)


class LocalWorkers(Children):
    """The workers that a coordinator starts; each writes to output_dir/logs/worker-<id>.log."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _start(self, worker_id: WorkerId) -> None:
        if worker_id in self._children and self._code(worker_id) is None:
            return
        self._forget(worker_id)
        if self._is_served(worker_id):
            return
        # They read a model of the hub with its token, and have no other use for one.
        model = self.config.model
        name = model.name_or_path if model is not None else None
        of_hub = name is not None and not self.config.path(name).is_dir()
        log = self._log(worker_id)
        with open(log, "ab", opener=not_through_links) as output:
            tail = partial(_tail, log, output.tell())
            self._spawn(worker_id, output, environment(hub_token=of_hub), tail)

    def _log(self, worker_id: WorkerId) -> Path:
        return self._logs / f"worker-{worker_id}.log"

    def _is_served(self, worker_id: WorkerId) -> bool:
        """Whether another process listens at this worker's address; then that is used."""
        worker = self.config.worker(worker_id)
        taken = worker.port is not None and not addresses.port_is_free(worker.ip, worker.port)
        return taken and addresses.is_local_address(worker.ip)

    def revive(self, worker_id: WorkerId, stop: threading.Event) -> None:
        """Start a dead local worker again, unless another process serves in its place. After
        repeated deaths pause first (until `stop`). Raises PeerLostError when the worker died too
        often, or for a reason that a restart would meet again."""
        child = self._children.get(worker_id)
        if child is None or (code := child.code()) is None:
            return
        if self._is_served(worker_id):
            where = self.config.worker(worker_id).address
            _log.info("worker %s: something listens at %s; using it", worker_id, where)
            self._forget(worker_id)
            return
        how, tail = f"ended with {child.how}", child.tail()
        # It was told to end on this machine, or another process had its port for a while.
        passes = code in (*_IN_ORDER, UserError.exit_code)
        if not (passes or is_crash(code)):
            raise PeerLostError(f"worker {worker_id} is gone: it {how}{tail}")
        stop.wait(self._pause_s(worker_id, how, tail))
        self._start_again(worker_id)

    def start_missing(self, worker_id: WorkerId) -> None:
        """Start a local worker after another process that served in its place has gone. Raises
        ResourceError."""
        if worker_id in self.ids and worker_id not in self._children:
            self._start_again(worker_id)

    def _start_again(self, worker_id: WorkerId) -> None:
        try:
            self._start(worker_id)
        except OSError as error:
            raise ResourceError(
                f"cannot start worker {worker_id} again: {in_words(error)}"
            ) from error

    def was_told_to_end(self, worker_id: WorkerId) -> bool:
        """Whether a local worker was ended by a signal, at once or in order."""
        code = self._code(worker_id)
        return code is not None and (code < 0 or code == StoppedEarly.exit_code)

    def answers(self, worker_id: WorkerId) -> None:
        """Note that a worker has been reached. If the process started here found its port in use,
        another process serves, and whatever started that will also start it again."""
        if self._code(worker_id) == UserError.exit_code:
            self._forget(worker_id)

    def kill(self, worker_id: WorkerId) -> bool:
        """Kill a local worker that does not answer; False where it is not local. `revive` starts it
        again."""
        if (child := self._children.get(worker_id)) is None:
            return False
        _log.warning("worker %s does not answer; its process is killed", worker_id)
        child.process.kill()
        child.code(timeouts.STOP_S)  # None where it hangs in the kernel
        return True

    def report(self) -> None:
        """Log which processes were started; `start` may run before there is a log."""
        for worker_id in self.ids:
            if (child := self._children.get(worker_id)) is not None:
                text = f"started as process {child.process.pid}; its log is {self._log(worker_id)}"
            else:
                worker = self.config.worker(worker_id)
                text = f"something already listens at {worker.address}; using it"
            _log.info("worker %s: %s", worker_id, text)

    def starts(self, worker_id: WorkerId) -> bool:
        """Whether the process of this worker was started here."""
        return worker_id in self._children

    def _code(self, worker_id: WorkerId) -> int | None:
        """The exit code of a local worker; None while it lives."""
        child = self._children.get(worker_id)
        return child.code() if child is not None else None

    def exit_text(self, worker_id: WorkerId, within_s: float = 0.0) -> str | None:
        """How a local worker ended; None while it lives, and for other workers. Its links break
        just before it ends: `within_s` is the time to wait for its end."""
        child = self._children.get(worker_id)
        if child is None or child.code(within_s) is None:
            return None
        return f"worker {worker_id} ended with {child.how}{child.tail()}"


def _tail(log: Path, begin: int) -> str:
    """The last lines of a worker's log from byte `begin` on."""
    lines: list[str] = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    last = [line for line in lines if line.strip()][-_TAIL_LINES:]
    return "\n    ".join(["; the end of its log:", *last]) if last else ""


def run_workers(
    config: Config,
    worker_ids: Sequence[WorkerId],
    *,
    keep: bool = False,
    debug: bool = False,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run these workers of this machine until all have ended in order, or one has ended for good;
    return its exit code, 75 after a signal. Their lines appear on standard error, with names if
    there are several.

    Raises ResourceError when they cannot be started, and PeerLostError when one has died too
    often."""
    lines = log.Lines(log.to_stderr)
    events = log.Events(config.output_dir / "logs" / log.EVENTS_FILE, "supervisor")
    with log.log_to(config.training.log_level, lines, events):
        return _Supervisor(config, worker_ids, program, keep=keep, debug=debug).run()


@dataclass(eq=False)
class _Supervisor(Children):
    """The workers of a machine without the coordinator, and the loop that looks after them."""

    _printers: dict[WorkerId, threading.Thread] = field(default_factory=dict, init=False)
    _start_at: dict[WorkerId, float] = field(default_factory=dict, init=False)
    _leave_by: dict[WorkerId, float] = field(default_factory=dict, init=False)
    """When each worker that was told to end is killed."""
    _codes: dict[WorkerId, int] = field(default_factory=dict, init=False)
    """Exit codes of workers that have ended for good."""
    _stop_reason: str | None = None
    _signals: int = 0

    def run(self) -> int:
        with signals_passed_to(self._note_signal):
            try:
                self.start()
                while (code := self._code()) is None:
                    for worker_id in self.ids:
                        if worker_id not in self._codes:
                            self._look_after(worker_id)
                    time.sleep(timeouts.ANSWER_TICK_S)
                return code
            finally:
                self.stop(0.0 if self._signals > 1 else timeouts.EXIT_S)
                for printer in self._printers.values():
                    printer.join(timeouts.STOP_S)

    def _code(self) -> int | None:
        """The exit code, once it is known."""
        known = self._codes.values()
        if failed := [code for code in known if code not in _IN_ORDER]:
            return failed[0]
        if self._signals > 1:
            return StoppedEarly.exit_code
        return max(known) if len(known) == len(self.ids) else None

    def _note_signal(self, name: str) -> None:
        """Have signals passed on to the workers; a second one ends all at once."""
        self._signals += 1
        self._stop_reason = self._stop_reason or stopped_by(name)

    def _look_after(self, worker_id: WorkerId) -> None:
        child = self._children.get(worker_id)
        if child is not None:
            if child.code() is not None:
                self._ended(worker_id, child)
            elif self._stop_reason is not None:
                self._tell_to_end(worker_id, child.process, self._stop_reason)
        elif self._stop_reason is not None:
            self._codes[worker_id] = StoppedEarly.exit_code
        elif time.monotonic() >= self._start_at[worker_id]:
            try:
                self._start(worker_id)
            except OSError as error:
                self._died(worker_id, f"could not be started again: {in_words(error)}")

    def _start(self, worker_id: WorkerId) -> None:
        process = self._spawn(worker_id, subprocess.PIPE, environment())
        name = f"worker {worker_id} | " if len(self.ids) > 1 else ""
        self._printers[worker_id] = print_lines(process, name)

    def _tell_to_end(
        self, worker_id: WorkerId, process: subprocess.Popen[bytes], reason: str
    ) -> None:
        """Tell a worker, on its life line, to leave its run and end; kill it if it does not."""
        if worker_id not in self._leave_by:
            self._leave_by[worker_id] = time.monotonic() + timeouts.RELEASE_S + timeouts.STOP_S
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(reason.encode() + b"\n")
                process.stdin.flush()
        elif time.monotonic() > self._leave_by[worker_id]:
            process.kill()

    def _ended(self, worker_id: WorkerId, child: _Child) -> None:
        """Note that a process has ended: it is started again or over."""
        self._forget(worker_id)
        self._printers[worker_id].join(timeouts.STOP_S)  # a child of its own may hold the pipe
        code = child.process.returncode
        if not is_crash(code):
            self._codes[worker_id] = code
        elif self._stop_reason is not None:
            self._codes[worker_id] = StoppedEarly.exit_code
        else:
            self._died(worker_id, f"ended with {child.how}")

    def _died(self, worker_id: WorkerId, how: str) -> None:
        self._start_at[worker_id] = time.monotonic() + self._pause_s(worker_id, how)


def print_lines(process: subprocess.Popen[bytes], prefix: str) -> threading.Thread:
    """Copy a child's lines to our standard error behind `prefix`, in a thread."""
    assert process.stdout is not None
    output = process.stdout

    def copy() -> None:
        with output:
            for line in output:
                text = one_line(line.decode("utf-8", "replace").rstrip())
                # One write per line keeps the lines of several workers whole.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"{prefix}{text}\n")
                    sys.stderr.flush()

    thread = threading.Thread(target=copy, name=f"print {prefix}", daemon=True)
    thread.start()
    return thread
