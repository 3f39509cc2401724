"""Other objectives over islands that sum their gradients: the islands stay one training."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.extras.classification.test_classification_runs import KINDS, save_pairs, save_rows
from tests.extras.islands.test_islands import island, lines, quorums, train_pair
from tests.extras.vision import seeing
from tests.integration.test_parity import LORA, assert_same, weights
from tests.pools import Notes

__all__ = ["quorums"]  # the fixture of all islands

pytestmark = [
    pytest.mark.xdist_group("pool"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.long,
]
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo"},
    "dpo_in_each_step": {"objective": "dpo", "precompute_ref_log_probs": False},
    "reward": {"objective": "reward"},
    "classification": {"objective": "classification"},
    "pictures": {"objective": "image-text-to-text"},
    "pairs_with_pictures": {"objective": "image-dpo"},
}


@pytest.mark.parametrize("case", CASES)
def test_islands_of_any_objective_are_one_training(case, pool, llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    training, model = CASES[case], llama
    if "pictures" in case:
        model = seeing.save_llava(tmp_path / "llava", 6)
        pairs = training["objective"] == "image-dpo"
        rows = (seeing.save_pairs if pairs else seeing.save_rows)(
            tmp_path / "rows", count=11 if pairs else 21
        )
    elif training["objective"] == "classification":
        rows = save_rows(tmp_path / "rows.jsonl", KINDS["classes"][0])
    else:
        rows = save_pairs(tmp_path / "rows.jsonl")
    settings: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(rows), "max_length": 64},
        "adapter": {**LORA, "lora_dropout": 0.0},
    }
    whole = island(pool, tmp_path / "whole", [], settings, accumulation=4, training=training)
    train(Config.from_dict(whole), progress=Notes())
    share: dict[str, Any] = {"accumulation": 4, "training": training}  # of the whole step
    train_pair(pool, tmp_path, ([2, 4], [3]), settings, section={"share": 1}, **share)
    a, b = tmp_path / "a", tmp_path / "b"
    assert lines(a, "step", "loss", "grad_norm") == lines(b, "step", "loss", "grad_norm")
    assert_same(weights(a), weights(b))
    expected = lines(tmp_path / "whole", "loss")
    for ours, theirs in zip(lines(a, "loss"), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
