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
from hetero_framework.core.background import in_background, wait_for

BEAT_S = 0.2
FORGET_S = 1.5
"""An island that is not beaten for is forgotten after so long: time for a new link, and for a
pause of the lighthouse itself, of 1.3 s on two cores with a load of 7."""
SILENT_S = 2.0
"""So long a link may be silent; islands beat on theirs every 0.4 seconds."""


class Presence:
    """Calls `beat` with the id of each island that is here, from a thread of its own."""

    def __init__(self, beat: Callable[[str], None]) -> None:
        self._beat = beat
        self._lock = threading.Lock()
        self._heard: dict[object, tuple[str, float]] = {}  # whose link it is, and when last
        self._closed = threading.Event()
        self._beating = in_background(self._run, "heartbeats for islands")

    def heard(self, link: object, id: str) -> None:
        """Something came on this link of the island `id`."""
        with self._lock:
            self._heard[link] = id, time.monotonic()

    def gone(self, link: object) -> None:
        """It has ended; it may never have been heard."""
        with self._lock:
            self._heard.pop(link, None)

    def here(self) -> set[str]:
        """The ids of all that are."""
        since = time.monotonic() - SILENT_S
        with self._lock:
            return {id for id, at in self._heard.values() if at >= since}

    def close(self) -> None:
        self._closed.set()
        wait_for([self._beating], timeouts.EXIT_S)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            for id in self.here():
                self._beat(id)
