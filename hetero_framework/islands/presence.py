"""Which islands are at the lighthouse, by their links to its machine.

Heartbeats alone leave a choice between noticing late that an island is gone and dropping one that
was only slow. A process that ends breaks its links at once, and one whose link is there and silent
may be slow. So the lighthouse's machine beats for islands itself, for as long as a link of theirs
is there and was not silent for long, and the lighthouse forgets soon who is not beaten for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hetero_framework.core import timeouts
from hetero_framework.core.threads import in_background, wait_for

BEAT_S = 0.1
FORGET_S = 0.8
"""An island that is not beaten for is forgotten after so long: time for a pause of the lighthouse
itself. Beside six busy processes on one core its beats were 0.12 s apart at most."""
SILENT_S = 2.0
"""So long a link may be silent; islands beat on theirs every 0.4 seconds."""


class Presence:
    """Calls `beat` with the id of each island that is here, from a thread of its own."""

    def __init__(self, beat: Callable[[str], None]) -> None:
        self._beat = beat
        self._lock = threading.Lock()
        self._heard: dict[object, tuple[str, float]] = {}  # whose link it is, and when last
        self._since = time.monotonic()  # somebody has been here from then on
        self._closed = threading.Event()
        self._beating = in_background(self._run, "heartbeats for islands")

    def heard(self, link: object, id: str) -> None:
        """Something came on this link of the island `id`."""
        with self._lock:
            now = time.monotonic()
            if not self._here(now):
                self._since = now
            self._heard[link] = id, now

    def gone(self, link: object) -> None:
        """It has ended; it may never have been heard."""
        with self._lock:
            self._heard.pop(link, None)

    def here(self) -> set[str]:
        """The ids of all that are."""
        with self._lock:
            return self._here(time.monotonic())

    def since_s(self) -> float:
        """For so many seconds there has always been an island here; 0 where there is none."""
        with self._lock:
            now = time.monotonic()
            return now - self._since if self._here(now) else 0.0

    def _here(self, now: float) -> set[str]:
        return {id for id, at in self._heard.values() if at >= now - SILENT_S}

    def close(self) -> None:
        self._closed.set()
        wait_for([self._beating], timeouts.EXIT_S)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            for id in self.here():
                self._beat(id)
