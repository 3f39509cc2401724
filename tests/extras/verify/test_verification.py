"""Verification of a configured model, or of an architecture, and the table of architectures."""

from __future__ import annotations

import pytest

from hetero_framework.config import Config
from hetero_framework.errors import ArchitectureError
from hetero_framework.extras.padding_free.packing import Packing
from hetero_framework.extras.verify.architectures import verify_all, write_architectures
from hetero_framework.extras.verify.verification import Verified, ranges_from_cuts, verify_model
from hetero_framework.models.cut.tiny import tiny_config
from tests.samples import machines_here, save_llama


def test_verify_uses_the_plan_of_a_configuration(tmp_path):
    fields = {k: v for k, v in tiny_config("llama").to_dict().items() if k != "dtype"}
    raw = {"version": "1", **machines_here(("local", 2), (1, 6)), "model": {"from_config": fields}}
    raw["shard_plan"][1]["is_last"] = True
    config = Config.from_dict(raw, tmp_path)
    result = verify_model(config)
    assert [(s.start, s.end) for s in result.stages] == [(0, 2), (2, 6)]
    other = verify_model(config, cuts=[1, 5])
    assert [(s.start, s.end) for s in other.stages] == [(0, 1), (1, 5), (5, 6)]


def test_cuts_that_do_not_fit_are_refused():
    for cuts in ([4, 2], [7], [3, 3]):
        with pytest.raises(ArchitectureError, match="6 layers"):
            ranges_from_cuts(cuts, 6)
    assert [rng.end for rng in ranges_from_cuts([0, 6], 6)] == [0, 6, 6]


def test_verify_refuses_a_configured_model_that_needs_padding(tmp_path):
    fields = {k: v for k, v in tiny_config("bloom").to_dict().items() if k != "dtype"}
    model = {"from_config": fields, "tokenizer": "a"}
    data = {"train": "a.jsonl", "padding_free": True}
    raw = {**machines_here(("local", 3), (1, 6)), "model": model, "data": data}
    result = verify_model(Config.from_dict(raw, tmp_path))
    assert result.verdict == "refused"
    assert result.reason.startswith("data.padding_free: samples that share a row")


def test_verify_takes_the_configured_weights_where_they_fit(tmp_path):
    save_llama(tmp_path / "model", layers=3)
    raw = {**machines_here(("local", 1), (1, 3)), "model": {"name_or_path": "model"}}
    result = verify_model(Config.from_dict(raw, tmp_path))
    assert (result.subject, result.verdict) == ("the model itself", "bit-equal")


def test_architecture_whose_blocks_run_in_turns_is_refused():
    (result,) = verify_all(model_types=["hrm_text"])
    assert result.verdict == "refused"
    assert "no list of blocks" in result.reason
    assert result.reason.endswith("would have to go through a stage several times")


def test_table_lists_every_result_with_its_reason(tmp_path):
    results = [
        Verified("zeta", "bit-equal", packing=Packing("per_sample")),
        Verified("iota", "bit-equal", packing=Packing(None)),
        Verified("theta", "bit-equal", packing=Packing(None, "samples meet")),
        Verified("eta", "bit-equal", half="differs by 1", pictures="admitted"),
        Verified("beta", "within tolerance", "most in x", weight_difference=2e-6),
        Verified("alpha", "refused", "Layer 1 receives a | b", pictures="refused: a | b"),
        Verified("zeta", "bit-equal", half="differs by 2", task="sequence-classification"),
        Verified("iota", "bit-equal", task="sequence-classification"),
        Verified("kappa", "refused", "no blocks", task="sequence-classification"),
        Verified("kappa", "bit-equal", task="token-classification"),
        Verified("lambda", "bit-equal", task="image-classification"),
        Verified("mu", "refused", "no chain", task="image-classification"),
    ]
    path = tmp_path / "docs" / "architectures.md"
    write_architectures(results, path)
    text = path.read_text("utf-8")
    assert "5 of 6 pass" in text
    assert "4 of those that pass are equal to the bit; the others:\n" in text
    assert "| `eta` | differs by 1 |" in text
    assert "2 can be trained without padding" in text
    assert "by itself:\n\n`zeta`\n" in text
    assert "one long sample:\n\n`iota`\n" in text
    assert "| `beta` | 0.0e+00 | 0.0e+00 | 2.0e-06 | most in x |" in text
    assert "Of 2 classes 1 are admitted and 1 refused; 0 cannot be tried here." in text
    assert "| `alpha` | refused: a / b |\n| `eta` | admitted |" in text
    assert "| `alpha` | Layer 1 receives a / b |" in text
    assert "2 of 3 architectures are bit-equal with `reward`, `classification`." in text
    assert "| bit-equal | bit-equal | no class | `iota`, `zeta` |" in text
    assert "With `image-classification` 1 of 2 pass." in text
    assert "dropout included.\n\n`lambda`\n" in text
    assert "| `mu` (`image-classification`) | no chain |" in text
    assert "| no class | refused | bit-equal | `kappa` |" in text
    assert "| `zeta` (`reward`, `classification`) | differs by 2 |" in text
    assert "| `kappa` (`reward`, `classification`) | no blocks |" in text


def test_progress_is_called_for_each_architecture():
    seen: list[Verified] = []
    results = verify_all(seen.append, ["biogpt", "hrm_text"])
    assert seen == results
    assert [(r.model_type, r.task, r.verdict) for r in results] == [
        ("biogpt", "causal-lm", "bit-equal"),
        ("hrm_text", "causal-lm", "refused"),
        ("biogpt", "sequence-classification", "bit-equal"),
        ("biogpt", "token-classification", "bit-equal"),
    ]
