from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from hetero_framework.extras.planner import Result, evaluate
from hetero_framework.extras.planner.result import Alone
from tests.extras.planner.fleets import device, fleet_of

HALVES = [{"id": "local", "start": 0, "end": 4}, {"id": "box", "start": 4, "end": 8}]


@pytest.fixture(scope="module")
def result() -> Result:
    return evaluate(fleet_of(device("local"), device("box")), HALVES)


def test_a_result_as_json_has_all_fields_except_the_schedule(result: Result) -> None:
    found = result.to_dict()
    for name in (
        "shard_plan", "gradient_checkpointing", "max_in_flight", "predicted_step_s",
        "devices", "unused", "why", "advice", "seconds",
    ):  # fmt: skip
        assert name in found
    assert set(found) == {one.name for one in fields(Result)} - {"schedule"} | {"lower_bound_s"}
    again = json.loads(json.dumps(found))
    assert again == found
    assert again["shard_plan"] == HALVES
    assert {k: again["devices"][1][k] for k in ("id", "layers")} == {"id": "box", "layers": 4}
    assert set(again["devices"][0]) == {one.name for one in fields(result.devices[0])}
    assert again["in_flight"] == list(result.in_flight)


def test_alone_is_none_where_no_device_could_do_it(result: Result) -> None:
    assert replace(result, alone=None).to_dict()["alone"] is None
    assert replace(result, alone=Alone("box", 2.5)).to_dict()["alone"] == {
        "id": "box",
        "step_s": 2.5,
    }


def test_the_pipeline_is_the_simulated_one(result: Result) -> None:
    assert result.pipeline is result.schedule.profile
    assert result.pipeline.forward_s == pytest.approx((0.004, 0.004))
