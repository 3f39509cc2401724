from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import PLAN_FILE, Config
from hetero_framework.errors import ResourceError
from hetero_framework.extras.planner import Result, evaluate
from hetero_framework.extras.planner.result import Alone, host_rates, planned, save_plan
from tests.extras.planner.fleets import GB, card, device, fleet_of
from tests.samples import plan_of

HALVES = plan_of(("local", 4), ("box", 8))


@pytest.fixture(scope="module")
def result():
    return evaluate(fleet_of(device("local"), device("box")), HALVES)


def test_a_result_as_json_has_all_fields_except_the_schedule(result):
    found = result.to_dict()
    for name in (
        "shard_plan", "max_in_flight", "predicted_step_s",
        "devices", "unused", "limits", "seconds",
    ):  # fmt: skip
        assert name in found
    assert set(found) == {one.name for one in fields(Result)} - {"schedule"} | {"lower_bound_s"}
    again = json.loads(json.dumps(found))
    assert again == found
    assert again["shard_plan"] == HALVES
    assert {k: again["devices"][1][k] for k in ("id", "layers")} == {"id": "box", "layers": 4}
    assert set(again["devices"][0]) == {one.name for one in fields(result.devices[0])}
    assert again["in_flight"] == list(result.in_flight)


def test_alone_is_none_where_no_device_could_do_it(result):
    assert replace(result, alone=None).to_dict()["alone"] is None
    found = replace(result, alone=Alone("box", 2.5)).to_dict()["alone"]
    assert found == {"id": "box", "step_s": 2.5}


def test_the_pipeline_is_the_simulated_one(result):
    assert result.pipeline is result.schedule.profile
    assert result.pipeline.forward_s == pytest.approx((0.004, 0.004))


def test_measured_rates_of_host_memory_are_saved_with_a_plan(tmp_path):
    made = config(tmp_path)
    assert host_rates(made) == {}
    save_plan(made, evaluate(fleet_of(card("local"), card(1, host_bytes=0)), PLAN))
    assert host_rates(made) == {"local": 2000 * GB}
    (made.output_dir / PLAN_FILE).write_text("[]")
    assert host_rates(made) == {}


PLAN = plan_of(("local", 4), (1, 8))
FLEET = fleet_of(device("local"), device(1))


def config(folder: Path, **training: Any) -> Config:
    training = {"output_dir": str(folder / "run"), **training}
    worker = {"id": 1, "ip": "127.0.0.1", "port": 9999}
    raw = {"coordinator": {"ip": "127.0.0.1", "port": 9998}, "workers": [worker]}
    raw |= {"shard_plan": PLAN, "model": {"name_or_path": "model"}, "training": training}
    return Config.from_dict(raw)


def test_a_saved_prediction_is_read_back_equal(tmp_path):
    made = config(tmp_path)
    assert planned(made) is None
    found = evaluate(FLEET, PLAN)
    save_plan(made, found)
    kept = planned(made)
    assert (kept.step_s, kept.pipeline) == (found.predicted_step_s, found.pipeline)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(("per_device_train_batch_size", 7), ("gradient_accumulation_steps", 3)),
        ("gradient_checkpointing", True),
    ],
)
def test_a_prediction_does_not_count_for_other_micro_batches(name, other, tmp_path):
    save_plan(config(tmp_path), evaluate(FLEET, PLAN))
    assert planned(config(tmp_path, **{name: other})) is None


def test_a_prediction_of_another_plan_or_damaged_file_does_not_count(tmp_path):
    made = config(tmp_path)
    save_plan(made, evaluate(FLEET, PLAN))
    other = [{**PLAN[0], "end": 5}, {**PLAN[1], "start": 5}]
    assert planned(made.with_changes(shard_plan=other)) is None
    file = made.output_dir / PLAN_FILE
    kept = json.loads(file.read_text())
    for broken in (b"{", json.dumps({**kept, "pipeline": {"forward_s": [1]}}).encode()):
        file.write_bytes(broken)
        assert planned(made) is None


def test_a_plan_that_cannot_be_written_is_an_error_with_the_file(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ResourceError, match=PLAN_FILE):
        save_plan(config(tmp_path), evaluate(FLEET, PLAN))
