"""A simulated step with other times, in the same order, for comparisons of schedules."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_framework.engine.schedule.readiness import BACKWARD, FORWARD, Task
from hetero_framework.engine.schedule.simulator import Nic, Profile, SimulatedSpan


def retimed(profile: Profile, spans: Sequence[SimulatedSpan]) -> float:
    """Seconds of a simulated step with other times and in the same order: each task and transfer
    begins when what was before it on its device or NICs has ended and its tensor is there."""
    free: dict[int | Nic, float] = {}
    ended: dict[Task, float] = {}
    arrived: dict[Task, float] = {}
    first_leg: dict[Task, tuple[float, float]] = {}  # of a tensor: when it begins and ends
    last = profile.num_stages - 1
    for task, _, _, is_transfer, leg in spans:
        kind, stage, _ = task
        before = _before(task, last)
        ready = 0.0 if before is None else ended[before]
        if is_transfer:
            boundary = min(stage, stage - 1 if kind == FORWARD else stage + 1)
            edge, nics = profile.edges[boundary], profile.legs(boundary, kind)[leg]
            seconds = edge.forward_s if kind == FORWARD else edge.backward_s
            whole_at = 0.0
            if leg:
                ready, whole_at = first_leg[task]
            if seconds:
                ready = max(ready, *(free.get(nic, 0.0) for nic in nics))
            over = max(ready + seconds, whole_at)
            if seconds:
                free.update(dict.fromkeys(nics, over))
            first_leg[task] = ready, over
            arrived[task] = over + edge.latency_s
        else:
            device = profile.devices[stage]
            begins = max(free.get(device, 0.0), arrived.get(task, ready))
            seconds = profile.forward_s[stage] if kind == FORWARD else profile.backward_s[stage]
            if stage == last:
                seconds += profile.backward_s[last]
            free[device] = ended[task] = begins + seconds
    return max(ended.values(), default=0.0)


def _before(task: Task, last: int) -> Task | None:
    """The tasks whose results a task takes."""
    kind, stage, k = task
    if kind == FORWARD:
        return Task(FORWARD, stage - 1, k) if stage else None
    return Task(FORWARD if stage + 1 == last else BACKWARD, stage + 1, k)
