"""Files whose tensors do not belong together: each refused with its file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_framework.config import ModelConfig
from hetero_framework.errors import ModelError
from hetero_framework.models.files.source import ModelSource
from hetero_framework.models.files.weights import Checkpoint
from tests.extras.stored_formats.test_forms import dense, shards, stored

__all__ = ["dense"]

Tensors = dict[str, Tensor]
MODULE = "model.layers.1.mlp.down_proj"
FP8, SCALE = f"{MODULE}.weight", f"{MODULE}.weight_scale_inv"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def first(name: str, value: float) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def seven_groups(tensors: Tensors) -> None:
    tensors.pop(f"{MODULE}.g_idx")
    for end in ("scales", "qzeros"):
        tensors[f"{MODULE}.{end}"] = tensors[f"{MODULE}.{end}"][:7].contiguous()


BLOCKS, GPTQ = "fp8 in blocks", "gptq 4 in order of importance"
# Form, a change of the files, tensor and reason.
CASES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scales": (BLOCKS, without(SCALE), f"{FP8} .*F8_E4M3, and no scales"),
    "other blocks": (
        BLOCKS,
        changed(SCALE, lambda t: torch.ones(5, 7)),
        rf"{FP8} .*\[5, 7\], which does not divide \[192, 320\] into blocks of 128",
    ),
    "zero": (BLOCKS, first(SCALE, 0.0), f"{SCALE} .*1 of its numbers are zero"),
    "nan": (BLOCKS, first(SCALE, float("nan")), f"{SCALE} .*1 of its numbers are zero"),
    "full values": (BLOCKS, changed(FP8, Tensor.float), f"{FP8} .*F32, and has scales"),
    "a vector": (BLOCKS, changed(FP8, Tensor.flatten), f"{FP8} .*no matrix"),
    "no zeros": (GPTQ, without(f"{MODULE}.qzeros"), rf"{MODULE}\.qweight .*no zeros"),
    "no scales of groups": (GPTQ, without(f"{MODULE}.scales"), r"qweight .*no scales"),
    "groups that do not divide": (GPTQ, seven_groups, "320 inputs do not divide into 7"),
    "no such group": (
        GPTQ,
        first(f"{MODULE}.g_idx", 99),
        r"qweight .*1 inputs \(g_idx\) are in none of its 10",
    ),
    "zero scale of a group": (GPTQ, first(f"{MODULE}.scales", 0), r"scales .*1 of its"),
    "exponent of NaN": ("mxfp4", first(f"{EXPERTS}_scales", 255), "_scales .*1 of its"),
    "scales of fewer groups": (
        "mxfp4",
        changed(f"{EXPERTS}_scales", lambda t: t[..., :2]),
        f"{EXPERTS}_blocks .*that of its scales",
    ),
    "two forms": (
        BLOCKS,
        lambda tensors: tensors.update({f"{MODULE}.qweight": torch.zeros(2, 2)}),
        r"qweight .*belongs to another form .*'fp8'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_do_not_belong_together_are_named(case, dense, tmp_path):
    form, change, reason = CASES[case]
    folder = tmp_path / "stored"
    stored(form, dense, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = ModelConfig(name_or_path=str(folder))
    with pytest.raises(ModelError, match=reason) as caught:
        ModelSource(model, tmp_path).stored_lines()
    assert "model.safetensors" in str(caught.value)
    with pytest.raises(ModelError, match=reason):
        shards(folder, torch.float32)


@pytest.mark.parametrize("size", ["x", [128], [0, 128], [128, "x"]])
def test_blocks_that_are_no_sizes_are_refused(size, dense, tmp_path):
    stored(BLOCKS, dense, tmp_path / "stored")
    set_quantization(tmp_path / "stored", weight_block_size=size)
    with pytest.raises(ModelError, match=r"has weight_block_size .* in its quantization_config"):
        Checkpoint(str(tmp_path / "stored"))


@pytest.mark.parametrize(
    ("form", "dtype", "said"),
    [
        (BLOCKS, torch.float32, r"has the scale .*, and config\.json has no"),
        ("modelopt fp8", torch.bfloat16, r"weight_scale, and config\.json has no quantization"),
    ],
)
def test_eight_bits_without_their_settings_are_refused(form, dtype, said, dense, tmp_path):
    folder = tmp_path / "stored"
    stored(form, dense, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        shards(folder, dtype)


def set_quantization(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_what_becomes_of_the_weights_is_said_without_a_download(dense, tmp_path):
    stored(BLOCKS, dense, tmp_path / "stored")
    model = ModelConfig(name_or_path="stored", dtype="float32")
    (line,) = ModelSource(model, tmp_path).stored_lines()
    begin = "weights stored as fp8 are made full as each stage loads its own: 3.52 MiB of float32 "
    assert line.startswith(begin)
    full = ModelConfig(name_or_path=str(dense["llama"]))
    assert ModelSource(full, tmp_path).stored_lines() == []
