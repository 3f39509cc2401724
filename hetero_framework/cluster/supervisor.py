"""Keeps a machine's workers running: a small parent without torch, and a child for each worker.

A child that crashed is started again (restart_policy.py). A child that ended in order, or for a
reason that a restart would meet again, is not. When the parent ends, the children end: it passes
signals on to them, and its own death closes their life lines.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hetero_framework import log
from hetero_framework.cluster import oom_killer
from hetero_framework.cluster.child import PROGRAM, Spawner, describe_end, end_processes
from hetero_framework.cluster.restart_policy import MAX_DEATHS, RestartPolicy, is_crash
from hetero_framework.cluster.stop_signals import signals_passed_to, stopped_by
from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.errors import PeerLostError, ResourceError, StoppedEarly, in_words
from hetero_framework.log import event, one_line

_IN_ORDER = (0, StoppedEarly.exit_code)
_TAIL_LINES = 12
_log = logging.getLogger(__name__)


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
        workers = [SupervisedWorker(worker_id) for worker_id in worker_ids]
        try:
            spawner = Spawner(config, [*program, *["--keep"] * keep], debug=debug)
            return _Supervisor(workers, spawner).run()
        except OSError as error:
            raise ResourceError(
                f"cannot start the workers of this machine: {in_words(error)}"
                + f" ({error.filename})" * bool(error.filename)
            ) from error


@dataclass
class SupervisedWorker:
    """One worker and its process."""

    id: WorkerId
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: subprocess.Popen[bytes] | None = None
    printer: threading.Thread | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    starts: int = 0
    start_at: float = 0.0
    kills: int | None = None
    leave_by: float | None = None  # the deadline, once it was told to end
    code: int | None = None  # how it ended for good

    def end(self, reason: str) -> None:
        """Tell the process, on its life line, to leave its run and end for this reason."""
        if self.process is None or self.leave_by is not None:
            return
        self.leave_by = time.monotonic() + timeouts.RELEASE_S + timeouts.STOP_S
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(reason.encode() + b"\n")
            self.process.stdin.flush()


class _Supervisor:
    """The loop over all workers of this machine."""

    def __init__(self, workers: Sequence[SupervisedWorker], spawner: Spawner) -> None:
        self._workers = workers
        self._spawner = spawner
        self._stop_reason: str | None = None
        self._signals = 0

    def run(self) -> int:
        with signals_passed_to(self._note_signal):
            try:
                while (code := self._code()) is None:
                    for worker in self._workers:
                        if worker.code is None:
                            self._look_after(worker)
                    time.sleep(timeouts.ANSWER_TICK_S)
                return code
            finally:
                at_once = self._signals > 1
                running = [worker.process for worker in self._workers if worker.process is not None]
                end_processes(running, 0.0 if at_once else timeouts.EXIT_S)
                for worker in self._workers:
                    if worker.printer is not None:  # a child of the worker's own may hold the pipe
                        worker.printer.join(timeouts.STOP_S)

    def _code(self) -> int | None:
        """The exit code, once it is known."""
        known = [worker.code for worker in self._workers if worker.code is not None]
        if failed := [code for code in known if code not in _IN_ORDER]:
            return failed[0]
        if self._signals > 1:
            return StoppedEarly.exit_code
        return max(known) if len(known) == len(self._workers) else None

    def _note_signal(self, name: str) -> None:
        """Have signals passed on to the workers; a second one ends all at once."""
        self._signals += 1
        self._stop_reason = self._stop_reason or stopped_by(name)

    def _look_after(self, worker: SupervisedWorker) -> None:
        process = worker.process
        if process is not None:
            code = process.poll()
            if code is not None:
                self._ended(worker, process, code)
            elif self._stop_reason is not None:
                worker.end(self._stop_reason)
            if worker.leave_by is not None and time.monotonic() > worker.leave_by:
                process.kill()
        elif self._stop_reason is not None:
            worker.code = StoppedEarly.exit_code
        elif time.monotonic() >= worker.start_at:
            self._start(worker)

    def _start(self, worker: SupervisedWorker) -> None:
        worker.kills = oom_killer.out_of_memory_kills()
        worker.last_lines.clear()
        try:
            worker.process = self._spawner.spawn(worker.id, subprocess.PIPE)
        except OSError as error:
            if worker.starts == 0:
                raise
            self._died(worker, f"it could not be started again: {in_words(error)}")
            return
        worker.starts += 1
        name = f"worker {worker.id} | " if len(self._workers) > 1 else ""
        worker.printer = print_lines(worker.process, name, worker.last_lines)

    def _ended(self, worker: SupervisedWorker, process: subprocess.Popen[bytes], code: int) -> None:
        """Note that a process has ended: it is started again or over."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if worker.printer is not None:
            worker.printer.join(timeouts.STOP_S)
        worker.process = worker.printer = None
        if self._stop_reason is not None:
            worker.code = StoppedEarly.exit_code if is_crash(code) else code
        elif is_crash(code):
            self._died(worker, f"it ended with {describe_end(process.pid, code, worker.kills)}")
        else:
            worker.code = code

    def _died(self, worker: SupervisedWorker, how: str) -> None:
        """Schedule the worker's restart. Raises PeerLostError when it has died too often."""
        pause_s = worker.policy.died(time.monotonic())
        if pause_s is None:
            lines = [f"worker {worker.id} has died {MAX_DEATHS} times in ten minutes; {how}"]
            if worker.last_lines:
                lines[0] += "; its last lines:"
            raise PeerLostError("\n    ".join([*lines, *worker.last_lines]))
        worker.start_at = time.monotonic() + pause_s
        when = f"in {pause_s:.0f} s" if pause_s else "at once"
        restarted = event("worker restarted", worker=worker.id, reason=how, pause_s=pause_s)
        text = "worker %s: %s; it is started again %s"
        _log.warning(text, worker.id, how, when, extra=restarted)


def print_lines(
    process: subprocess.Popen[bytes], prefix: str, last_lines: deque[str]
) -> threading.Thread:
    """Copy a child's lines to our standard error behind `prefix`, in a thread; keep the last."""
    assert process.stdout is not None
    output = process.stdout

    def copy() -> None:
        with output:
            for line in output:
                text = one_line(line.decode("utf-8", "replace").rstrip())
                if text.strip():
                    last_lines.append(text)
                # One write per line keeps the lines of several workers whole.
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"{prefix}{text}\n")
                    sys.stderr.flush()

    thread = threading.Thread(target=copy, name=f"print {prefix}", daemon=True)
    thread.start()
    return thread
