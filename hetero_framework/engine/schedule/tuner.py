"""Tunes the schedule of a run's steps to the measured times.

It changes only the order and the time of computations, never a number in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hetero_framework.config import StageSpec
from hetero_framework.engine.schedule.simulator import Edge, Profile
from hetero_framework.engine.schedule.tuning import TunedSchedule, tune

_WEIGHT = 0.5  # of the newest step in the running mean
_ASSUMED_WIRE = 0.1  # of a stage's forward, until a step was measured


class StageSeconds(NamedTuple):
    """Seconds per micro-batch of one stage: its work, and the arrival of input and gradient."""

    forward_s: float
    backward_s: float
    arrive_forward_s: float
    arrive_backward_s: float


def assumed_profile(stages: Sequence[StageSpec], direct: frozenset[int] = frozenset()) -> Profile:
    """The profile before a measurement: time in proportion to layers, backward twice forward,
    and a little for the wire. The unit is a layer's forward."""
    seconds = {}
    for spec in stages:
        layers = max(spec.end - spec.start, 0.5)
        wire_s = _ASSUMED_WIRE * layers
        seconds[spec.index] = StageSeconds(layers, 2.0 * layers, wire_s, wire_s)
    return make_profile(stages, seconds, {}, direct)


def make_profile(
    stages: Sequence[StageSpec],
    seconds: Mapping[int, StageSeconds],
    latency_s: Mapping[int, float],
    direct: frozenset[int],
) -> Profile:
    """A profile of these stages. `latency_s[k]` is the one-way latency after stage k; an edge
    between two workers that is not in `direct` is relayed by the coordinator."""
    owners = list(dict.fromkeys(spec.owner for spec in stages))
    devices = [owners.index(spec.owner) for spec in stages]
    edges = []
    for before, after in pairwise(stages):
        k = before.index
        relayed = k not in direct and "local" not in (before.owner, after.owner)
        relay = owners.index("local") if relayed and "local" in owners else None
        there_s, back_s = seconds[k + 1].arrive_forward_s, seconds[k].arrive_backward_s
        edges.append(Edge(there_s, back_s, latency_s.get(k, 0.0), relay))
    forward_s = [seconds[spec.index].forward_s for spec in stages]
    backward_s = [seconds[spec.index].backward_s for spec in stages]
    return Profile.of(forward_s, backward_s, devices=devices, edges=edges)


class Tuner:
    """The in-flight limits and the policy of a run's steps.

    `max_in_flight` is the user's choice (None: the tuner's). `memory_limits[k]` is the number of
    forwards that stage k has memory for. `planned` are the plan's times, if there is a plan.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        *,
        max_in_flight: int | None = None,
        memory_limits: Sequence[int] | None = None,
        planned: Profile | None = None,
    ) -> None:
        self._stages = list(stages)
        self._max_in_flight = max_in_flight
        self._memory_limits = memory_limits
        self._planned = planned
        self._seconds: dict[int, StageSeconds] = {}
        self._latency_s: dict[int, float] = {}
        self._observed = 0
        self._choices: dict[tuple[int, frozenset[int]], TunedSchedule] = {}

    def profile(self, direct: frozenset[int]) -> Profile:
        """The times of stages and edges: measured, else planned, else assumed."""
        if not self._seconds:
            return self._planned or assumed_profile(self._stages, direct)
        return make_profile(self._stages, self._seconds, self._latency_s, direct)

    def choice(self, micro_batches: int, direct: frozenset[int]) -> TunedSchedule:
        """The schedule of a step with these micro-batches and direct edges."""
        if (key := (micro_batches, direct)) not in self._choices:
            profile, most = self.profile(direct), self._max_in_flight
            limits = self._memory_limits
            tuned = tune(profile, micro_batches, max_in_flight=most, in_flight_limits=limits)
            assumed = profile == assumed_profile(self._stages, direct)
            self._choices[key] = replace(tuned, direct=direct, assumed=assumed)
        return self._choices[key]

    def observe(self, seconds: Mapping[int, StageSeconds], latency_s: Mapping[int, float]) -> None:
        """Take in the times of a step. The second step's times replace the first step's, which are
        atypical.

        Choices are made anew after 1, 2, 4, 8, ... steps; devices and links rarely change.
        """
        self._observed += 1
        weight = 1.0 if self._observed <= 2 else _WEIGHT
        for k, new in seconds.items():
            old = self._seconds.get(k, new)
            pairs = zip(old, new, strict=True)
            self._seconds[k] = StageSeconds(*((1 - weight) * a + weight * b for a, b in pairs))
        self._latency_s.update(latency_s)
        if self._observed & (self._observed - 1) == 0:
            self._choices.clear()
