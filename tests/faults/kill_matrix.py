"""One run whose processes are killed one after the other, each at a named place, and the same run
undisturbed.

    python -m tests.faults.kill_matrix CASE DIRECTORY

Every process is armed with one failpoint; when it has died there the next process takes its place,
armed with the next one. All are forked from a process that has imported everything, so that a death
costs no imports: what is tested is what the survivors do. Prints a JSON object: what differs from
the undisturbed run, how many steps were repeated, and how long it took until training went on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks import machines
from benchmarks.machines import Child, Machines

NEEDED = ["tests.faults.networked", "transformers.models.llama.modeling_llama", "peft"]
COORDINATOR, FIRST, LAST = PROCESSES = ("coordinator", "worker-1", "worker-2")
REPLICATE_STEPS = 2
SAVE_STEPS = 30
SILENT_S = 60.0

Death = tuple[str, str]
"""A process, and the failpoint at which it is killed."""

IN_STEPS = (
    *("step", "forward", "forward-done", "forward-half", "backward", "backward-done"),
    *("backward-half", "norms", "commit", "optimizer-half", "commit-done"),
)
"""Each of these strikes in a step of its own."""
NEVER = {(COORDINATOR, "backward-half"), (LAST, "forward-half")}


def of_one(process: str) -> list[list[Death]]:
    """One process dies everywhere it can: while the run begins, in steps, between them, and when it
    takes over its state after the death before."""
    first, *inside = [point for point in IN_STEPS if (process, point) not in NEVER]
    points = ["join", "load", f"{first}@3", "load-state"]
    points += [f"{point}@{2 * number + 5}" for number, point in enumerate(inside)]
    points += ["state-part", "evaluation"] + ["checkpoint"] * (process == COORDINATOR) + ["gather"]
    return [[(process, point)] for point in points]


def of_several() -> list[list[Death]]:
    """In each group two or three die: at the same step, or one while another is missed."""
    groups: list[list[tuple[str, str]]] = [
        # At the same step.
        [(FIRST, "forward"), (LAST, "forward")],
        [(FIRST, "commit-done"), (LAST, "optimizer-half")],
        [(COORDINATOR, "commit"), (FIRST, "commit")],
        [(COORDINATOR, "commit-done"), (LAST, "commit-done")],
        [(COORDINATOR, "backward"), (LAST, "forward-done")],
        [(COORDINATOR, "step"), (FIRST, "step"), (LAST, "step")],
        # While one is missed, another dies, or the one that takes its place.
        [(FIRST, "forward"), (LAST, "abort")],
        [(LAST, "backward-done"), (FIRST, "abort")],
        [(LAST, "norms"), (COORDINATOR, "abort")],
        [(FIRST, "optimizer-half"), (COORDINATOR, "join")],
        [(FIRST, "backward-half"), (FIRST, "join")],
        [(LAST, "commit"), (LAST, "load")],
        [(FIRST, "forward-half"), (FIRST, "load-state")],
        [(COORDINATOR, "forward-half"), (COORDINATOR, "load")],
        [(COORDINATOR, "norms"), (COORDINATOR, "load-state")],
        [(COORDINATOR, "optimizer-half"), (LAST, "load")],
        [(COORDINATOR, "forward-done"), (FIRST, "load-state")],
        [(COORDINATOR, "backward-done"), (COORDINATOR, "join"), (FIRST, "join")],
    ]
    return [list(_at(3 * number + 3, group)) for number, group in enumerate(groups)]


def _at(step: int, group: Iterable[tuple[str, str]]) -> Iterator[Death]:
    """The deaths of a group happen at one step, as a process counts that has seen it; one that has
    begun anew has seen none."""
    before: set[str] = set()
    for process, point in group:
        yield process, point if process in before else f"{point}@{step}"
        before.add(process)


CASES = {**{process: of_one(process) for process in PROCESSES}, "several": of_several()}


class Here:
    """The room of processes that stay where they are."""

    def enter(self) -> None: ...


def live(connection: Connection, name: str, point: str | None, raw: dict[str, Any]) -> None:
    """The process `name`, until it is killed at `point` or the run is over."""
    from hetero_framework.cluster.local_workers import LocalWorkers
    from hetero_framework.cluster.worker import serve
    from hetero_framework.config import Config
    from hetero_framework.engine.loading import load_stages
    from hetero_framework.trainer.coordinator import train
    from tests.faults.networked import Tell

    if point is not None:
        os.environ["HETERO_FAILPOINT"] = f"{name}/{point}"
    config = Config.from_dict(raw)
    logs = config.output_dir.parent / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / f"{name}.log").open("ab", buffering=0) as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    if name == COORDINATOR:
        train(config, progress=Tell(connection), workers=LocalWorkers(config, ()))
        connection.send(("done", None))
    else:
        serve(config, int(name[-1]), build=load_stages, keep=True)


@dataclass
class Recovery:
    """What followed the deaths after which training went on."""

    deaths: list[str] = field(default_factory=list)
    last_at: float = 0.0
    reached: int = 0  # steps done before
    is_going_on: bool = False
    seconds: float = 0.0
    repeated: int = 0


class Lives:
    """The processes of a run, and what became of it."""

    def __init__(self, raw: dict[str, Any], groups: Sequence[Sequence[Death]]) -> None:
        self._raw = raw
        workers = [f"worker-{worker['id']}" for worker in raw.get("workers", [])]
        self._points: dict[str, deque[str]] = {name: deque() for name in (*workers, COORDINATOR)}
        for process, point in (death for group in groups for death in group):
            self._points[process].append(point)
        self._armed: dict[str, str | None] = {}
        self._children: dict[str, Child] = {}
        self._open: Recovery | None = None
        self._reached = 0
        self.recoveries: list[Recovery] = []

    def run(self) -> None:
        """Until the run is over. Raises AssertionError when a process ends that should not, or
        nothing happens any more."""
        with Machines() as started:
            for name in self._points:
                self._begin(name, started)
            while True:
                ready = wait(list(self._children.values()), SILENT_S)
                assert ready, f"nothing has happened for {SILENT_S} s: {self._armed}"
                for name in [name for name, child in self._children.items() if child in ready]:
                    if self._hear(name, started):
                        left = {name: list(points) for name, points in self._points.items()}
                        assert not any(left.values()), f"the run was over before {left}"
                        return

    def _begin(self, name: str, started: Machines) -> None:
        points = self._points[name]
        self._armed[name] = point = points.popleft() if points else None
        self._children[name] = started.start(Here(), live, name, point, self._raw)

    def _hear(self, name: str, started: Machines) -> bool:
        """What a process has said, or that it has ended; whether the run is over."""
        child = self._children[name]
        try:
            what, value = child.receive(0)
        except machines.HeteroError as ended:
            where = f"{name}/{self._armed[name]}"
            if self._armed[name] is None or child.exit_code != -signal.SIGKILL:
                raise AssertionError(f"{where}: {ended}") from None
            self._died(where)
            self._begin(name, started)
            return False
        if what == "said":
            if (found := self._open) is not None and " goes on after step " in value:
                found.is_going_on = True
        elif what == "step":
            self._progress(value)
            self._reached = max(self._reached, value)
        else:
            self._progress(self._reached + 1)
        return what == "done"

    def _died(self, where: str) -> None:
        if self._open is None:
            # Before the first step nobody says that training goes on: it begins.
            self._open = Recovery(reached=self._reached, is_going_on=self._reached == 0)
            self.recoveries.append(self._open)
        self._open.deaths.append(where)
        self._open.last_at = time.monotonic()

    def _progress(self, step: int) -> None:
        if self._open is not None and self._open.is_going_on:
            self._open.seconds = time.monotonic() - self._open.last_at
            self._open.repeated = max(0, self._open.reached - step + 1)
            self._open = None


def configurations(at: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the run that is cut over three processes, and of the same in one."""
    from tests.integration.test_parity import LORA
    from tests.samples import machines_here, plan_of, save_llama, save_texts

    texts = str(save_texts(at / "texts.jsonl", 21))
    training = {
        **{"max_steps": steps, "num_train_epochs": 100, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 4, "learning_rate": 1e-3, "save_strategy": "steps"},
        **{"save_steps": SAVE_STEPS, "eval_strategy": "steps", "eval_steps": SAVE_STEPS},
        **{"report_to": "none", "visualize": False, "verify_architecture": False},
        **{"replicate_steps": REPLICATE_STEPS, "connect_timeout_s": 60.0, "rejoin_wait_s": 60.0},
    }
    cut = {
        **machines_here(("local", 2), (1, 4), (2, 6), num_threads=1),
        "model": {"name_or_path": str(save_llama(at / "llama"))},
        "data": {"train": texts, "eval": texts, "max_length": 32},
        "adapter": LORA,
    }
    whole = {**cut, "workers": [], "shard_plan": plan_of(("local", 6))}
    return (
        {**cut, "training": {**training, "output_dir": str(at / "cut" / "run")}},
        {**whole, "training": {**training, "output_dir": str(at / "whole" / "run")}},
    )


