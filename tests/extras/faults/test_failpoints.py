"""Failpoints: the syntax of the variable, when they fire, and their actions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hetero_framework import log
from hetero_framework.core import failpoints
from hetero_framework.errors import ConfigError, as_hetero_error
from hetero_framework.extras.faults.failpoints import ONCE_VARIABLE, POINTS
from tests.installed import whole

ROOT = Path(__file__).parents[3]


@pytest.fixture
def arm(monkeypatch):
    def make(text: str, process: str = "worker-1", once: Path | None = None) -> object:
        monkeypatch.setenv(failpoints.VARIABLE, text)
        if once is not None:
            monkeypatch.setenv(ONCE_VARIABLE, str(once))
        return failpoints.armed(process)

    return make


def fires(name: str) -> bool:
    """Of failpoints that raise."""
    try:
        failpoints.hit(name)
    except RuntimeError:
        return True
    return False


@pytest.fixture
def at_step():
    yield log.set_step
    log.set_step(None)


UNARMED = failpoints.hit


def test_without_the_variable_no_failpoint_is_on(tmp_path, monkeypatch):
    """Nor one that a file names."""
    monkeypatch.chdir(tmp_path)
    for name in (failpoints.VARIABLE, ".env", "failpoints"):
        Path(name).write_text(f"{failpoints.VARIABLE}=step:raise\n")
    monkeypatch.delenv(failpoints.VARIABLE, raising=False)
    with failpoints.armed("coordinator"):
        assert failpoints.hit is UNARMED
        assert failpoints.hit("forward") is None
        assert not failpoints.is_due("forward")


def test_a_point_without_a_step_fires_once(arm):
    with arm("forward:raise"):
        assert [fires("forward") for _ in range(3)] == [True, False, False]
        assert not fires("backward")
    assert failpoints.hit is UNARMED


def test_a_point_of_a_step_fires_once_in_it(arm, at_step):
    with arm("forward@2:raise"):
        fired = []
        for step in (None, 1, 2, 2, 3):
            at_step(step)
            fired.append(fires("forward"))
    assert fired == [False, False, True, False, False]


def test_step_zero_is_before_the_first(arm):
    with arm("load@0:raise"):
        assert fires("load")


def test_a_point_of_every_step_fires_every_time(arm, tmp_path):
    with arm("forward@*:raise", once=tmp_path):
        assert [fires("forward") for _ in range(3)] == [True] * 3


def test_a_point_of_another_process_does_not_fire(arm):
    with arm("worker-2/forward:raise,coordinator/backward:raise, worker-1/commit:raise"):
        assert [fires(name) for name in ("forward", "backward", "commit")] == [False, False, True]


def test_several_points_of_one_place_fire_one_after_the_other(arm):
    with arm("forward:sleep:0,forward:raise"):
        assert [fires("forward") for _ in range(3)] == [False, True, False]


def test_with_a_directory_a_failpoint_fires_in_one_process_only(arm, tmp_path):
    for _ in range(2):  # the second time as a process that is started again
        with arm("worker-1/forward@0:raise,backward:raise", once=tmp_path):
            fired = fires("forward"), fires("backward")
    assert fired == (False, False)
    marks = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(marks) == {"worker-1.forward@0=raise", "backward=raise"}
    assert marks["backward=raise"] == f"worker-1 {os.getpid()}\n"


def test_a_planted_link_keeps_a_point_from_firing_and_is_not_followed(arm, tmp_path):
    once = tmp_path / "once"
    once.mkdir()
    (once / "step=raise").symlink_to(tmp_path / "made")
    with arm("step:raise", once=once):
        assert not fires("step")
    assert not (tmp_path / "made").exists()


def test_the_start_of_a_process_says_that_faults_are_injected(arm, logged):
    with arm("forward@9:raise"):
        pass
    assert logged == ["fault injection ON: HETERO_FAILPOINT=forward@9:raise"]


def test_a_tensor_becomes_infinite(arm):
    tensor = torch.zeros(3, requires_grad=True) + 1
    with arm("output"):
        failpoints.hit("output", tensor)
    assert tensor.isinf().all()


@pytest.mark.parametrize("shape", ["", ":device", ":cpu", ":mps", ":host"])
def test_every_shape_of_out_of_memory_is_known_as_such(shape, arm):
    with arm(f"forward:oom{shape}"), pytest.raises((RuntimeError, MemoryError)) as caught:
        failpoints.hit("forward")
    assert "memory ran out" in as_hetero_error(caught.value).message


def test_slow_stretches_the_time_since_the_previous_failpoint(arm):
    with arm("forward-done@*:slow:3"):
        failpoints.hit("forward")
        began = time.perf_counter()
        time.sleep(0.05)
        failpoints.hit("forward-done")
    assert time.perf_counter() - began >= 0.15


WRONG = {
    "backwards": "there is no failpoint 'backwards'",
    "forward@x": "is not a failpoint",
    "worker-1/": "is not a failpoint",
    "host/forward": "is not a failpoint",
    "forward:explode": "no action 'explode'",
    "forward:inf": "no action 'inf'",
    "forward:sleep:long": "sleep takes a number",
    "forward:exit:1.5": "exit takes a number",
    "forward:oom:gpu": "oom takes device or cpu",
    "forward:kill:9": "kill takes nothing",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_malformed_failpoint_is_refused(text, arm):
    with pytest.raises(ConfigError, match=re.escape(WRONG[text])), arm(f"load:raise,{text}"):
        pass


def ended_with(action: str) -> int:
    """The exit code of a process with this failpoint, which would else end with 7."""
    code = (
        "from hetero_framework.core import failpoints; import sys\n"
        "with failpoints.armed('coordinator'): failpoints.hit('forward'); sys.exit(7)"
    )
    env = {**os.environ, failpoints.VARIABLE: f"forward:{action}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True)
    if action != "sleep:0":
        assert b"failpoint forward:" in done.stderr, done.stderr
    return done.returncode


def test_kill_and_exit_end_the_process():
    killed = 1 if sys.platform == "win32" else -signal.SIGKILL
    assert [ended_with(a) for a in ("kill", "exit:3", "exit", "sleep:0")] == [killed, 3, 1, 7]


def test_the_page_lists_every_failpoint_with_its_place():
    page = (ROOT / "docs" / "maintainers" / "fault_injection.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, re.MULTILINE)) == POINTS


@whole
def test_every_point_is_placed_in_the_product():
    package = ROOT / "hetero_framework"
    text = "\n".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    calls = set(re.findall(r"failpoints\.hit\(\"([a-z-]+)\"", text))
    calls |= {"evaluation", "forward-half", "backward-half"}  # named by what they are about
    assert calls == set(POINTS)
