"""The schedule of a step, which changes no number of its result.

A policy decides among what is ready, so a tensor that comes a millisecond later than simulated may
change all that follows. A run keeps to the planned order: a late tensor then delays only the tasks
that wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hetero_framework.core.planned_order import Lane
from hetero_framework.engine.schedule.readiness import FORWARD
from hetero_framework.engine.schedule.simulator import SimulatedSpan


class Transfer(NamedTuple):
    """A tensor on the wire for the next task of a lane. `leg` 1 is the way of a relayed tensor from
    the relay on."""

    lane: Lane
    leg: int = 0


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of all processes, or of one (`for_process`).

    Args:
        in_flight_limits: how many forwards each stage may store.
        max_in_flight: how many micro-batches may be in the step at once.
        tasks: the lanes of tasks in the order in which they begin; empty where there is no order.
        transfers: all tensors on the wire in the order in which they begin; empty for one process.
        sends: the large tensors that one process sends, in order.
        receives: the large tensors that it receives, in order.
        order_timeout_s: how long a device or NIC waits for the task or tensor whose turn it is,
            while another could go.
        direct: the boundaries (index of the stage before) whose tensors go straight from worker to
            worker.
    """

    in_flight_limits: tuple[int, ...]
    max_in_flight: int = 1
    tasks: tuple[Lane, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    sends: tuple[Lane, ...] = ()
    receives: tuple[Lane, ...] = ()
    order_timeout_s: float = 0.0
    direct: frozenset[int] = frozenset()

    def in_order_of(self, spans: Sequence[SimulatedSpan]) -> StepSchedule:
        """This schedule in the order of a simulated step. Tensors without bytes are left out, since
        they never wait."""
        tasks = tuple(span.task.lane for span in spans if not span.is_transfer)
        carried = (span for span in spans if span.is_transfer and span.ended > span.began)
        transfers = tuple(Transfer(span.task.lane, span.leg) for span in carried)
        return replace(self, tasks=tasks, transfers=transfers)

    def for_process(self, stages: Collection[int], relays: bool = False) -> StepSchedule:
        """The part of the schedule for the process that holds these stages. With `relays` that
        process passes on the tensors between workers that have no direct link."""
        key = (tuple(stages), relays)
        if key not in self._known:
            self._known[key] = self._for_process(*key)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[tuple[int, ...], bool], StepSchedule]:
        """Results of `for_process`: every step asks for the same."""
        return {}

    def _for_process(self, stages: Collection[int], relays: bool) -> StepSchedule:
        relayed = {lane for lane, leg in self.transfers if leg}
        sends: tuple[Lane, ...] = ()
        receives: tuple[Lane, ...] = ()
        for lane, leg in self.transfers:
            passes = relays and lane in relayed
            if (passes and leg) or (not leg and _sender(lane) in stages):
                sends += (lane,)
            if (passes and not leg) or (leg == (lane in relayed) and lane[1] in stages):
                receives += (lane,)
        tasks = tuple(lane for lane in self.tasks if lane[1] in stages)
        return replace(self, transfers=(), tasks=tasks, sends=sends, receives=receives)


def _sender(lane: Lane) -> int:
    kind, stage = lane
    return stage - 1 if kind == FORWARD else stage + 1
