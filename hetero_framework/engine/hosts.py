"""What the pipeline must have of the processes that hold the other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from hetero_framework.config import StageSpec
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.messages import Message


class LinkLost(Exception):
    """The link to one worker broke; the step in flight has to be repeated."""

    def __init__(self, worker: WorkerId, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class DirectLost(Exception):
    """The link between two workers broke; the step in flight has to be repeated without it."""

    def __init__(self, one: WorkerId, other: WorkerId, reason: str) -> None:
        super().__init__(f"workers {one} and {other}: {reason}")
        self.pair = frozenset((one, other))
        self.reason = reason


@dataclass(frozen=True)
class Event:
    """What the inbox holds: a message of a worker with what it carried, unpacked, or the news
    that its link is gone. `wire` tells an old link's events from those of the present one."""

    worker: WorkerId
    wire: Any
    message: Message | None = None
    arrival: Any = None
    lost: str | None = None


class Hosts(Protocol):
    """The workers of a run, as the pipeline speaks to them."""

    @property
    def workers(self) -> list[WorkerId]: ...
    def route(self, stages: Iterable[StageSpec]) -> None: ...
    def expect(self, step: int, attempt: int) -> None: ...
    def generation(self, worker_id: WorkerId) -> object: ...
    def send(self, worker_id: WorkerId, message: Message) -> None: ...
    def post(
        self, stage: int, message: Message, done: Callable[[], None] | None = None
    ) -> None: ...
    def ping(self, worker_id: WorkerId) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def receive(self, timeout_s: float) -> Event | None: ...
