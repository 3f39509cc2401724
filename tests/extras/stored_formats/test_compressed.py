"""Checkpoints that compressed-tensors wrote: the weights are those that it makes of them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, Qwen3MoeConfig
from transformers.quantizers.base import HfQuantizer

from hetero_framework import versions
from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import Checkpoint, read_config
from tests.cases import seldom, spread
from tests.extras.stored_formats import writing
from tests.extras.stored_formats.test_forms import LLAMA, TINY, shards

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

QWEN3_MOE = Qwen3MoeConfig(
    **{**TINY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96},
    **{"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
)
FP8 = {"num_bits": 8, "type": "float"}
BY_ROW = {"type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8 by row": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8 in blocks": ("float-quantized", FP8 | BLOCKS),
    "fp8 in groups": ("naive-quantized", FP8 | {"strategy": "group", "group_size": 32}),
    "int8 by row": ("int-quantized", BY_ROW | {"num_bits": 8}),
    "int8 with zeros": ("int-quantized", BY_ROW | {"num_bits": 8, "symmetric": False}),
    "int4 in groups": ("pack-quantized", INT4),
    "int4 with zeros": ("pack-quantized", INT4 | {"symmetric": False}),
    "int4 by row with zeros": ("pack-quantized", BY_ROW | {"num_bits": 4, "symmetric": False}),
    "int3 with zeros": ("pack-quantized", INT4 | {"num_bits": 3, "symmetric": False}),
    "int8 packed": ("pack-quantized", INT4 | {"num_bits": 8}),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4),
    "mxfp4": ("mxfp4-pack-quantized", MX | {"num_bits": 4}),
    "mxfp6": ("mxfp6-pack-quantized", MX | {"num_bits": 6}),
    "mxfp8": ("mxfp8-quantized", MX | {"num_bits": 8}),
}
# Of experts transformers reads these; it leaves out the zeros and NVFP4's scale of the tensor.
AS_EXPERTS = ("fp8 by tensor", "fp8 by row", "int4 in groups", "int8 packed", "mxfp4", "mxfp6")


def settings(*groups: tuple[str, dict[str, Any], list[str]], form: str = "") -> dict[str, Any]:
    """A quantization_config of groups, each its format, its arguments and what it takes."""
    return {
        "quant_method": "compressed-tensors",
        "format": form or groups[0][0],
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{k}": {"targets": targets, "weights": args} | ({"format": own} if form else {})
            for k, (own, args, targets) in enumerate(groups)
        },
        "ignore": ["lm_head"],
    }


def group(**args: Any) -> dict[str, Any]:
    """A change of the group's arguments in the settings of FP8 by tensor."""
    weights = FP8 | {"strategy": "tensor"} | args
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def compress(tensor: Tensor, form: str, given: dict[str, Any], *, exact: bool) -> writing.Stored:
    """The tensors that the library stores for a weight, and the weight that it restores from them;
    with `exact` from scales in float32."""
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    args = scheme.weights
    rows, columns = tensor.shape
    height, width = args.block_structure or (1, args.group_size or columns)
    if args.strategy == "tensor":
        height = rows
    down, across = -(-rows // height), -(-columns // width)
    padded = torch.zeros(down * height, across * width, dtype=tensor.dtype)
    padded[:rows, :columns] = tensor
    blocks = padded.unflatten(1, (across, width)).unflatten(0, (down, height)).transpose(1, 2)
    low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
    state = {"weight": tensor}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(tensor.min(), tensor.max())
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress(state, scheme)
    again = parts | {"weight_scale": parts["weight_scale"].float()} if exact else parts
    return {f".{k}": v for k, v in parts.items()}, compressor.decompress(again, scheme)["weight"]


def beside(name: str, tensor: Tensor, *, form: str, args: dict[str, Any]) -> Any:
    if not writing.is_linear(name):
        return None
    exact = form in ("float-quantized", "naive-quantized") and ".experts." in name
    parts, weight = compress(tensor, form, args, exact=exact)
    return {name.removesuffix(".weight") + end: part for end, part in parts.items()}, weight


def full(dense: Path, folder: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> Path:
    """Write a checkpoint in full precision, with these weights in this dtype."""
    folder.mkdir()
    tensors = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(dense / "config.json", folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def dense(request, tmp_path_factory):
    """A checkpoint in full precision."""
    torch.manual_seed(0)
    config = {"llama": LLAMA, "qwen3_moe": QWEN3_MOE}[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
@pytest.mark.parametrize("dtype", seldom((torch.float32, torch.bfloat16), torch.float32))
@pytest.mark.parametrize(
    ("form", "dense"), spread([*FORMATS], ["llama", "qwen3_moe"]), indirect=["dense"]
)
def test_weights_are_those_of_the_library(form, dtype, dense, tmp_path, monkeypatch):
    monkeypatch.setattr("hetero_framework.extras.stored_formats.form._NUMBERS_AT_ONCE", 1)
    name, args = FORMATS[form]
    store = partial(beside, form=name, args=args)
    weights = writing.rewrite(dense, tmp_path / "x", settings((name, args, ["Linear"])), store)
    held = shards(tmp_path / "x", dtype, 1)
    expected = shards(full(dense, tmp_path / "full", weights, dtype), dtype, 2)
    assert held.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(held[key], weight), key
    if "moe" in dense.name and form not in AS_EXPERTS:
        return
    if not hasattr(HfQuantizer, "get_load_operations"):
        return  # transformers before it made weights full while it loads
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", dtype=dtype, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for key, weight in model.named_parameters():
        assert torch.equal(held[key], weight), key


def read(dense: Path, folder: Path, given: dict[str, Any], store: Any) -> dict[str, Tensor]:
    """What shards hold of a checkpoint that is written so, after a comparison with it."""
    weights = writing.rewrite(dense, folder, given, store)
    held = shards(folder, torch.bfloat16, 2)
    expected = full(dense, folder / "full", weights, torch.bfloat16)
    for key, weight in shards(expected, torch.bfloat16).items():
        assert torch.equal(held[key], weight), key
    return held


def test_each_group_has_a_format_of_its_own(dense, tmp_path):
    groups = {
        "int4 with zeros": ["re:.*self_attn\\.(q|k)_proj$"],
        "nvfp4": ["model.layers.1.self_attn.o_proj"],
        "fp8 by row": ["Linear"],
    }

    def store(name: str, tensor: Tensor) -> Any:
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            form, args = FORMATS["int4 with zeros"]
        elif name == "model.layers.1.self_attn.o_proj.weight":
            form, args = FORMATS["nvfp4"]
        else:
            form, args = FORMATS["fp8 by row"]
        return beside(name, tensor, form=form, args=args)

    given = settings(*((*FORMATS[form], to) for form, to in groups.items()), form="mixed-precision")
    read(dense, tmp_path / "x", given, store)
    for group in given["config_groups"].values():
        group["format"] = None  # the library tells formats by the arguments
    held = shards(tmp_path / "x", torch.bfloat16)
    given["config_groups"] = {k: v for k, v in given["config_groups"].items() if k != "group_2"}
    assert held
    writing.rewrite(dense, tmp_path / "y", given, store)
    with pytest.raises(ModelError, match="no group of config_groups takes its module"):
        shards(tmp_path / "y", torch.bfloat16)


@pytest.mark.parametrize("zeros", [False, True])
def test_inputs_may_be_of_groups_that_do_not_lie_in_a_row(zeros, dense, tmp_path):
    args = INT4 | {"symmetric": not zeros}

    def store(name: str, tensor: Tensor) -> Any:
        if not writing.is_linear(name):
            return None
        order = torch.arange(tensor.shape[1]) // 32
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
        back = order.argsort(stable=True).argsort()
        ordered = tensor[:, order.argsort(stable=True)]
        parts, _ = compress(ordered, "pack-quantized", args, exact=False)
        numbers, weight = compress(ordered, "int-quantized", args, exact=False)
        parts[".weight_packed"] = pack_to_int32(numbers[".weight"][:, back], 4)
        parts[".weight_g_idx"] = order.to(torch.int32)
        base = name.removesuffix(".weight")
        return {base + end: part for end, part in parts.items()}, weight[:, back]

    given = settings(("pack-quantized", args | {"actorder": "group"}, ["Linear"]))
    dynamic = {"num_bits": 8, "dynamic": True, "strategy": "token", "actorder": "group"}
    given["config_groups"]["group_0"]["input_activations"] = dynamic
    read(dense, tmp_path / "x", given, store)

    def row(name: str, tensor: Tensor, order: Tensor) -> Any:
        if (made := beside(name, tensor, form="pack-quantized", args=args)) is None:
            return None
        return made[0] | {name.removesuffix("weight") + "weight_g_idx": order.clone()}, made[1]

    def unordered(name: str, tensor: Tensor) -> Any:
        return row(name, tensor, torch.full([tensor.shape[-1]], -1))

    read(dense, tmp_path / "none", given, unordered)
    writing.rewrite(dense, tmp_path / "short", given, partial(row, order=torch.zeros(1).int()))
    with pytest.raises(ModelError, match=r"its order have the shape \[1\], not"):
        shards(tmp_path / "short", torch.bfloat16)


def test_zeros_may_be_stored_one_by_one(dense, tmp_path):
    args = INT4 | {"symmetric": False}

    def store(name: str, tensor: Tensor) -> Any:
        if not writing.is_linear(name):
            return None
        parts, weight = compress(tensor, "pack-quantized", args, exact=False)
        numbers, _ = compress(tensor, "int-quantized", args, exact=False)
        parts[".weight_zero_point"] = numbers[".weight_zero_point"].to(torch.int8)
        return {name.removesuffix(".weight") + end: part for end, part in parts.items()}, weight

    read(dense, tmp_path / "x", settings(("pack-quantized", args, ["Linear"])), store)


def test_the_last_rows_may_be_few(tmp_path, monkeypatch):
    monkeypatch.setattr("hetero_framework.extras.stored_formats.form._NUMBERS_AT_ONCE", 1)
    config = LlamaConfig(**LLAMA.to_diff_dict() | {"intermediate_size": 10 * 32 + 8})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "d")
    form, args = FORMATS["int4 with zeros"]

    def store(name: str, tensor: Tensor) -> Any:
        return beside(name, tensor, form=form, args=args) if "gate_proj" in name else None

    read(tmp_path / "d", tmp_path / "x", settings((form, args, ["Linear"])), store)


def test_full_weights_may_have_the_scales_beside_them_that_they_were_trained_for(dense, tmp_path):
    def store(name: str, tensor: Tensor) -> Any:
        scale = {name.removesuffix(".weight") + ".weight_scale": torch.ones(1)}
        return ({name: tensor} | scale, tensor) if writing.is_linear(name) else None

    given = settings(("dense", FP8 | {"strategy": "tensor"}, ["Linear"]))
    given |= {"quant_method": "sparseml", "quantization_status": "frozen"}
    read(dense, tmp_path / "x", given, store)


def test_a_missing_package_is_named_with_the_pip_line(dense, tmp_path, monkeypatch):
    given = settings(("float-quantized", FP8 | {"strategy": "tensor"}, ["Linear"]))
    writing.rewrite(dense, tmp_path / "x", given, lambda *_: None)
    for here in (None, "0.15.0.1"):
        monkeypatch.setattr(versions, "installed", lambda package, here=here: here)
        with pytest.raises(ModelError, match=r"does not have compressed-tensors>=0\.20") as refused:
            read_config(str(tmp_path / "x"), None)
        assert refused.value.hint == "pip install 'compressed-tensors>=0.20'"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"format": "marlin-24"},
            "has format 'marlin-24' in its quantization_config; .*pack-quantized",
        ),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "neither sparse nor rotated"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "neither sparse nor rotated"),
        ({"config_groups": None}, "is none of compressed-tensors: AttributeError"),
        ({"sparsity_config": "sparse"}, "neither sparse nor rotated"),
        (group(num_bits=3), "is none of compressed-tensors: NotImplementedError"),
        (group(num_bits=0, type="int"), "has num_bits '0'"),
        (group(actorder="x"), "is none of compressed-tensors"),
        (
            group()
            | {
                "config_groups": group()["config_groups"]
                | {"b": {"targets": ["Linear"], "weights": INT4}}
            },
            "targets of one group",
        ),
    ],
)
def test_a_format_that_the_library_does_not_read_is_named(change, why, dense, tmp_path):
    given = settings(("float-quantized", FP8 | {"strategy": "tensor"}, ["Linear"])) | change
    writing.rewrite(dense, tmp_path / "x", given, lambda *_: None)
    with pytest.raises(ModelError, match=why):
        Checkpoint(str(tmp_path / "x"))


