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


def told(steps: str, release_s: float = 60.0) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, steps, str(release_s)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
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
def test_an_order_is_passed_once_and_a_second_signal_is_immediate(steps: str, heard: str) -> None:
    assert told(steps) == (0, heard)


def test_a_process_that_does_not_end_is_ended() -> None:
    assert told("hang SIGTERM", release_s=0.1) == (75, "")


def test_handlers_are_as_before_after_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals().obeyed_by(lambda reason, at_once: None):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert timeouts.HAND_OVER_S < timeouts.RELEASE_S < 25
