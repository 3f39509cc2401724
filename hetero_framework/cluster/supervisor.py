"""Keeps the workers of a machine running: a small parent process without torch, one child each.

A child that died is started again (restarts.py); one that ended in order, or for a reason that it
would meet again, is not. The machine's owner may have a worker paused: its process ends, and with
it go memory and device, until it is wanted again (pausing.py). Whatever ends the parent ends the
children: signals are told to them, and its own death closes their life lines.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from hetero_framework import log, units
from hetero_framework.cluster import kernel_word, pausing
from hetero_framework.cluster.child import PROGRAM, Spawner, describe_end, end_processes
from hetero_framework.cluster.orders import stop_signals, stopped_by
from hetero_framework.cluster.restarts import MAX_DEATHS, RestartPolicy, is_crash
from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.errors import PeerLostError, ResourceError, StoppedEarly
from hetero_framework.log import event, one_line

PAUSED = "paused by its owner"
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
    """Run these workers of this machine until all have ended in order, or one for good: its exit
    code, 75 after a signal. Their lines appear on standard error, of several behind their names.

    Raises ResourceError when they cannot be started, UserError when somebody else serves one of
    them here, and PeerLostError when one has died too often."""
    lines = log.Lines(log.to_stderr)
    events = log.Events(config.output_dir / "logs" / log.EVENTS_FILE, "supervisor")
    with log.log_to(config.training.log_level, lines, events), ExitStack() as held:
        wards = []
        for worker_id in worker_ids:
            entry = config.worker(worker_id)
            about = pausing.Worker(str(worker_id), entry.address, psutil.Process().pid)
            desk = pausing.desk_of(about)
            if desk is not None:
                held.enter_context(desk.held(about))
            wards.append(_Ward(worker_id, about, desk))
        try:
            spawner = Spawner(config, [*program, *["--keep"] * keep], debug=debug)
            return _Supervisor(wards, spawner).run()
        except OSError as error:
            raise ResourceError(f"cannot start the workers of this machine: {error}") from error


@dataclass
class _Ward:
    """One worker, and what has become of it."""

    worker_id: WorkerId
    about: pausing.Worker
    desk: pausing.Desk | None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: subprocess.Popen[bytes] | None = None
    printer: threading.Thread | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    starts: int = 0
    start_at: float = 0.0
    kills: int | None = None
    leave_by: float | None = None  # it has been told to end, and has so long for it
    code: int | None = None  # how it ended for good

    @property
    def is_pause_wanted(self) -> bool:
        return self.desk is not None and self.desk.is_pause_wanted()

    @property
    def is_paused(self) -> bool:
        return self.about.state == pausing.State.PAUSED.value

    def tell(self, state: pausing.State, freed_bytes: int = 0) -> None:
        """What `hetero pause` and `resume` shall know."""
        self.about = replace(self.about, state=state.value, freed_bytes=freed_bytes)
        if self.desk is not None:
            self.desk.tell(self.about)

    def end(self, reason: str) -> None:
        """Have the process let go of its run and end; its life line carries the reason."""
        if self.process is None or self.leave_by is not None:
            return
        self.leave_by = time.monotonic() + timeouts.RELEASE_S + timeouts.STOP_S
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(reason.encode() + b"\n")
            self.process.stdin.flush()


class _Supervisor:
    """The loop over all workers of this machine."""

    def __init__(self, wards: Sequence[_Ward], spawner: Spawner) -> None:
        self._wards = wards
        self._spawner = spawner
        self._stop_reason: str | None = None
        self._signals = 0

    def run(self) -> int:
        with self._signals_noted():
            try:
                while (code := self._code()) is None:
                    for ward in self._wards:
                        if ward.code is None:
                            self._look_after(ward)
                    time.sleep(timeouts.ANSWER_TICK_S)
                return code
            finally:
                at_once = self._signals > 1
                running = [ward.process for ward in self._wards if ward.process is not None]
                end_processes(running, 0.0 if at_once else timeouts.EXIT_S)
                for ward in self._wards:
                    if ward.printer is not None:  # a child of the worker's own may hold the pipe
                        ward.printer.join(timeouts.STOP_S)

    def _code(self) -> int | None:
        """The exit code, once it is known."""
        known = [ward.code for ward in self._wards if ward.code is not None]
        if failed := [code for code in known if code not in _IN_ORDER]:
            return failed[0]
        if self._signals > 1:
            return StoppedEarly.exit_code
        return max(known) if len(known) == len(self._wards) else None

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Within the block signals are told to the workers; a second one ends all at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self._signals += 1
            self._stop_reason = self._stop_reason or stopped_by(shown[number])

        shown = stop_signals()
        before: dict[int, Any] = {number: signal.signal(number, note) for number in shown}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _look_after(self, ward: _Ward) -> None:
        process = ward.process
        if process is not None:
            code = process.poll()
            if code is not None:
                self._ended(ward, process, code)
            elif self._stop_reason is not None:
                ward.end(self._stop_reason)
            elif ward.leave_by is None and ward.is_pause_wanted:
                _log.info("worker %s is to pause; the run saves its state first", ward.worker_id)
                ward.tell(pausing.State.LEAVING, _memory_of(process))
                ward.end(PAUSED)
            if ward.leave_by is not None and time.monotonic() > ward.leave_by:
                process.kill()
        elif self._stop_reason is not None:
            ward.code = StoppedEarly.exit_code
        elif ward.is_pause_wanted:
            if not ward.is_paused:
                self._paused(ward)
        elif time.monotonic() >= ward.start_at:
            self._start(ward)

    def _start(self, ward: _Ward) -> None:
        if ward.is_paused:
            ward.policy = RestartPolicy()
            _log.info("worker %s goes on", ward.worker_id, extra=_event("worker resumed", ward))
        ward.kills = kernel_word.out_of_memory_kills()
        ward.last_lines.clear()
        ward.leave_by = None
        try:
            ward.process = self._spawner.spawn(ward.worker_id, subprocess.PIPE)
        except OSError as error:
            if ward.starts == 0:
                raise
            self._died(ward, f"it could not be started again: {error}")
            return
        ward.starts += 1
        name = f"worker {ward.worker_id} | " if len(self._wards) > 1 else ""
        ward.printer = _print_lines(ward.process, name, ward.last_lines)
        ward.tell(pausing.State.RUNNING)

    def _ended(self, ward: _Ward, process: subprocess.Popen[bytes], code: int) -> None:
        """A process is gone: started again, paused, or over."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if ward.printer is not None:
            ward.printer.join(timeouts.STOP_S)
        ward.process = ward.printer = None
        if self._stop_reason is not None:
            ward.code = StoppedEarly.exit_code if is_crash(code) else code
        elif ward.leave_by is not None:
            self._paused(ward)
        elif is_crash(code):
            self._died(ward, f"it ended with {describe_end(process.pid, code, ward.kills)}")
        else:
            ward.code = code

    def _paused(self, ward: _Ward) -> None:
        ward.leave_by = None
        ward.tell(pausing.State.PAUSED, ward.about.freed_bytes)
        freed = f"; {units.size(ward.about.freed_bytes)} are free" * (ward.about.freed_bytes > 0)
        said = "worker %s is paused%s; it goes on after: hetero resume %s"
        paused = _event("worker paused", ward)
        _log.info(said, ward.worker_id, freed, ward.worker_id, extra=paused)

    def _died(self, ward: _Ward, how: str) -> None:
        """Have the worker started again. Raises PeerLostError when it has died too often."""
        pause_s = ward.policy.died(time.monotonic())
        if pause_s is None:
            lines = [f"worker {ward.worker_id} has died {MAX_DEATHS} times in ten minutes; {how}"]
            if ward.last_lines:
                lines[0] += "; its last lines:"
            raise PeerLostError("\n    ".join([*lines, *ward.last_lines]))
        ward.start_at = time.monotonic() + pause_s
        when = f"in {pause_s:.0f} s" if pause_s else "at once"
        restarted = _event("worker restarted", ward, reason=how, pause_s=pause_s)
        said = "worker %s: %s; it is started again %s"
        _log.warning(said, ward.worker_id, how, when, extra=restarted)


def _event(what: str, ward: _Ward, **fields: Any) -> dict[str, Any]:
    return event(what, worker=ward.worker_id, **fields)


def _memory_of(process: subprocess.Popen[bytes]) -> int:
    with suppress(psutil.Error):
        return int(psutil.Process(process.pid).memory_info().rss)
    return 0


def _print_lines(
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
