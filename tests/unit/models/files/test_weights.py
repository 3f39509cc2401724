"""Wrong or damaged files of a model: the error names the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hetero_framework.errors import ModelError
from hetero_framework.models.files.weights import Checkpoint, read_config
from tests.unit.adapter_helpers import save_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
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
def test_index_without_a_weight_map_is_named(text: str, model: Path) -> None:
    assert read_all(model) > 0
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json(.|\n)*download it"):
        read_all(model)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "C:\\x", 7])
def test_index_that_leads_out_of_the_model_is_refused(name: object, model: Path) -> None:
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="which is not a file beside it"):
        read_all(model)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_weight_file_is_named(size: int, model: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=rf"{file.name} cannot be read(.|\n)*copy or download"):
        read_all(model)


def test_absent_weight_file_is_named(model: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[0]
    file.unlink()
    with pytest.raises(ModelError, match=f"lacks its file {file.name}"):
        read_all(model)


@pytest.mark.parametrize("single", [True, False])
def test_an_lfs_pointer_is_recognised(single: bool, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base" if single else model
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(POINTER)
    with pytest.raises(ModelError, match=r"Git LFS pointer(.|\n)*git lfs pull"):
        read_all(folder)


def test_a_folder_without_config_json_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json that names its model_type"):
        read_config(str(model), None)


def test_a_misspelt_directory_is_refused() -> None:
    with pytest.raises(ModelError, match="model 'modle': no directory here, and as a name on the"):
        read_config("modle", None)
