"""Whether a process that died is started again, and after which pause: times in, pauses out."""

from __future__ import annotations

from collections import deque

from hetero_framework.core import timeouts
from hetero_framework.errors import HeteroError

MAX_DEATHS = 5
"""So many deaths within DEATHS_S are too many: a restart does not cure what is wrong."""


def is_crash(code: int) -> bool:
    """Whether a process that ended with this exit code (minus the number of a signal) may do better
    when it is started again: it was killed, or met a bug. What ended in order, by wrong input, by
    its identity or for lack of memory would end so again."""
    return code < 0 or code == HeteroError.exit_code or code > 255  # Windows' own


class RestartPolicy:
    """The deaths of one process within the last DEATHS_S. The first is followed by a restart at
    once, the next ones by pauses of 1, 2 and 4 s: what has worked for minutes did not die of its
    start, so older deaths do not count."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()

    def died(self, now_s: float) -> float | None:
        """Seconds to wait before it is started again; None when it has died too often. `now_s` is
        of any clock that does not go back."""
        while self._recent and now_s - self._recent[0] > timeouts.DEATHS_S:
            self._recent.popleft()
        self._recent.append(now_s)
        count = len(self._recent)
        if count >= MAX_DEATHS:
            return None
        return 2.0 ** (count - 2) if count > 1 else 0.0
