"""What to run next: the pipeline's policy as pure functions, and a simulator to judge it by.

A stage runs what is ready; among several ready tasks of one device a `Policy` decides. Each
direction of a stage takes its micro-batches in ascending order, a stage holds at most its limit of
stored forwards, and at most `window` micro-batches are in the pipeline. With one stage per device
that is 1F1B, which alternates by itself; with several it is interleaving.

`tune` plays a `Profile` (measured or estimated times of stages and boundaries) with several
policies and windows and takes the best. `step_bound` is what no schedule can beat.

Units: seconds. p stages, m micro-batches, F and B the forward and backward time of a stage.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

FORWARD = "forward"
BACKWARD = "backward"


# ------------------------------------------------------------------------------------ the policy


@dataclass(frozen=True, order=True)
class Task:
    """One thing a stage can do now."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Policy:
    """Which of several ready tasks of one device is run: the one with the smallest key.

        backward of micro-batch k on stage s:  bias + backward_age k + backward_depth s
        forward  of micro-batch k on stage s:         forward_age k' + forward_depth s

    k' is k, or with `grouped` k rounded down to a multiple of the number of devices, as the
    micro-batches of interleaved 1F1B travel in groups.
    """

    bias: float
    backward_age: float
    backward_depth: float
    forward_age: float
    forward_depth: float
    grouped: bool = False

    def key(self, task: Task, num_devices: int) -> tuple[float, int, int]:
        """Sort key, smallest first; ties go to the older micro-batch, then the deeper stage."""
        k, stage = task.micro_batch, task.stage
        if task.kind == BACKWARD:
            value = self.bias + self.backward_age * k + self.backward_depth * stage
        else:
            age = k - k % num_devices if self.grouped else k
            value = self.forward_age * age + self.forward_depth * stage
        return (value, k, -stage)


BACKWARD_FIRST = Policy(-1e9, 1.0, 0.0, 1.0, 0.0)
"""Backward before forward, then the oldest micro-batch: least memory, and with one stage per
device as fast as any."""

PORTFOLIO = (
    BACKWARD_FIRST,
    Policy(1.29, 0.70, -0.39, 0.26, -0.61, grouped=True),
    Policy(3.45, 1.46, 0.57, 0.84, -1.47),
    Policy(3.0, 1.5, 0.0, 0.75, -1.5),
)
"""What `tune` tries. The last three advance deep stages first and let forwards pass backwards that
are not urgent; found by random search over simulated pipelines (docs/decisions.md)."""


def choose(ready: Iterable[Task], policy: Policy = BACKWARD_FIRST, num_devices: int = 1) -> Task:
    """The ready task to run now. Raises ValueError when nothing is ready."""
    return min(ready, key=lambda task: policy.key(task, num_devices))


# ----------------------------------------------------------------------------------- the profile


