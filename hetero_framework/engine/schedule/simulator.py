"""A pure simulator of one step under a schedule.

The simulated devices take their tasks from `Readiness` and micro-batches enter by `Admission`, as
in the engine, so that a run does what was simulated.

Units: seconds. p stages, m micro-batches, F and B the forward and backward time of a stage.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from hetero_framework.engine.schedule.readiness import (
    BACKWARD,
    BACKWARD_FIRST,
    FORWARD,
    Admission,
    Policy,
    Readiness,
    Task,
)

Nic = tuple[int, str]
"""A device, and a direction of its network: "in" or "out"."""


@dataclass(frozen=True)
class Edge:
    """The boundary between a stage and the next: the seconds on the wire of an activation and of a
    gradient, the seconds that the first byte takes, and the device that relays, if any."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0
    relay: int | None = None


@dataclass(frozen=True)
class Profile:
    """Times of every stage and edge, and the device of each stage.

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
        """Seconds of one micro-batch through all stages and edges and back."""
        kinds = (FORWARD, BACKWARD)
        wire_s = sum(self.edge_s(k, kind) for k in range(len(self.edges)) for kind in kinds)
        return sum(self.forward_s) + sum(self.backward_s) + wire_s

    def legs(self, stage: int, kind: str) -> tuple[tuple[Nic, ...], ...]:
        """For each leg of the edge after `stage`, the NICs that a tensor passes at once: sender and
        receiver, or with a relay first sender and relay, then relay and receiver."""
        sender, receiver = self.devices[stage], self.devices[stage + 1]
        if sender == receiver:
            return ()
        if kind == BACKWARD:
            sender, receiver = receiver, sender
        relay = self.edges[stage].relay
        if relay is None or relay in (sender, receiver):
            return (((sender, "out"), (receiver, "in")),)
        return ((sender, "out"), (relay, "in")), ((relay, "out"), (receiver, "in"))

    def nics(self, stage: int, kind: str) -> tuple[Nic, ...]:
        """All NICs that a tensor on the edge after `stage` passes."""
        return tuple(nic for leg in self.legs(stage, kind) for nic in leg)


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`: seconds of the step, each device's busy share of it, and the largest
    number of stored forwards of each stage."""

    seconds: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


class SimulatedSpan(NamedTuple):
    """A task of a device, or with `is_transfer` the way of a tensor for this task. Seconds since
    the step began. `leg` 1 is the way of a relayed tensor from the relay on."""

    task: Task
    began: float
    ended: float
    is_transfer: bool = False
    leg: int = 0


def simulate(
    profile: Profile,
    micro_batches: int,
    max_in_flight: int,
    *,
    policy: Policy = BACKWARD_FIRST,
    in_flight_limits: Sequence[int] | None = None,
    spans: list[SimulatedSpan] | None = None,
) -> Simulation:
    """Simulate a step of a profile, measured or estimated.

    `in_flight_limits[k]` is how many forwards stage k may store, by default `max_in_flight`. The
    last stage does forward and backward of a micro-batch as one task, as the real one does. A
    tensor passes the NICs of both its ends at once; a relay sends it on while it comes in, or keeps
    it until there is room on its way. `spans` gets tasks and transfers. Raises ValueError for a
    limit below one.
    """
    if max_in_flight < 1 or (in_flight_limits is not None and min(in_flight_limits) < 1):
        raise ValueError("an in-flight limit smaller than one micro-batch never starts")
    limits: dict[int, dict[int, int]] = {}  # by device and stage
    for stage, device in enumerate(profile.devices):
        limit = max_in_flight if in_flight_limits is None else in_flight_limits[stage]
        limits.setdefault(device, {})[stage] = limit
    readiness = {device: Readiness(stages, policy) for device, stages in limits.items()}
    admission = Admission(micro_batches, max_in_flight)
    nics = _NicQueues(profile)
    return _Simulator(profile, micro_batches, admission, readiness, nics, spans).run()


