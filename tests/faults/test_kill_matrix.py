"""Kills of each process at every failpoint, and of two or three at once or one after the other. The
run recovers by itself and ends with the undisturbed result, to the last bit."""

import json
import sys

import pytest

from hetero_framework.extras.faults.failpoints import POINTS
from tests.faults import programs
from tests.faults.kill_matrix import CASES, NEVER, PROCESSES, REPLICATE_STEPS

MOST_S = 11.0
"""That a process has died is noticed within 1 s; training goes on within 10 s more."""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform == "win32", reason="the processes are forked"),
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_processes_are_killed_has_the_undisturbed_result(case, tmp_path, figure):
    done = programs.run("kill_matrix", case, tmp_path)
    logs = "\n".join(log.read_text()[-3000:] for log in tmp_path.glob("cut/logs/*.log"))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    found = json.loads(done.stdout.splitlines()[-1])
    equal = "bit-equal" if not found["differences"] else "NOT equal"
    figure(
        f"kill -9, {case}: {found['deaths']} times at {len(found['points'])} places",
        f"{equal}, <= {found['repeated']} steps repeated, on after {found['slowest_s']:.1f} s",
        f"bit-equal, {REPLICATE_STEPS} steps, {MOST_S:.0f} s",
    )
    assert not found["differences"], f"{found}\n{logs}"
    assert found["repeated"] <= REPLICATE_STEPS, found
    assert found["slowest_s"] <= MOST_S, found


def test_each_process_is_killed_at_each_place_that_it_passes():
    struck = {
        (process, point.partition("@")[0])
        for groups in CASES.values()
        for group in groups
        for process, point in group
    }
    # Those of islands are struck in test_islands.py and test_island_rounds.py.
    points = [name for name in POINTS if not name.startswith("island-")]
    wanted = {(process, name) for process in PROCESSES for name in points}
    absent = NEVER | {(process, "output") for process in PROCESSES}  # numbers, not places
    assert wanted - struck == absent | {(worker, "checkpoint") for worker in PROCESSES[1:]}
