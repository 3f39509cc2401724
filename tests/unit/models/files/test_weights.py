"""Wrong or damaged files of a model: the error names the file and the remedy."""

from __future__ import annotations

import itertools
import json
import platform
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import Checkpoint, quantization_of, read_config
from tests.unit.adapter_helpers import save_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


@pytest.fixture
def model(tmp_path):
    base = save_model(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(
        tmp_path / "model", max_shard_size="50KB"
    )
    return tmp_path / "model"


def read_all(folder: Path) -> int:
    checkpoint = Checkpoint(str(folder))
    with checkpoint.slices(lambda name: True) as slices:
        return sum(slice_[:].numel() for slice_ in slices.values())


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "[" * 9999]
)
def test_index_without_a_weight_map_is_named(text, model):
    assert read_all(model) > 0
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json(.|\n)*download it"):
        read_all(model)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "C:\\x", 7])
def test_index_that_leads_out_of_the_model_is_refused(name, model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="which is not a file beside it"):
        read_all(model)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_weight_file_is_named(size, model):
    file = sorted(model.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=rf"{file.name} cannot be read(.|\n)*copy or download"):
        read_all(model)


def test_absent_weight_file_is_named(model):
    file = sorted(model.glob("*.safetensors"))[0]
    file.unlink()
    with pytest.raises(ModelError, match=f"lacks its file {file.name}"):
        read_all(model)


@pytest.mark.parametrize("single", [True, False])
def test_an_lfs_pointer_is_recognised(single, model, tmp_path):
    folder = tmp_path / "base" if single else model
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(POINTER)
    with pytest.raises(ModelError, match=r"Git LFS pointer(.|\n)*git lfs pull"):
        read_all(folder)


def test_a_folder_without_config_json_is_refused(model):
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json that names its model_type"):
        read_config(str(model), None)


def test_a_misspelt_directory_is_refused():
    said = "model 'modle': no directory here, and as a name on the"
    with pytest.raises(ModelError, match=f"{platform.node()} cannot .* {said}"):
        read_config("modle", None)


LAYOUTS = {
    **{"model.safetensors": "", "model.safetensors.index.json": "", "model.fp16.safetensors": ""},
    **{"model.safetensors.index.fp16.json": "", "nested/model.safetensors": ""},
    "other.safetensors": "other.safetensors",
    "other.safetensors.index.json": "other.safetensors.index.json",
    "absent": "absent.safetensors",
}
"""Files of weights, and the one that config.json names for them."""


def write_layout(folder: Path, base: Path, name: str, value: int) -> None:
    """All weights filled with `value`, in a file `name`, or as a shard with the index `name`."""
    config = json.loads((folder / "config.json").read_text())
    if LAYOUTS[name]:
        config["transformers_weights"] = LAYOUTS[name]
        (folder / "config.json").write_text(json.dumps(config))
    file = folder / (f"shard-of-{value}.safetensors" if name.endswith(".json") else name)
    file.parent.mkdir(exist_ok=True)
    tensors = {k: torch.full_like(t, value) for k, t in load_file(base).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if name.endswith(".json"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
        (folder / name).write_text(json.dumps(index))


def value_read(source: str) -> float | None:
    try:
        with Checkpoint(source).slices("lm_head.weight".__eq__) as slices:
            return float(slices["lm_head.weight"][0, 0])
    except ModelError:
        return None


def value_of_library(source: str) -> float | None:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
    except OSError:
        return None
    return float(model.lm_head.weight.detach()[0, 0])


@pytest.mark.parametrize("on_hub", [False, True])
def test_files_are_preferred_as_from_pretrained_prefers_them(on_hub, tmp_path, monkeypatch):
    base = save_model(tmp_path / "base")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    seen = set()
    numbers = {layout: number for number, layout in enumerate(LAYOUTS)}
    commit = "c0ffee" * 6 + "0000"
    for one, other in itertools.combinations_with_replacement(LAYOUTS, 2):
        name = f"{numbers[one]}-{numbers[other]}"
        root = tmp_path / f"models--models--{name}"
        folder = root / "snapshots" / commit
        folder.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        (folder / "config.json").write_text((base / "config.json").read_text())
        for layout in {one, other}:
            write_layout(folder, base / "model.safetensors", layout, numbers[layout])
        source = f"models/{name}" if on_hub else str(folder)
        assert value_read(source) == value_of_library(source), (one, other)
        seen.add(value_read(source))
    assert seen == {None, 0, 1, 5, 6}


def test_an_adapter_beside_the_model_is_named(model):
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}')
    with pytest.raises(ModelError, match=r"an adapter beside(.|\n)*hetero merge"):
        Checkpoint(str(model))


@pytest.mark.parametrize("name", ["../x.safetensors", "pytorch_model.bin", 7])
def test_weights_that_lie_elsewhere_are_refused(name, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": name}))
    with pytest.raises(ModelError, match="transformers_weights"):
        Checkpoint(str(model))


BITS = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quantization_config": BITS, "text_config": {"quantization_config": BITS}}, BITS),
        ({"quantization_config": None, "text_config": {"quantization_config": BITS}}, BITS),
        ({"quantization_config": BITS, "compression_config": {}}, BITS),
        ({"quantization_config": BITS, "compression_config": {**BITS, "bits": 8}}, None),
        ({"quantization_config": BITS, "text_config": {"quantization_config": {"bits": 8}}}, None),
    ],
)
def test_how_weights_are_stored_is_said_once(fields, expected):
    if expected is not None:
        assert quantization_of(fields) == expected
        return
    with pytest.raises(ModelError, match="says twice how the weights are stored"):
        quantization_of(fields)
