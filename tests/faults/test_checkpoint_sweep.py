"""A disk that fails while a checkpoint is written or read leaves the old or the new step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults import programs
from tests.faults.checkpoint_sweep import SCENES
from tests.faults.syscall_sweep import MODES
from tests.faults.syscalls import unsupported


def sweep(every: int, program: str = "checkpoint_sweep") -> dict[str, dict[str, Any]]:
    """Counts by case."""
    if problem := unsupported():
        pytest.skip(problem)
    done = programs.run(program, every)
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr, sep="\n")
    cases = {line.pop("case"): line for line in map(json.loads, done.stdout.splitlines())}
    known = {"points", "old", "new", "error"}
    wrong = {name: counts.keys() - known for name, counts in cases.items()}
    assert not any(wrong.values()), f"{wrong}\n{done.stderr}"
    return cases


@pytest.mark.long
def test_every_thirteenth_point_of_the_sweep() -> None:
    cases = sweep(13)
    assert all(counts["points"] >= 3 for counts in cases.values())


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_point_of_the_sweep() -> None:
    cases = sweep(1)
    for mode in MODES:
        points = [cases[f"{scene}: {mode}"]["points"] for scene in SCENES]
        assert sum(points) >= 150, (mode, points)
    for scene in SCENES:
        killed = cases[f"{scene}: kill"]
        assert killed["old"] > 20, scene
        assert killed["new"] > 3, scene
