"""A disk that fails leaves the old or the new state: of a checkpoint that is written or read, of a
result that is written, of keys that are rotated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults import checkpoint_sweep, export_sweep, programs
from tests.faults.syscall_sweep import MODES
from tests.faults.syscalls import unsupported


def sweep(program: str, every: int) -> dict[str, dict[str, Any]]:
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
@pytest.mark.parametrize(("program", "every"), [("checkpoint_sweep", 13), ("keys_sweep", 37)])
def test_some_points_of_a_sweep(program, every):
    cases = sweep(program, every)
    assert all(counts["points"] >= 3 for counts in cases.values())
    assert program != "keys_sweep" or len(cases) == 2 * len(MODES)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_point_of_the_sweep():
    cases = sweep("checkpoint_sweep", 1)
    for mode in MODES:
        points = [cases[f"{scene}: {mode}"]["points"] for scene in checkpoint_sweep.SCENES]
        assert sum(points) >= 150, (mode, points)
    for scene in checkpoint_sweep.SCENES:
        killed = cases[f"{scene}: kill"]
        assert killed["old"] > 20, scene
        assert killed["new"] > 3, scene


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_fourth_point_of_the_export_sweep():
    cases = sweep("export_sweep", 4)
    for mode in MODES:
        points = [cases[f"{scene}: {mode}"]["points"] for scene in export_sweep.SCENES]
        assert sum(points) >= 50, (mode, points)
    assert cases["over an older one: kill"]["old"] > 3
    assert cases["over an older one: kill"]["new"] > 0


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_every_point_of_the_sweep_of_keys():
    for name, counts in sweep("keys_sweep", 1).items():
        assert counts["points"] >= 80, name
        if "ENOSPC" not in name and "EIO" not in name:
            assert min(counts["old"], counts["new"]) > 3, name
