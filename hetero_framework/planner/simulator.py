"""How long a step takes under a schedule: a pure simulator, and a bound that no schedule can beat.

The simulated devices take their tasks from `Readiness` and micro-batches enter by `Admission`, as
in the engine: what is simulated is what runs.

Units: seconds. p stages, m micro-batches, F and B the forward and backward time of a stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_framework.planner.readiness import (
    BACKWARD,
    BACKWARD_FIRST,
    FORWARD,
    Admission,
    Policy,
    Readiness,
    Task,
)


@dataclass(frozen=True)
class Edge:
    """The boundary between a stage and the next one: seconds on the wire of one activation and of
    one gradient, seconds that the first byte takes, and the device that relays, if one does."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0
    relay: int | None = None

    def slower(self, factor: float) -> Edge:
        """Everything on it takes so many times as long."""
        return Edge(
            factor * self.forward_s, factor * self.backward_s, factor * self.latency_s, self.relay
        )


@dataclass(frozen=True)
class Profile:
    """What a schedule is judged by: times of every stage and edge, and who runs what.

    `devices[k]` is the device of stage k. A device has one NIC for each direction, as fast as the
    edges' seconds say; a relayed tensor passes the relay's two NICs too.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    devices: tuple[int, ...]
    edges: tuple[Edge, ...]

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
        devices = range(p) if devices is None else devices
        edges = (Edge(),) * (p - 1) if edges is None else edges
        return cls(tuple(forward_s), tuple(backward_s), tuple(devices), tuple(edges))

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

    @property
    def path_s(self) -> float:
        """Seconds of one micro-batch through everything and back."""
        kinds = (FORWARD, BACKWARD)
        wire_s = sum(self.edge_s(k, kind) for k in range(len(self.edges)) for kind in kinds)
        return sum(self.forward_s) + sum(self.backward_s) + wire_s

    def nics(self, stage: int, kind: str) -> tuple[tuple[int, str], ...]:
        """The NICs that a tensor passes on the edge after `stage`."""
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

    For each device and each NIC: the earliest moment that it can have something to do, all its
    work, and the shortest path from the end of that work to the end of the step. And the path of
    one micro-batch through everything. For equal stages and free transfers that is
    (m + p - 1)(F + B), which 1F1B reaches, and with v stages per device
    m(F + B) + (p - 1)(F + B) / v (Narayanan et al. 2021, section 2.2).
    """
    p = profile.num_stages
    reach = [0.0] * p  # earliest start of a stage's first forward
    leave = [0.0] * p  # from the end of a stage's last backward to the end of the step
    for stage in range(1, p):
        before = stage - 1
        reach[stage] = reach[before] + profile.forward_s[before] + profile.edge_s(before, FORWARD)
        leave[stage] = leave[before] + profile.backward_s[before] + profile.edge_s(before, BACKWARD)
    # What occupies each device and NIC: seconds per micro-batch, earliest start, least time after.
    uses: dict[Any, list[tuple[float, float, float]]] = {}
    for stage, device in enumerate(profile.devices):
        work = profile.forward_s[stage] + profile.backward_s[stage]
        uses.setdefault(device, []).append((work, reach[stage], leave[stage]))
    path = profile.path_s
    for stage, edge in enumerate(profile.edges):
        there = reach[stage] + profile.forward_s[stage]
        back = profile.edge_s(stage, BACKWARD) + profile.backward_s[stage] + leave[stage]
        use = (edge.forward_s, there, path - there - edge.forward_s)
        for nic in profile.nics(stage, FORWARD):
            uses.setdefault(nic, []).append(use)
        use = (edge.backward_s, path - back, back - edge.backward_s)
        for nic in profile.nics(stage, BACKWARD):
            uses.setdefault(nic, []).append(use)
    bounds = [
        min(head for _, head, _ in own)
        + micro_batches * sum(work for work, *_ in own)
        + min(tail for *_, tail in own)
        for own in uses.values()
    ]
    return max([path, *bounds]) if micro_batches else 0.0


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
    """Simulate a step of a profile, measured or estimated.

    `in_flight_limits[k]` is how many forwards stage k may store (default: `max_in_flight`). With
    `spread` each task and transfer takes up to that share more or less, always the same. The last
    stage does forward and backward of a micro-batch as one task, as the real one does. A tensor
    passes all its NICs at once, when the last is free. Raises ValueError for a limit below one.
    """
    if max_in_flight < 1 or (in_flight_limits is not None and min(in_flight_limits) < 1):
        raise ValueError("an in-flight limit smaller than one micro-batch never starts")
    limits: dict[int, dict[int, int]] = {}  # of each device's stages
    for stage, device in enumerate(profile.devices):
        limit = max_in_flight if in_flight_limits is None else in_flight_limits[stage]
        limits.setdefault(device, {})[stage] = limit
    readiness = {device: Readiness(own, policy, len(limits)) for device, own in limits.items()}
    admission = Admission(micro_batches, max_in_flight)
    return _Simulator(profile, micro_batches, admission, readiness, spread).run()


