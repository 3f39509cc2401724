"""The order of a planned step: what each device computes and each NIC carries after what.

A policy decides among what is ready, so a tensor that comes a millisecond later than simulated may
change all that follows. A run keeps to the planned order: what is late then makes later what waits
for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetero_framework.core.planned_order import Lane
from hetero_framework.planner.schedule.readiness import FORWARD
from hetero_framework.planner.schedule.simulator import SimulatedSpan


class Transfer(NamedTuple):
    """A tensor on the wire for the next task of a lane; `leg` 1 is a relayed one's way from the
    relay on."""

    lane: Lane
    leg: int = 0


@dataclass(frozen=True)
class Order:
    """What one process does in a step: the lanes of its tasks, of the large tensors that it sends
    and of those that it receives, in the order in which they begin."""

    tasks: tuple[Lane, ...] = ()
    sends: tuple[Lane, ...] = ()
    receives: tuple[Lane, ...] = ()


@dataclass(frozen=True)
class StepOrder:
    """That of all processes, in the order in which everything begins."""

    tasks: tuple[Lane, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @classmethod
    def of(cls, spans: Sequence[SimulatedSpan]) -> StepOrder:
        """The order of a simulated step. What has no bytes waits for nobody and is not in it."""
        tasks = tuple(span.task.lane for span in spans if not span.is_transfer)
        carried = (span for span in spans if span.is_transfer and span.ended > span.began)
        return cls(tasks, tuple(Transfer(span.task.lane, span.leg) for span in carried))

    def at(self, stages: Collection[int], relays: bool = False) -> Order:
        """The order of the process that holds these stages; with `relays` it is the relay."""
        key = (tuple(stages), relays)
        if key not in self._known:
            self._known[key] = self._at(*key)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[tuple[int, ...], bool], Order]:
        """Every step asks for the same."""
        return {}

    def _at(self, stages: Collection[int], relays: bool) -> Order:
        relayed = {lane for lane, leg in self.transfers if leg}
        sends, receives = [], []
        for lane, leg in self.transfers:
            passes = relays and lane in relayed
            if (passes and leg) or (not leg and _sender(lane) in stages):
                sends.append(lane)
            if (passes and not leg) or (leg == (lane in relayed) and lane[1] in stages):
                receives.append(lane)
        tasks = tuple(lane for lane in self.tasks if lane[1] in stages)
        return Order(tasks, tuple(sends), tuple(receives))


def _sender(lane: Lane) -> int:
    kind, stage = lane
    return stage - 1 if kind == FORWARD else stage + 1
