"""Random kills of random processes, one after the other: nothing is lost, nobody has to do anything
but to give the same command again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS, EVENTS = 30, 3


@pytest.mark.faults
@pytest.mark.timeout(1000)
@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
def test_a_soak_of_random_kills_ends_with_the_undisturbed_result(tmp_path: Path, figure) -> None:
    """The seed is another one each time; it is printed, and the program takes it."""
    seed = random.SystemRandom().randrange(1 << 16)
    command = [sys.executable, "-m", "tests.faults.soak"]
    command += [str(STEPS), str(EVENTS), str(seed), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    equal = "bit-equal" if found["equal"] else "NOT equal"
    reached = (
        f"seed {seed}: {found['kills']} kills, {found['steps']} steps, {equal}, "
        f"{found['commands']} commands, {found['seconds']:.0f} s"
    )
    figure("soak of random kills", reached, "bit-equal, no manual action")
    assert found["equal"], done.stdout
    assert found["steps"] == STEPS
