"""Spans of a step as a recorder would have made them, of a schedule that is known exactly.

Every process runs what is ready, backward first, in one thread; a frame takes `wire_s` for each
leg and has the link to itself; with `turns` the frames of a process take turns, as on one network
card. Worker n's clock is `clock(n)` seconds ahead of the coordinator's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hetero_framework.config import Config
from hetero_framework.core.spans import Span
from hetero_framework.extras.observe.timeline import Trace
from hetero_framework.extras.observe.trace_file import Timeline, read_timeline

Spans = dict[int, list[Span]]
THREE: dict[str, Any] = {
    "devices": [0, 1, 2], "micro_batches": 4, "forward_s": [0.01, 0.02, 0.01],
    "backward_s": [0.02, 0.04, 0.02], "wire_s": 0.003, "update_s": 0.005,
}  # fmt: skip
"""Settings of `step_spans`: three processes, one stage each."""


def config_of(
    owners: Sequence[int | str], layers: int = 4, *, offload: int = 0, **training: Any
) -> Config:
    """`layers` for each entry of the plan; owners are "local" and workers 1, 2, ..."""
    workers = sorted({owner for owner in owners if isinstance(owner, int)})
    plan = [
        {"id": owner, "start": layers * i, "end": layers * (i + 1), "offload": offload}
        for i, owner in enumerate(owners)
    ]
    raw: dict[str, Any] = {
        "coordinator": {"ip": "10.0.0.100"},
        "workers": [{"id": n, "ip": f"10.0.0.{n}"} for n in workers],
        "adapter": {"r": 4} if offload else None,
    }
    return Config.from_dict({**raw, "shard_plan": plan, "training": training})


def clock(process: int) -> float:
    return 1000.0 * process


def record(
    output: Path,
    settings: dict[str, Any],
    *,
    steps: Sequence[int],
    layers: int = 4,
    clock_error_s: float = 0.0,
    offload: int = 0,
    **training: Any,
) -> Trace:
    """Write a timeline of these steps, 10 ms apart; `settings` are those of `step_spans`.

    `clock_error_s` is by how much the measured offset of each worker's clock is wrong.
    """
    owners = [device or "local" for device in settings["devices"]]
    config = config_of(owners, layers, offload=offload, output_dir=str(output), **training)
    start = 0.0
    with closing(Timeline(config)) as timeline:
        for step in steps:
            spans = step_spans(**settings, step=step, start=start)
            for process, own in spans.items():
                offset = clock(process) + (clock_error_s if process else 0.0)
                timeline.add(process or "local", own, offset)
                start = max([start, *(span["ended"] + 0.01 - clock(process) for span in own)])
    return read_timeline(output)


def step_spans(
    devices: Sequence[int],
    micro_batches: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    wire_s: float = 0.0,
    relay: bool = True,
    turns: bool = False,
    nbytes: int = 1 << 20,
    dtype: str = "float32",
    max_in_flight: int | None = None,
    step: int = 0,
    start: float = 0.0,
    update_s: float = 0.0,
    jitter: Callable[[], float] = lambda: 1.0,
    copies: dict[int, tuple[float, float]] | None = None,
    clock: Callable[[int], float] = clock,
) -> Spans:
    """The spans of one step of each process, by its number (worker n is process n); each task and
    transfer takes `jitter()` times its seconds. `copies` of stages: the seconds for which weights
    travel from the beginning of each task, and the last of them in which the task waits."""
    return _Play(locals()).run()


class _Play:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.__dict__.update(settings)
        self.p = len(self.devices)
        self.spans: Spans = {process: [] for process in sorted(set(self.devices) | {0})}
        self.free = dict.fromkeys(self.devices, self.start)
        self.ready: dict[tuple[str, int, int], float] = {}
        self.limit = self.max_in_flight or 2 * self.p
        self.launched = 0
        self.port: dict[tuple[int, str], float] = defaultdict(float)

    def run(self) -> Spans:
        for _ in range(min(self.limit, self.micro_batches)):
            self.launch(self.start)
        while self.ready:
            # The task that can start first; of several, backward first, then the oldest.
            task = min(self.ready, key=self.order)
            self.work(*task, max(self.ready.pop(task), self.free[self.devices[task[1]]]))
        end = max(self.free.values())
        for process in self.spans if self.update_s else ():
            self.note(process, "commit", 0, -1, end, end + self.update_s)
        return self.spans

    def order(self, task: tuple[str, int, int]) -> tuple[float, bool, int, int]:
        kind, stage, k = task
        begin = max(self.ready[task], self.free[self.devices[stage]])
        return (round(begin, 9), kind == "forward", k, -stage)

    def launch(self, at: float) -> None:
        if self.launched < self.micro_batches:
            self.ready["forward", 0, self.launched] = at
            self.launched += 1

    def work(self, kind: str, stage: int, k: int, began: float) -> None:
        forward, backward = self.forward_s[stage], self.backward_s[stage]
        last = stage == self.p - 1
        seconds = backward if kind == "backward" else forward + (backward if last else 0.0)
        ended = began + seconds * self.jitter()
        self.free[self.devices[stage]] = ended
        self.note(self.devices[stage], "forward_backward" if last else kind, stage, k, began, ended)
        if self.copies and stage in self.copies:
            moving_s, awaited_s = self.copies[stage]
            there = began + moving_s
            self.note(self.devices[stage], "weights", stage, -1, began, there)
            if awaited_s:
                self.note(self.devices[stage], "awaited", stage, -1, there - awaited_s, there)
        if kind == "forward" and not last:
            self.hand_on("forward", stage, stage + 1, k, ended)
        elif stage > 0:
            self.hand_on("backward", stage, stage - 1, k, ended)
        else:
            self.launch(ended)

    def hand_on(self, kind: str, source: int, target: int, k: int, at: float) -> None:
        sender, receiver = self.devices[source], self.devices[target]
        way = [sender, receiver]
        if sender == receiver:
            way = []
        elif self.relay and 0 not in way:
            way.insert(1, 0)
        for one, other in itertools.pairwise(way):
            extra = {"what": kind.upper(), "bytes": self.nbytes, "dtype": self.dtype, "codec": ""}
            if self.turns:
                at = max(at, self.port[one, "out"], self.port[other, "in"])
            end = at + self.wire_s * self.jitter()
            self.port[one, "out"] = self.port[other, "in"] = end
            self.note(one, "send", target, k, at, end, peer=other or "local", **extra)
            self.note(other, "receive", target, k, at, end, peer=one or "local", **extra)
            at = end
        self.ready[kind, target, k] = at

    def note(
        self, process: int, kind: str, stage: int, k: int, began: float, ended: float, **extra: Any
    ) -> None:
        shift = self.clock(process)
        times = {"began": began + shift, "ended": ended + shift}
        span = {"kind": kind, "stage": stage, "micro_batch": k, "step": self.step}
        self.spans[process].append({**span, **times, **extra})
