"""Results of a model that is stored in fewer bits: quantised anew, written, merged, loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hetero_framework.config import AdapterConfig
from hetero_framework.extras.exporting.merge import merge_adapter
from hetero_framework.models.files.export import CARD, OutputDirectory
from hetero_framework.trainer.coordinator import train
from hetero_framework.trainer.outputs import load_result
from tests.cases import seldom
from tests.extras.exporting.test_merge import saved_adapter
from tests.extras.stored_formats.test_training import saved
from tests.integration.test_parity import assert_same, weights
from tests.integration.test_resume import stop_after
from tests.unit.adapter_helpers import keep_unpacked, shards
from tests.unit.models.files.test_export import load_cleanly


def packed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model that bitsandbytes has quantised, its statistics among them."""
    found = dict(model.state_dict())
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            packed = state.as_dict(packed=True).items()
            found |= {f"{name}.weight.{key}": value for key, value in packed}
    return found


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantising_anew_is_bitsandbytes_quantisation_of_the_full_weights(kind, tmp_path):
    stored, full = saved("fp8 by row", tmp_path)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    nf4 |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    how = {"device_map": {"": "cpu"}}
    how["quantization_config"] = BitsAndBytesConfig(
        **({"load_in_8bit": True} if kind == "int8" else nf4)
    )
    whole = AutoModelForCausalLM.from_pretrained(full, **how)
    keep_unpacked(whole)
    expected, held = packed(whole), {}
    for shard in shards(stored, 0, 2, 6, attach=False, quantization=kind):
        held |= packed(shard.model)
    names = [name for name in expected if ".mlp." in name or ".self_attn." in name]
    assert len(names) > 6 * 7
    for name in names:
        assert torch.equal(held[name], expected[name]), name


@pytest.mark.parametrize("case", seldom(["fp8 by tensor", "mxfp4"], "fp8 by tensor"))
def test_merging_and_loading_use_the_full_weights(case, tmp_path):
    stored, full = saved(case, tmp_path)
    settings = AdapterConfig(target_modules=("q_proj", "v_proj"))
    adapter = saved_adapter(stored, tmp_path / "adapter", settings, layers=6)
    about = json.loads((adapter / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(stored)
    for base, name in ((stored, "merged"), (full, "expected")):
        merge_adapter(adapter, str(base), OutputDirectory(tmp_path / name))
    assert_same(tensors(tmp_path / "merged"), tensors(tmp_path / "expected"))
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    form = case.partition(" ")[0]
    assert f"- {form}; this was made from its weights" in (tmp_path / "merged" / CARD).read_text()
    assert "Stored form" not in (tmp_path / "expected" / CARD).read_text()
    load_cleanly(tmp_path / "merged")
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(full), adapter)
    ids = torch.arange(3, 20)[None]
    for given in ({}, {"dtype": "auto"}, {"dtype": torch.float32}):
        loaded = load_result({"adapter": adapter}, **given)
        assert torch.equal(loaded(input_ids=ids).logits, expected(input_ids=ids).logits)
    half = load_result({"adapter": adapter}, dtype="bfloat16").get_base_model()
    assert half.lm_head.weight.dtype == torch.bfloat16


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_cleanly(folder).state_dict())


def test_a_full_result_has_full_weights_and_resumes_to_the_bit(alone, tmp_path):
    stored, full = saved("fp8 by tensor", tmp_path)
    training = {"save_strategy": "steps", "save_steps": 2}

    def config(name: str, base: Path) -> Any:
        plan = [{"id": "local", "start": 0, "end": 6}]
        model = {"name_or_path": str(base)}
        return alone(name, training=training, model=model, shard_plan=plan)

    train(config("whole", stored))
    train(config("other", full))
    stop_after(config("parts", stored), 3)
    train(config("parts", stored), resume=2)
    for other in ("other", "parts"):
        assert_same(weights(tmp_path / "whole"), weights(tmp_path / other))
    assert "quantization_config" not in (tmp_path / "whole/model/config.json").read_text()
    card = (tmp_path / "whole" / "model" / CARD).read_text()
    assert "- fp8; this was made from its weights in full precision" in card
    load_cleanly(tmp_path / "whole" / "model")
