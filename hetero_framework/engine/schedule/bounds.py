"""Lower bounds on a step's length, from single machines, as for job shops.

For any set J of tasks of one machine, the step lasts at least

    least head of J + sum of the work of J + least tail of J     (Carlier 1982),

where a task's head is the earliest moment that it can begin and its tail the least time from its
end to the end of the step. Machines are the devices and each direction of their NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD
from hetero_framework.engine.schedule.simulator import Nic, Profile


class _Flow(NamedTuple):
    """The forwards or the backwards of all micro-batches on one machine. In seconds: the work of
    each, the head of the first, the tail of the last. Forwards come, and backwards leave, at least
    `pace_s` apart: the time that the slowest stage or edge in front takes for one."""

    kind: str
    work_s: float
    head_s: float
    tail_s: float
    pace_s: float


class _Load:
    """The work of one machine. `limit` is the least in-flight limit up to its first stage."""

    __slots__ = ("flows", "limit")

    def __init__(self, limit: int) -> None:
        self.flows: list[_Flow] = []
        self.limit = limit


def step_bound(
    profile: Profile, micro_batches: int, in_flight_limits: Sequence[int] | None = None
) -> float:
    """Least seconds of a step under any schedule; 0 without micro-batches. `in_flight_limits[k]` is
    how many forwards stage k may store, by default all.

    For equal stages and free transfers the bound is (m + p - 1)(F + B), which 1F1B reaches. With
    v stages per device it is m(F + B) + (p - 1)(F + B) / v (Narayanan et al. 2021, section 2.2).
    """
    if not micro_batches:
        return 0.0
    return max(machine_bounds(profile, micro_batches, in_flight_limits))


def machine_bounds(
    profile: Profile, micro_batches: int, in_flight_limits: Sequence[int] | None = None
) -> list[float]:
    """Lower bounds in seconds for a step of at least one micro-batch: by the path of a micro-batch,
    by each stage's in-flight limit, each device and each NIC. `step_bound` is their maximum.

    A stage of limit h begins a forward only when the h-th forward before it has come back. So its
    last forward begins (m - 1) // h rounds after its first. A round is the way of one micro-batch
    from this stage to the end and back. This gives the bound path + (m - 1) // h * round.
    """
    m, last, path_s = micro_batches, profile.num_stages - 1, profile.path_s
    bounds = [path_s]
    loads: dict[int | Nic, _Load] = {}
    head_s = tail_s = 0.0  # of the stage's first forward, and of its last backward
    forward_pace_s = backward_pace_s = 0.0  # of the slowest stage or edge so far
    limit = m
    for stage, device in enumerate(profile.devices):
        forward_s, backward_s = profile.forward_s[stage], profile.backward_s[stage]
        load = loads.setdefault(device, _Load(limit))
        if stage == last:
            load.flows.append(_Flow("", forward_s + backward_s, head_s, tail_s, 0.0))
            break
        if in_flight_limits is not None and in_flight_limits[stage] < m:
            round_s = path_s - head_s - tail_s
            bounds.append(path_s + (m - 1) // in_flight_limits[stage] * round_s)
            limit = min(limit, in_flight_limits[stage])
            if not load.flows:
                load.limit = limit
        # A task's head is the path before it, its tail the path behind it.
        after_s, before_s = path_s - head_s - forward_s, path_s - tail_s - backward_s
        load.flows.append(_Flow(FORWARD, forward_s, head_s, after_s, forward_pace_s))
        load.flows.append(_Flow(BACKWARD, backward_s, before_s, tail_s, backward_pace_s))
        head_s, tail_s = head_s + forward_s, tail_s + backward_s
        forward_pace_s = max(forward_pace_s, forward_s)
        backward_pace_s = max(backward_pace_s, backward_s)
        if profile.devices[stage + 1] == device:
            continue
        edge = profile.edges[stage]
        after_s = path_s - head_s - edge.forward_s
        there = _Flow(FORWARD, edge.forward_s, head_s, after_s, forward_pace_s)
        head_s += edge.forward_s + edge.latency_s
        tail_s += edge.backward_s + edge.latency_s
        after_s = tail_s - edge.backward_s
        back = _Flow(BACKWARD, edge.backward_s, path_s - tail_s, after_s, backward_pace_s)
        for flow in (there, back):
            for nic in profile.nics(stage, flow.kind):
                loads.setdefault(nic, _Load(limit)).flows.append(flow)
        forward_pace_s = max(forward_pace_s, edge.forward_s)
        backward_pace_s = max(backward_pace_s, edge.backward_s)
    return bounds + [_one_machine_s(load.flows, m, load.limit) for load in loads.values()]


def _one_machine_s(flows: Sequence[_Flow], m: int, limit: int) -> float:
    """The bound from one machine, with all its tasks as J. If it has only the forwards and the
    backwards of one stage or edge, the first few forwards and the last few backwards are left out
    of J as far as that raises the bound (`_idle_s`)."""
    if len(flows) == 2 and flows[0].kind != flows[1].kind:
        there, back = flows if flows[0].kind == FORWARD else reversed(flows)
        before_s, first = _idle_s(there, back.head_s - there.head_s, limit)
        after_s, last = _idle_s(back, there.tail_s - back.tail_s, limit)
        # With all forwards and all backwards left out J is empty: both may be the same idle time.
        idle_s = max(before_s, after_s) if first == last == m else before_s + after_s
        return there.head_s + m * (there.work_s + back.work_s) + idle_s + back.tail_s
    head_s = min(flow.head_s for flow in flows)
    tail_s = min(flow.tail_s for flow in flows)
    return head_s + m * sum(flow.work_s for flow in flows) + tail_s


def _idle_s(flow: _Flow, span_s: float, limit: int) -> tuple[float, int]:
    """The most that the bound grows if the first k <= `limit` tasks of a flow are left out of J,
    and that k; zeros if it never grows.

    This describes forwards; for backwards read it from the end of the step. Without the first k
    forwards the least head of J is later by min(k pace, span): forward k + 1 comes k pace after the
    first, and the first backward, for which forward `limit` + 1 waits, comes after `span_s`. The
    work of J shrinks by k work. So the growth is min(k pace, span) - k work. It is largest at the
    last k with k pace <= span, or at the next k.
    """
    count = min(limit, int(span_s / flow.pace_s)) if flow.pace_s > 0 else limit
    in_time = (count * (flow.pace_s - flow.work_s), count)
    count = min(limit, count + 1)
    idle_s, count = max(in_time, (span_s - count * flow.work_s, count))
    return (idle_s, count) if idle_s > 0 else (0.0, 0)
