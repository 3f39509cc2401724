from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from hetero_framework.planner import Result, evaluate
from hetero_framework.planner.result import Alone
from tests.unit.planner.fleets import device, fleet_of

HALVES = [{"id": "local", "start": 0, "end": 4}, {"id": "box", "start": 4, "end": 8}]


@pytest.fixture(scope="module")
def result() -> Result:
    return evaluate(fleet_of(device("local"), device("box")), HALVES)


@pytest.mark.parametrize(
    ("step_s", "bound_s", "proved", "gap"),
    [
        (1.2, 1.0, False, pytest.approx(0.2)),
        (1.2, 1.2, False, 0.0),
        (1.2, 1.0, True, 0.0),  # of its kind the best: what is left is the bound's fault
        (1.2, 0.0, False, 1.0),  # nothing is known
        (0.0, 0.0, False, 0.0),
    ],
)
def test_the_gap_is_a_share_of_the_bound(
    result: Result, step_s: float, bound_s: float, proved: bool, gap: float
) -> None:
    changed = replace(result, predicted_step_s=step_s, lower_bound_s=bound_s, proved_optimal=proved)
    assert changed.gap == gap


def test_as_json_it_has_all_but_the_schedule(result: Result) -> None:
    found = result.to_dict()
    for name in (
        "shard_plan", "gradient_checkpointing", "max_in_flight", "predicted_step_s",
        "lower_bound_s", "gap", "proved_optimal", "devices", "unused", "why", "advice", "seconds",
    ):  # fmt: skip
        assert name in found
    assert set(found) == {one.name for one in fields(Result)} - {"schedule"} | {"gap"}
    again = json.loads(json.dumps(found))
    assert again == found
    assert again["shard_plan"] == HALVES
    assert {k: again["devices"][1][k] for k in ("id", "layers")} == {"id": "box", "layers": 4}
    assert set(again["devices"][0]) == {one.name for one in fields(result.devices[0])}
    assert again["in_flight"] == list(result.in_flight)


def test_whoever_could_do_it_alone_may_be_nobody(result: Result) -> None:
    assert replace(result, alone=None).to_dict()["alone"] is None
    assert replace(result, alone=Alone("box", 2.5)).to_dict()["alone"] == {
        "id": "box",
        "step_s": 2.5,
    }


def test_the_pipeline_is_what_was_simulated(result: Result) -> None:
    assert result.pipeline is result.schedule.profile
    assert result.pipeline.forward_s == pytest.approx((0.004, 0.004))