class _Simulator:
    """One simulation: an event queue of tensors that arrive and tasks that end."""

    def __init__(
        self,
        profile: Profile,
        micro_batches: int,
        admission: Admission,
        readiness: Mapping[int, Readiness],  # of each device
        spread: float,
    ) -> None:
        self._profile = profile
        self._m = micro_batches
        self._admission = admission
        self._readiness = readiness
        self._spread = spread
        self._idle = dict.fromkeys(readiness, True)
        self._busy_s = dict.fromkeys(readiness, 0.0)
        self._nic_free: dict[tuple[int, str], float] = {}
        self._events: list[tuple[float, int, str, Task]] = []
        self._serial = self._finished = 0

    def run(self) -> Simulation:
        now, devices = 0.0, self._profile.devices
        self._admit()
        self._start(now, devices[0])
        while self._finished < self._m:
            now, _, what, task = heapq.heappop(self._events)
            device = devices[task.stage]
            if what == "arrived":
                self._readiness[device].arrived(task)
            else:
                self._idle[device] = True
                self._ended(now, task)
            self._start(now, device)
        busy = tuple(busy_s / now if now else 0.0 for busy_s in self._busy_s.values())
        peaks = tuple(self._readiness[d].peak_in_flight(k) for k, d in enumerate(devices))
        return Simulation(now, busy, peaks)

    def _post(self, at: float, what: str, task: Task) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, what, task))

    def _admit(self) -> None:
        while (micro_batch := self._admission.next(self._finished)) is not None:
            self._admission.admit()
            self._readiness[self._profile.devices[0]].arrived(Task(FORWARD, 0, micro_batch))

    def _ended(self, now: float, task: Task) -> None:
        stage, k = task.stage, task.micro_batch
        if task.kind == FORWARD and stage < self._profile.num_stages - 1:
            self._send(now, Task(FORWARD, stage + 1, k), stage)
            return
        self._readiness[self._profile.devices[stage]].release(stage)
        if stage > 0:
            self._send(now, Task(BACKWARD, stage - 1, k), stage - 1)
        else:
            self._finished += 1
            self._admit()

    def _send(self, now: float, task: Task, stage: int) -> None:
        """Send a task's tensor over the edge after `stage`."""
        nics = self._profile.nics(stage, task.kind)
        if not nics:
            self._readiness[self._profile.devices[stage]].arrived(task)
            return
        edge = self._profile.edges[stage]
        seconds = edge.forward_s if task.kind == FORWARD else edge.backward_s
        seconds *= self._factor(task, 1)
        end = max([now, *(self._nic_free.get(nic, 0.0) for nic in nics)]) + seconds
        self._nic_free.update(dict.fromkeys(nics, end))
        self._post(end + edge.latency_s, "arrived", task)

    def _start(self, now: float, device: int) -> None:
        task = self._readiness[device].next() if self._idle[device] else None
        if task is None:
            return
        self._readiness[device].start(task, stores=task.kind == FORWARD)
        stage, profile = task.stage, self._profile
        cost = profile.backward_s[stage] if task.kind == BACKWARD else profile.forward_s[stage]
        if task.kind == FORWARD and stage == profile.num_stages - 1:
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
