"""A lower bound on one recorded step, from its own times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetero_framework.core.spans import BACKWARD, FORWARD, FORWARD_BACKWARD, RECEIVE
from hetero_framework.extras.observe.timeline import (
    StageInfo,
    TaskKey,
    Tasks,
    TraceEvent,
    awaited,
    tasks_of,
)

Interval = tuple[float, float]


def recorded_bound(stages: Sequence[StageInfo], events: Sequence[TraceEvent]) -> float:
    """Least seconds of a step with just these tasks and transfers, whatever their order.

    The longest chain of tasks that wait for each other; and for each process, and for each
    direction of its links, the time that it was busy between the shortest chain before and the
    shortest after. Between two processes a chain has the delay of the quickest tensor that crossed
    there in this step: means over steps would bound none of them. Never more than the step took,
    though chains may seem longer where clocks contradict each other.
    """
    tasks = tasks_of(events)
    if not tasks:
        return 0.0
    began = min(task.began for task in tasks.values())
    took = max(task.ended for task in tasks.values()) - began
    takers = {event: _taken_by(event, len(stages)) for event in events if event.kind == RECEIVE}
    chains = _Chains(tasks, {(takers[e], e.process): e.ended for e in takers})
    groups: dict[object, list[tuple[Interval, float, float]]] = {}
    for key, task in tasks.items():
        use = ((task.began, task.ended), chains.before[key], chains.after[key])
        groups.setdefault(task.process, []).append(use)
    for event, key in takers.items():
        taker = tasks.get(key)
        maker = awaited(taker, tasks) if taker else None
        if taker and maker:
            head, tail = chains.before[maker.key] + maker.seconds, chains.after[key]
            use = ((event.began, event.ended), head, tail + taker.seconds)
            for nic in ((event.process, "in"), (event.peer, "out")):
                groups.setdefault(nic, []).append(use)
    bounds = [
        min(head for _, head, _ in group)
        + length(union(interval for interval, _, _ in group))
        + min(tail for *_, tail in group)
        for group in groups.values()
    ]
    return min(max([chains.longest, *bounds]), took)


def _taken_by(event: TraceEvent, num_stages: int) -> TaskKey:
    """The task that waits for a frame."""
    kind = BACKWARD if event.what == "BACKWARD" else FORWARD
    if kind == FORWARD and event.stage == num_stages - 1:
        kind = FORWARD_BACKWARD
    return (kind, event.stage, event.micro_batch)


class _Chains:
    """Seconds of the longest chain of tasks before and after each task. `arrivals` is when a task's
    tensor came to a process."""

    def __init__(self, tasks: Tasks, arrivals: Mapping[tuple[TaskKey, int], float]) -> None:
        links: list[tuple[TaskKey, TaskKey, tuple[int, str]]] = []  # cause, effect, edge
        delays: dict[tuple[int, str], float] = {}
        # Forwards towards the last stage, then backwards towards the first.
        in_order = sorted(tasks, key=lambda key: key[1] * (-1 if key[0] == BACKWARD else 1))
        for key in sorted(in_order, key=lambda key: key[0] == BACKWARD):
            (kind, stage, k), task = key, tasks[key]
            before = awaited(task, tasks)
            if before is not None:
                edge = (stage, kind)
                arrived = arrivals.get((key, task.process), before.ended)
                delay = max(0.0, min(arrived, task.began) - before.ended)
                delays[edge] = min(delays.get(edge, delay), delay)
                links.append((before.key, key, edge))
            if kind == BACKWARD and (FORWARD, stage, k) in tasks:
                links.append(((FORWARD, stage, k), key, (stage, "itself")))
        self.before, self.after = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 0.0)
        for cause, key, edge in links:
            ready = self.before[cause] + tasks[cause].seconds + delays.get(edge, 0.0)
            self.before[key] = max(self.before[key], ready)
        for cause, key, edge in reversed(links):
            left = delays.get(edge, 0.0) + tasks[key].seconds + self.after[key]
            self.after[cause] = max(self.after[cause], left)
        self.longest = max(self.before[key] + tasks[key].seconds for key in tasks)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(ended - began for began, ended in intervals)
