from __future__ import annotations

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import UserError
from tests.faults.chaos import Verdict, chaos, schedule, text

NAMES = ["coordinator", "worker 1", "worker 2"]


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_follows_from_the_seed_and_covers_all(seed):
    plan = schedule(NAMES, 12, 5, seed)
    assert plan == schedule(NAMES, 12, 5, seed)
    assert len(plan) == 5
    assert set(plan.values()) == set(NAMES)
    assert all(1 <= step < 12 for step in plan)


def test_schedules_of_other_seeds_differ():
    assert len({str(schedule(NAMES, 12, 3, seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize(("same", "said"), [(True, "the same, byte for byte"), (False, "NOT THE")])
def test_the_verdict_is_printed(same, said):
    shown = text(vars(Verdict(same, 20, 1, 2, 10.0, 31.4, seed=7)))
    assert f"20 steps, 1 kill, the command given 2 times: the results are {said}" in shown
    assert "seed 7" in shown


def config() -> Config:
    machine = {"ip": "127.0.0.1", "device": "cpu"}
    plan = [{"id": "local", "start": 0, "end": 2}]
    return Config.from_dict({"coordinator": {**machine, "port": 9999}, "shard_plan": plan})


@pytest.mark.parametrize("kills", [5, -1])
def test_kills_must_fit_into_the_steps(kills, tmp_path):
    with pytest.raises(UserError, match=f"{kills} kills do not fit into 5 steps"):
        chaos(config(), tmp_path / "new", steps=5, kills=kills, seed=0, options=[])


def test_directory_in_use_is_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="is not empty"):
        chaos(config(), tmp_path, steps=5, kills=1, seed=0, options=[])
