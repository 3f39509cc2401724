"""The schedule for a profile: in-flight limits by a rule, and the policy that suits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.policies import portfolio
from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Policy
from hetero_framework.engine.schedule.simulator import (
    Nic,
    Profile,
    SimulatedSpan,
    Simulation,
    simulate,
)
from hetero_framework.engine.schedule.step_schedule import StepSchedule


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
