"""The schedule for a profile: in-flight limits by a rule, and the policy that suits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, DueDates, Policy
from hetero_framework.engine.schedule.simulator import (
    Nic,
    Profile,
    SimulatedSpan,
    Simulation,
    simulate,
)
from hetero_framework.engine.schedule.step_schedule import StepSchedule

_HEAD_WEIGHT = 0.75  # of `due_dates`, where a device has several stages


@dataclass(frozen=True)
class TunedSchedule:
    """The choice for steps of this profile, and its prediction. If the profile is only `assumed`, a
    run does not wait for the planned order."""

    policy: Policy
    max_in_flight: int
    in_flight_limits: tuple[int, ...]
    profile: Profile
    micro_batches: int
    direct: frozenset[int] = frozenset()
    assumed: bool = False

    @cached_property
    def forecast(self) -> Simulation:
        """The planned step; never less than its bound, as sums rounded in another order may be."""
        step = self._simulated()
        return replace(step, seconds=max(step.seconds, self.bound_s))

    @cached_property
    def spans(self) -> Sequence[SimulatedSpan]:
        """Tasks and transfers of the planned step, by their beginning."""
        spans: list[SimulatedSpan] = []
        self._simulated(spans)
        return spans

    def _simulated(self, spans: list[SimulatedSpan] | None = None) -> Simulation:
        return simulate(
            self.profile,
            self.micro_batches,
            self.max_in_flight,
            policy=self.policy,
            in_flight_limits=self.in_flight_limits,
            spans=spans,
        )

    @property
    def unordered(self) -> StepSchedule:
        """The schedule of evaluations, without an order."""
        return StepSchedule(self.in_flight_limits, self.max_in_flight, direct=self.direct)

    @cached_property
    def schedule(self) -> StepSchedule:
        """The schedule in the order of the planned step."""
        timeout_s = 0.0 if self.assumed else self.order_timeout_s
        return replace(self.unordered, order_timeout_s=timeout_s).in_order_of(self.spans)

    @cached_property
    def bound_s(self) -> float:
        """A lower bound for every schedule of this profile."""
        return step_bound(self.profile, self.micro_batches, self.in_flight_limits)

    @property
    def order_timeout_s(self) -> float:
        """How long a device or NIC waits for the task or tensor whose turn it is: a mean task.
        Shorter waits cost more if times are up to 30 % off and edges up to 1.5 times as slow."""
        profile = self.profile
        tasks = [*profile.forward_s, *profile.backward_s]
        return sum(tasks) / len(tasks)


def default_max_in_flight(num_stages: int) -> int:
    """Micro-batches in the pipeline while nothing has been measured: 2 p."""
    return 2 * num_stages


def tune(
    profile: Profile,
    micro_batches: int,
    *,
    max_in_flight: int | None = None,
    in_flight_limits: Sequence[int] | None = None,
) -> TunedSchedule:
    """The schedule for a step of this profile: limits by `_limits`, and the better policy of the
    portfolio. `in_flight_limits[k]` >= 1: the forwards that stage k has memory for."""
    most = max_in_flight or max(1, micro_batches)
    room = in_flight_limits or (most,) * profile.num_stages
    limits = tuple(min(*pair, most) for pair in zip(_limits(profile), room, strict=True))
    schedules = [
        TunedSchedule(policy, max_in_flight or max(limits), limits, profile, micro_batches)
        for policy in portfolio(profile, micro_batches)
    ]
    return min(schedules, key=lambda schedule: schedule.forecast.seconds)


def _limits(profile: Profile) -> list[int]:
    """How many forwards each stage stores at the pace of the busiest device or NIC: those that are
    on their way from it to the end and back (Little's law), and two to spare for each stage after
    it, since edges and tasks may take longer than measured."""
    busy_s: dict[int | Nic, float] = {}
    for k, device in enumerate(profile.devices):
        work_s = profile.forward_s[k] + profile.backward_s[k]
        busy_s[device] = busy_s.get(device, 0.0) + work_s
    for k, edge in enumerate(profile.edges):
        for kind, seconds in ((FORWARD, edge.forward_s), (BACKWARD, edge.backward_s)):
            for nic in profile.nics(k, kind):
                busy_s[nic] = busy_s.get(nic, 0.0) + seconds
    pace_s = max(busy_s.values()) or 1.0
    last = profile.num_stages - 1
    limits, way_s = [1], profile.forward_s[last] + profile.backward_s[last]
    for k in reversed(range(last)):
        way_s += profile.forward_s[k] + profile.backward_s[k]
        way_s += profile.edge_s(k, FORWARD) + profile.edge_s(k, BACKWARD)
        limits.append(math.ceil(way_s / pace_s) + 2 * (last - k))
    return limits[::-1]


def portfolio(profile: Profile, micro_batches: int) -> tuple[Policy, ...]:
    """The policies worth trying for such a step. Over 23 planned interleaved pipelines the better
    of the two takes 1.004 times as long as the best of five policies and all limits, `due_dates`
    alone 1.014, `forwards_ahead` 1.06."""
    p = profile.num_stages
    if profile.num_devices == p:
        return (forwards_ahead(p),)
    return due_dates(profile, micro_batches, _HEAD_WEIGHT), by_depth(p)


def forwards_ahead(num_stages: int) -> Policy:
    """Forward k goes before backward j while k < 1.5 j. Backward first would starve later stages if
    they have less work, as in plans of many devices, where they begin late."""
    return Policy((DueDates(0.0, 1.0, 0.0, 1.5),) * num_stages)


def by_depth(num_stages: int) -> Policy:
    """For several stages on a device: the backward of micro-batch k goes before forwards only in
    stages from about 0.3 k on, so that early stages feed later stages first. It stores many
    forwards."""
    return Policy(tuple(DueDates(0.05 * k, 0.05, -2.0 * k, 0.6) for k in range(num_stages)))


def due_dates(profile: Profile, micro_batches: int, head_weight: float) -> Policy:
    """For several stages on a device: the task with the longest way to the end of the step comes
    first. `head_weight` (0 to 1) prefers, in part, the task that could have begun first.

    A task's head is the least time before it, its tail the least time from its beginning to the end
    of the step, if tasks waited only for tensors and for the micro-batch before. A task is due at
    head_weight * head - (1 - head_weight) * tail. With each micro-batch the head grows, and the
    tail shrinks, by the time of the slowest stage or boundary on the way. With weight 0 this is the
    job-shop rule of most work remaining (Panwalkar and Iskander 1977).
    """
    tasks, gaps = _path(profile)
    heads = _first_begins(tasks, gaps)
    after = _first_begins(tasks[::-1], gaps[::-1])[::-1]  # the same from the end of the step
    due = []
    for seconds, (head_s, pace_s), (after_s, after_pace_s) in zip(tasks, heads, after, strict=True):
        tail_s = seconds + after_s + (micro_batches - 1) * after_pace_s
        each_s = head_weight * pace_s + (1 - head_weight) * after_pace_s
        due.append((head_weight * head_s - (1 - head_weight) * tail_s, each_s))
    p = profile.num_stages
    backwards = [*due[p:][::-1], (0.0, 0.0)]  # the last stage does both as one task
    return Policy(tuple(DueDates(*due[k], *backwards[k]) for k in range(p)))


class _Gap(NamedTuple):
    """Seconds between two tasks of a micro-batch. In `wire_s` of them other tensors must wait."""

    seconds: float
    wire_s: float


def _path(profile: Profile) -> tuple[list[float], list[_Gap]]:
    """The seconds of a micro-batch's tasks, from the first forward to the last backward, and the
    gaps between them."""
    *forward_s, last_forward_s = profile.forward_s
    *backward_s, last_backward_s = profile.backward_s
    there, back = [], []
    for k, edge in enumerate(profile.edges):
        crosses = profile.devices[k] != profile.devices[k + 1]
        there.append(_Gap(profile.edge_s(k, FORWARD), edge.forward_s if crosses else 0.0))
        back.append(_Gap(profile.edge_s(k, BACKWARD), edge.backward_s if crosses else 0.0))
    tasks = [*forward_s, last_forward_s + last_backward_s, *backward_s[::-1]]
    return tasks, [*there, *back[::-1]]


def _first_begins(tasks: Sequence[float], gaps: Sequence[_Gap]) -> list[tuple[float, float]]:
    """The earliest begin of each task of the first micro-batch, and its delay per later one."""
    begins = []
    begins_s = pace_s = 0.0
    for seconds, gap in zip(tasks, [*gaps, _Gap(0.0, 0.0)], strict=True):
        pace_s = max(pace_s, seconds)
        begins.append((begins_s, pace_s))
        begins_s += seconds + gap.seconds
        pace_s = max(pace_s, gap.wire_s)
    return begins
