"""What a stage may be at best, in any layout: its work, its time, its memory, its boundary.

A choice stands for all stages of so many layers on the workers of a group; every field of it is as
good as that of any of them, each by itself. So a bound made of choices holds for all layouts.

Work is what the coordinator takes for layers, in its mean layers (`work_of_layers`): all layers
have as much of it as there are, and on equal layers it is their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_framework.planner.groups import Group
from hetero_framework.planner.layout import Fleet
from hetero_framework.planner.rules import Rules

_BUCKETS = 8
"""Of a layer's work: stages of one length whose work is in the same bucket are one choice. Twice as
many are up to twice the columns where layers differ; where all are alike there is one anyway."""
_EXACTLY = 1e-9  # sums in another order differ by less

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class StageChoices(NamedTuple):
    """One stage of a worker: arrays of one value for each choice. Seconds are per micro-batch.

    `limit` is the in-flight limit that memory leaves, 0 where not one forward fits; `last_s` is
    `seconds` with the head, and `may_be_last` says whether that fits. `round_trip_s` and
    `relayed_s` are the boundary's (`Boundary`). `nic_s` is what the busier NIC still has to do in
    the step, from when the stage can begin; `last_nic_s` that beside the work for one micro-batch
    where it is the last stage.
    """

    group: Integers
    work: Floats
    forward_s: Floats
    backward_s: Floats
    seconds: Floats
    last_s: Floats
    limit: Integers
    may_be_last: Bools
    round_trip_s: Floats
    relayed_s: Floats
    nic_s: Floats
    last_nic_s: Floats


class DeviceChoices(NamedTuple):
    """All that a worker may hold in two stages or more: arrays of one value for each choice.

    Seconds of a unit of work and of its quickest layer, per micro-batch, and the most work that
    there is memory for (`Capacity`). `nic_s` is what the busier NIC has to do in the step, from
    when its first stage can begin, with two stages; `has_last` where one of these is the last of
    all. The rest is as in `StageChoices`.
    """

    group: Integers
    unit_s: Floats
    layer_s: Floats
    most_work: Floats
    round_trip_s: Floats
    relayed_s: Floats
    nic_s: Floats
    has_last: Bools


class Capacity(NamedTuple):
    """What a device can do at best: seconds of a unit of work and of a layer, forward and backward
    of one micro-batch, and the work that it has memory for with one micro-batch in flight."""

    unit_s: float
    layer_s: float
    most_work: float


class _Stage(NamedTuple):
    """The fields of `StageChoices` that do not depend on the boundary, of one choice."""

    work: float
    forward_s: float
    backward_s: float
    seconds: float
    limit: int
    may_be_last: bool


def work_of_layers(fleet: Fleet) -> Floats:
    """The work in front of each layer and of all: `layers` + 1 sums from 0 to `layers`. Where the
    coordinator takes no time for a layer each layer counts as 1."""
    local = fleet.costs[0]
    seconds = np.array(local.forward_s) + np.array(local.backward_s)
    if np.diff(seconds).min() <= 0:
        return np.arange(fleet.layers + 1.0)
    return seconds * (fleet.layers / seconds[-1])


def stage_choices(
    rules: Rules, groups: Sequence[Group], most_s: float, *, after_coordinator: bool
) -> StageChoices:
    """All stages that take less than `most_s` for a step, right behind the coordinator's or behind
    a worker's.

    When a stage can begin its first activation is there, so m - 1 are still to be received, the
    first of them perhaps as much earlier as the latency is long; then m gradients from behind, and
    after the last one there is its backward. To be sent are m activations, the first after its
    forward, and of m gradients all but the last.
    """
    m, rows = rules.fleet.micro_batches, []
    for number, group in enumerate(groups):
        head_s = min(_head_s(rules.fleet, d) for d in group.members)
        boundaries = (group.from_coordinator,) if after_coordinator else group.from_workers
        for stage in _stages(rules, group, most_s):
            for into in boundaries:
                received_s = (m - 1) * into.forward_s + m * group.out_backward_s - into.latency_s
                sent_s = (m - 1) * into.backward_s + m * group.out_forward_s
                rows.append(
                    (
                        number,
                        *(stage.work, stage.forward_s, stage.backward_s, stage.seconds),
                        *(stage.seconds + head_s, stage.limit, stage.may_be_last),
                        *(into.round_trip_s, into.relayed_s),
                        max(received_s + stage.backward_s, sent_s + stage.forward_s),
                        (m - 1) * max(into.forward_s, into.backward_s),
                    )
                )
    return StageChoices(*map(np.array, zip(*rows, strict=True)))


def _head_s(fleet: Fleet, d: int) -> float:
    device = fleet.costs[d].device
    return device.head_forward_s + device.head_backward_s


def _stages(rules: Rules, group: Group, most_s: float) -> Iterator[_Stage]:
    """The head alone, without layers, and stages of one layer to all."""
    fleet, work = rules.fleet, work_of_layers(rules.fleet)
    yield _Stage(0.0, 0.0, 0.0, 0.0, 0, any(_has_the_head(fleet, d) for d in group.members))
    for recompute in (False, True) if rules.checkpointing else (False,):
        members = [_StageCosts(fleet, d, recompute) for d in group.members]
        for length in range(1, fleet.layers + 1):
            costs = [one.of_length(length) for one in members]
            seconds = np.min([one[0] + one[1] for one in costs], axis=0)
            if fleet.micro_batches * seconds.min() > most_s:
                break
            best = [np.min([one[k] for one in costs], axis=0) for k in range(4)]
            of_work = work[length:] - work[:-length]
            for alike in _buckets(of_work):
                forward_s, backward_s, weights, kept = (float(x[alike].min()) for x in best)
                free = [one.free_bytes - weights for one in members]
                limit = in_flight_limit(max(free), kept, fleet.micro_batches)
                may_be_last = any(
                    left - fleet.costs[d].device.head_bytes >= kept
                    for left, d in zip(free, group.members, strict=True)
                )
                if limit or may_be_last:
                    both_s = float(seconds[alike].min())
                    most = float(of_work[alike].max())
                    yield _Stage(most, forward_s, backward_s, both_s, limit, may_be_last)


def _buckets(work: Floats) -> Iterator[Bools]:
    """Which stages of one length, by the layer that they begin with, are one choice."""
    if np.ptp(work) < _EXACTLY:
        yield np.ones(len(work), bool)
        return
    buckets = np.floor(work * _BUCKETS)
    for bucket in np.unique(buckets):
        yield buckets == bucket


def in_flight_limit(free_bytes: float, activation_bytes: float, micro_batches: int) -> int:
    """How many forwards there is memory for, of all micro-batches of a step; 0 for none."""
    if free_bytes < activation_bytes or free_bytes < 0:
        return 0
    return (
        int(min(micro_batches, free_bytes / activation_bytes))
        if activation_bytes
        else micro_batches
    )


def device_choices(
    rules: Rules, groups: Sequence[Group], *, after_coordinator: bool
) -> DeviceChoices:
    """What workers may hold in two stages or more, the first of them right behind the coordinator's
    first or behind a worker's, as if each layer were their cheapest.

    Their NICs carry what those of one stage do (`stage_choices`), a second boundary into them, the
    best, for all micro-batches, and a second one out, unless the second stage is the last of all.
    """
    m, rows = rules.fleet.micro_batches, []
    for number, group in enumerate(groups):
        own = [capacity_of(rules, d) for d in group.members]
        unit_s, layer_s = min(one.unit_s for one in own), min(one.layer_s for one in own)
        most_work = max(one.most_work for one in own)
        every = (group.from_coordinator, *group.from_workers)
        second_forward_s = min(into.forward_s for into in every)
        second_backward_s = min(into.backward_s for into in every)
        for into in every[:1] if after_coordinator else every[1:]:
            received_s = (m - 1) * into.forward_s - into.latency_s + m * second_forward_s
            sent_s = (m - 1) * into.backward_s + m * second_backward_s
            for outs in (2, 1):
                nic_s = max(
                    received_s + m * outs * group.out_backward_s,
                    sent_s + m * outs * group.out_forward_s,
                )
                links = (into.round_trip_s, into.relayed_s, nic_s, outs == 1)
                rows.append((number, unit_s, layer_s, most_work, *links))
    return DeviceChoices(*map(np.array, zip(*rows, strict=True)))


def capacity_of(rules: Rules, d: int) -> Capacity:
    """What device d can do at best."""
    fleet, costs = rules.fleet, rules.fleet.costs[d]
    work = np.diff(work_of_layers(fleet))
    seconds = np.diff(costs.forward_s) + np.diff(costs.backward_s)
    kept = np.diff(costs.kept_bytes)
    if rules.checkpointing:
        kept = np.minimum(kept, np.diff(costs.recomputed_bytes))
    kept = kept * [fleet.stores_layer(k) for k in range(fleet.layers)]
    each = float(np.diff(costs.layer_bytes).min() + kept.min())
    free = costs.memory_bytes * (1 + _EXACTLY)
    free -= costs.device.embedding_bytes if d == 0 else 0.0
    layers = min(float(fleet.layers), max(0.0, free) / each if each else math.inf)
    most_work = layers * float(work.max())
    return Capacity(float((seconds / work).min()), float(seconds.min()), most_work)


def _has_the_head(fleet: Fleet, d: int) -> bool:
    costs = fleet.costs[d]
    return costs.memory_bytes * (1 + _EXACTLY) >= costs.device.head_bytes


class _StageCosts:
    """What all stages of one length on a device cost. `free_bytes` is what it has for their weights
    and activations."""

    def __init__(self, fleet: Fleet, d: int, recompute: bool) -> None:
        costs = fleet.costs[d]
        self.free_bytes = costs.memory_bytes * (1 + _EXACTLY)
        self.free_bytes -= costs.largest_bytes if recompute else 0.0
        kept = costs.recomputed_bytes if recompute else costs.kept_bytes
        backward_s = costs.recompute_s if recompute else costs.backward_s
        self._sums = [
            np.array(values) for values in (costs.forward_s, backward_s, costs.layer_bytes, kept)
        ]
        self._stores = np.array([fleet.stores_layer(k) for k in range(fleet.layers)], float)

    def of_length(self, length: int) -> list[Floats]:
        """Seconds of forward and of backward, bytes of weights, and bytes kept of a micro-batch:
        four arrays, with a value for each layer that a stage of so many may begin with."""
        found = [values[length:] - values[:-length] for values in self._sums]
        found[3] *= self._stores[length - 1 :]
        return found