class _Lane:
    """The tensors that wait for their NICs, oldest first, in one direction of one edge, or on one
    leg of a relayed edge. `following` is the next leg. `whole_at` is the time when all of a tensor
    will have come to the relay. Only the last leg has a latency. `turn` counts the tensors of all
    lanes that began before this lane's last one; it is negative before the first. `sharing` are the
    lanes that use one of its NICs, this lane too."""

    __slots__ = (
        *("following", "latency_s", "leg", "nics", "seconds", "sharing", "turn", "waiting"),
        "whole_at",
    )

    def __init__(self, nics: tuple[Nic, ...], seconds: float, leg: int, turn: int) -> None:
        self.nics = nics
        self.seconds = seconds
        self.leg = leg
        self.turn = turn
        self.latency_s = 0.0
        self.following: _Lane | None = None
        self.sharing: list[_Lane] = []
        self.waiting: deque[Task] = deque()
        self.whole_at: dict[Task, float] = {}


class _NicQueues:
    """The NICs of all devices: each carries one tensor at a time.

    A NIC chooses its next tensor when it becomes free, not when one is ready. Lanes take turns: of
    the tensors whose NICs are all free, the tensor goes whose lane has waited longest since its
    last one. A tensor that still comes in at its relay goes after complete ones. Small frames
    (losses, control) pass at once and are not simulated.
    """

    def __init__(self, profile: Profile) -> None:
        self._busy: set[Nic] = set()
        self._turn = 0
        self._lanes: dict[tuple[str, int], _Lane] = {}  # by kind and stage of the receiving task
        self._users: dict[Nic, list[_Lane]] = {}
        for k, edge in enumerate(profile.edges):
            self._add(profile, k, Task(BACKWARD, k, 0), edge.backward_s)
            self._add(profile, k, Task(FORWARD, k + 1, 0), edge.forward_s)
        for users in self._users.values():
            for lane in users:
                lane.sharing = list(dict.fromkeys(x for nic in lane.nics for x in self._users[nic]))

    def _add(self, profile: Profile, boundary: int, receiver: Task, seconds: float) -> None:
        """Add the lanes of the tensors for one stage's tasks of one kind."""
        legs = profile.legs(boundary, receiver.kind)
        if not legs:
            return
        if not seconds:
            legs = ((),)  # without bytes there is no wait
        # Before their first tensor lanes go in the order of the edges, backward first.
        turn = len(self._lanes) - 2 * len(profile.edges)
        lanes = [_Lane(nics, seconds, leg, turn) for leg, nics in enumerate(legs)]
        lanes[0].following = lanes[1] if len(lanes) > 1 else None
        lanes[-1].latency_s = profile.edges[boundary].latency_s
        self._lanes[receiver.lane] = lanes[0]
        for lane in lanes:
            for nic in lane.nics:
                self._users.setdefault(nic, []).append(lane)

    def lane(self, task: Task) -> _Lane | None:
        """The lane of a task's tensor, None between two stages of one device."""
        return self._lanes.get((task.kind, task.stage))

    def can_cross(self, lane: _Lane) -> bool:
        return self._busy.isdisjoint(lane.nics)

    def take(self, lane: _Lane) -> Task:
        """Let the lane's first tensor begin to cross."""
        self._busy.update(lane.nics)
        lane.turn = self._turn
        self._turn += 1
        return lane.waiting.popleft()

    def release(self, lane: _Lane, now: float) -> list[_Lane]:
        """Free a crossed tensor's NICs; return the lanes that may have waited for them, in turn."""
        self._busy.difference_update(lane.nics)
        waiting = [user for user in lane.sharing if user.waiting]
        if len(waiting) > 1:
            waiting.sort(key=_turn)
            if any(other.leg for other in waiting):
                waiting.sort(key=lambda lane: lane.whole_at.get(lane.waiting[0], now) > now)
        return waiting


_turn = attrgetter("turn")


