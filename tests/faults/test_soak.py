"""A short soak; the long one is a program, and its result is under benchmarks/results."""

from __future__ import annotations

import json
import sys

import pytest

from tests.faults import programs
from tests.faults.soak import KINDS, configuration, schedule
from tests.samples import free_ports, save_llama, save_texts

STEPS = 120
COUNTS = {"kills": 2, "drops": 2, "coordinator_kills": 1, "full_disks": 1}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
def test_a_soak_of_random_faults_ends_with_the_undisturbed_result(figure):
    """The seed is another one each time; it is printed, and the program takes it."""
    words: list[object] = ["--steps", STEPS]
    for kind, count in COUNTS.items():
        words += [f"--{kind.replace('_', '-')}", count]
    done = programs.run("soak", *words)
    assert done.stdout.startswith("seed "), done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    happened = ", ".join(f"{found[kind]} {kind.replace('_', ' ')}" for kind in KINDS)
    reached = f"{found['steps']} steps, {happened}, bit-equal, {found['seconds']:.0f} s"
    figure("soak of random faults", reached, "bit-equal, no manual action")
    assert found["steps"] == STEPS
    assert found["commands"] == 1 + COUNTS["coordinator_kills"]


def test_the_long_soaks_schedule_has_everything_and_spares_each_worker_between():
    counts = {"kills": 24, "drops": 6, "coordinator_kills": 2, "full_disks": 1}
    for seed in range(50):
        plan = schedule(8640, counts, seed)
        assert len(plan) == 33
        assert [at for at, _ in plan] == sorted({at for at, _ in plan})
        assert 0 < plan[0][0] < plan[-1][0] < 8640
        kills = [what for _, what in plan if what in ("kill 1", "kill 2")]
        assert len(kills) == 24
        assert all(kills[k : k + 4].count("kill 1") in (1, 2, 3) for k in range(20))


@pytest.mark.faults
def test_chaos_says_that_the_results_are_the_same(tmp_path, figure):
    save_llama(tmp_path / "llama")
    save_texts(tmp_path / "texts.jsonl", 40)
    file = configuration(tmp_path, "run", 12, free_ports(3))
    words = ["--config", file, "--json", "--output-dir", tmp_path / "chaos"]
    done = programs.run("chaos", *words, "--steps", 12, "--kills", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["same"]
    assert verdict["steps"] == 12
    assert verdict["commands"] == 2
    figure("chaos, 3 kills in 12 steps", f"the same in {verdict['seconds']:.0f} s", "same")
