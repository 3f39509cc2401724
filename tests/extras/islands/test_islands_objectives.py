"""Other objectives over islands that sum their gradients: the islands stay one training."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import train
from tests.cases import seldom
from tests.extras.classification.test_classification_runs import KINDS, save_pairs, save_rows
from tests.extras.islands.test_islands import island, lines, quorums, train_islands
from tests.extras.vision import seeing
from tests.integration.test_parity import LORA, assert_same, weights
from tests.pools import Notes

__all__ = ["quorums"]  # the fixture of all islands

pytestmark = [
    pytest.mark.xdist_group("pool"),
    pytest.mark.usefixtures("nothing_left"),
]
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo"},
    "dpo_in_each_step": {"objective": "dpo", "precompute_ref_log_probs": False},
    "reward": {"objective": "reward"},
    "classification": {"objective": "classification"},
    "pictures": {"objective": "image-text-to-text"},
    "pairs_with_pictures": {"objective": "image-dpo"},
}


ONE = {"rows": 8, "accumulation": 1}  # a step is one micro-batch


@pytest.mark.parametrize("case", seldom(CASES, *(case for case in CASES if case != "dpo")))
def test_islands_of_any_objective_are_one_training(case, pool, llama, tmp_path, monkeypatch):
    """Island a has micro-batches of two, b of one; the last step of an epoch has fewer samples."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    training, model = CASES[case], llama
    if "pictures" in case:
        model = seeing.save_llava(tmp_path / "llava", 6)
        pairs = training["objective"] == "image-dpo"
        rows = (seeing.save_pairs if pairs else seeing.save_rows)(
            tmp_path / "rows", count=11 if pairs else 24
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
    if case == "pictures":
        settings["model"]["train_towers"] = True
    twos: dict[str, Any] = {"accumulation": 4, "training": training}  # of the whole step
    # Of these models, the loss of a micro-batch is the mean over its tokens.
    alike = twos if case == "pictures" else {**twos, "rows": 1, "accumulation": 8}
    one = twos if case == "pictures" else {**twos, **ONE}
    train(Config.from_dict(island(pool, tmp_path / "whole", [], settings, **one)), progress=Notes())
    a, b = {"name": "a", "share": 1}, {"name": "b", "share": 1}
    train_islands(
        {
            "a": island(pool, tmp_path / "a", [2, 4], settings, section=a, **twos),
            "b": island(pool, tmp_path / "b", [3], settings, section=b, first_worker=3, **alike),
        }
    )
    ours, theirs = (lines(tmp_path / name, "step", "loss", "grad_norm") for name in "ab")
    assert ours == theirs
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    expected = lines(tmp_path / "whole", "loss")
    for found, loss in zip(lines(tmp_path / "a", "loss"), expected, strict=True):
        assert found == pytest.approx(loss, rel=1e-5)
