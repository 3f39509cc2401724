"""Files whose tensors or settings contradict each other, in every form: each refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import Checkpoint
from tests.extras.stored_formats import writing
from tests.extras.stored_formats.test_forms import dense, stored

__all__ = ["dense"]

M = "model.layers.1.mlp.down_proj"  # [192, 320]
W, S = f"{M}.weight", f"{M}.weight_scale_inv"
E = "model.layers.1.mlp.experts.down_proj"
Q = f"{M}._weight"
GPTQ, SORTED, AWQ, BLOCKS = "gptq 4", "gptq 4 in order of importance", "awq", "fp8 in blocks"
TENSOR, ROWS, FP4 = "fp8 by tensor", "fp8 by row", "mxfp4"
AO, AR = "torchao int4", "auto-round of gptq"
NV, OPT = "modelopt nvfp4, without its name", "modelopt fp8"
Change = Callable[[Tensor], Tensor]


def first(value: float) -> Change:
    return lambda t: t.clone().index_fill_(0, torch.tensor([0]), value)


def half(axis: int) -> Change:
    return lambda t: t.narrow(axis, 0, t.shape[axis] // 2)


def doubled(axis: int) -> Change:
    return lambda t: torch.cat([t, t], axis)


def torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"quant_type": {"default": {"_type": name, "_data": data}}}


def per_module(own: Any) -> dict[str, Any]:
    return torchao("FqnToConfig", fqn_to_config={r"re:model\.layers\.1.*": own})


INT4 = torchao("Int4WeightOnlyConfig", group_size=64)["quant_type"]["default"]
# Form, tensor and its change, or settings.
CASES: list[tuple[str, str, Any]] = [
    (GPTQ, f"{M}.qweight", half(0)),
    (GPTQ, f"{M}.qweight", half(1)),
    (GPTQ, f"{M}.qweight", doubled(0)),
    (GPTQ, f"{M}.qweight", Tensor.t),
    (GPTQ, f"{M}.qweight", lambda t: t[None]),
    (GPTQ, f"{M}.qweight", lambda t: t.to(torch.int64)),
    (GPTQ, f"{M}.scales", Tensor.t),
    (GPTQ, f"{M}.scales", half(1)),
    (GPTQ, f"{M}.scales", half(0)),
    (GPTQ, f"{M}.scales", lambda t: t[0, 0]),
    (GPTQ, f"{M}.scales", first(float("inf"))),
    (GPTQ, f"{M}.scales", lambda t: t.to(torch.int32)),
    (GPTQ, f"{M}.qzeros", half(1)),
    (GPTQ, f"{M}.qzeros", Tensor.t),
    (GPTQ, f"{M}.g_idx", half(0)),
    (GPTQ, f"{M}.g_idx", Tensor.float),
    (GPTQ, f"{M}.g_idx", first(-1)),
    (GPTQ, f"{M}.g_idx", lambda t: t * 0),
    (GPTQ, f"{M}.g_idx", lambda t: t.flip(0)),
    (SORTED, f"{M}.g_idx", lambda t: t // 2),
    (SORTED, f"{M}.g_idx", None),
    (GPTQ, "group_size", {"group_size": 64}),
    (GPTQ, "group_size", {"group_size": -1}),
    (GPTQ, "group_size", {"group_size": 0}),
    (GPTQ, "group_size", {"group_size": "32"}),
    (GPTQ, "q_group_size", {"q_group_size": 64}),
    (GPTQ, "w_bit", {"w_bit": 8}),
    (GPTQ, "bits", {"bits": 8}),
    (GPTQ, "bits", {"bits": 5}),
    (GPTQ, "bits", {"bits": None}),
    (GPTQ, "checkpoint_format", {"format": "gptq_v2"}),
    (GPTQ, "checkpoint_format", {"checkpoint_format": "marlin"}),
    (GPTQ, "method", {"method": "awq"}),
    (GPTQ, "zeros", {"sym": True}),
    (GPTQ, "pack_dtype", {"pack_dtype": "int16"}),
    (GPTQ, "rotation", {"rotation": "hadamard"}),
    (GPTQ, "adapter", {"adapter": {"rank": 8}}),
    (GPTQ, "is_marlin_format", {"is_marlin_format": True}),
    (GPTQ, "bits", {"dynamic": {"+:.*down_proj": {"bits": 8}}}),
    (GPTQ, "bits", {"dynamic": {".*down_proj": {"bits": 7}}}),
    (GPTQ, "leaves its module out", {"dynamic": {r"-:.*layers\.1\..*": {}}}),
    (GPTQ, "modules_to_not_convert", {"modules_to_not_convert": "lm_head"}),
    (GPTQ, "num_bits", {"num_bits": 8}),
    (GPTQ, "groupsize", {"groupsize": 64}),
    (GPTQ, "layer_config", {"layer_config": {M: {"bits": 8}}}),
    (GPTQ, "patterns", {"dynamic": {"+:(": {"bits": 4}}}),
    (AWQ, f"{M}.qweight", half(0)),
    (AWQ, f"{M}.qweight", Tensor.t),
    (AWQ, f"{M}.scales", Tensor.t),
    (AWQ, f"{M}.qzeros", None),
    (AWQ, f"{M}.qzeros", Tensor.float),
    (AWQ, "group_size", {"group_size": 32}),
    (AWQ, "version", {"version": "gemv"}),
    (AWQ, "format", {"format": "gemv"}),
    (AWQ, "backend", {"backend": "llm-awq"}),
    (AWQ, "bits", {"bits": 8}),
    (AWQ, "w_bit", {"w_bit": 3}),
    (AWQ, "zero_point", {"zero_point": False}),
    (AR, "data_type", {"data_type": "mx_fp"}),
    (AR, "extra_config", {"extra_config": {M: {"group_size": 64}}}),
    (AR, "leaves its module out", {"extra_config": {M: {"bits": 16}}}),
    (AR, "sym", {"sym": True}),
    (AR, "extra_config", {"extra_config": [M]}),
    (AR, "extra_config", {"extra_config": {M: {"bits": "16"}}}),
    (AR, "checkpoint_format", {"checkpoint_format": "gptq_v2"}),
    (BLOCKS, S, lambda t: torch.ones(192, 1)),
    (BLOCKS, S, lambda t: torch.ones(192)),
    (BLOCKS, S, lambda t: t.to(torch.int32)),
    (BLOCKS, S, lambda t: -t),
    (BLOCKS, W, Tensor.t),
    (BLOCKS, W, lambda t: t.view(torch.uint8)),
    (BLOCKS, W, lambda t: t[None, None]),
    (BLOCKS, "expert_dtype", {"expert_dtype": "int4"}),
    (BLOCKS, "stored as F8_E4M3", {"fmt": "e5m2"}),
    (BLOCKS, "scale_fmt", {"scale_fmt": "e4m3"}),
    (BLOCKS, "does not divide", {"weight_block_size": [64, 128]}),
    (BLOCKS, "does not divide", {"weight_block_size": None}),
    (BLOCKS, "weight_block_size", {"weight_block_size": [True, 128]}),
    (BLOCKS, "leaves its module out", {"modules_to_not_convert": [M]}),
    (BLOCKS, "leaves its module out", {"ignored_layers": ["down_proj"]}),
    (BLOCKS, "ignored_layers", {"ignored_layers": ["a"], "modules_to_not_convert": ["b"]}),
    (BLOCKS, "dynamic", {"dynamic": {"+:.*": {"bits": 4}}}),
    (TENSOR, S, lambda t: torch.ones(1, 320)),
    (TENSOR, S, lambda t: torch.ones(3, 320)),
    (ROWS, f"{W}_scale", Tensor.t),
    (ROWS, W, lambda t: t.view(torch.int8)),
    (ROWS, f"{W}_scale", lambda t: torch.ones(1)),
    (ROWS, f"{W}_scale", lambda t: torch.ones(192, 1, dtype=torch.uint8)),
    (OPT, f"{W}_scale", lambda t: torch.ones(192)),
    (OPT, "quant_algo", {"quant_algo": "NVFP4"}),
    (OPT, "quant_algo", {"quant_algo": None}),
    (OPT, "num_bits", {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}),
    (OPT, "type", {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}),
    (OPT, "config_groups", {"config_groups": {"group_0": {}}}),
    (NV, "group_size", {"config_groups": {"group_0": {"weights": {"group_size": 32}}}}),
    (OPT, "exclude_modules", {"exclude_modules": 5}),
    (OPT, "weight_block_size", {"weight_block_size": [64, 64]}),
    (OPT, "leaves its module out", {"exclude_modules": ["model.layers.1*"]}),
    (NV, f"{W}_scale", lambda t: t.float()),
    (NV, f"{W}_scale", half(1)),
    (NV, f"{W}_scale_2", None),
    (NV, f"{W}_scale_2", lambda t: torch.ones(2)),
    (NV, "group_size", {"group_size": 32}),
    (FP4, f"{E}_blocks", half(3)),
    (FP4, f"{E}_blocks", lambda t: t.to(torch.int8)),
    (FP4, f"{E}_scales", half(0)),
    (FP4, "leaves its module out", {"modules_to_not_convert": ["model.layers.*.mlp"]}),
    (AO, f"{Q}_scale", Tensor.t),
    (AO, f"{Q}_zero_point", half(0)),
    (AO, f"{Q}_zero_point", lambda t: t * float("nan")),
    (AO, f"{Q}_zero_point", lambda t: t.to(torch.int32)),
    (AO, f"{Q}_qdata", lambda t: t.to(torch.int32)),
    (AO, f"{Q}_qdata", lambda t: t.view(torch.float8_e4m3fn)),
    (AO, "does not divide", torchao("Int4WeightOnlyConfig", group_size=32)),
    (AO, "quant_type", torchao("Int8WeightOnlyConfig", group_size=64)),
    (AO, "leaves its module out", per_module(None)),
    (AO, "does not divide", per_module({**INT4, "_data": {"group_size": 32}})),
]


def rewritten(form: str, what: str, change: Any, dense: dict[str, Path], folder: Path) -> Any:
    """Write a form with a tensor or settings changed. The weights that it stood for."""
    meant = stored(form, dense, folder)
    if isinstance(change, dict):
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        return meant
    tensors = load_file(folder / "model.safetensors")
    value = tensors.pop(what)
    if change is not None:
        tensors[what] = change(value).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return meant


def weight(folder: Path) -> dict[str, Tensor]:
    with Checkpoint(str(folder)).slices(lambda name: name.startswith((M, E))) as parts:
        return {name: part[...] for name, part in parts.items()}


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_contradiction_is_refused_by_name(case, dense, tmp_path):
    form, what, change = CASES[case]
    rewritten(form, what, change, dense, tmp_path / "x")
    with pytest.raises(ModelError) as caught:
        weight(tmp_path / "x")
    said = str(caught.value)
    assert what in said if isinstance(change, dict) else M in said or E in said, said
    assert "quantization_config" in said or "model.safetensors" in said


SAME: list[tuple[str, dict[str, Any]]] = [
    (NV, {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}),
    (OPT, {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}),
    (GPTQ, {"sym": False, "format": "gptq", "method": "gptq", "pack_dtype": "int32"}),
    (GPTQ, {"q_group_size": 32, "w_bit": 4, "damp_percent": 0.1, "meta": {"quantizer": "x"}}),
    (GPTQ, {"bits": 8, "dynamic": {"+:.*_proj": {"bits": 4}, "-:.*": {}}}),
    (GPTQ, {"dynamic": {"-:.*lm_head": {}}}),
    (GPTQ, {"group_size": None}),
    (AWQ, {"zero_point": True, "sym": True, "format": "GEMM", "modules_to_not_convert": ["gate"]}),
    (AR, {"group_size": 32, "sym": False, "data_type": "int", "iters": 200}),
    (BLOCKS, {"fmt": "e4m3", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}),
    (TENSOR, {"weight_block_size": None, "activation_scheme": "static"}),
    (OPT, {"exclude_modules": ["lm_head", "model.layers.0*"], "kv_cache_quant_algo": "FP8"}),
    (AO, torchao("Int4WeightOnlyConfig", group_size=64)),
    (AO, per_module(INT4)),
]


@pytest.mark.parametrize("case", range(len(SAME)))
def test_settings_that_agree_read_the_same_weights(case, dense, tmp_path):
    form, settings = SAME[case]
    meant = rewritten(form, "", settings, dense, tmp_path / "x")
    made = weight(tmp_path / "x")
    assert torch.equal(made[W], meant[W].float())


@pytest.mark.parametrize("inputs", [320, 336])
def test_the_last_group_of_inputs_may_be_smaller(inputs, tmp_path):
    numbers = torch.randint(0, 16, (inputs, 64), generator=torch.Generator().manual_seed(0))
    scales = torch.rand(3, 64).half() + 0.5
    order = torch.arange(inputs) // 128
    tensors = {
        f"{M}.qweight": writing.pack(numbers, 4),
        f"{M}.qzeros": writing.pack(torch.full((64, 3), 7), 4).t().contiguous(),
        f"{M}.scales": scales,
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "gptq", "bits": 4, "sym": True}  # groups of 128 by default
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert torch.equal(weight(tmp_path)[W], ((numbers - 8).half() * scales[order]).t().float())


@pytest.mark.parametrize(
    ("scales", "along"), [((2, 1, 96), 2), ((2, 96, 1), 2), ((2, 64, 1), 1), ((2, 64), 1)]
)
def test_experts_of_fbgemm_have_scales_of_their_rows_or_columns(scales, along, tmp_path):
    values = torch.randn(2, 64, 96).to(torch.float8_e4m3fn)
    factors = torch.rand(scales) + 0.1
    save_file({E: values, f"{E}_scale": factors}, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fbgemm_fp8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    shape = (2, 1, 96) if along == 2 else (2, 64, 1)
    assert torch.equal(weight(tmp_path)[E], values.float() * factors.reshape(shape))
