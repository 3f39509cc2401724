"""What no schedule could have beaten: a bound for one recorded step, from its own times.

A mean over several steps bounds no single one of them, so nothing here is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetero_framework.core.trace import BACKWARD, FORWARD, RECEIVE
from hetero_framework.profiling.timeline import Event, StageInfo, Tasks, awaited, tasks_of

Interval = tuple[float, float]


def step_bound(stages: Sequence[StageInfo], events: Sequence[Event]) -> float:
    """Least seconds of a step with just these tasks and transfers, whatever their order.

    The longest chain of tasks that wait for each other; and for each process, and for each
    direction of its links, the time that it was busy between the shortest chain before and the
    shortest after. Between two processes a chain has the delay of the quickest tensor that crossed
    there in this step. Never more than the step took: where clocks contradict each other, chains
    may seem longer.
    """
    tasks = tasks_of(events)
    if not tasks:
        return 0.0
    began = min(task.began for task in tasks.values())
    took = max(task.ended for task in tasks.values()) - began
    chains = _Chains(tasks, _arrivals(events, len(stages)))
    groups: dict[object, list[tuple[Interval, float, float]]] = {}
    for key, task in tasks.items():
        own = ((task.began, task.ended), chains.before[key], chains.after[key])
        groups.setdefault(task.process, []).append(own)
    for event in events:
        taker = tasks.get(_taken_by(event, len(stages)))
        maker = awaited(taker, tasks) if taker else None
        if event.kind == RECEIVE and taker and maker:
            head, tail = chains.before[_key(maker)] + maker.seconds, chains.after[_key(taker)]
            span = ((event.began, event.ended), head, tail + taker.seconds)
            for way in ((event.process, "in"), (event.peer, "out")):
                groups.setdefault(way, []).append(span)
    bounds = [chains.longest] + [
        min(head for _, head, _ in group)
        + length(union(interval for interval, _, _ in group))
        + min(tail for *_, tail in group)
        for group in groups.values()
    ]
    return min(max(bounds), took)


_Key = tuple[str, int, int]


def _key(task: Event) -> _Key:
    return (task.kind, task.stage, task.micro_batch)


def _taken_by(event: Event, num_stages: int) -> _Key:
    """The task that waits for a frame."""
    kind = BACKWARD if event.what == "BACKWARD" else FORWARD
    if kind == FORWARD and event.stage == num_stages - 1:
        kind = "forward_backward"
    return (kind, event.stage, event.micro_batch)


def _arrivals(events: Sequence[Event], num_stages: int) -> dict[tuple[_Key, int], float]:
    """When each task's tensor arrived at each process that it came to."""
    return {
        (_taken_by(event, num_stages), event.process): event.ended
        for event in events
        if event.kind == RECEIVE
    }


class _Chains:
    """Seconds of the longest chain of tasks before and after each task."""

    def __init__(self, tasks: Tasks, arrivals: Mapping[tuple[_Key, int], float]) -> None:
        causes: dict[_Key, list[tuple[_Key, tuple[int, str]]]] = {}
        self._delay: dict[tuple[int, str], float] = {}
        for key, task in tasks.items():
            kind, stage, k = key
            causes[key] = []
            before = awaited(task, tasks)
            if before is not None:
                edge = (stage, kind)
                arrived = arrivals.get((key, task.process), before.ended)
                delay = max(0.0, min(arrived, task.began) - before.ended)
                self._delay[edge] = min(self._delay.get(edge, delay), delay)
                causes[key].append((_key(before), edge))
            if kind == BACKWARD and (FORWARD, stage, k) in tasks:
                causes[key].append(((FORWARD, stage, k), (stage, "itself")))
        # Forwards towards the last stage, then backwards towards the first.
        in_order = sorted(tasks, key=lambda key: key[1] * (-1 if key[0] == BACKWARD else 1))
        in_order.sort(key=lambda key: key[0] == BACKWARD)
        self.before = dict.fromkeys(tasks, 0.0)
        self.after = dict.fromkeys(tasks, 0.0)
        for key in in_order:
            for cause, edge in causes[key]:
                ready = self.before[cause] + tasks[cause].seconds + self._delay.get(edge, 0.0)
                self.before[key] = max(self.before[key], ready)
        for key in reversed(in_order):
            for cause, edge in causes[key]:
                left = self._delay.get(edge, 0.0) + tasks[key].seconds + self.after[key]
                self.after[cause] = max(self.after[cause], left)
        self.longest = max(self.before[key] + tasks[key].seconds for key in tasks)


# --------------------------------------------------------------------------------------- intervals


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