@pytest.mark.parametrize(
    ("form", "part", "change", "why"),
    [
        ("fp8 by row", "scale", lambda t: t[:-1], r"its scales have the shape \[\d+, 1\], not"),
        ("fp8 by row", "scale", lambda t: t * 0, "of its numbers are zero, infinite or NaN"),
        ("int4 with zeros", "zero_point", lambda t: t[:-1], "its zeros have the shape"),
        ("int4 with zeros", "zero_point", None, "it has no zeros"),
        ("int4 in groups", "scale", None, "it has no scales: there is no .*weight_scale"),
        ("int4 in groups", "shape", lambda t: t + 8, "its values have the shape"),
        ("int4 by row with zeros", "shape", lambda t: t * 0, "rows and columns are expected"),
        ("nvfp4", "global_scale", lambda t: t * float("nan"), "zero, infinite or NaN"),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(form, part, change, why, dense, tmp_path):
    name, args = FORMATS[form]

    def store(key: str, tensor: Tensor) -> Any:
        if (made := beside(key, tensor, form=name, args=args)) is None:
            return None
        key = key.removesuffix("weight") + f"weight_{part}"
        value = made[0].pop(key)
        return made[0] | ({key: change(value)} if change is not None else {}), made[1]

    writing.rewrite(dense, tmp_path / "x", settings((name, args, ["Linear"])), store)
    with pytest.raises(ModelError, match=rf"weight\w* in model.safetensors of the model .*{why}"):
        shards(tmp_path / "x", torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ignore": ["re:("]}, "has targets or ignore .*regular expressions"),
        (
            group(
                strategy="block", block_structure=[1, 32], num_bits=4, type="int", symmetric=False
            )
            | {"format": "pack-quantized"},
            "its zeros are stored as I32",
        ),
        (
            {
                "config_groups": {
                    "g": {
                        "targets": ["Linear"],
                        "weights": INT4 | {"symmetric": False, "actorder": "GROUP"},
                    }
                }
            },
            "it has no order",
        ),
    ],
)
def test_settings_that_contradict_a_module_are_named(change, why, dense, tmp_path):
    name, args = FORMATS["int4 with zeros"]
    store = partial(beside, form=name, args=args)
    given = settings((name, args, ["Linear"])) | change
    writing.rewrite(dense, tmp_path / "x", given, store)
    with pytest.raises(ModelError, match=why):
        shards(tmp_path / "x", torch.bfloat16)
