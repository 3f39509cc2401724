"""What to run next: the pipeline's policy as pure functions, and a simulator to judge it by.

Shape of the schedule: a stage runs whatever is ready, backward before forward, the lowest
micro-batch first, and the coordinator lets at most `window` micro-batches into the pipeline: 1F1B
that alternates by itself. A window of p suffices for few stages and free transfers; 2 p reaches
the bound for any number of equal stages and also hides the time on the wire.

Units: seconds. p stages, m micro-batches, F and B the forward and backward time of a stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True, order=True)
class Task:
    """One thing a stage can do now."""

    kind: str
    stage: int
    micro_batch: int


def priority(task: Task) -> tuple[int, int, int]:
    """Sort key, smallest first: backward, then the oldest micro-batch, then the deepest stage."""
    return (0 if task.kind == BACKWARD else 1, task.micro_batch, -task.stage)


def choose(ready: Iterable[Task]) -> Task:
    """The ready task to run now. Raises ValueError when nothing is ready."""
    return min(ready, key=priority)


def window_size(num_stages: int, configured: int | None) -> int:
    """Micro-batches that may be in the pipeline at once.

    Default 2 p: the stage at the front then still has work while a gradient is on the wire. See
    docs/decisions.md for the measurement against p.
    """
    return configured if configured is not None else 2 * num_stages


def one_f_one_b_bound(forward_s: Sequence[float], backward_s: Sequence[float], m: int) -> float:
    """Least seconds that a step can take, transfers free.

    Stage k has work for m (F_k + B_k), cannot begin before the forwards of the stages in front of
    it, and is followed by their backwards. For equal stages the last one decides:
    (m + p - 1)(F + B), which 1F1B reaches (Narayanan et al. 2021, section 2.2).
    """
    turns = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return max(sum(turns[:k]) + m * turn for k, turn in enumerate(turns))


@dataclass(frozen=True)
class Simulation:
    """Outcome of `simulate`: seconds of the step, and each device's busy share of it."""

    seconds: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


def simulate(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    window: int,
    *,
    devices: Sequence[int] | None = None,
    transfer_s: float = 0.0,
) -> Simulation:
    """Play the policy with given stage times.

    `devices[k]` is the device that runs stage k (default: one each); `transfer_s` is what every
    hop costs. The last stage does forward and backward of a micro-batch as one task, as the real
    one does. Raises ValueError if the window is smaller than one.
    """
    if window < 1:
        raise ValueError("a window smaller than one micro-batch never starts")
    p = len(forward_s)
    place = list(devices) if devices is not None else list(range(p))
    ready: dict[int, set[Task]] = {device: set() for device in place}
    busy_until = dict.fromkeys(place, 0.0)
    busy = dict.fromkeys(place, 0.0)
    held = [0] * p
    peak = [0] * p
    events: list[tuple[float, int, str, Task]] = []
    serial = launched = finished = 0

    def post(at: float, what: str, task: Task) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (at, serial, what, task))

    def launch(at: float) -> None:
        nonlocal launched
        if launched < micro_batches:
            post(at, "ready", Task(FORWARD, 0, launched))
            launched += 1

    for _ in range(min(window, micro_batches)):
        launch(0.0)
    now = 0.0
    while finished < micro_batches:
        now, _, what, task = heapq.heappop(events)
        device = place[task.stage]
        if what == "ready":
            ready[device].add(task)
        else:
            stage, k = task.stage, task.micro_batch
            if task.kind == FORWARD and stage < p - 1:
                post(now + transfer_s, "ready", Task(FORWARD, stage + 1, k))
            elif stage > 0:
                held[stage] -= 1
                post(now + transfer_s, "ready", Task(BACKWARD, stage - 1, k))
            else:
                held[stage] -= 1
                finished += 1
                launch(now)
        if ready[device] and busy_until[device] <= now:
            chosen = choose(ready[device])
            ready[device].remove(chosen)
            cost = backward_s[chosen.stage] if chosen.kind == BACKWARD else forward_s[chosen.stage]
            if chosen.kind == FORWARD:
                held[chosen.stage] += 1
                peak[chosen.stage] = max(peak[chosen.stage], held[chosen.stage])
                if chosen.stage == p - 1:
                    cost += backward_s[chosen.stage]
            busy[device] += cost
            busy_until[device] = now + cost
            post(now + cost, "done", chosen)
    return Simulation(
        seconds=now,
        busy=tuple(busy[d] / now if now else 0.0 for d in dict.fromkeys(place)),
        peak_in_flight=tuple(peak),
    )
