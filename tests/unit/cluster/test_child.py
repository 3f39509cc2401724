"""Starting and ending are tested where they are used: test_local_workers.py, test_supervisor.py."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hetero_framework.cluster.child import PROGRAM, describe_end, describe_exit, environment


def test_exit_codes_and_signals_have_words():
    assert describe_exit(2) == "exit code 2"
    assert describe_exit(-signal.SIGTERM) == "signal SIGTERM"
    assert describe_exit(-999) == "signal 999"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_sigkill_is_looked_up_in_the_kernels_log():
    assert describe_end(7, -signal.SIGTERM, 3) == "signal SIGTERM"
    assert describe_end(7, 1, 3) == "exit code 1"
    assert describe_end(7, -signal.SIGKILL, None).startswith("signal SIGKILL (")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_the_end_of_a_life_line_interrupts_any_wait_as_sigterm_does():
    program = (
        "import argparse, signal, sys, threading\n"
        "from hetero_framework.commands.options import keep_life_line\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "keep_life_line(argparse.Namespace(life_line=True))\n"
        "threading.Event().wait(60)\n"
    )
    words = [sys.executable, "-c", program]
    assert subprocess.run(words, stdin=subprocess.DEVNULL, timeout=40).returncode == 7


def test_modules_of_the_current_directory_are_not_taken_for_the_librarys(tmp_path):
    (tmp_path / "argparse.py").write_text("raise SystemExit(7)")
    words = [*PROGRAM, "--help"]
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
