"""A lower bound on one recorded step, from its own times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hetero_framework.core.spans import BACKWARD, FORWARD, FORWARD_BACKWARD, RECEIVE
from hetero_framework.extras.observe import timeline
from hetero_framework.extras.observe.timeline import StageInfo, TaskKey, Tasks, TraceEvent

Interval = tuple[float, float]


def recorded_bound(stages: Sequence[StageInfo], events: Sequence[TraceEvent]) -> float:
    """Least seconds of a step with just these tasks and transfers, whatever their order.

    The longest chain of tasks that wait for each other; and for each process, and for each
    direction of its links, the time that it was busy between the shortest chain before and the
    shortest after. Between two processes a chain has the delay of the quickest tensor that crossed
    there in this step: means over steps would bound none of them. Never more than the step took,
    though chains may seem longer where clocks contradict each other.
    """
    tasks = timeline.tasks_of(events)
    if not tasks:
        return 0.0
    took = max(task.ended for task in tasks.values()) - min(t.began for t in tasks.values())
    takers = {event: _taken_by(event, len(stages)) for event in events if event.kind == RECEIVE}
    before, after = _chains(tasks, {(takers[e], e.process): e.ended for e in takers})
    groups: dict[object, list[tuple[Interval, float, float]]] = {}
    for key, task in tasks.items():
        use = ((task.began, task.ended), before[key], after[key])
        groups.setdefault(task.process, []).append(use)
    for event, key in takers.items():
        if (taker := tasks.get(key)) and (maker := timeline.awaited(taker, tasks)):
            head, tail = before[maker.key] + maker.seconds, after[key] + taker.seconds
            for nic in ((event.process, "in"), (event.peer, "out")):
                groups.setdefault(nic, []).append(((event.began, event.ended), head, tail))
    bounds = [
        min(head for _, head, _ in group)
        + covered(i for i, *_ in group)
        + min(t for *_, t in group)
        for group in groups.values()
    ]
    return min(max(*(before[key] + task.seconds for key, task in tasks.items()), *bounds), took)


def _taken_by(event: TraceEvent, num_stages: int) -> TaskKey:
    """The task that waits for a frame."""
    forward = FORWARD_BACKWARD if event.stage == num_stages - 1 else FORWARD
    kind = BACKWARD if event.what == "BACKWARD" else forward
    return (kind, event.stage, event.micro_batch)


def _chains(
    tasks: Tasks, arrivals: Mapping[tuple[TaskKey, int], float]
) -> tuple[dict[TaskKey, float], dict[TaskKey, float]]:
    """Seconds of the longest chain of tasks before and after each task. `arrivals` is when a task's
    tensor came to a process."""
    links: list[tuple[TaskKey, TaskKey, tuple[int, str]]] = []  # cause, effect, edge
    delays: dict[tuple[int, str], float] = {}
    # Forwards towards the last stage, then backwards towards the first.
    for key in sorted(tasks, key=lambda k: (k[0] == BACKWARD, -k[1] if k[0] == BACKWARD else k[1])):
        (kind, stage, k), task = key, tasks[key]
        if (cause := timeline.awaited(task, tasks)) is not None:
            edge = (stage, kind)
            arrived = arrivals.get((key, task.process), cause.ended)
            delay = max(0.0, min(arrived, task.began) - cause.ended)
            delays[edge] = min(delays.get(edge, delay), delay)
            links.append((cause.key, key, edge))
        if kind == BACKWARD and (FORWARD, stage, k) in tasks:
            links.append(((FORWARD, stage, k), key, (stage, "itself")))
    before, after = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 0.0)
    for made, key, edge in links:
        ready = before[made] + tasks[made].seconds + delays.get(edge, 0.0)
        before[key] = max(before[key], ready)
    for made, key, edge in reversed(links):
        after[made] = max(after[made], delays.get(edge, 0.0) + tasks[key].seconds + after[key])
    return before, after


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds in which at least one of the intervals runs."""
    total, until = 0.0, -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
