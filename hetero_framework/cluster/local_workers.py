"""The worker processes that a coordinator starts on its own machine."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_framework.cluster import oom_killer
from hetero_framework.cluster.child import PROGRAM, Spawner, describe_end, end_processes
from hetero_framework.cluster.restart_policy import MAX_DEATHS, RestartPolicy, is_crash
from hetero_framework.config import Config
from hetero_framework.core import addresses, timeouts
from hetero_framework.core.fields import WorkerId
from hetero_framework.errors import PeerLostError, ResourceError, StoppedEarly, UserError, in_words
from hetero_framework.file_trust import not_through_links
from hetero_framework.log import event

_log = logging.getLogger(__name__)
_TAIL_LINES = 12
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True)
class WorkerExit:
    """A worker process that ended by itself: exit code, or minus the number of a signal."""

    worker_id: WorkerId
    code: int
    last_lines: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        text = f"worker {self.worker_id} ended with {self.how}"
        end = "; the end of its log:" if self.last_lines else ""
        return "\n    ".join([text + end, *self.last_lines])


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
        """With `run_id` the workers serve only that run."""
        self._config = config
        self._ids = tuple(worker_ids)
        self._debug = debug
        self._program = [*program, *(["--run-id", run_id] if run_id else [])]
        self._children: dict[WorkerId, _Child] = {}
        self._policies = {worker_id: RestartPolicy() for worker_id in self._ids}
        self._spawner: Spawner | None = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the workers that do not run, or do not run any more. Raises ResourceError."""
        try:
            # They read a model of the hub with its token, and have no other use for one.
            model = self._config.model
            name = model.name_or_path if model is not None else None
            of_hub = name is not None and not self._config.path(name).is_dir()
            self._spawner = Spawner(
                self._config, self._program, debug=self._debug, hub_token=of_hub
            )
            for worker_id in self._ids:
                self._start(worker_id, self._spawner)
        except OSError as error:
            self.stop()
            raise ResourceError(
                f"cannot start the workers of this machine: {in_words(error)}"
                + f" ({error.filename})" * bool(error.filename)
            ) from error

    def revive(self, worker_id: WorkerId, stop: threading.Event) -> None:
        """Start a dead local worker again, unless another process serves in its place. After
        repeated deaths pause first (until `stop`). Raises PeerLostError when the worker died too
        often, or for a reason that a restart would meet again."""
        if (ended := self._exit_of(worker_id)) is None or self._is_served(worker_id):
            return
        pause_s = self._policies[worker_id].died(time.monotonic())
        in_order = ended.code in (0, StoppedEarly.exit_code)  # it was told to, on this machine
        # It has worked before, so another process had the port for a while.
        had_no_port = ended.code == UserError.exit_code
        if not (in_order or had_no_port or is_crash(ended.code)) or pause_s is None:
            too_often = "" if pause_s is not None else f"it died {MAX_DEATHS} times; "
            raise PeerLostError(f"worker {worker_id} is gone: {too_often}{ended}")
        stop.wait(pause_s)
        self._start_again(worker_id)
        what = f"it ended with {ended.how}"
        restarted = event("worker restarted", worker=worker_id, reason=what)
        _log.warning("worker %s: %s; started again", worker_id, what, extra=restarted)

    def start_missing(self, worker_id: WorkerId) -> None:
        """Start a local worker after another process that served in its place has gone. Raises
        ResourceError."""
        if worker_id in self._ids and worker_id not in self._children and self._spawner is not None:
            self._start_again(worker_id)

    def _start_again(self, worker_id: WorkerId) -> None:
        assert self._spawner is not None  # of `start`
        try:
            self._start(worker_id, self._spawner)
        except OSError as error:
            raise ResourceError(
                f"cannot start worker {worker_id} again: {in_words(error)}"
            ) from error

    def was_told_to_end(self, worker_id: WorkerId) -> bool:
        """Whether a local worker was ended by a signal, at once or in order."""
        ended = self._exit_of(worker_id)
        return ended is not None and (ended.code < 0 or ended.code == StoppedEarly.exit_code)

    def answers(self, worker_id: WorkerId) -> None:
        """Note that a worker has been reached. If the process started here found its port in use,
        another process serves, and whatever started that will also start it again."""
        ended = self._exit_of(worker_id)
        if ended is not None and ended.code == UserError.exit_code:
            self._forget(worker_id)

    def _is_served(self, worker_id: WorkerId) -> bool:
        """Whether another process listens at this worker's address; then that is used."""
        worker = self._config.worker(worker_id)
        taken = worker.port is not None and not addresses.port_is_free(worker.ip, worker.port)
        if taken:
            _log.info("worker %s: something listens at %s; using it", worker_id, worker.address)
            self._forget(worker_id)
        return taken

    def _forget(self, worker_id: WorkerId) -> None:
        if (child := self._children.pop(worker_id, None)) is not None:
            end_processes([child.process], 0.0)  # closes its life line

    def kill(self, worker_id: WorkerId) -> bool:
        """Kill a local worker that does not answer; False where it is not local. `revive` starts it
        again."""
        if (child := self._children.get(worker_id)) is None:
            return False
        _log.warning("worker %s does not answer; its process is killed", worker_id)
        child.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            child.process.wait(timeouts.STOP_S)
        return True

    def _start(self, worker_id: WorkerId, spawner: Spawner) -> None:
        running = self._children.get(worker_id)
        if running is not None:
            if running.process.poll() is None:
                return
            end_processes([running.process], 0.0)  # closes its life line
        worker = self._config.worker(worker_id)
        ip, port = worker.ip, worker.port
        taken = port is not None and not addresses.port_is_free(ip, port)
        if taken and addresses.is_local_address(ip):
            return  # what listens there is used
        log = spawner.log_dir / f"worker-{worker_id}.log"
        with open(log, "ab", opener=not_through_links) as output:
            begin = output.tell()
            process = spawner.spawn(worker_id, output)
        self._children[worker_id] = _Child(process, log, begin, oom_killer.out_of_memory_kills())

    def report(self) -> None:
        """Log which processes were started; `start` may run before there is a log."""
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

    def _exit_of(self, worker_id: WorkerId) -> WorkerExit | None:
        """How a local worker ended, with the end of its log; None while it lives."""
        child = self._children.get(worker_id)
        if child is None or child.process.poll() is None:
            return None
        code, tail = child.process.returncode, child.tail()
        how = describe_end(child.process.pid, code, child.kills_before)
        return WorkerExit(worker_id, code, tail, how)

    def exit_text(self, worker_id: WorkerId, within_s: float = 0.0) -> str | None:
        """How a local worker ended; None while it lives, and for other workers. Its links break
        just before it ends: `within_s` is the time to wait for its end."""
        if within_s and (child := self._children.get(worker_id)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(within_s)
        ended = self._exit_of(worker_id)
        return str(ended) if ended is not None else None

    def stop(self, grace_s: float = timeouts.EXIT_S) -> None:
        """End all workers: close the life lines, wait `grace_s`, then kill. Safe to call twice."""
        processes = [child.process for child in self._children.values()]
        self._children = {}
        end_processes(processes, grace_s)


@dataclass(frozen=True)
class _Child:
    process: subprocess.Popen[bytes]
    log: Path
    begin: int  # bytes of the log that earlier processes wrote
    kills_before: int | None  # `out_of_memory_kills` before the start

    def tail(self) -> tuple[str, ...]:
        """The last lines that this process wrote."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.begin, end - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]
        return ()
