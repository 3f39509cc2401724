"""Each stored form, from files to shards: the weights are those that the files stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
)

from hetero_framework import registry
from hetero_framework.errors import ModelError
from hetero_framework.extras.stored_formats.fp8 import E2M1, numbers
from hetero_framework.extras.stored_formats.gptq import Gptq
from hetero_framework.models.cut.partition import ShardRange
from hetero_framework.models.cut.shard import build_shard
from hetero_framework.models.files.weights import Checkpoint, as_loaded, read_config
from tests.cases import spread
from tests.extras.stored_formats import writing

TINY = {
    **{"vocab_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
# 192 is not a multiple of a block.
LLAMA = LlamaConfig(**TINY, hidden_size=192, intermediate_size=320)
GPT_OSS = GptOssConfig(
    **TINY, hidden_size=64, intermediate_size=96, num_local_experts=4, head_dim=16
)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
Store = Callable[[str, Tensor], Any]


def fp8(name: str, tensor: Tensor, *, end: str = "_scale_inv", height: int, width: int) -> Any:
    if not writing.is_linear(name):
        return None
    rows, columns = tensor.shape
    size = height or rows, width or columns
    values, factors, weight = writing.fp8_blocks(tensor, *size)
    return {name: values, name + end: factors}, weight


def beside(name: str, tensor: Tensor, *, store: Callable[[Tensor], writing.Stored]) -> Any:
    """Of a linear weight's tensors, with the names of its module."""
    if not writing.is_linear(name):
        return None
    parts, weight = store(tensor)
    return {name.removesuffix(".weight") + end: part for end, part in parts.items()}, weight


def experts(name: str, tensor: Tensor) -> Any:
    if not name.endswith("_proj"):
        return None
    parts, weight = writing.mxfp4(tensor)
    return {name + end: part for end, part in parts.items()}, weight


def gptq(bits: int, less: int, *, act_order: bool) -> tuple[dict[str, Any], Store]:
    store = partial(writing.gptq, bits=bits, group=32, act_order=act_order, less=less)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": act_order}
    settings["checkpoint_format"] = ["gptq_v2", "gptq"][less]
    return settings, partial(beside, store=store)


def modelopt(name: str, tensor: Tensor, *, algorithm: str) -> Any:
    if not writing.is_linear(name):
        return None
    if algorithm == "FP8":
        parts, weight = fp8(name, tensor, end="_scale", height=0, width=0)
        parts[name + "_scale"] = parts[name + "_scale"].reshape(())
    else:
        *made, weight = writing.nvfp4(tensor)
        parts = dict(zip((name, name + "_scale", name + "_scale_2"), made, strict=True))
    return parts | {name.replace("weight", "input_scale"): torch.ones(())}, weight


def auto_round(packing: str) -> tuple[dict[str, Any], Store]:
    settings = {"quant_method": "auto-round", "bits": 4, "packing_format": packing}
    settings["extra_config"] = {"lm_head": {"bits": 16}}
    less = 1 if packing == "auto_round:auto_gptq" else 0
    pack = partial(writing.gptq, bits=4, group=32, less=less)
    return settings, partial(
        beside, store=partial(writing.awq, group=64) if "awq" in packing else pack
    )


def int4(name: str, tensor: Tensor) -> Any:
    """Of torchao, as its Int4Tensor."""
    if not writing.is_linear(name):
        return None
    parts, weight = writing.int4(tensor, 64)
    return {name.replace(".weight", "._weight") + end: part for end, part in parts.items()}, weight


