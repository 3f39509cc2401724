"""Full training with layers in host memory, in runs that are killed, or resumed otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.extras.host_memory.test_runs import SAVED, run
from tests.integration.test_parity import assert_same, weights
from tests.pools import Notes, read_metrics
from tests.samples import DEVICE, save_llama

pytestmark = [
    pytest.mark.usefixtures("nothing_left_here"),
    pytest.mark.skipif(DEVICE == "cpu", reason="the CPU and the machine have one memory"),
    pytest.mark.timeout(700),
]
FULL: dict[str, Any] = {"full": True, "fp16": True, "gradient_checkpointing": True}
KILLS = ("backward@3", "optimizer-half@4", "commit-done@6")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def whole_in_full(tied, texts, tmp_path_factory):
    """The undisturbed full training of a model whose head, a stage of its own, is its embedding."""
    output = tmp_path_factory.mktemp("full") / "run"
    train(run(output, tied, texts, 0, **FULL))
    return output


def test_a_worker_whose_trained_layers_visit_is_killed_at_every_moment_of_a_step(
    tied, texts, tmp_path, whole_in_full, monkeypatch
):
    points = ",".join(f"worker-1/{point}" for point in KILLS)
    monkeypatch.setenv("HETERO_FAILPOINT", points)
    monkeypatch.setenv("HETERO_FAILPOINT_ONCE", str(tmp_path))
    notes = Notes()
    train(run(tmp_path / "run", tied, texts, 6, **FULL), progress=notes)
    assert len([line for line in notes.lines if "training goes on after step" in line]) == 3
    assert read_metrics(tmp_path / "run") == read_metrics(whole_in_full)
    assert_same(weights(tmp_path / "run"), weights(whole_in_full))


def test_full_training_goes_on_with_other_layers_in_host_memory(
    tied, texts, tmp_path, whole_in_full
):
    output = tmp_path / "run"
    train(run(output, tied, texts, 4, **FULL, **SAVED))
    for step, offload in ((4, 6), (6, 0)):
        train(run(output, tied, texts, offload, **FULL, **SAVED), resume=step)
        assert read_metrics(output) == read_metrics(whole_in_full)
        assert_same(weights(output), weights(whole_in_full))


def test_stages_of_one_worker_in_turn_have_trained_layers_that_visit(
    tied, texts, tmp_path, whole_in_full
):
    raw = run(tmp_path / "run", tied, texts, 0, **FULL).to_dict()
    ends = (("local", 0, 0), (1, 3, 3), ("local", 4, 0), (1, 6, 2), ("local", 6, 0))
    raw["shard_plan"], start = [], 0
    for owner, end, offload in ends:
        raw["shard_plan"].append({"id": owner, "start": start, "end": end, "offload": offload})
        start = end
    train(Config.from_dict(raw))
    assert read_metrics(tmp_path / "run") == read_metrics(whole_in_full)
    assert_same(weights(tmp_path / "run"), weights(whole_in_full))
