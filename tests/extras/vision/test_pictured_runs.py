"""Runs with pictures beside other settings, and runs whose processes are killed."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.extras.preferences.test_preference_processes import trained_by_command
from tests.extras.vision.seeing import LAYERS, save_pairs, save_rows
from tests.faults.final_state import assert_same_run
from tests.integration.pairs import OBJECTIVES, SETTINGS, Runs
from tests.samples import DEVICE, machines_here

pytestmark = pytest.mark.xdist_group("pool2")
TRAINING = {
    **{"max_steps": 4, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "beta": 0.5},
    **{"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1},
    **{"eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "visualize": False},
}
PAIRS = [
    *("image-text-to-text mix+evals", "image-text-to-text full+held_out"),
    *("image-text-to-text chunks+smoothing", "image-text-to-text dropout+checkpointing"),
    *("image-text-to-text towers+full+mix", "image-text-to-text towers+dropout+checkpointing"),
    *("image-dpo mix+eval", "image-dpo full+held_out", "image-dpo chunks+checkpointing"),
    *("image-kto full+eval", "image-kto chunks+checkpointing"),
]
CASES = {"llava": "image-text-to-text", "qwen2_5_vl": "image-text-to-text", "gemma3": "image-dpo"}


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    machines = pool.machines
    folder = tmp_path_factory.mktemp("pairs")
    return Runs(folder, machines["workers"][:1], machines["coordinator"]["port"])


@pytest.mark.parametrize("case", seldom(PAIRS, *PAIRS[1:]))
def test_cuts_offloading_and_a_resume_change_no_bit(case, runs, verdicts):
    """`Runs` has the list of what else changes none."""
    objective, _, settings = case.partition(" ")
    assert runs.try_neutral(objective, (*settings.split("+"),)) == "trained"


@pytest.mark.long
@pytest.mark.parametrize("also", ["towers", "features"])
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name.startswith("image-")])
def test_settings_of_pictures_are_trained_or_refused_beside_others(
    also, objective, runs, verdicts, tmp_path, monkeypatch
):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    told = {name: runs.try_pair(objective, (also, name)) for name in SETTINGS}
    assert [said for said in told.items() if said[1].startswith("FAULT")] == []
    print(*(f"{name}: {said}" for name, said in told.items() if said != "trained"), sep="\n")
    assert "trained" in told.values()


@pytest.mark.long
@pytest.mark.parametrize("family", CASES)
def test_workers_and_coordinators_killed_in_a_step_change_no_bit(
    family, models, tmp_path, monkeypatch
):
    """The run that goes on has another plan, and features that were kept before."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    objective = CASES[family]
    training: dict[str, Any] = {**TRAINING, "objective": objective}
    if objective == "image-text-to-text":
        del training["beta"]
    rows = (save_pairs if objective == "image-dpo" else save_rows)(tmp_path / "rows")
    data = {"train": str(rows), "eval": str(rows)}

    def run(name: str, *parts: Any) -> dict[str, Any]:
        trains = family != "llava"
        kept = {"cache_image_features": name == "killed" and not trains}
        raw = {**machines_here(*parts, device=DEVICE), "data": {**data, **kept}}
        raw["model"] = {"name_or_path": str(models(family)), "train_towers": trains}
        return {**raw, "training": {**training, "output_dir": str(tmp_path / name)}}

    train(Config.from_dict(run("whole", ("local", LAYERS))))
    (tmp_path / "run.json").write_text(json.dumps(run("killed", ("local", 2), (1, LAYERS))))
    points = "worker-1/backward@2,coordinator/backward@4"
    once = {"HETERO_FAILPOINT": points, "HETERO_FAILPOINT_ONCE": str(tmp_path)}
    killed = trained_by_command(tmp_path / "run.json", **once)
    said = killed.stdout + killed.stderr
    assert killed.returncode == -signal.SIGKILL, said
    assert "training goes on after step 1 with worker 1" in said, said
    again = train(Config.from_dict(run("killed", ("local", 3), (1, LAYERS))))
    assert len(again.losses) == 1
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
