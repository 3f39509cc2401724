"""What Linux' kernel says of a process that SIGKILL ended: whether memory had run out."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_COUNTERS = Path("/proc/vmstat")
_MESSAGES = Path("/dev/kmsg")
_MAX_MESSAGES = 10_000  # the kernel's buffer holds fewer


def out_of_memory_kills() -> int | None:
    """How many processes of this machine were ended so far for lack of memory; None where nobody
    counts."""
    with suppress(OSError, ValueError):
        found = re.search(r"^oom_kill (\d+)$", _COUNTERS.read_text("ascii"), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def on_kill(pid: int, kills_before: int | None) -> str:
    """Why a process was killed, as far as it can be known; `kills_before` is what
    `out_of_memory_kills` gave before."""
    if (line := _message_of(pid)) is not None:
        return f"out of memory; the kernel: {line}"
    now = out_of_memory_kills()
    if now is None or kills_before is None:
        return "out of memory, as a rule"
    if now > kills_before:
        return "out of memory: the kernel counts a process ended for that meanwhile"
    return "by hand, or out of memory; the kernel counts none ended for that"


def _message_of(pid: int) -> str | None:
    """The kernel's line about the end of this process, where it may be read: root, as a rule."""
    found = None
    with suppress(OSError):
        descriptor = os.open(_MESSAGES, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            for _ in range(_MAX_MESSAGES):
                text = os.read(descriptor, 8192).decode("utf-8", "replace")  # one message each
                if re.search(rf"\bKilled process {pid}\b", text):
                    found = text.partition(";")[2].splitlines()[0]
        finally:
            os.close(descriptor)
    return found
