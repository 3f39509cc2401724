"""The critical path of a simulated step: the chain of tasks and transfers that sets its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Task
from hetero_framework.engine.schedule.simulator import Nic, Profile, SimulatedSpan

_SAME_S = 1e-9  # of a moment: tolerance for sums in another order


class OnPath(NamedTuple):
    """How many forwards and backwards of a stage are on a critical path."""

    forwards: int = 0
    backwards: int = 0


def critical_path(profile: Profile, spans: Sequence[SimulatedSpan]) -> list[OnPath]:
    """Each stage's part in a critical path of a simulated step: a chain of tasks and transfers
    through all of it, of which each begins at the end of the one before. The last stage's tasks are
    both a forward and a backward. Where several have just ended, the device's last task counts
    before the tensor."""
    before = _Before(profile, spans)
    last = profile.num_stages - 1
    counts = [[0, 0] for _ in profile.forward_s]
    span: SimulatedSpan | None = max(spans, key=lambda span: span.ended)
    while span is not None:
        kind, stage, _ = span.task
        if not span.is_transfer:
            counts[stage][0] += kind == FORWARD
            counts[stage][1] += kind == BACKWARD or stage == last
        span = before.of(span)
    return [OnPath(*count) for count in counts]


class _Before:
    """The predecessor that a task or transfer waited for."""

    def __init__(self, profile: Profile, spans: Sequence[SimulatedSpan]) -> None:
        self._profile = profile
        self._tasks: dict[Task, SimulatedSpan] = {}
        self._transfers: dict[tuple[Task, int], SimulatedSpan] = {}  # by leg
        self._previous: dict[SimulatedSpan, list[SimulatedSpan]] = {}
        latest: dict[int | Nic, SimulatedSpan] = {}
        for span in sorted(spans, key=lambda span: (span.began, span.ended)):
            users: Sequence[int | Nic] = (profile.devices[span.task.stage],)
            if span.is_transfer:
                self._transfers[span.task, span.leg] = span
                users = self._nics(span)
            else:
                self._tasks[span.task] = span
            self._previous[span] = [latest[user] for user in users if user in latest]
            latest.update(dict.fromkeys(users, span))

    def of(self, span: SimulatedSpan) -> SimulatedSpan | None:
        """None for the first task, and where the wait had another reason."""
        for other in self._previous[span]:
            if abs(other.ended - span.began) < _SAME_S:
                return other
        legs = (0,) if span.leg else () if span.is_transfer else (1, 0)
        for leg in legs:
            if (span.task, leg) in self._transfers:
                return self._transfers[span.task, leg]
        return self._tasks.get(self._sender(span.task))

    def _sender(self, task: Task) -> Task:
        """The task whose tensor this one takes."""
        kind, stage, k = task
        if kind == FORWARD:
            return Task(FORWARD, stage - 1, k)
        return Task(FORWARD if stage + 2 == self._profile.num_stages else BACKWARD, stage + 1, k)

    def _nics(self, transfer: SimulatedSpan) -> tuple[Nic, ...]:
        """The NICs that it passes; none without bytes."""
        kind, stage, _ = transfer.task
        legs = self._profile.legs(stage - 1 if kind == FORWARD else stage, kind)
        return legs[transfer.leg]
