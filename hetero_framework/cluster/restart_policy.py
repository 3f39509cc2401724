"""Decides whether and when a dead process is started again. Pure: times in, pauses out."""

from __future__ import annotations

from collections import deque

from hetero_framework.core import timeouts
from hetero_framework.errors import HeteroError

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
