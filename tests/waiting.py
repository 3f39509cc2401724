"""Waiting for what nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

WAIT_S = 120.0
"""Long enough for a machine that does something else too."""


def wait_until(condition: Callable[[], Any], what: str = "it") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
