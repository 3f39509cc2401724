"""The supervisor with real children: workers in miniature that take the real one's options."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.cluster import local_workers
from hetero_framework.cluster.local_workers import RestartPolicy, run_workers
from hetero_framework.config import Config
from hetero_framework.core import timeouts
from hetero_framework.core.threads import in_background
from hetero_framework.errors import PeerLostError
from tests.unit.cluster.conftest import parent, stand_in
from tests.waiting import WAIT_S, is_running, wait_until

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")

# It ends in order with the base directory's file "finish", and writes its process id there.
STAND_IN = """
place = pathlib.Path(options.base_dir)
told = threading.Event()
def hear(reason):
    print("told:", reason, flush=True)
    told.set()
watch_parent(on_order=(lambda reason: None) if behaviour == "deaf" else hear)
print(f"hello from {options.worker_id} with keep {options.keep}", flush=True)
with (place / f"starts-{options.worker_id}").open("a") as file:
    file.write(f"{os.getpid()}\\n")
if behaviour == "done":
    sys.exit(0)
if behaviour == "outlived":
    code = "import time; time.sleep(60)"  # it is killed
    print("left", subprocess.Popen([sys.executable, "-c", code]).pid, flush=True)
    sys.exit(0)
if behaviour == "fail" and options.worker_id == "2":
    print("the reason", flush=True)
    sys.exit(6)
while not (place / "finish").exists():
    if told.wait(0.02):
        sys.exit(75)
"""


class Served:
    """`run_workers` in a thread."""

    def __init__(self, config: Config, program: list[str]) -> None:
        self.config = config
        self.running = in_background(lambda: run_workers(config, (1,), program=program), "run")

    def starts(self) -> list[int]:
        """Process ids of the worker's processes so far."""
        file = self.config.base_dir / "starts-1"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def started(self, number: int) -> int:
        """Wait for its so-many-th process."""
        wait_until(lambda: len(self.starts()) >= number or self.running.done())
        return self.starts()[number - 1]

    def finish(self) -> None:
        """Have the workers end in order."""
        (self.config.base_dir / "finish").touch()
        assert wait([self.running], WAIT_S).done


def program(behaviour: str) -> list[str]:
    bug = [sys.executable, "-c", "print('AssertionError: the last line'); raise SystemExit(1)"]
    return bug if behaviour == "bug" else stand_in(STAND_IN, behaviour)


@pytest.fixture
def serve(config, stack):
    def start(behaviour: str) -> Served:
        served = Served(config, program(behaviour))
        stack.callback(served.finish)
        return served

    return start


@pytest.fixture
def quick(monkeypatch):
    """Pauses before a restart take hundredths of a second."""

    class Quick(RestartPolicy):
        def died(self, now_s: float) -> float | None:
            pause_s = super().died(now_s)
            return None if pause_s is None else pause_s / 100

    monkeypatch.setattr(local_workers, "RestartPolicy", Quick)


def events(config: Config) -> list[dict[str, Any]]:
    lines = (config.output_dir / "logs" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# ---- lines and exit codes


def test_lines_appear_behind_names_and_the_end_in_order_is_zero(config, capfd):
    assert run_workers(config, (1, 2), program=program("done")) == 0
    lines = capfd.readouterr().err.splitlines()
    said = sorted(line.split(" with ")[0] for line in lines)
    assert said == ["worker 1 | hello from 1", "worker 2 | hello from 2"]


def test_lines_of_a_single_worker_need_no_name(config, capfd):
    assert run_workers(config, (1,), keep=True, program=program("done")) == 0
    assert capfd.readouterr().err == "hello from 1 with keep True\n"


def test_processes_left_behind_by_a_worker_are_not_waited_for(config, capfd, monkeypatch):
    monkeypatch.setattr(timeouts, "STOP_S", 0.1)
    before = set(threading.enumerate())
    assert run_workers(config, (1,), program=program("outlived")) == 0
    (printer,) = set(threading.enumerate()) - before
    psutil.Process(int(capfd.readouterr().err.split()[-1])).kill()
    printer.join(WAIT_S)
    assert not printer.is_alive()


def test_a_worker_that_fails_for_good_stops_the_others(config, capfd):
    assert run_workers(config, (1, 2), program=program("fail")) == 6
    said = capfd.readouterr().err
    assert "worker 2 | the reason" in said
    assert said.count("hello from 2") == 1  # lack of memory would come again


# ---- restarts


@posix
def test_a_killed_worker_is_started_again(serve, config, capfd):
    served = serve("wait")
    first = served.started(1)
    os.kill(first, signal.SIGKILL)
    assert served.started(2) != first
    served.finish()
    assert served.running.result(WAIT_S) == 0
    assert len(served.starts()) == 2
    said = capfd.readouterr().err
    assert re.search(r"worker 1: it ended with signal SIGKILL \(.*out of memory.*; it is", said)
    (restart,) = events(config)
    assert (restart["what"], restart["worker"]) == ("worker restarted", 1)
    assert restart["process"] == "supervisor"


@pytest.mark.usefixtures("quick")
def test_the_fifth_death_in_ten_minutes_ends_it_with_the_reason(serve, config, capfd):
    served = serve("bug")
    error = served.running.exception(WAIT_S)
    assert isinstance(error, PeerLostError)
    assert error.exit_code == 4
    said = str(error)
    assert "worker 1 has died 5 times in ten minutes; it ended with exit code 1" in said
    assert capfd.readouterr().err.count("AssertionError: the last line") == 5
    assert [entry["what"] for entry in events(config)] == ["worker restarted"] * 4


# ---- the parent's own end

PARENT = """
import json, sys
from hetero_framework.config import Config
from hetero_framework.cluster.local_workers import run_workers
raw, base, program = json.loads(sys.argv[1])
sys.exit(run_workers(Config.from_dict(raw, base), (1, 2), program=program))
"""


@pytest.fixture
def supervised(config, tmp_path, stack):
    """A supervisor in a process of its own; both workers have begun."""

    def start(behaviour: str) -> subprocess.Popen[str]:
        process = parent(PARENT, config, program(behaviour), stderr=subprocess.PIPE)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        started = [tmp_path / f"starts-{i}" for i in (1, 2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in started))
        return process

    return start


def workers_of(tmp_path: Path) -> list[int]:
    return [int((tmp_path / f"starts-{i}").read_text()) for i in (1, 2)]


@posix
@pytest.mark.parametrize(
    ("number", "shown"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")]
    if os.name != "nt"
    else [],
)
def test_a_signal_is_told_to_the_workers_and_the_code_is_75(supervised, tmp_path, number, shown):
    process = supervised("wait")
    process.send_signal(number)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 75
    for worker in (1, 2):
        assert f"worker {worker} | told: it was stopped on its own machine ({shown})" in said
    assert not any(map(is_running, workers_of(tmp_path)))


@posix
def test_a_second_signal_ends_all_at_once(supervised, tmp_path):
    process = supervised("deaf")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=timeouts.RELEASE_S - 5)
    assert process.returncode == 75
    wait_until(lambda: not any(map(is_running, workers_of(tmp_path))))


def test_workers_end_with_a_supervisor_that_is_killed(supervised, tmp_path):
    process = supervised("wait")
    process.kill()
    wait_until(lambda: not any(map(is_running, workers_of(tmp_path))))