@dataclass(frozen=True)
class Edge:
    """The boundary between a stage and the next one: seconds on the wire of one activation and of
    one gradient, seconds that the first byte takes, and the device that relays, if one does."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0
    relay: int | None = None


@dataclass(frozen=True)
class Profile:
    """What a schedule is judged by: times of every stage and boundary, and who runs what.

    `devices[k]` is the device of stage k. A device sends and receives over one port each, at the
    speed that the hops' seconds say; a relayed tensor passes the relay's two ports too.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    devices: tuple[int, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        p = len(self.forward_s)
        if not (len(self.backward_s) == len(self.devices) == p and len(self.edges) == p - 1):
            raise ValueError("a profile needs F, B and a device for each stage, and p - 1 hops")

    @classmethod
    def of(
        cls,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        *,
        devices: Sequence[int] | None = None,
        edges: Sequence[Edge] | None = None,
    ) -> Profile:
        """A profile; by default a device for each stage and free transfers."""
        p = len(forward_s)
        return cls(
            tuple(forward_s),
            tuple(backward_s),
            tuple(devices) if devices is not None else tuple(range(p)),
            tuple(edges) if edges is not None else (Edge(),) * (p - 1),
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def num_devices(self) -> int:
        return len(set(self.devices))

    def edge_s(self, stage: int, kind: str) -> float:
        """Seconds from the end of a task to its tensor's arrival at the neighbour: forward from
        `stage` to the next one, backward from the next one to `stage`; 0 on one device."""
        if self.devices[stage] == self.devices[stage + 1]:
            return 0.0
        edge = self.edges[stage]
        return (edge.forward_s if kind == FORWARD else edge.backward_s) + edge.latency_s

    def nics(self, stage: int, kind: str) -> tuple[tuple[int, str], ...]:
        """The ports that a tensor passes over the boundary after `stage`."""
        sender, receiver = self.devices[stage], self.devices[stage + 1]
        if sender == receiver:
            return ()
        if kind == BACKWARD:
            sender, receiver = receiver, sender
        relay = self.edges[stage].relay
        middle = () if relay in (None, sender, receiver) else ((relay, "in"), (relay, "out"))
        return ((sender, "out"), *middle, (receiver, "in"))  # type: ignore[arg-type]


def step_bound(profile: Profile, micro_batches: int) -> float:
    """Least seconds of a step under any schedule.

    For each device and each port: the earliest moment that it can have something to do, all its
    work, and the shortest way from the end of that work to the end of the step. And the way of one
    micro-batch through everything. For equal stages and free transfers that is (m + p - 1)(F + B),
    which 1F1B reaches, and with v stages per device m(F + B) + (p - 1)(F + B) / v (Narayanan et
    al. 2021, section 2.2).
    """
    p = profile.num_stages
    reach = [0.0] * p  # earliest start of a stage's first forward
    leave = [0.0] * p  # from the end of a stage's last backward to the end of the step
    for stage in range(1, p):
        before = stage - 1
        reach[stage] = reach[before] + profile.forward_s[before] + profile.edge_s(before, FORWARD)
        leave[stage] = leave[before] + profile.backward_s[before] + profile.edge_s(before, BACKWARD)
    turns = [f + b for f, b in zip(profile.forward_s, profile.backward_s, strict=True)]
    bounds = [reach[-1] + turns[-1] + leave[-1]]
    for device in set(profile.devices):
        own = [k for k in range(p) if profile.devices[k] == device]
        work = micro_batches * sum(turns[k] for k in own)
        bounds.append(min(reach[k] for k in own) + work + min(leave[k] for k in own))
    bounds += _nic_bounds(profile, micro_batches, reach, leave)
    return max(bounds) if micro_batches else 0.0


def _nic_bounds(
    profile: Profile, micro_batches: int, reach: list[float], leave: list[float]
) -> list[float]:
    work: dict[tuple[int, str], float] = {}
    head: dict[tuple[int, str], float] = {}
    tail: dict[tuple[int, str], float] = {}
    end = profile.num_stages - 1
    # The way of a micro-batch between leaving a stage forward and coming back to it.
    turn = profile.forward_s[end] + profile.backward_s[end]
    for stage in reversed(range(end)):
        forward_at = reach[stage] + profile.forward_s[stage]
        backward_at = forward_at + profile.edge_s(stage, FORWARD) + turn
        back = profile.edge_s(stage, BACKWARD) + profile.backward_s[stage] + leave[stage]
        latency = profile.edges[stage].latency_s
        uses = (
            (FORWARD, profile.edges[stage].forward_s, forward_at, latency + turn + back),
            (
                BACKWARD,
                profile.edges[stage].backward_s,
                backward_at,
                latency + profile.backward_s[stage] + leave[stage],
            ),
        )
        for kind, seconds, at, after in uses:
            for nic in profile.nics(stage, kind):
                work[nic] = work.get(nic, 0.0) + micro_batches * seconds
                head[nic] = min(head.get(nic, math.inf), at)
                tail[nic] = min(tail.get(nic, math.inf), after)
        turn += profile.forward_s[stage] + profile.backward_s[stage]
        turn += profile.edge_s(stage, FORWARD) + profile.edge_s(stage, BACKWARD)
    return [head[nic] + work[nic] + tail[nic] for nic in work]


# --------------------------------------------------------------------------------- the simulator


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`: seconds of the step, each device's busy share of it, and the largest
    number of stored forwards of each stage."""

    seconds: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


def simulate(
    profile: Profile,
    micro_batches: int,
    max_in_flight: int,
    *,
    policy: Policy = BACKWARD_FIRST,
    in_flight_limits: Sequence[int] | None = None,
    spread: float = 0.0,
) -> Simulation:
    """Play a step. `limits[k]` is how many forwards stage k may hold (default: the window). With
    `spread` tasks and transfers take up to that share more or less, each its own, always the same.

    The last stage does forward and backward of a micro-batch as one task, as the real one does. A
    tensor goes over all its ports at once, when the last of them is free. Raises ValueError if
    the window or a limit is smaller than one.
    """
    if max_in_flight < 1 or (in_flight_limits is not None and min(in_flight_limits) < 1):
        raise ValueError("a window or limit smaller than one micro-batch never starts")
    return _Simulator(profile, micro_batches, max_in_flight, policy, in_flight_limits, spread).run()


class _Simulator:
    """One simulation: an event queue of tensors that arrive and tasks that end."""

    def __init__(
        self,
        profile: Profile,
        micro_batches: int,
        max_in_flight: int,
        policy: Policy,
        in_flight_limits: Sequence[int] | None,
        spread: float,
    ) -> None:
        p = profile.num_stages
        self._spread = spread
        self._profile = profile
        self._m = micro_batches
        self._max_in_flight = max_in_flight
        self._policy = policy
        self._in_flight_limits = (
            list(in_flight_limits) if in_flight_limits is not None else [max_in_flight] * p
        )
        self._devices = list(dict.fromkeys(profile.devices))
        self._ready: dict[int, set[Task]] = {device: set() for device in self._devices}
        self._idle = dict.fromkeys(self._devices, True)
        self._busy_s = dict.fromkeys(self._devices, 0.0)
        self._nic_free: dict[tuple[int, str], float] = {}
        self._next = {FORWARD: [0] * p, BACKWARD: [0] * p}
        self._in_flight = [0] * p
        self._peak = [0] * p
        self._events: list[tuple[float, int, str, Task]] = []
        self._serial = self._launched = self._finished = 0

    def run(self) -> Simulation:
        for _ in range(min(self._max_in_flight, self._m)):
            self._launch(0.0)
        now = 0.0
        while self._finished < self._m:
            now, _, what, task = heapq.heappop(self._events)
            device = self._profile.devices[task.stage]
            if what == "arrived":
                self._ready[device].add(task)
            else:
                self._idle[device] = True
                self._ended(now, task)
            self._start(now, device)
        shares = tuple(self._busy_s[d] / now if now else 0.0 for d in self._devices)
        return Simulation(now, shares, tuple(self._peak))

    def _post(self, at: float, what: str, task: Task) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, what, task))

    def _launch(self, at: float) -> None:
        if self._launched < self._m:
            self._post(at, "arrived", Task(FORWARD, 0, self._launched))
            self._launched += 1

    def _ended(self, now: float, task: Task) -> None:
        stage, k = task.stage, task.micro_batch
        if task.kind == FORWARD and stage < self._profile.num_stages - 1:
            self._send(now, Task(FORWARD, stage + 1, k), stage)
            return
        self._in_flight[stage] -= 1
        if stage > 0:
            self._send(now, Task(BACKWARD, stage - 1, k), stage - 1)
        else:
            self._finished += 1
            self._launch(now)

    def _send(self, now: float, task: Task, boundary: int) -> None:
        nics = self._profile.nics(boundary, task.kind)
        if not nics:
            self._post(now, "arrived", task)
            return
        edge = self._profile.edges[boundary]
        seconds = edge.forward_s if task.kind == FORWARD else edge.backward_s
        seconds *= self._factor(task, 1)
        end = max([now, *(self._nic_free.get(nic, 0.0) for nic in nics)]) + seconds
        self._nic_free.update(dict.fromkeys(nics, end))
        self._post(end + edge.latency_s, "arrived", task)

    def _start(self, now: float, device: int) -> None:
        possible = [task for task in self._ready[device] if self._allowed(task)]
        if not possible or not self._idle[device]:
            return
        task = choose(possible, self._policy, len(self._devices))
        self._ready[device].remove(task)
        stage = task.stage
        self._next[task.kind][stage] += 1
        profile = self._profile
        cost = profile.backward_s[stage] if task.kind == BACKWARD else profile.forward_s[stage]
        if task.kind == FORWARD:
            self._in_flight[stage] += 1
            self._peak[stage] = max(self._peak[stage], self._in_flight[stage])
            if stage == profile.num_stages - 1:
                cost += profile.backward_s[stage]
        cost *= self._factor(task, 0)
        self._busy_s[device] += cost
        self._idle[device] = False
        self._post(now + cost, "ended", task)

    def _factor(self, task: Task, salt: int) -> float:
        if not self._spread:
            return 1.0
        kind = 2 * (task.kind == BACKWARD) + salt
        mixed = (task.micro_batch * 7919 + task.stage * 104_729 + kind * 1_299_709) * 2_654_435_761
        return 1.0 + self._spread * ((mixed % 2**32) / 2**31 - 1.0)

    def _allowed(self, task: Task) -> bool:
        if task.micro_batch != self._next[task.kind][task.stage]:
            return False
        return (
            task.kind == BACKWARD
            or self._in_flight[task.stage] < self._in_flight_limits[task.stage]
        )


# ------------------------------------------------------------------------------------ the choice


@dataclass(frozen=True)
class TunedSchedule:
    """How a step is to be run, and what the simulation expects of it."""

    policy: Policy
    max_in_flight: int
    in_flight_limits: tuple[int, ...]
    forecast: Simulation


_GOOD_ENOUGH = 1.005
_SPREAD = 0.3
_MOST_MICRO_BATCHES = 64
_MOST_TASKS = 16_000  # that `tune` plays in all; about a tenth of a second


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
    """The policy and window for a step of this profile.

    Of what is within 0.5 % of the fastest for this profile, and then within 0.5 % of the fastest
    when things go worse, the smallest window but one and the fewest stored forwards; with `window`
    that one. Worse is: boundaries half as slow again, and also tasks and transfers up to 0.3 longer
    or shorter, as samples and networks are. `limits[k]` >= 1 is how many forwards stage k has
    memory for. Longer steps than 64 micro-batches are judged by 64.
    """
    p = profile.num_stages
    m = max(1, min(micro_batches, _MOST_MICRO_BATCHES))
    slow = _with_slow_boundaries(profile)
    cases = list(dict.fromkeys(((profile, 0.0), (slow, 0.0), (slow, _SPREAD))))
    policies = PORTFOLIO if profile.num_devices < p else (BACKWARD_FIRST,)
    simulations = 2 * len(policies) * len(cases)
    candidates = [max_in_flight] if max_in_flight is not None else _candidates(slow, m, simulations)
    simulated = []
    for size in candidates:
        for shape in dict.fromkeys((_flat(size, p), _tapered(size, p))):
            in_flight = (
                shape if in_flight_limits is None else tuple(map(min, shape, in_flight_limits))
            )
            for policy in policies:
                seconds = [
                    simulate(
                        case, m, size, policy=policy, in_flight_limits=in_flight, spread=spread
                    ).seconds
                    for case, spread in cases
                ]
                simulated.append((seconds, size, in_flight, policy))
    as_given = _GOOD_ENOUGH * min(seconds[0] for seconds, *_ in simulated)
    fast = [entry for entry in simulated if entry[0][0] <= as_given]
    best = _GOOD_ENOUGH * min(sum(seconds) for seconds, *_ in fast)
    good = sorted(
        (entry for entry in fast if sum(entry[0]) <= best),
        key=lambda entry: (entry[1], sum(entry[2]), sum(entry[0])),
    )
    least = good[0][1]
    ample = [entry for entry in good if least < entry[1] <= least + max(1, least // 4)]
    _, size, in_flight, policy = (ample or good)[0]
    forecast = simulate(profile, m, size, policy=policy, in_flight_limits=in_flight)
    return TunedSchedule(policy, size, in_flight, forecast)


def _with_slow_boundaries(profile: Profile) -> Profile:
    edges = (
        replace(
            edge,
            forward_s=1.5 * edge.forward_s,
            backward_s=1.5 * edge.backward_s,
            latency_s=1.5 * edge.latency_s,
        )
        for edge in profile.edges
    )
    return replace(profile, edges=tuple(edges))


def _flat(max_in_flight: int, num_stages: int) -> tuple[int, ...]:
    return (max_in_flight,) * num_stages


def _tapered(max_in_flight: int, num_stages: int) -> tuple[int, ...]:
    """Fewer stored forwards towards the end of the pipeline, where they come back sooner."""
    return tuple(
        max(1, -(-max_in_flight * (num_stages - k) // num_stages)) for k in range(num_stages)
    )


def _candidates(profile: Profile, micro_batches: int, simulations: int) -> list[int]:
    """Sizes worth playing, so often each: from p to twice what the longest way holds at the slowest
    device's pace, since the pace varies."""
    p = profile.num_stages
    pace = max(
        sum(
            profile.forward_s[k] + profile.backward_s[k]
            for k in range(p)
            if profile.devices[k] == device
        )
        for device in set(profile.devices)
    )
    way = step_bound(profile, 1)
    most = max(2 * p, (math.ceil(2 * way / pace) if pace > 0 else 1) + p)
    most = min(most, micro_batches)
    least = min(p, most)
    sizes = max(2, _MOST_TASKS // (2 * p * micro_batches * simulations))
    step = max(1, -(-(most - least) // sizes))
    return sorted({*range(least, most + 1, step), most})
