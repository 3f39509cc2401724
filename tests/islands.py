"""Several islands in this process, each in a thread of its own, that meet without a lighthouse."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from hetero_framework.config import Config
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import NetworkError, PeerAwayError
from hetero_framework.islands import notes
from hetero_framework.islands.rendezvous import Finished, Member, View
from hetero_framework.trainer.coordinator import RunSummary, train
from tests.integration.conftest import Notes

PATIENCE_S = 60.0


class Harbour:
    """In place of a lighthouse: a view is made when all that live have asked for it, the first one
    when at least `least` have."""

    def __init__(self) -> None:
        self.least = 1
        self._changed = threading.Condition()
        self._living: dict[Member, int] = {}  # and how many views each has had
        self._asking: set[Member] = set()
        self._views: list[View] = []
        self.notes = notes.Notes()

    def enter(self, member: Member) -> None:
        with self._changed:
            self._living[member] = len(self._views)

    def leave(self, member: Member) -> None:
        with self._changed:
            self._living.pop(member, None)
            self._asking.discard(member)
            self._changed.notify_all()
            self._try()

    def next_view(self, member: Member, timeout_s: float) -> View:
        with self._changed:
            self._asking.add(member)
            number = len(self._views)
            self._try()
            if not self._changed.wait_for(
                lambda: len(self._views) > number or member not in self._living, timeout_s
            ):
                self._asking.discard(member)
                raise PeerAwayError("the other islands did not ask in time")
            if len(self._views) == number:
                raise NetworkError(f"island {member.name} has left the others")
            return self._views[number]

    def _try(self) -> None:
        enough = self._views or len(self._asking) >= self.least
        if self._asking and enough and self._asking >= self._living.keys():
            self._views.append(View.of(list(self._asking)))
            self._asking = set()
            self._changed.notify_all()


class Berth:
    """A `Rendezvous` by way of a `Harbour`; takes what TorchftRendezvous takes."""

    def __init__(
        self, harbour: Harbour, member: Member, lively: Callable[[], bool] = lambda: True
    ) -> None:
        self._harbour, self._member = harbour, member
        harbour.enter(member)

    def members(self, timeout_s: float) -> View:
        return self._harbour.next_view(self._member, timeout_s)

    in_reach = True

    def note(self, finished: Finished) -> None:
        self._harbour.notes.answer(notes.noting(finished))

    def finished(self, run: str, facts: str, since_s: float) -> Finished | None:
        return notes.found(self._harbour.notes.answer(notes.looking(run, facts, since_s)))

    def close(self) -> None:
        self._harbour.leave(self._member)


def train_islands(raws: Mapping[str, dict[str, Any]]) -> dict[str, RunSummary]:
    """As `outcomes`. Raises what one raised."""
    found = outcomes(raws)
    for outcome in found.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return found  # type: ignore[return-value]


def outcomes(raws: Mapping[str, dict[str, Any]]) -> dict[str, RunSummary | BaseException]:
    """Train by these configurations, one for each island, at the same time; what each returned or
    raised. `trainer.islands.rendezvous_at` must give a Berth by then. Threads share torch's random
    numbers: an adapter would begin with other ones each time."""
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