def differences(one: Path, other: Path) -> list[str]:
    """What two runs differ in: lines of steps and evaluations, checkpoints, results."""
    from tests.faults import final_state

    mine, theirs = final_state.lines(one), final_state.lines(other)
    found = [f"{a} for {b}" for a, b in zip_longest(mine, theirs) if a != b]
    return found + final_state.differences(one, other)


def matrix(case: str, at: Path) -> dict[str, Any]:
    machines._PRELOAD += NEEDED
    groups = CASES[case]
    steps = SAVE_STEPS if case != "several" else 2 * SAVE_STEPS
    cut, whole = configurations(at, steps)
    lives, calm = Lives(cut, groups), Lives(whole, [])
    (at / "cut").mkdir()
    (at / "whole").mkdir()
    lives.run()
    calm.run()
    slowest = max(lives.recoveries, key=lambda recovery: recovery.seconds)
    return {
        "deaths": sum(map(len, groups)),
        "points": sorted({point.partition("@")[0] for group in groups for _, point in group}),
        "differences": differences(at / "cut" / "run", at / "whole" / "run"),
        "repeated": max(recovery.repeated for recovery in lives.recoveries),
        "slowest_s": slowest.seconds,
        "slowest": slowest.deaths,
        "recoveries": [
            [recovery.deaths, recovery.repeated, round(recovery.seconds, 2)]
            for recovery in lives.recoveries
        ],
    }


if __name__ == "__main__":
    print(json.dumps(matrix(sys.argv[1], Path(sys.argv[2]))))
