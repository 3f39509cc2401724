"""Checkpoints that torchao wrote: the weights are those that it makes of them.

It writes in a process of its own: a process that imports it warns and takes long.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hetero_framework.errors import ModelError
from tests.extras.stored_formats import writing
from tests.extras.stored_formats.test_forms import LLAMA, shards

WRITE = """
import sys
import torch, torchao.quantization as q
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, TorchAoConfig
from tests.extras.stored_formats.test_forms import LLAMA

folder, form = sys.argv[1:]
config = {
    "int8": lambda: q.Int8WeightOnlyConfig(),
    "int8 in groups": lambda: q.Int8WeightOnlyConfig(granularity=q.PerGroup(32)),
    "int8 with zeros": lambda: q.IntxWeightOnlyConfig(
        weight_dtype=torch.int8,
        granularity=q.PerAxis(0),
        mapping_type=q.quant_primitives.MappingType.ASYMMETRIC,
    ),
    "int4 in bytes": lambda: q.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=q.PerGroup(32)
    ),
    "float8": lambda: q.Float8WeightOnlyConfig(),
    "float8 with int8 in places": lambda: q.FqnToConfig(
        {"re:.*mlp.*": q.Int8WeightOnlyConfig(), "_default": q.Float8WeightOnlyConfig()}
    ),
}[form]()
torch.manual_seed(0)
AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16).save_pretrained(folder + "/dense")
model = AutoModelForCausalLM.from_pretrained(
    folder + "/dense", dtype=torch.bfloat16, quantization_config=TorchAoConfig(config)
)
model.save_pretrained(folder + "/x")
for dtype in (torch.bfloat16, torch.float32):
    full = {}
    for name, weight in model.state_dict().items():
        if hasattr(weight, "target_dtype"):
            weight = weight.dequantize()
        elif hasattr(weight, "qdata"):
            weight = weight.dequantize(dtype)
        full[name] = weight.to(dtype).contiguous()
    save_file(full, f"{folder}/{dtype}.safetensors")
"""


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize(
    "form",
    [
        *("int8", "int8 in groups", "int8 with zeros", "int4 in bytes"),
        *("float8", "float8 with int8 in places"),
    ],
)
def test_weights_are_those_of_the_library(form, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-c", WRITE, str(tmp_path), form], check=True)
    monkeypatch.setattr("hetero_framework.extras.stored_formats.form._NUMBERS_AT_ONCE", 50)
    for dtype in (torch.bfloat16, torch.float32):
        held = shards(tmp_path / "x", dtype, 1)
        full = load_file(tmp_path / f"{dtype}.safetensors")
        assert full.keys() == held.keys()
        for name, weight in held.items():
            assert torch.equal(weight, full[name]), name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"_scale": None}, "it has no scales: there is no .*q_proj._weight_scale"),
        (
            {"_scale": torch.ones(7, 1)},
            r"its scales have the shape \[7, 1\], which does not divide",
        ),
        ({"_scale": torch.zeros(192, 1)}, "192 of its numbers are zero"),
        ({"_zero_point": torch.zeros(1, dtype=torch.int8)}, "its zeros another"),
        ({"_qdata": torch.zeros(4, 4, 4, dtype=torch.int32)}, "I32 with scales in F32 is packed"),
        ({"_act_pre_scale": torch.ones(192)}, "are scaled by another tensor"),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(change, why, tmp_path):
    AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16).save_pretrained(tmp_path / "d")

    def store(name: str, tensor: torch.Tensor) -> Any:
        if not name.endswith("q_proj.weight"):
            return None
        parts = {"_qdata": tensor.to(torch.int8), "_scale": torch.ones(192, 1)} | change
        base = name.replace(".weight", "._weight")
        return {base + end: part.clone() for end, part in parts.items() if part is not None}, tensor

    writing.rewrite(tmp_path / "d", tmp_path / "x", {"quant_method": "torchao"}, store)
    with pytest.raises(
        ModelError, match=rf"_qdata in model\.safetensors of .*{why}|_scale in .*{why}"
    ):
        shards(tmp_path / "x", torch.bfloat16)
