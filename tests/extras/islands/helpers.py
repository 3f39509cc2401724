"""Several islands in this process, a thread each, and a lighthouse without torchft."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

from hetero_framework.config import Config
from hetero_framework.core.dial import Listener
from hetero_framework.core.frames import DEFAULT_MAX_FRAME_BYTES
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.extras.islands.lighthouse import Lighthouse
from hetero_framework.extras.islands.links import IslandLinks
from hetero_framework.extras.islands.quorums import Quorums
from hetero_framework.security.access import LOOPBACK_ONLY, Access
from hetero_framework.trainer.coordinator import RunSummary, train
from tests.pools import Notes
from tests.waiting import WAIT_S

PATIENCE_S = 240.0  # an island starts processes, which takes a minute where much else runs


class StandIn(Quorums):
    """In place of torchft: a quorum is made when all islands that are here have asked, the first
    one when at least `least` have."""

    def __init__(self) -> None:
        self.least = 1
        self.lighthouse: Lighthouse | None = None
        self._changed = threading.Condition()
        self._asked: dict[str, int] = {}
        self._quorum: dict[str, int] = {}

    def beat(self, id: str) -> None: ...

    def ask(self, id: str, number: int, timeout_s: float) -> dict[str, int] | None:
        assert self.lighthouse is not None
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._asked[id] = number
            while self._quorum.get(id) != number:
                here = {island.id for island in list(self.lighthouse._islands.values())}
                enough = self._quorum or len(here) >= self.least
                if here and enough and here <= self._asked.keys():
                    self._quorum = {one: self._asked.pop(one) for one in here}
                    self._changed.notify_all()
                elif time.monotonic() >= deadline:
                    return None
                else:
                    self._changed.wait(0.01)
            return self._quorum

    def close(self) -> None: ...


@contextmanager
def serving(
    quorums: Quorums, access: Access = LOOPBACK_ONLY, port: int = 0
) -> Iterator[Lighthouse]:
    """A lighthouse on the loopback that gets its quorums there."""
    with (
        closing(Listener("127.0.0.1", port)) as listener,
        closing(Lighthouse(listener, access, quorums)) as lighthouse,
    ):
        if isinstance(quorums, StandIn):
            quorums.lighthouse = lighthouse
        yield lighthouse


def links_of(name: str, process: str = "1") -> IslandLinks:
    """An island's door on the loopback."""
    sizes: dict[str, Any] = {"max_frame_bytes": DEFAULT_MAX_FRAME_BYTES, "liveness_s": WAIT_S}
    return IslandLinks(name, process, LOOPBACK_ONLY, "127.0.0.1", **sizes)


def train_islands(raws: Mapping[str, dict[str, Any]]) -> dict[str, RunSummary]:
    """As `outcomes`. Raises what one raised."""
    found = outcomes(raws)
    for outcome in found.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return found  # type: ignore[return-value]


def outcomes(raws: Mapping[str, dict[str, Any]]) -> dict[str, RunSummary | BaseException]:
    """Train by these configurations, one for each island, at the same time; what each returned or
    raised. Threads share torch's random numbers: dropout would draw other ones each time."""
    running: dict[str, Future[RunSummary]] = {}
    for name, raw in raws.items():
        config = Config.from_dict(raw)
        running[name] = in_background(
            lambda config=config: train(config, progress=Notes()), f"island {name}"
        )
        time.sleep(0)
    if not wait_for(running.values(), PATIENCE_S):
        faulthandler.dump_traceback()
        raise AssertionError("the islands hang")
    return {name: future.exception() or future.result() for name, future in running.items()}
