"""The schedule for a profile: candidates are simulated, and the best one is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hetero_framework.planner.bounds import step_bound
from hetero_framework.planner.order import StepOrder
from hetero_framework.planner.policies import portfolio
from hetero_framework.planner.readiness import Policy
from hetero_framework.planner.simulator import Profile, SimulatedSpan, Simulation, simulate


@dataclass(frozen=True)
class TunedSchedule:
    """A way to run a step of this profile."""

    policy: Policy
    max_in_flight: int
    in_flight_limits: tuple[int, ...]
    profile: Profile
    micro_batches: int

    @cached_property
    def forecast(self) -> Simulation:
        """The step, simulated whole; never less than its bound, as sums rounded in another order
        may be."""
        simulated = _simulated(
            self.profile,
            self.micro_batches,
            self.max_in_flight,
            self.policy,
            self.in_flight_limits,
            0.0,
        )
        bound = step_bound(self.profile, self.micro_batches, self.in_flight_limits)
        return replace(simulated, seconds=max(simulated.seconds, bound))

    def spans(self) -> list[SimulatedSpan]:
        """What the simulated step does when."""
        found: list[SimulatedSpan] = []
        simulate(
            self.profile,
            self.micro_batches,
            self.max_in_flight,
            policy=self.policy,
            in_flight_limits=self.in_flight_limits,
            spans=found,
        )
        return found

    @cached_property
    def order(self) -> StepOrder:
        """That of the simulated step."""
        return StepOrder.of(self.spans())

    @property
    def patience_s(self) -> float:
        """How long a device or NIC waits for whose turn it is: a task of the mean length. Of random
        times up to 30 % off and edges up to half as slow again that makes less than a tenth of it,
        or none, make more of."""
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
    """Who tunes a profile with a window that was tuned before asks the same again."""
    return simulate(
        profile,
        micro_batches,
        max_in_flight,
        policy=policy,
        in_flight_limits=in_flight_limits,
        spread=spread,
    )


_GOOD_ENOUGH = 1.005
_WORTH_ITS_MEMORY = 0.99
_SPREAD = 0.3
_MOST_MICRO_BATCHES = 64
_MOST_TASKS = 16_000  # that `tune` simulates in all; about a tenth of a second


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
    """The policy and the in-flight limits for a step of this profile; steps of more than 64
    micro-batches, or of 2 p if that is more, are judged by so many. `in_flight_limits[k]` >= 1 is
    what stage k has memory for.

    With one stage per device any other policy stores more forwards than backward first, so it has
    to be 1 % faster. Of what is within 0.5 % of the fastest for this profile, and then within 0.5 %
    of the fastest when things go worse, the fewest micro-batches in flight but one and the fewest
    stored forwards; `max_in_flight` fixes the former. Worse is: edges half as slow again, and also
    tasks and transfers up to 0.3 longer or shorter, as samples and networks are.
    """
    p = profile.num_stages
    m = max(1, min(micro_batches, max(_MOST_MICRO_BATCHES, 2 * p)))
    slow = replace(profile, edges=tuple(edge.slower(1.5) for edge in profile.edges))
    cases = list(dict.fromkeys(((profile, 0.0), (slow, 0.0), (slow, _SPREAD))))
    policies = portfolio(profile, m)
    simulations = 2 * len(policies) * len(cases)
    candidates = [max_in_flight] if max_in_flight is not None else _candidates(slow, m, simulations)
    simulated = []
    for size in candidates:
        # Fewer stored forwards towards the end of the pipeline, where they come back sooner.
        tapered = tuple(max(1, -(-size * (p - k) // p)) for k in range(p))
        shapes: Sequence[tuple[int, ...]] = ((size,) * p, tapered)
        if in_flight_limits is not None:
            shapes = [tuple(map(min, shape, in_flight_limits)) for shape in shapes]
        for limits in dict.fromkeys(shapes):
            for number, policy in enumerate(policies):
                seconds = _simulated(profile, m, size, policy, limits, 0.0).seconds
                simulated.append((seconds, size, limits, number))
    if profile.num_devices == p:
        first = min(seconds for seconds, *_, number in simulated if number == 0)
        simulated = [x for x in simulated if x[3] == 0 or x[0] < _WORTH_ITS_MEMORY * first]
    as_given = _GOOD_ENOUGH * min(seconds for seconds, *_ in simulated)
    fast = []
    for seconds, size, limits, number in simulated:
        if seconds <= as_given:
            others = [
                _simulated(case, m, size, policies[number], limits, spread).seconds
                for case, spread in cases[1:]
            ]
            fast.append(([seconds, *others], size, limits, number))
    best = _GOOD_ENOUGH * min(sum(seconds) for seconds, *_ in fast)
    good = sorted(
        (entry for entry in fast if sum(entry[0]) <= best),
        key=lambda entry: (entry[1], sum(entry[2]), sum(entry[0])),
    )
    least = good[0][1]
    ample = [entry for entry in good if least < entry[1] <= least + max(1, least // 4)]
    _, size, limits, number = (ample or good)[0]
    policy = portfolio(profile, micro_batches)[number]
    return TunedSchedule(policy, size, limits, profile, micro_batches)


def _candidates(profile: Profile, micro_batches: int, simulations: int) -> list[int]:
    """Values of `max_in_flight` worth simulating, so often each: from p to twice what the longest
    path takes up at the slowest device's pace, since the pace varies."""
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
