"""Policies that order the tasks of a pipeline's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero_framework.engine.schedule.readiness import (
    BACKWARD,
    FORWARD,
    DueDates,
    Policy,
)
from hetero_framework.engine.schedule.simulator import Profile

_HEAD_WEIGHT = 0.75  # of `due_dates`, where a device has several stages


def portfolio(profile: Profile, micro_batches: int) -> tuple[Policy, ...]:
    """The policies worth trying for such a step. Over 23 planned interleaved pipelines the better
    one of the two comes to 1.004 times the best of five policies and all limits, `due_dates` alone
    to 1.014, `forwards_ahead` to 1.06."""
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
    """The earliest begin of each task of the first micro-batch, and the delay per later one."""
    begins = []
    begins_s = pace_s = 0.0
    for seconds, gap in zip(tasks, [*gaps, _Gap(0.0, 0.0)], strict=True):
        pace_s = max(pace_s, seconds)
        begins.append((begins_s, pace_s))
        begins_s += seconds + gap.seconds
        pace_s = max(pace_s, gap.wire_s)
    return begins