OPT_FP8, OPT_NVFP4 = (partial(modelopt, algorithm=name) for name in ("FP8", "NVFP4"))
FORMS: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8 in blocks": (BLOCKS, partial(fp8, height=128, width=128)),
    "fp8 by tensor": ({"quant_method": "fp8"}, partial(fp8, height=0, width=0)),
    "fp8 by row": ({"quant_method": "fbgemm_fp8"}, partial(fp8, end="_scale", height=1, width=0)),
    "gptq 2": gptq(2, 1, act_order=False),
    "gptq 3": gptq(3, 1, act_order=True),
    "gptq 4": gptq(4, 1, act_order=False),
    "gptq 4 in order of importance": gptq(4, 0, act_order=True),
    "gptq 8": gptq(8, 0, act_order=False),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        partial(beside, store=partial(writing.awq, group=64)),
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, experts),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, OPT_FP8),
    "modelopt nvfp4, without its name": ({"quant_algo": "NVFP4"}, OPT_NVFP4),
    "auto-round of gptq": auto_round("auto_round:auto_gptq"),
    "auto-round of gptq, zeros as they are": auto_round("auto_round"),
    "auto-round of awq": auto_round("auto_round:auto_awq"),
    "torchao int4": ({"quant_method": "torchao"}, int4),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Checkpoints in full precision."""
    folders = {}
    for name, config in {"llama": LLAMA, "gpt_oss": GPT_OSS}.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def stored(form: str, dense: dict[str, Path], folder: Path) -> dict[str, Tensor]:
    settings, store = FORMS[form]
    return writing.rewrite(
        dense["gpt_oss" if form == "mxfp4" else "llama"], folder, settings, store
    )


def shards(folder: Path, dtype: torch.dtype, *starts: int) -> dict[str, Tensor]:
    """The weights of all shards of a checkpoint that is cut before these layers."""
    config = read_config(str(folder), None)
    as_loaded(config)
    ends = [*starts, config.num_hidden_layers]
    held: dict[str, Tensor] = {}
    for start, end in zip([0, *starts], ends, strict=True):
        rng = ShardRange(start, end, start == 0, end == ends[-1])
        shard = build_shard(config, Checkpoint(str(folder)), rng, dtype=dtype)
        held |= dict(shard.model.named_parameters())
        assert not hasattr(shard.model.config, "quantization_config")
    return held


@pytest.mark.parametrize(("form", "dtype"), spread([*FORMS], [torch.float32, torch.bfloat16]))
def test_shards_hold_the_weights_that_the_files_stand_for(form, dtype, dense, tmp_path):
    weights = stored(form, dense, tmp_path / "stored")
    held = shards(tmp_path / "stored", dtype, 1, 2)
    assert weights.keys() <= held.keys()
    for name, weight in weights.items():
        assert torch.equal(held[name], weight.to(dtype)), name


@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("fp8 by tensor", FineGrainedFP8Config(dequantize=True)),
        ("mxfp4", Mxfp4Config(dequantize=True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_library(form, how, dtype, dense, tmp_path):
    stored(form, dense, tmp_path / "stored")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored", quantization_config=how, dtype=dtype
    )
    held = shards(tmp_path / "stored", dtype, 2)
    for name, weight in model.named_parameters():
        assert torch.equal(held[name], weight), name


def test_a_form_that_nobody_knows_is_named_with_those_that_are_known(dense, tmp_path):
    writing.rewrite(dense["llama"], tmp_path / "x", {"quant_method": "hqq"}, lambda *_: None)
    with pytest.raises(ModelError, match="'hqq', which cannot be read here; known are bitsandb"):
        read_config(str(tmp_path / "x"), None)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zeros_of_gptq_are_less_one_even_those_of_0(bits):
    most = (1 << bits) - 1
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, most + 1, (64, 32), generator=generator)
    zeros = torch.randint(0, most + 1, (2, 32), generator=generator)
    if bits == 3:  # a number may lie in two words, and each is less one by itself
        packed = writing.pack(((zeros - 1) & most).t(), bits).t()
    else:
        packed = writing.pack(zeros.t(), bits).t() - sum(1 << k for k in range(0, 32, bits))
    scales = torch.rand(2, 32, generator=generator).to(torch.float16)
    parts = {"values": writing.pack(numbers, bits), "zeros": packed, "scales": scales}
    form = Gptq({"bits": bits}, "x")
    weight = (numbers - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)
    assert torch.equal(form.rows(parts, 0, 32, torch.device("cpu")), weight.t())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fake"},
            "packing_format 'auto_round:fake'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"x": {"bits": 8}}},
            "extra_config .*; weights that all have as many bits",
        ),
    ],
)
def test_settings_that_cannot_be_read_are_named(settings, why, dense, tmp_path):
    writing.rewrite(dense["llama"], tmp_path / "x", settings, lambda *_: None)
    with pytest.raises(ModelError, match=why):
        Checkpoint(str(tmp_path / "x"))


def test_numbers_of_eight_and_four_bits_are_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        finite = codes[codes.view(dtype).float().isfinite()].view(dtype)
        made = numbers(finite, torch.device("cpu"))
        assert torch.equal(made.view(torch.int32), finite.float().view(torch.int32))
    assert int(numbers(codes.view(torch.float8_e4m3fn), torch.device("cpu")).isnan().sum()) == 2
    low, high = torch.tensor(E2M1)[codes.int() & 15], torch.tensor(E2M1)[codes.int() >> 4]
    made = numbers(codes, torch.device("cpu"))
    both = torch.stack((low, high), -1).flatten().view_as(made)
    assert torch.equal(made.view(torch.int32), both.view(torch.int32))


def test_the_page_has_every_form():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("## Checkpoints in fewer bits")[2].partition("##")[0]
    assert [name for name in registry.names("stored_formats") if f"`{name}`" not in table] == []
