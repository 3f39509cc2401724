"""Runs of several objectives, and one with everything switched on, killed at random moments."""

import sys

import pytest

from tests.faults.programs import told
from tests.faults.random_kills import KILLS, KINDS, STEPS, schedule

SEEDS = range(3)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_run_killed_at_random_moments_leaves_what_the_undisturbed_one_does(
    kind, tmp_path, figure
):
    """7 kills of a process or both for each seed: 126 in all, of which some find nobody."""
    found = told("random_kills", kind, tmp_path, *SEEDS)
    kills = sum(line["kills"] for line in found)
    seconds = sum(line["seconds"] for line in found)
    figure(f"kills at random: {kind}", f"{kills} kills, equal, {seconds:.0f} s", "equal")
    assert [line["different"] for line in found] == [[]] * len(SEEDS), found
    assert kills >= 3 * len(SEEDS), found


def test_kills_at_random_come_at_every_time_of_a_run():
    kills = [kill for kind in KINDS for seed in SEEDS for kill in schedule(kind, seed)]
    assert len(kills) == len(KINDS) * len(SEEDS) * KILLS > 100
    assert {step for step, _, _ in kills} == set(range(STEPS + 1))
    assert {who for _, _, who in kills} == {"coordinator", "worker", "both"}
