"""Tunes the schedule for a profile: simulates candidates and takes the best one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from hetero_framework.engine.schedule.bounds import step_bound
from hetero_framework.engine.schedule.policies import portfolio
from hetero_framework.engine.schedule.readiness import Policy
from hetero_framework.engine.schedule.simulator import (
    Profile,
    SimulatedSpan,
    Simulation,
    simulate,
)
from hetero_framework.engine.schedule.step_schedule import StepSchedule

_GOOD_ENOUGH = 1.005
"""Of schedules within this many times the shortest step, the fewest micro-batches in flight win. At
1.01 steps are up to 1 % longer for less memory; at 1.0 chance decides between equals."""
_WORTH_ITS_MEMORY = 0.99
"""A policy that stores more forwards has to be below this many times the backward-first step."""
_SLOWER = 1.5  # factor on an edge's seconds in worse conditions
_SPREAD = 0.3  # of a task's or transfer's seconds, likewise
_MOST_MICRO_BATCHES = 64
"""Micro-batches by which a longer step is judged: schedules differ in how they fill and drain."""
_MOST_TASKS = 16_000
"""Tasks that `tune` simulates in all, in about a tenth of a second. This limits how many values of
`max_in_flight` are tried."""


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
    def _simulated(self) -> tuple[Simulation, Sequence[SimulatedSpan]]:
        spans: list[SimulatedSpan] = []
        step = simulate(
            self.profile,
            self.micro_batches,
            self.max_in_flight,
            policy=self.policy,
            in_flight_limits=self.in_flight_limits,
            spans=spans,
        )
        return step, spans

    @cached_property
    def forecast(self) -> Simulation:
        """The planned step. It is not shorter than its bound, as it could be by rounding."""
        step, _ = self._simulated
        return replace(step, seconds=max(step.seconds, self.bound_s))

    @property
    def spans(self) -> Sequence[SimulatedSpan]:
        """Tasks and transfers of the planned step, by their beginning."""
        return self._simulated[1]

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


@lru_cache(maxsize=256)
def _simulated(
    profile: Profile,
    micro_batches: int,
    max_in_flight: int,
    policy: Policy,
    in_flight_limits: tuple[int, ...],
    spread: float,
) -> Simulation:
    """Cached `simulate`: a profile is tuned again with the same values."""
    return simulate(
        profile,
        micro_batches,
        max_in_flight,
        policy=policy,
        in_flight_limits=in_flight_limits,
        spread=spread,
    )


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
    """The policy and the in-flight limits for a step of this profile. A step of more than
    max(64, 2 p) micro-batches is judged by a step of that many micro-batches.
    `in_flight_limits[k]` >= 1: the forwards that stage k has memory for.

    With one stage per device every other policy stores more forwards than backward first, so it
    has to be 1 % faster. Schedules stay if they are within 0.5 % of the fastest, first for this
    profile, then in worse conditions too. Of these the second smallest `max_in_flight` (unless
    it is given), then the fewest stored forwards win. Worse conditions are edges 1.5 times as
    slow, and tasks and transfers up to 30 % longer or shorter, as samples and networks are.
    """
    p = profile.num_stages
    m = max(1, min(micro_batches, max(_MOST_MICRO_BATCHES, 2 * p)))
    slow = replace(profile, edges=tuple(edge.slower(_SLOWER) for edge in profile.edges))
    cases = list(dict.fromkeys(((profile, 0.0), (slow, 0.0), (slow, _SPREAD))))
    policies = portfolio(profile, m)
    simulations = 2 * len(policies) * len(cases)
    sizes = _worth_simulating(slow, m, simulations) if max_in_flight is None else [max_in_flight]

    def seconds_of(one: _Candidate, case: Profile, spread: float) -> float:
        policy = policies[one.policy]
        return _simulated(case, m, one.max_in_flight, policy, one.limits, spread).seconds

    as_given = {
        one: seconds_of(one, profile, 0.0)
        for one in _candidates(sizes, p, in_flight_limits, len(policies))
    }
    if profile.num_devices == p:
        as_given = _worth_their_memory(as_given)
    in_all = {
        one: sum([as_given[one], *(seconds_of(one, *case) for case in cases[1:])])
        for one in _near_the_best(as_given)
    }
    chosen = _with_few_in_flight(in_all)
    policy = portfolio(profile, micro_batches)[chosen.policy]
    return TunedSchedule(policy, chosen.max_in_flight, chosen.limits, profile, micro_batches)


class _Candidate(NamedTuple):
    """A schedule to be judged; `policy` is its number in the portfolio."""

    max_in_flight: int
    limits: tuple[int, ...]
    policy: int


def _candidates(
    sizes: Sequence[int], num_stages: int, most: Sequence[int] | None, policies: int
) -> Iterator[_Candidate]:
    """Candidates: for each `max_in_flight` of `sizes`, equal and tapered limits (stage k stores at
    most `most[k]`), and for each of these every policy."""
    for max_in_flight in sizes:
        shapes = [(max_in_flight,) * num_stages, tapered_limits(max_in_flight, num_stages)]
        if most is not None:
            shapes = [tuple(map(min, shape, most)) for shape in shapes]
        for limits in dict.fromkeys(shapes):
            for policy in range(policies):
                yield _Candidate(max_in_flight, limits, policy)


def _worth_their_memory(seconds: Mapping[_Candidate, float]) -> dict[_Candidate, float]:
    """Drop policies that store more forwards than policy 0 (backward first) but save little."""
    first_s = min(taken for one, taken in seconds.items() if one.policy == 0)
    return {
        one: taken
        for one, taken in seconds.items()
        if one.policy == 0 or taken < _WORTH_ITS_MEMORY * first_s
    }


def _with_few_in_flight(seconds: Mapping[_Candidate, float]) -> _Candidate:
    """The candidate near the best with the second smallest `max_in_flight`: the smallest has
    nothing to spare. It is the smallest if the second is more than a quarter larger."""
    good = sorted(
        _near_the_best(seconds), key=lambda one: (one.max_in_flight, sum(one.limits), seconds[one])
    )
    least = good[0].max_in_flight
    ample = [one for one in good if least < one.max_in_flight <= least + max(1, least // 4)]
    return (ample or good)[0]


def _near_the_best(seconds: Mapping[_Candidate, float]) -> list[_Candidate]:
    most = _GOOD_ENOUGH * min(seconds.values())
    return [one for one in seconds if seconds[one] <= most]


def tapered_limits(max_in_flight: int, num_stages: int) -> tuple[int, ...]:
    """In-flight limits that fall towards the end of the pipeline, where forwards come back sooner:
    in proportion to the number of stages from there to the end, as in 1F1B."""
    p = num_stages
    return tuple(-(-max_in_flight * (p - k) // p) for k in range(p))


def _worth_simulating(profile: Profile, micro_batches: int, simulations: int) -> list[int]:
    """Values of `max_in_flight` worth simulating: from p to twice the number that the longest path
    holds at the slowest device's pace, since the pace varies."""
    p = profile.num_stages
    loads = dict.fromkeys(profile.devices, 0.0)
    for k, device in enumerate(profile.devices):
        loads[device] += profile.forward_s[k] + profile.backward_s[k]
    pace = max(loads.values())
    most = max(2 * p, (math.ceil(2 * profile.path_s / pace) if pace > 0 else 1) + p)
    most = min(most, micro_batches)
    least = min(p, most)
    sizes = max(2, _MOST_TASKS // (2 * p * micro_batches * simulations))
    step = max(1, -(-(most - least) // sizes))
    return sorted({*range(least, most + 1, step), most})