class _Simulator:
    """One simulation: an event queue of tensors that cross and arrive, and of tasks that end. Each
    entry has its time, a serial number (at equal times the first posted comes first), the method to
    call, and its arguments."""

    def __init__(
        self,
        profile: Profile,
        micro_batches: int,
        admission: Admission,
        readiness: Mapping[int, Readiness],  # of each device
        nics: _NicQueues,
        spans: list[SimulatedSpan] | None,
    ) -> None:
        self._spans = spans
        self._profile = profile
        self._m = micro_batches
        self._admission = admission
        self._readiness = readiness
        self._nics = nics
        self._last = last = profile.num_stages - 1
        forward_s, backward_s = profile.forward_s, profile.backward_s
        both_s = (*forward_s[:last], forward_s[last] + backward_s[last])
        self._seconds = {FORWARD: both_s, BACKWARD: backward_s}
        self._idle = dict.fromkeys(readiness, True)
        self._busy_s = dict.fromkeys(readiness, 0.0)
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._serial = self._finished = 0

    def run(self) -> Simulation:
        now, devices = 0.0, self._profile.devices
        self._admit()
        self._start(now, devices[0])
        while self._finished < self._m:
            now, _, happens, what = heapq.heappop(self._events)
            happens(now, what)
        busy = tuple(busy_s / now if now else 0.0 for busy_s in self._busy_s.values())
        peaks = tuple(self._readiness[d].peak_in_flight(k) for k, d in enumerate(devices))
        return Simulation(now, busy, peaks)

    def _post(self, at: float, happens: Callable[[float, Any], None], what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, happens, what))

    def _admit(self) -> None:
        while (micro_batch := self._admission.next(self._finished)) is not None:
            self._admission.admit()
            self._readiness[self._profile.devices[0]].arrived(Task(FORWARD, 0, micro_batch))

    def _ended(self, now: float, task: Task) -> None:
        """Handle the end of a task."""
        kind, stage, k = task
        device = self._profile.devices[stage]
        self._idle[device] = True
        if kind == FORWARD and stage < self._last:
            self._send(now, Task(FORWARD, stage + 1, k))
        else:
            self._readiness[device].release(stage)
            if stage > 0:
                self._send(now, Task(BACKWARD, stage - 1, k))
            else:
                self._finished += 1
                self._admit()
        self._start(now, device)

    def _send(self, now: float, task: Task) -> None:
        """Pass a task its tensor: at once on the same device, else when its NICs are free."""
        lane = self._nics.lane(task)
        if lane is None:
            self._readiness[self._profile.devices[task.stage]].arrived(task)
            return
        self._enter(now, lane, task)

    def _enter(self, now: float, lane: _Lane, task: Task) -> None:
        lane.waiting.append(task)
        if self._nics.can_cross(lane):
            self._cross(now, lane)

    def _cross(self, now: float, lane: _Lane) -> None:
        task = self._nics.take(lane)
        end = now + lane.seconds
        if lane.whole_at:
            end = max(end, lane.whole_at.pop(task, now))
        if self._spans is not None:
            self._spans.append(SimulatedSpan(task, now, end, is_transfer=True, leg=lane.leg))
        self._post(end, self._crossed, (lane, task))
        if (following := lane.following) is not None:
            following.whole_at[task] = end
            self._enter(now, following, task)

    def _crossed(self, now: float, crossing: tuple[_Lane, Task]) -> None:
        """Handle a tensor whose last byte has left its NICs."""
        lane, task = crossing
        if lane.latency_s:
            self._post(now + lane.latency_s, self._arrived, task)
        elif lane.following is None:
            self._arrived(now, task)
        for other in self._nics.release(lane, now):
            if self._nics.can_cross(other):
                self._cross(now, other)

    def _arrived(self, now: float, task: Task) -> None:
        device = self._profile.devices[task.stage]
        self._readiness[device].arrived(task)
        if self._idle[device]:
            self._start(now, device)

    def _start(self, now: float, device: int) -> None:
        """Have an idle device take its next task, if there is one."""
        readiness = self._readiness[device]
        task = readiness.next()
        if task is None:
            return
        readiness.start(task, stores=task.kind == FORWARD)
        cost = self._seconds[task.kind][task.stage]
        self._busy_s[device] += cost
        if self._spans is not None:
            self._spans.append(SimulatedSpan(task, now, now + cost))
        self._idle[device] = False
        self._post(now + cost, self._ended, task)
