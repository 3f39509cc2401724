"""Runs with tensors in host memory that are killed, or resumed with other settings of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.integration.test_parity import assert_same, weights
from tests.integration.test_recovery import configuration
from tests.pools import Notes, read_metrics
from tests.samples import DEVICE

pytestmark = [
    pytest.mark.usefixtures("nothing_left_here"),
    pytest.mark.skipif(DEVICE == "cpu", reason="the CPU and the machine have one memory"),
]
AWAY = {"gradient_checkpointing": True, "activation_offloading": True, "offload_optimizer": True}
SAVED = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}


def run(
    output: Path, llama: Path, texts: Path, offload: int, *, full: bool = False, **training: Any
) -> Any:
    """A configuration whose worker has all layers, and `offload` of them in host memory. `full`:
    without an adapter."""
    raw = configuration(output, llama, texts, **training).to_dict()
    raw["adapter"] = None if full else raw["adapter"]
    raw["workers"] = raw["workers"][:1]
    raw["shard_plan"] = [
        {"id": "local", "start": 0, "end": 0},
        {"id": 1, "start": 0, "end": 6, "offload": offload},
        {"id": "local", "start": 6, "end": 6},
    ]
    return Config.from_dict(raw)


@pytest.fixture(scope="module")
def whole(llama, texts, tmp_path_factory):
    """The undisturbed run that holds everything."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train(run(output, llama, texts, 0, gradient_checkpointing=True))
    return output


def test_a_worker_that_is_killed_in_a_backward_comes_back_with_its_layers(
    llama, texts, tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("HETERO_FAILPOINT", "worker-1/backward@4")
    monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(tmp_path))
    notes = Notes()
    train(run(tmp_path / "run", llama, texts, 6, **AWAY), progress=notes)
    assert [line for line in notes.lines if "training goes on after step" in line]
    assert read_metrics(tmp_path / "run") == read_metrics(whole)
    assert_same(weights(tmp_path / "run"), weights(whole))


def test_a_run_goes_on_with_other_tensors_in_host_memory(llama, texts, tmp_path, whole):
    output = tmp_path / "run"
    train(run(output, llama, texts, 4, **AWAY, **SAVED))
    for offload, away in ((6, {}), (0, AWAY)):
        settings = {"gradient_checkpointing": True, **away, **SAVED}
        train(run(output, llama, texts, offload, **settings), resume=4 if offload else 6)
        assert read_metrics(output) == read_metrics(whole)
        assert_same(weights(output), weights(whole))
