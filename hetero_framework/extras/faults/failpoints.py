"""The failpoints of HETERO_FAILPOINT: when one fires, and what it does to its process.

    HETERO_FAILPOINT=[process/]name[@step][:action[:value]],...

`process` is `coordinator` or `worker-<id>`; without it the entry is for every process. `name` is
one of POINTS. `step` counts from 1, as the log does; 0 is before the first step.

    name        fires once in a process, the first time that it is reached
    name@9      fires once in a process, the first time that it is reached in step 9
    name@*      fires every time, and says so once

Actions: `kill` (SIGKILL to itself; the default), `exit:CODE` (at once, without cleaning up; 1),
`stop` (SIGSTOP; not on Windows), `raise` (a RuntimeError, as a bug would), `oom:SHAPE` (the
out-of-memory error of `device`, the default, `cpu`, `mps` or `host`), `sleep:SECONDS`, and
`slow:FACTOR` (as if this thread's work since the point before had taken FACTOR times as long).
`inf` makes the tensor of a numeric point infinite.

A process that is started again has the same environment and fires again. With
HETERO_FAILPOINT_ONCE=DIR a point that fires once leaves a file in DIR, and fires in no process that
finds this file. A process with failpoints says so when it starts.

To add one: a line in POINTS, a `hit` in the product, a row in docs/maintainers/fault_injection.md.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework import log
from hetero_framework.core.failpoints import VARIABLE
from hetero_framework.errors import ConfigError

ONCE_VARIABLE = "HETERO_FAILPOINT_ONCE"

POINTS = {
    "join": "a greeting: before the coordinator sends HELLO, before a worker answers it",
    "load": "in the middle of loading: the weights are there, the adapter is not",
    "load-state": "before a part of a checkpoint is taken over",
    "step": "a step begins",
    "forward": "before a forward",
    "forward-done": "after a forward, before its result is sent",
    "forward-half": "half of a frame with hidden states is written",
    "backward": "before a backward",
    "backward-done": "after a backward, before its result is sent",
    "backward-half": "half of a frame with gradients is written",
    "norms": "all backwards are done, the norms are not yet reported",
    "abort": "before a step is forgotten",
    "commit": "the step is decided, no weight is changed",
    "optimizer-half": "half of a stage's parameters have made the step",
    "commit-done": "all stages here have made the step, and nobody has been told",
    "state-part": "before a part of a snapshot is handed out",
    "checkpoint": "a checkpoint's files are written, its manifest is not",
    "evaluation": "before a forward of an evaluation",
    "gather": "before a part of the result is handed out",
    "island-meet": "who takes part is known, the links between islands are not there yet",
    "island-state": "before a part of the state is given to an island that joins",
    "island-gradients": "before gradients of a stage are sent to the other islands",
    "island-changes": "before what has changed of a fragment is sent to the other islands",
    "island-vote": "the sums or averages are here, this island has not voted",
    "island-decision": "all islands have voted, none has been told the decision",
    "island-told": "one island has been told to commit, the others have not",
    "island-apply": "all have agreed on a fragment's weights, the stages do not have them",
    "output": "numeric: what leaves a stage's forward, or its loss",
}
"""The place of each failpoint, by name. The coordinator and workers have the same points."""

_NUMERIC = {"output"}
_SPEC = re.compile(
    r"(?:(?P<process>coordinator|worker-[^/:,]+)/)?(?P<name>[a-z-]+)"
    r"(?:@(?P<step>\*|\d+))?(?::(?P<action>[a-z]+)(?::(?P<value>[a-z0-9.]+))?)?"
)
_EVERY = "*"


def _kill(value: str | None) -> None:
    if sys.platform != "win32":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _stop(value: str | None) -> None:
    if sys.platform == "win32":
        raise ConfigError(f"{VARIABLE}: there is no stop on Windows")
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(value: str | None) -> None:
    raise RuntimeError("a failpoint raised this")


def _out_of_memory(shape: str | None) -> None:
    if shape == "host":
        raise MemoryError
    if shape == "cpu":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 PB")
    if shape == "mps":
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1 PB, max allowed: 0 bytes)")
    import torch  # this module is imported before it is known whether torch is wanted

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


ACTIONS: dict[str, Callable[[str | None], None]] = {
    "kill": _kill,
    "exit": lambda value: os._exit(int(value or 1)),
    "stop": _stop,
    "raise": _raise,
    "oom": _out_of_memory,
    "sleep": lambda value: time.sleep(float(value or 0)),
}


@dataclass
class _Failpoint:
    """One entry of the variable. A `step` of None means any step. `done` says that it has fired and
    may not fire again, `told` that its firing is reported."""

    text: str
    process: str | None
    name: str
    step: str | None
    action: str
    value: str | None
    done: bool = False
    told: bool = False

    def is_due(self, name: str) -> bool:
        return (
            not self.done
            and self.name == name
            and self.step in (None, _EVERY, str(log.current_step() or 0))
        )


class Failpoints:
    """The failpoints in `text` for this process. Raises ConfigError for an unreadable text."""

    def __init__(self, text: str, process: str) -> None:
        points = [_parse(entry.strip()) for entry in text.split(",") if entry.strip()]
        self.points = [point for point in points if point.process in (None, process)]
        self._process = process
        once = os.environ.get(ONCE_VARIABLE)
        self._once = Path(once) if once else None
        self._lock = threading.Lock()
        self._last: dict[int, float] = {}  # when each thread last passed a point
        logging.getLogger(__name__).warning("fault injection ON: %s=%s", VARIABLE, text)

    def is_due(self, name: str) -> bool:
        return any(point.is_due(name) for point in self.points)

    def hit(self, name: str, tensor: Any = None) -> None:
        """Do what the failpoints say about this place."""
        with self._lock:
            point = next((point for point in self.points if point.is_due(name)), None)
            fires = point is not None and self._claim(point)
        if point is not None and fires:
            if not point.told:
                point.told = True
                sys.stderr.write(f"failpoint {point.text} fires in {self._process}\n")
                sys.stderr.flush()
            if point.action == "slow":
                now = time.perf_counter()
                since = self._last.get(threading.get_ident(), now)
                time.sleep((float(point.value or 2) - 1) * (now - since))
            elif point.action == "inf":
                tensor.data.fill_(float("inf"))
            else:
                ACTIONS[point.action](point.value)
        self._last[threading.get_ident()] = time.perf_counter()

    def _claim(self, point: _Failpoint) -> bool:
        """Whether the point may fire. A point that fires once is marked as done."""
        if point.step == _EVERY:
            return True
        point.done = True
        if self._once is None:
            return True
        try:
            with (self._once / point.text.replace("/", ".").replace(":", "=")).open("x") as file:
                file.write(f"{self._process} {os.getpid()}\n")
        except FileExistsError:
            return False
        return True


def _parse(text: str) -> _Failpoint:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {text!r} is not a failpoint",
            hint="write [process/]name[@step][:action[:value]], such as worker-1/forward@9:kill",
        )
    name, numeric = match["name"], match["name"] in _NUMERIC
    if name not in POINTS:
        raise ConfigError(
            f"{VARIABLE}: there is no failpoint {name!r}", hint=f"one of: {', '.join(POINTS)}"
        )
    action = match["action"] or ("inf" if numeric else "kill")
    known = ["inf"] * numeric + [*ACTIONS, "slow"]
    if action not in known:
        raise ConfigError(
            f"{VARIABLE}: {name} has no action {action!r}", hint=f"one of: {', '.join(known)}"
        )
    _check_value(text, action, match["value"])
    return _Failpoint(text, match["process"], name, match["step"], action, match["value"])


def _check_value(text: str, action: str, value: str | None) -> None:
    shapes = ("device", "cpu", "mps", "host")
    if action in ("sleep", "slow", "exit"):
        wanted, fits = "a number", re.fullmatch(r"\d+(\.\d+)?", value or "1") is not None
    elif action == "oom":
        wanted, fits = " or ".join(shapes), value in (None, *shapes)
    else:
        wanted, fits = "nothing", value is None
    if not fits or (action == "exit" and not (value or "1").isdigit()):
        raise ConfigError(f"{VARIABLE}: {text!r}: {action} takes {wanted}, got {value!r}")
