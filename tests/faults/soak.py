"""A run whose processes are killed at random moments, and the same run undisturbed.

    python -m tests.faults.soak STEPS EVENTS SEED DIRECTORY

The command is `hetero train` as a user gives it, given again whenever it ended before the run was
over. What is done when follows from the seed alone, and is printed; the moment within a step does
not. Prints a JSON object at the end: whether the results are equal, and what it cost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.integration.test_parity import LORA, weights
from tests.samples import free_ports, save_llama, save_texts

ACTIONS = ("worker 1", "worker 2", "coordinator", "both workers", "pause 1")
LIMIT_S = 900.0
STOPPED_S = 1.0
POLL_S = 0.02


def schedule(steps: int, events: int, seed: int) -> dict[int, str]:
    """What happens after which step, each kind at least once where there are enough events."""
    dice = random.Random(seed)
    kinds = [*ACTIONS, *dice.choices(ACTIONS, k=events)][:events]
    dice.shuffle(kinds)
    return dict(zip(sorted(dice.sample(range(2, steps), events)), kinds, strict=True))


def configuration(at: Path, name: str, steps: int, whole: bool) -> Path:
    ports = free_ports(3)
    machine = {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu", "num_threads": 1}
    ends = [("local", 0, 6)] if whole else [("local", 0, 2), (1, 2, 4), (2, 4, 6)]
    raw = {
        "coordinator": {**machine, "port": ports[0]},
        "workers": [{**machine, "id": i, "port": ports[i]} for i, _, _ in ends[1:]],
        "shard_plan": [{"id": i, "start": start, "end": end} for i, start, end in ends],
        "model": {"name_or_path": str(at / "llama")},
        "data": {"train": str(at / "texts.jsonl"), "max_length": 64},
        "adapter": LORA,
        "training": {
            "output_dir": str(at / name),
            "max_steps": steps,
            "num_train_epochs": 1000,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "learning_rate": 1e-3,
            "save_strategy": "steps",
            "save_steps": 10,
            "save_total_limit": 2,
            "report_to": "none",
            "visualize": False,
            "verify_architecture": False,
            "replicate_steps": 2,
        },
    }
    file = at / f"{name}.json"
    file.write_text(json.dumps(raw))
    return file


class Command:
    """`hetero train`, given again for as long as the run is not over."""

    def __init__(self, config: Path, output: Path) -> None:
        self._config = config
        self._output = output
        self.given = 0
        self.process = self._give()

    def _give(self) -> subprocess.Popen[bytes]:
        self.given += 1
        command = [sys.executable, "-m", "hetero_framework", "train", "--config", str(self._config)]
        with self._config.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def is_over(self) -> bool:
        """Whether the run has ended in order; one that was killed is started again."""
        code = self.process.poll()
        if code is None or code == 0:
            return code == 0
        if code != -signal.SIGKILL:
            log = self._config.with_suffix(".log").read_text(errors="replace")
            raise AssertionError(f"the run ended with {code}:\n{log[-4000:]}")
        self.process = self._give()
        return False

    def step(self) -> int:
        """The last step that was written down."""
        file = self._output / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        with suppress(IndexError, ValueError):  # none yet, or half a line
            return int(json.loads(lines[-1])["step"])
        return 0

    def worker(self, worker: int) -> psutil.Process | None:
        """Its process; None while there is none."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                words = child.cmdline()
                if "--worker-id" in words and words[words.index("--worker-id") + 1] == str(worker):
                    return child
        return None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def act(what: str, command: Command) -> None:
    if what == "coordinator":
        command.process.kill()
        command.process.wait()
    elif what == "pause 1":
        if (process := command.worker(1)) is not None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)  # the fault itself
            process.send_signal(signal.SIGCONT)
    else:
        workers = (1, 2) if what == "both workers" else (int(what[-1]),)
        for process in map(command.worker, workers):
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def until(condition: Callable[[], bool], deadline: float, command: Command) -> None:
    while not condition():
        if time.monotonic() > deadline:
            log = command._config.with_suffix(".log").read_text(errors="replace")
            raise AssertionError(f"nothing happens any more after step {command.step()}:\n{log}")
        time.sleep(POLL_S)  # nothing announces what another process writes


def run(at: Path, name: str, steps: int, events: dict[int, str], whole: bool) -> dict[str, Any]:
    command = Command(configuration(at, name, steps, whole), at / name)
    dice, began = random.Random(0), time.monotonic()
    deadline = began + LIMIT_S
    try:
        for step, what in sorted(events.items()):
            until(lambda: command.is_over() or command.step() >= step, deadline, command)  # noqa: B023
            time.sleep(dice.uniform(0, 0.2))  # somewhere in the next step or two
            act(what, command)
            print(f"after step {step}: {what}", flush=True)
        until(command.is_over, deadline, command)
    finally:
        command.end()
    return {"seconds": time.monotonic() - began, "commands": command.given, "step": command.step()}


def soak(steps: int, events: int, seed: int, at: Path) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    save_llama(at / "llama")
    save_texts(at / "texts.jsonl", 40)
    plan = schedule(steps, events, seed)
    print(f"seed {seed}: {plan}", flush=True)
    calm = run(at, "whole", steps, {}, whole=True)
    hard = run(at, "cut", steps, plan, whole=False)
    one, other = weights(at / "cut"), weights(at / "whole")
    return {
        "equal": one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one),
        "steps": hard["step"],
        "kills": sum(what != "pause 1" for what in plan.values()),
        "commands": hard["commands"],
        "seconds": hard["seconds"],
        "calm_seconds": calm["seconds"],
    }


if __name__ == "__main__":
    print(json.dumps(soak(*map(int, sys.argv[1:4]), Path(sys.argv[4]))))
