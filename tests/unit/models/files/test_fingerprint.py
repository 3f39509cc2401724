"""Hashes of the weights that stages read, compared between processes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero_framework.core import cache
from hetero_framework.errors import ModelError
from hetero_framework.models.files import fingerprint as module
from hetero_framework.models.files.fingerprint import (
    COMMIT,
    CONFIG,
    INDEX,
    check_same_model,
    difference,
    fingerprint,
    summary,
    whole_fingerprint,
)
from hetero_framework.models.files.weights import Checkpoint
from tests.unit.adapter_helpers import save_model, shards


def weights(found: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in found.items() if key not in (CONFIG, COMMIT, INDEX)}


def whole(folder: Path) -> dict[str, str]:
    found = whole_fingerprint(str(folder), None)
    assert found is not None
    return found


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_stages_together_read_all_weights_of_the_model(model_type, tmp_path):
    base = save_model(tmp_path / "base", model_type)
    parts = shards(base, 0, 1, 3, 4)
    known = whole(base)
    assert all(difference(part.fingerprint, known) is None for part in parts)
    together = {k: v for part in parts for k, v in weights(part.fingerprint).items()}
    assert together == weights(known)
    (one,) = shards(base, 0, 4)
    assert summary([one.fingerprint]) == summary(p.fingerprint for p in parts) == summary([known])


def test_files_of_another_size_hold_the_same_weights(tmp_path):
    base = save_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "small", max_shard_size="50KB")
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 1
    assert whole(tmp_path / "small") == whole(base)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number": lambda weight: torch.where(weight == weight[3, 5], 2.0, weight),
    "shape": lambda weight: weight.reshape(weight.shape[::-1]),
    "type": lambda weight: weight.view(torch.int32),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
def test_one_change_is_found_and_named(name, change, tmp_path):
    base = save_model(tmp_path / "base")
    shutil.copytree(base, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = CHANGES[change](tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    said = difference(whole(tmp_path / "other"), whole(base))
    assert name.startswith(said.removeprefix("the weights of ").removesuffix(" differ"))


def test_other_settings_and_revisions_are_named_before_the_weights(tmp_path):
    base = save_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    known = whole(base)
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": "5.4"}))
    assert difference(whole(base), known) is None
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert difference(whole(base), known) == "config.json differs"
    one, other = {"commit": "a", "layers.10": "x"}, {"commit": "b", "layers.9": "x"}
    assert difference(one, other) == "it is another revision of the repository"
    layers = {"layers.10": "1", "layers.9": "1"}
    assert difference(layers, dict.fromkeys(layers, "2")) == "the weights of layers.9 differ"


def test_processes_are_compared_with_the_coordinators_files_or_with_each_other():
    ours = {CONFIG: "c", INDEX: "i", COMMIT: "a", "layers.0": "x"}
    theirs = {CONFIG: "c", INDEX: "i", COMMIT: "b", "layers.1": "y"}
    loaded = [("the coordinator", ours), ("worker 1", theirs)]
    check_same_model(loaded, {CONFIG: "c", "layers.0": "x", "layers.1": "y"})
    with pytest.raises(ModelError, match=r"worker 1 .* the coordinator: the weights of layers.1"):
        check_same_model(loaded, {CONFIG: "c", "layers.0": "x", "layers.1": "z"})
    with pytest.raises(ModelError, match=r"worker 1 .* the coordinator: .* revision(.|\n)*commit"):
        check_same_model(loaded, None)
    third = ("worker 2", {**theirs, INDEX: "j", "layers.1": "w"})
    with pytest.raises(ModelError, match=r"worker 2 has .* model than worker 1: .*file"):
        check_same_model([("worker 1", theirs), third], None)
    check_same_model([("worker 1", {}), ("worker 2", {})], None)


def test_machine_without_the_files_knows_nothing(tmp_path):
    base = save_model(tmp_path / "base")
    (base / "model.safetensors").unlink()
    assert whole_fingerprint(str(base), None) is None
    assert whole_fingerprint("nobody/nothing", None) is None


def test_commit_is_that_of_the_hubs_cache(tmp_path):
    base = save_model(tmp_path / "models--x" / "snapshots" / "c0ffee")
    checkpoint = Checkpoint(str(base))
    assert fingerprint(checkpoint, checkpoint.files)[COMMIT] == "c0ffee"


def test_bytes_are_read_once_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    assert cache.cache_directory() == tmp_path / "cache"
    base = save_model(tmp_path / "base")
    read = []
    digest = module._tensor_digest

    def counted(path: Path, start: int, entry: dict) -> str:
        read.append(path)
        return digest(path, start, entry)

    monkeypatch.setattr(module, "_tensor_digest", counted)
    first = whole(base)
    tensors = len(read)
    assert whole(base) == first
    assert len(read) == tensors > 0
    changed = load_file(base / "model.safetensors")
    changed["lm_head.weight"] = torch.zeros_like(changed["lm_head.weight"])
    path = base / "model.safetensors"
    before = path.stat()
    save_file(changed, path, metadata={"format": "pt"})
    if os.name == "posix":  # elsewhere there is no time of change
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as copying programs do
    assert path.stat().st_size == before.st_size
    assert whole(base) != first
    assert len(read) == 2 * tensors
