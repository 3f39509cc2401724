"""Every phase of a run is stopped by a signal to the coordinator, which ends with exit code 75.

It does so in time, and the same command finishes the run with an undisturbed one's weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_parity import LORA
from tests.samples import machines_here, save_llama, save_texts

pytestmark = [pytest.mark.faults, pytest.mark.skipif(os.name == "nt", reason="POSIX signals")]
GOAL_S = 25.0
WAIT_S = 150.0

# What the run is doing when it is told: a line of the logs, and the failpoint that makes it last.
PHASES = {
    "importing": ("torch and transformers are loaded now", None),
    "loading": ("coordinator/load:sleep:60 fires", "coordinator/load:sleep:60"),
    "a step": ("worker-1/forward@3:sleep:3 fires", "worker-1/forward@3:sleep:3"),
    "a step of minutes": ("worker-1/backward@3:sleep:200 fires", "worker-1/backward@3:sleep:200"),
    "an evaluation": ("worker-1/evaluation:sleep:3 fires", "worker-1/evaluation:sleep:3"),
    "a checkpoint": ("coordinator/checkpoint:sleep:2 fires", "coordinator/checkpoint:sleep:2"),
    "gathering": ("worker-1/gather:sleep:200 fires", "worker-1/gather:sleep:200"),
}


@dataclass
class Site:
    """A machine's directory with a run's configuration, and the processes that were started."""

    place: Path
    llama: Path
    texts: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        raw = {
            **machines_here(("local", 3), (1, 6)),
            "model": {"name_or_path": str(self.llama)},
            "adapter": LORA,
            "data": {"train": str(self.texts), "max_length": 64, "eval": str(self.texts)},
            "training": {
                **{"output_dir": str(self.place / "run"), "max_steps": 6},
                **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
                **{"eval_strategy": "steps", "eval_steps": 4},
                **{"save_strategy": "steps", "save_steps": 5},
                **{"sample_prompts": ["a model trains"], "sample_steps": 3},
                **{"sample_max_new_tokens": 4, "report_to": "none"},
                **{"visualize": False, "verify_architecture": False},
            },
        }
        self.place.mkdir(parents=True)
        self.file.write_text(json.dumps(raw), encoding="utf-8")

    @property
    def file(self) -> Path:
        return self.place / "config.json"

    def log(self, name: str) -> Path:
        return self.place / f"{name}.log"

    def start(self, name: str, *command: str, failpoint: str | None = None) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HETERO_CACHE": str(self.place / "c")}
        if failpoint is not None:
            environment["HETERO_FAILPOINT"] = failpoint
        with self.log(name).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero_framework", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def coordinator(self, failpoint: str | None = None) -> subprocess.Popen:
        """The same command at first and later."""
        return self.serve("coordinator", "train", "--role", "coordinator", failpoint=failpoint)

    def worker(self, *options: str, failpoint: str | None = None) -> subprocess.Popen:
        """A supervisor."""
        return self.serve("worker", "worker", *options, failpoint=failpoint)

    def serve(self, name: str, *command: str, failpoint: str | None) -> subprocess.Popen:
        return self.start(name, *command, "--config", str(self.file), failpoint=failpoint)

    def said(self) -> str:
        """Everything that any process wrote."""
        logs = [*self.place.glob("*.log"), *self.place.glob("run/logs/worker-*.log")]
        return "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def await_text(self, text: str) -> None:
        wait_until(lambda: text in self.said(), self)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def weights(self) -> bytes:
        return (self.place / "run" / "adapter" / "adapter_model.safetensors").read_bytes()


def wait_until(condition: Callable[[], Any], site: Site) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, site.said()
        assert all(process.poll() is None for process in site.processes), site.said()
        time.sleep(0.05)  # nothing announces what another process does


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("signals")
    llama, texts = save_llama(base / "llama"), save_texts(base / "texts.jsonl", 24)
    sites: list[Site] = []

    def make(name: str) -> Site:
        sites.append(Site(base / name, llama, texts))
        return sites[-1]

    yield make
    for site in sites:
        site.end()


@pytest.fixture(scope="module")
def whole(made):
    """The result of a run that nobody disturbs."""
    site = made("undisturbed")
    assert site.coordinator().wait(WAIT_S) == 0, site.said()
    return site.weights()


def finished(site: Site) -> bytes:
    """The same command again."""
    site.processes.clear()
    assert site.coordinator().wait(WAIT_S) == 0, site.said()
    return site.weights()


SIGNALS = 3 * [signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", 1)]


@pytest.mark.parametrize(("phase", "number"), [*zip(PHASES, SIGNALS, strict=False)])
def test_coordinator_is_stopped(phase, number, made, whole, figure):
    site: Site = made(f"coordinator {phase}")
    text, failpoint = PHASES[phase]
    process = site.coordinator(failpoint)
    site.await_text(text)
    process.send_signal(number)
    began = time.monotonic()
    code = process.wait(WAIT_S)
    took_s = time.monotonic() - began
    goal = f"exit code 75 within {GOAL_S:.0f} s"
    figure(f"{number.name} to the coordinator: {phase}", f"{code} after {took_s:.1f} s", goal)
    assert code == 75, site.said()
    assert "Traceback" not in site.said()
    assert finished(site) == whole
