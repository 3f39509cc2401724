"""Errors of predictions, on metrics with known causes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.engine.schedule.simulator import Edge, Profile, simulate
from hetero_framework.engine.schedule.tuning import tune
from hetero_framework.errors import UserError
from hetero_framework.extras.observe.prediction_error import data_step, read_account, text
from hetero_framework.trainer.metrics import predicted_stages

OWNERS: list[int | str] = ["local", 1, 2]
M = 8
PREDICTED = Profile.of(
    [0.01, 0.01, 0.0],
    [0.02, 0.02, 0.03],
    edges=[Edge(0.002, 0.002, 0.0005), Edge(0.004, 0.004, 0.001, relay=0)],
)


def line(step: int, took: Profile, *, more_s: float = 0.0) -> dict[str, Any]:
    """What a run writes of a step that took the times of `took`, and so much more."""
    schedule = tune(PREDICTED, M)
    predicted = predicted_stages(schedule, {"local": 10, 1: 20, 2: 30}, OWNERS)
    activation = [0.0, *(edge.forward_s for edge in took.edges)]
    gradient = [*(edge.backward_s for edge in took.edges), 0.0]
    return {
        "step": step,
        "micro_batches": M,
        "predicted_s": simulate(PREDICTED, M, 6).seconds,
        "pipeline_s": simulate(took, M, 6).seconds + more_s,
        "stages": [
            {
                "index": k,
                "owner": owner,
                "forward_s": M * took.forward_s[k],
                "backward_s": M * took.backward_s[k],
                "activation_s": activation[k],
                "gradient_s": gradient[k],
                "peak_memory": 100 + k,
                "predicted": predicted[k],
            }
            for k, owner in enumerate(OWNERS)
        ],
    }


def write(folder: Path, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_a_step_as_predicted_needs_no_reason(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1}, line(2, PREDICTED), line(3, PREDICTED), {"step": 3, "eval": 1})
    found = read_account(tmp_path, (1, 2, 3))
    assert found is not None
    assert (found["steps"], found["causes"]) == ([2, 3], [])
    assert found["error"] == pytest.approx(0)
    assert [stage["predicted_memory"] for stage in found["stages"]] == [10, 20, 30]
    assert [stage["peak_memory"] for stage in found["stages"]] == [100, 101, 102]
    assert [*text(found)][-1] == "as predicted, within 5 %"


def test_a_slow_stage_is_named_with_its_cost(tmp_path: Path) -> None:
    slow = Profile(PREDICTED.forward_s, (0.02, 0.05, 0.03), PREDICTED.devices, PREDICTED.edges)
    write(tmp_path, line(2, slow))
    found = read_account(tmp_path, (2,))
    assert found is not None
    (cause,) = found["causes"]
    assert "stage 1 on worker 1 computed 100% slower" in cause["text"]
    assert cause["seconds"] == pytest.approx(found["measured_s"] - found["predicted_s"])
    assert found["unexplained_s"] == pytest.approx(0)
    assert any("+" in said and "stage 1" in said for said in text(found))


def test_the_prediction_of_the_plan_is_reported_beside_it(tmp_path: Path) -> None:
    write(tmp_path, {**line(2, PREDICTED), "planned_s": simulate(PREDICTED, M, 6).seconds / 1.1})
    found = read_account(tmp_path, (2,))
    assert found is not None
    [said] = [one for one in text(found) if "when the plan was made" in one]
    assert said.endswith("(+10%)")
    assert "when the plan" not in " ".join(text(found | {"planned_s": None}))


def test_a_slow_link_and_unexplained_time_are_told_apart(tmp_path: Path) -> None:
    edges = (PREDICTED.edges[0], Edge(0.04, 0.04, 0.001, relay=0))
    slow = Profile(PREDICTED.forward_s, PREDICTED.backward_s, PREDICTED.devices, edges)
    write(tmp_path, line(2, slow, more_s=0.1))
    found = read_account(tmp_path, (2,))
    assert found is not None
    told = [cause["text"] for cause in found["causes"]]
    assert told[-1] == "tensors took 10.00 times as long to come to stage 2 on worker 2"
    assert all("tensors took" in said for said in told)
    assert found["unexplained_s"] == pytest.approx(0.1)
    assert "waiting that these times do not explain" in [*text(found)][-1]


def test_before_anything_is_measured_only_memory_is_predicted() -> None:
    assert predicted_stages(None, {"local": 5}, ["local", 1]) == [{"memory": 5}, {"memory": 0}]


def test_runs_that_predict_nothing_have_no_account(tmp_path: Path) -> None:
    assert read_account(tmp_path, (1,)) is None
    write(tmp_path, {**line(2, PREDICTED), "predicted_s": None})
    assert read_account(tmp_path, (2,)) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "predicted_s": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_account(tmp_path, (2,))


def test_a_line_names_the_step_of_the_data() -> None:
    assert data_step({"step": 4}) == 4
    assert data_step({"step": 4, "island": {"samples": {}}}) == 4
    assert data_step({"step": 4, "island": {"data_step": 1}}) == 2
