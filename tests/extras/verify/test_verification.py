"""Verification of a configured model, or of an architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.verify.verification import ranges_from_cuts, verify_model
from hetero_framework.models.cut.tiny import tiny_config
from tests.samples import machines_here, save_llama


def test_verify_uses_the_plan_of_a_configuration(tmp_path: Path) -> None:
    fields = {k: v for k, v in tiny_config("llama").to_dict().items() if k != "dtype"}
    raw = {"version": "1", **machines_here(("local", 2), (1, 6)), "model": {"from_config": fields}}
    raw["shard_plan"][1]["is_last"] = True
    config = Config.from_dict(raw, tmp_path)
    result = verify_model(config)
    assert [(s.start, s.end) for s in result.stages] == [(0, 2), (2, 6)]
    other = verify_model(config, cuts=[1, 5])
    assert [(s.start, s.end) for s in other.stages] == [(0, 1), (1, 5), (5, 6)]


def test_cuts_that_do_not_fit_are_refused() -> None:
    for cuts in ([4, 2], [7], [3, 3]):
        with pytest.raises(ArchitectureError, match="6 layers"):
            ranges_from_cuts(cuts, 6)
    assert [rng.end for rng in ranges_from_cuts([0, 6], 6)] == [0, 6, 6]


def test_verify_refuses_a_configured_model_that_needs_padding(tmp_path: Path) -> None:
    fields = {k: v for k, v in tiny_config("bloom").to_dict().items() if k != "dtype"}
    model = {"from_config": fields, "tokenizer": "a"}
    data = {"train": "a.jsonl", "padding_free": True}
    raw = {**machines_here(("local", 3), (1, 6)), "model": model, "data": data}
    result = verify_model(Config.from_dict(raw, tmp_path))
    assert result.verdict == "refused"
    assert result.reason.startswith("data.padding_free: samples that share a row")


def test_verify_takes_the_configured_weights_where_they_fit(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", layers=3)
    raw = {**machines_here(("local", 1), (1, 3)), "model": {"name_or_path": "model"}}
    result = verify_model(Config.from_dict(raw, tmp_path))
    assert (result.subject, result.verdict) == ("the model itself", "bit-equal")
