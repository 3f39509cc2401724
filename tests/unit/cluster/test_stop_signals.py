"""StopSignals in a process of its own, since signals are for main threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_framework.cluster.stop_signals import StopSignals
from hetero_framework.core import timeouts

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")

PROGRAM = """
import os, signal, sys, threading, time
from hetero_framework.cluster.stop_signals import StopSignals
from hetero_framework.core import timeouts
timeouts.RELEASE_S = float(sys.argv[2])
orders, told = StopSignals(), []
def parent(reason):
    thread = threading.Thread(target=orders.from_parent, args=(reason,))
    thread.start()
    thread.join()
def hear(reason, at_once):
    told.append((reason, at_once))
def kill(name):
    os.kill(os.getpid(), getattr(signal, name))
def until(number):
    deadline = time.monotonic() + 60
    while len(told) < number:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)
steps = sys.argv[1].split()
if steps[0] == "early":
    parent("paused")
with orders.obeyed_by(hear):
    for number, step in enumerate(steps[1:], 1 + (steps[0] == "early")):
        parent("paused") if step == "parent" else kill(step)
        if step != "parent" or number == 1:
            until(number)
    if steps[0] == "hang":
        time.sleep(60)  # the process ends meanwhile
print(told)
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )


def told(steps: str, release_s: float = 60.0) -> tuple[int, str]:
    done = run(PROGRAM, steps, str(release_s))
    assert not done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("steps", "heard"),
    [
        ("now SIGTERM", "[('it was stopped on its own machine (SIGTERM)', False)]"),
        ("now parent", "[('paused', False)]"),
        # A parent that could not wait until the libraries were imported.
        ("early", "[('paused', False)]"),
        # The parent hands on what a terminal or an init system has told this process, too.
        ("now SIGINT parent", "[('it was stopped on its own machine (Ctrl-C)', False)]"),
        ("now parent SIGTERM", "[('paused', False), ('paused', False)]"),
        ("now parent SIGTERM SIGHUP", "[('paused', False), ('paused', False), ('paused', True)]"),
    ],
)
def test_an_order_is_passed_once_and_a_second_signal_is_immediate(steps, heard):
    assert told(steps) == (0, heard)


def test_a_process_that_does_not_end_is_ended():
    assert told("hang SIGTERM", release_s=0.1) == (75, "")


def test_handlers_are_as_before_after_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals().obeyed_by(lambda reason, at_once: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert timeouts.HAND_OVER_S < timeouts.RELEASE_S < 25


# Strikes at a moment of the end of a worker, which serves nothing.
ENDING = """
import os, signal, sys
from hetero_framework.cluster import worker
from hetero_framework.cluster.stop_signals import StopSignals
from hetero_framework.config import Config
from hetero_framework.core.dial import Listener
from hetero_framework.engine.loading import load_stages
from hetero_framework.errors import StoppedEarly
listener = Listener("127.0.0.1", 0)
port = listener.port
listener.close()
place, name, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
cls, method = {"close": (Listener, "close"), "forget": (worker.Worker, "_forget_run"),
    "listen": (worker.Worker, "_listener"), "turn": (worker.Worker, "_turn")}.get(place, (None, ""))
orders = StopSignals(ends=True)
def strike():
    for _ in range(times):
        orders.from_parent(name) if name == "line" else os.kill(os.getpid(), getattr(signal, name))
if cls is not None:
    before = getattr(cls, method)
    def struck(self, *args):
        setattr(cls, method, before)
        strike()
        return before(self, *args)
    setattr(cls, method, struck)
if place == "early":
    orders.from_parent("stopped")
entry = {"id": 1, "ip": "127.0.0.1", "port": port, "device": "cpu"}
plan = [{"id": "local", "start": 0, "end": 1}, {"id": 1, "start": 1, "end": 2}]
machine = {"ip": "127.0.0.1", "port": 1}
config = Config.from_dict({"coordinator": machine, "workers": [entry], "shard_plan": plan})
turns = iter([False] + [True] * 99)
try:
    worker.serve(config, 1, build=load_stages, orders=orders, should_stop=lambda: next(turns))
except StoppedEarly as error:
    sys.exit(error.exit_code)
finally:
    if place == "after":
        strike()
"""


@pytest.mark.parametrize(
    ("place", "name", "times", "code"),
    [
        pytest.param("close", "SIGTERM", 1, 0, marks=pytest.mark.long),
        ("close", "line", 1, 0),
        pytest.param("forget", "SIGINT", 2, 0, marks=pytest.mark.long),
        pytest.param("after", "SIGHUP", 2, 0, marks=pytest.mark.long),
        pytest.param("turn", "SIGTERM", 2, 75, marks=pytest.mark.long),
        pytest.param("listen", "SIGHUP", 1, 75, marks=pytest.mark.long),
        pytest.param("early", "SIGTERM", 0, 75, marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_struck_as_it_ends_ends_in_order(place, name, times, code):
    done = run(ENDING, place, name, str(times))
    assert "Traceback" not in done.stderr
    assert done.returncode == code
