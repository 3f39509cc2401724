"""The pictures of a plan show the layers of each process, and the simulated step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.extras.planner import evaluate
from hetero_framework.extras.planner.plan_drawings import plan, step
from tests.extras.planner.fleets import GB, device, fleet_of, raw_fleet
from tests.samples import plan_of

ENTRIES = plan_of(("local", 3), (1, 6), ("local", 8))
FLEET = fleet_of(device("local"), device(1, memory_bytes=6 * GB), device("box"), speed=1e8)
RESULT = evaluate(FLEET, ENTRIES, gradient_checkpointing={"1": True}, max_in_flight=4)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_row_for_each_process_with_its_layers_and_memory() -> None:
    drawn = plan(RESULT)
    layers, memory = drawn.axes
    names = {"coordinator", "worker 1", "worker box", "layers 0-2, 6-7"}
    assert names | {"0-2", "6-7", "3-5", "not used"} <= set(texts(layers))
    assert "orange: computed again backward" in drawn.texts[1].get_text()
    bars = {(bar.get_x(), bar.get_width()): bar.get_facecolor() for bar in layers.patches}
    assert {(0, 3), (6, 2), (3, 3)} <= set(bars)
    assert bars[0, 3] == bars[6, 2] != bars[3, 3]  # which alone computes again
    assert sum("GiB of" in text for text in texts(memory)) == 2
    assert any("of 5.59 GiB" in text for text in texts(memory))
    assert "not used" in texts(memory)


def test_the_step_is_the_one_that_was_simulated() -> None:
    found = step(RESULT)
    assert found.seconds == pytest.approx(RESULT.predicted_step_s)
    assert [row.detail for row in found.rows] == ["stages 0, 2", "stage 1"]
    m = FLEET.micro_batches
    own, other = found.rows
    assert len(own.bars) == 3 * m  # forward and backward of stage 0, both at once of the last
    assert sum(bar.kind == "forward_backward" for bar in own.bars) == m
    assert len(other.bars) == 2 * m
    for row, use in zip(found.rows, RESULT.devices, strict=True):
        busy = sum(bar.ended - bar.began for bar in row.bars) / found.seconds
        assert busy == pytest.approx(use.busy)
        ordered = sorted(row.bars, key=lambda bar: bar.began)
        assert all(one.ended <= next.began + 1e-9 for one, next in itertools.pairwise(ordered))
    # Two boundaries, both ways: what one sends the other receives.
    assert len(own.sends) == len(own.receives) == len(other.sends) == len(other.receives) == 2 * m


def test_the_command_draws_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps(raw_fleet([device("local"), device(1)], speed=1e8)))
    target = tmp_path / "plan.svg"
    assert main(["plan", "--profile", str(file), "--picture", str(target)]) == 0
    assert "coordinator" in target.read_text()
    assert "Predicted step" in (tmp_path / "plan-step.svg").read_text()
    assert main(["plan", "--profile", str(file), "--picture", str(tmp_path / "plan.gif")]) == 2
    assert "there is no picture format 'gif'" in capsys.readouterr().err
    assert not (tmp_path / "plan.gif").exists()
