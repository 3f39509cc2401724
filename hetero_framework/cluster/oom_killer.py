"""Finds out from the kernel whether the out-of-memory killer of Linux ended a process."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_COUNTERS = Path("/proc/vmstat")
_MESSAGES = Path("/dev/kmsg")
_MAX_MESSAGES = 10_000  # the kernel's buffer holds fewer


def out_of_memory_kills() -> int | None:
    """Number of processes of this machine that the kernel has killed for lack of memory; None where
    the system has no such counter."""
    with suppress(OSError, ValueError):
        line = re.search(r"^oom_kill (\d+)$", _COUNTERS.read_text("ascii"), re.MULTILINE)
        return int(line[1]) if line else None
    return None


def on_kill(pid: int, kills_before: int | None) -> str:
    """Why a process was killed, as far as known; `kills_before` is an earlier value of
    `out_of_memory_kills`."""
    if (line := _message_of(pid)) is not None:
        return f"out of memory; the kernel: {line}"
    now = out_of_memory_kills()
    if now is None or kills_before is None:
        return "out of memory, as a rule"
    if now > kills_before:
        return "out of memory: the kernel has killed a process for that meanwhile"
    return "by hand, or out of memory; the kernel reports no such kill"


def _message_of(pid: int) -> str | None:
    """The kernel's log line about the end of this process, where we may read it (usually as
    root)."""
    message = None
    with suppress(OSError):
        descriptor = os.open(_MESSAGES, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            for _ in range(_MAX_MESSAGES):
                text = os.read(descriptor, 8192).decode("utf-8", "replace")  # one message each
                if re.search(rf"\bKilled process {pid}\b", text):
                    message = text.partition(";")[2].splitlines()[0]
        finally:
            os.close(descriptor)
    return message
