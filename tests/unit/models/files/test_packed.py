"""Checkpoints of bitsandbytes, and without a form, whose tensors or settings contradict them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import check_quantizer
from tests.unit.adapter_helpers import shards
from tests.unit.models.files.test_quantization import llama, quantised

__all__ = ["llama"]

M = "model.layers.1.mlp.down_proj"
W = f"{M}.weight"
STATE = f"{W}.quant_state.bitsandbytes__nf4"
FULL: Any = {"_load_in_4bit": False, "load_in_4bit": False}
EIGHT: Any = FULL | {"_load_in_8bit": True, "load_in_8bit": True}
FOUR: Any = {
    "_load_in_4bit": True,
    "load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_8bit": False,
}


@pytest.fixture(scope="module")
def kinds(llama, tmp_path_factory):
    """Checkpoints by how they are stored."""
    folders = {"full": llama}
    for kind in ("nf4", "int8"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        quantised(llama, kind).save_pretrained(folders[kind])
    return folders


def changed(source: Path, folder: Path, what: str, change: Any) -> None:
    """Copy a checkpoint, with a tensor changed, or left out for None, or with other settings."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if isinstance(change, dict):
        config["quantization_config"] = config.get("quantization_config", {}) | change
    else:
        value = tensors.pop(what)
        tensors |= {} if change is None else {what: change(value).contiguous()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def other_state(value: Tensor) -> Tensor:
    state = json.loads(bytes(value.tolist()))
    state["shape"] = state["shape"][::-1]
    return torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)


Change = Callable[[Tensor], Tensor]
half: Change = lambda t: t[: len(t) // 2]  # noqa: E731
CASES: list[tuple[str, str, Any]] = [
    *(("nf4", f"{W}.{end}", None) for end in ("absmax", "quant_map", "nested_absmax")),
    ("nf4", f"{W}.nested_absmax", Tensor.double),
    ("nf4", f"{W}.nested_absmax", lambda t: t * float("nan")),
    ("nf4", f"{W}.nested_quant_map", half),
    ("nf4", f"{W}.absmax", half),
    ("nf4", W, half),
    ("nf4", W, None),
    ("nf4", STATE, None),
    ("nf4", STATE, half),
    ("nf4", STATE, Tensor.int),
    ("nf4", STATE, other_state),
    ("nf4", "bnb_4bit_quant_type", {"bnb_4bit_quant_type": "fp4"}),
    ("nf4", "load_in_8bit", EIGHT),
    ("int8", f"{M}.SCB", None),
    ("int8", f"{M}.SCB", half),
    ("int8", W, Tensor.float),
    ("int8", "says 4 or 16", FOUR),
    ("int8", "says 4 or 16", {"llm_int8_has_fp16_weight": True}),
    ("int8", W, {"llm_int8_skip_modules": ["down_proj"]}),
    ("full", W, lambda t: t.to(torch.int8)),
    ("full", "quantization_config says", {"load_in_4bit": True}),
    ("full", "quantization_config says", {"load_in_8bit": True}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_contradiction_is_refused_by_name(case, kinds, tmp_path):
    kind, what, change = CASES[case]
    changed(kinds[kind], tmp_path / "x", what, change)
    with pytest.raises(ModelError) as caught:
        shards(tmp_path / "x", 0, 6, attach=False)
    said = str(caught.value)
    assert M in said or "layers.0." in said, said
    assert isinstance(change, dict) or M in said, said
    assert not isinstance(change, dict) or what.replace("layers.1", "layers.0") in said, said


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        *((given, "'no quant_method'") for given in ({}, [], 5, "gptq", {"bits": 4})),
        (FOUR | EIGHT | {"load_in_4bit": True}, "none of bitsandbytes: load_in_4bit and load_in_8"),
        (FOUR | {"bnb_4bit_compute_dtype": "x"}, "none of bitsandbytes"),
        (FOUR | {"llm_int8_skip_modules": "down_proj"}, "none of bitsandbytes"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, why):
    with pytest.raises(ModelError, match=why):
        check_quantizer(settings, "x")
