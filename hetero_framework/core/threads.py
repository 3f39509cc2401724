"""Daemon threads for jobs that a process does not wait for when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import TypeVar

from hetero_framework.core import timeouts

T = TypeVar("T")


def in_background(job: Callable[[], T], name: str) -> Future[T]:
    """Run `job` in a daemon thread. The future has its result, or its or the thread's error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        future.set_exception(error)
    return future


def wait_for(futures: Collection[Future[T]], timeout_s: float) -> bool:
    """Whether all futures are done in time. Waits in slices: Ctrl-C is heard on Windows, too."""
    deadline = time.monotonic() + timeout_s
    while wait(futures, max(0.0, min(deadline - time.monotonic(), timeouts.TICK_S))).not_done:
        if time.monotonic() >= deadline:
            return False
    return True
