"""Signals that ask, save or stop at once: in processes on real terminals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from hetero_framework.trainer import signals
from hetero_framework.trainer.signals import StopRequest
from tests.waiting import WAIT_S

pty = pytest.importorskip("pty", reason="no pseudo terminals on Windows")


_SCRIPT = """
import os, sys
from hetero_framework.trainer.signals import StopRequest
try:
    with StopRequest() as stop, stop.waiting():
        for number in map(int, sys.argv[1:]):
            os.kill(os.getpid(), number)
        print("ANSWER", stop.wants_checkpoint("Save?"), flush=True)
except KeyboardInterrupt:
    print("AT ONCE", flush=True)
"""
Reply = Callable[[int, int], object]


def never(pid: int, terminal: int) -> None:
    raise AssertionError("it asked")


@pytest.fixture(autouse=True)
def heard_as_usual():
    """Under `nohup` SIGHUP is ignored, also in the processes that the tests start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def answer_after(*numbers: int, reply: Reply = never) -> str:
    """What a process on a terminal of its own makes of these signals. Once it has asked whether to
    save, `reply(pid, terminal)` is called, again and again: a signal just before it begins to read
    is heard with the next one."""
    terminal, its_side = pty.openpty()
    command = [sys.executable, "-c", _SCRIPT, *(str(int(number)) for number in numbers)]
    process = subprocess.Popen(
        command, stdin=its_side, stdout=its_side, stderr=its_side, start_new_session=True
    )
    os.close(its_side)
    seen, deadline = b"", time.monotonic() + WAIT_S
    try:
        while b"ANSWER" not in seen and b"AT ONCE" not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 0.3)[0]:
                seen += os.read(terminal, 4096)
            elif b"[Y/n]" in seen:
                reply(process.pid, terminal)
        while not seen.endswith(b"\n"):
            seen += os.read(terminal, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return seen.decode()


def kill(number: int) -> Reply:
    return lambda pid, terminal: os.kill(pid, number)


def type_(text: bytes) -> Reply:
    return lambda pid, terminal: os.write(terminal, text)


TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (type_(b"n\n"), "ANSWER False"),
        (type_(b"\n"), "ANSWER True"),
        (kill(TERM), "ANSWER True"),
        (kill(HUP), "ANSWER True"),
        (kill(INT), "ANSWER False"),
    ],
    ids=["no", "enter", "sigterm", "sighup", "ctrl_c_again"],
)
def test_ctrl_c_asks_and_a_shutdown_answers_yes(reply, answer):
    assert answer in answer_after(INT, reply=reply)


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [
        pytest.param([TERM], "ANSWER True", id="sigterm alone saves"),
        pytest.param([HUP], "ANSWER True", id="sighup alone saves"),
        pytest.param([INT, TERM], "ANSWER True", id="sigterm takes the question of ctrl_c back"),
        pytest.param([TERM, TERM], "AT ONCE", id="sigterm twice stops at once"),
        pytest.param([INT, INT], "AT ONCE", id="ctrl_c twice stops at once"),
        pytest.param([TERM, INT], "AT ONCE", id="ctrl_c after sigterm stops at once"),
    ],
)
def test_nobody_is_asked_after_other_signals(numbers, answer):
    assert answer in answer_after(*numbers)


def test_before_the_first_step_any_signal_stops_at_once():
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop.requested == "SIGHUP"


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop, stop.waiting():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_windows_ctrl_break_is_a_request(monkeypatch):
    """SIGBREAK's number there is 21; here it stands in for a signal that nothing else uses."""
    monkeypatch.setattr(signals.signal, "SIGBREAK", signal.SIGUSR2, raising=False)
    with StopRequest() as stop, stop.waiting():
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.requested is not None
        assert stop.wants_checkpoint("Save?")


def test_wait_ends_when_a_stop_is_requested():
    began = time.monotonic()
    with StopRequest() as stop, stop.waiting():
        os.kill(os.getpid(), signal.SIGTERM)
        stop.wait(2 * WAIT_S)
    assert time.monotonic() - began < WAIT_S


_AT_IMPORT = """
import os, runpy, sys
module, number = sys.argv[1], int(sys.argv[2])
class Now:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Now())
sys.argv[:] = ["hetero", *sys.argv[3:]]
runpy.run_module("hetero_framework", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "module", ["hetero_framework.cli", "hetero_framework.versions", "hetero_framework.config.load"]
)
@pytest.mark.parametrize("command", ["train", "worker", "serve"])
def test_a_command_is_stopped_in_order_from_its_first_moment(command, module, number):
    """Not by the signal itself: its parent decides by the exit code how to go on."""
    words = [sys.executable, "-c", _AT_IMPORT, module, str(int(number)), command]
    done = subprocess.run([*words, "--config", "none.json"], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr.decode()) == (75, f"hetero: stopped: by {number.name}\n")


def test_commands_outside_of_a_run_end_by_the_signal():
    words = [sys.executable, "-c", _AT_IMPORT, "hetero_framework.cli", str(int(signal.SIGTERM))]
    done = subprocess.run([*words, "check"], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGTERM


def test_an_ignored_hangup_stays_ignored():
    """`nohup hetero train`."""
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + _AT_IMPORT
    words = [sys.executable, "-c", ignored, "hetero_framework.cli", str(int(signal.SIGHUP))]
    done = subprocess.run([*words, "train", "--help"], capture_output=True, timeout=120)
    assert done.returncode == 0


def test_a_request_from_another_thread_saves_and_does_not_ask():
    stop = StopRequest()
    assert (stop.requested, stop.waited_s) == (None, 0.0)
    stop.ask("the page")
    stop.ask("another one")
    assert stop.requested == "the page"
    assert stop.waited_s > 0
    assert stop.wants_checkpoint("Save?")


def test_a_signal_while_python_runs_a_text_ends_with_the_exit_code_too(tmp_path, monkeypatch):
    """A module that is run notes that, and would end by SIGINT."""
    (tmp_path / "run.py").write_text("""
import sys
from hetero_framework.trainer.signals import STOPPED, hearing
with hearing(["train"], ends=True):
    exec("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
sys.exit(STOPPED)
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-m", "run"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (signals.STOPPED, "hetero: stopped: by SIGTERM\n")
