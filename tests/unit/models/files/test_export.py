"""Checkpoints and merged adapters against transformers' and PEFT's own."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from hetero_framework.config import ModelConfig
from hetero_framework.core import files
from hetero_framework.errors import CheckpointError, ModelError, ResourceError
from hetero_framework.models.adapters.trainable import export_parts
from hetero_framework.models.cut.shard import Shard
from hetero_framework.models.files import export
from hetero_framework.models.files.export import (
    OutputDirectory,
    align_tokens,
    expected_checkpoint_tensors,
    export_layers,
    write_checkpoint,
)
from hetero_framework.models.files.source import ModelSource
from tests.unit.adapter_helpers import (
    chain_logits,
    randomise,
    save_model,
    shards,
    stock,
    stock_logits,
)
from tests.unit.data_helpers import tiny_tokenizer

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt2 tied": ("gpt2", {}),
    "gemma tied": ("gemma", {}),
    "zamba2": ("zamba2", {}),
}


def load_cleanly(folder: Path) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.train(False)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


def parts_of(pieces: list[Shard]) -> list[dict[str, torch.Tensor]]:
    return [dict(export_parts(piece)) for piece in pieces]


def written(folder: Path, pieces: list[Shard], *more: Any, **options: Any) -> Path:
    """The checkpoint of these pieces, in `folder / "out"`."""
    output = OutputDirectory(folder / "out", overwrite=True)
    write_checkpoint(output, parts_of(pieces), pieces[0].config, *more, **options)
    return output.path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_from_shards_equals_the_librarys_own(name, tmp_path):
    model_type, settings = MODELS[name]
    base = save_model(tmp_path / "base", model_type, **settings)
    pieces = shards(base, 0, 1, 3, 4)
    generation = GenerationConfig.from_pretrained(base)
    target = written(tmp_path, pieces, generation, max_file_bytes=100_000)
    ours, theirs = files_of(target), files_of(base)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert torch.equal(stock_logits(load_cleanly(target)), chain_logits(pieces))
    for file in ("config.json", "generation_config.json"):
        assert (target / file).read_text() == (base / file).read_text()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
    assert len(set(index["weight_map"].values())) > 1
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["base", "out"]


def test_settings_that_the_library_would_not_save_are_kept(tmp_path):
    """As Llama 2's, whose temperature comes without sampling."""
    base = save_model(tmp_path / "base")
    published = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(published))
    pieces = shards(base, 0, 2, 4)
    config = copy.deepcopy(pieces[0].config)
    generation = ModelSource(ModelConfig(name_or_path=str(base)), tmp_path).generation
    align_tokens(config, generation, tiny_tokenizer())
    with pytest.raises(ValueError, match="temperature"):
        generation.save_pretrained(tmp_path / "refused")
    write_checkpoint(OutputDirectory(tmp_path / "out"), parts_of(pieces), config, generation)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    end = tiny_tokenizer().eos_token_id
    assert {k: written[k] for k in published} == {**published, "eos_token_id": [end, 2]}


def test_a_padding_token_beyond_the_vocabulary_is_not_entered(tmp_path):
    """The embedding would not be built."""
    config, tokenizer = LlamaConfig(vocab_size=1000, pad_token_id=None), tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<more>"})
    config.vocab_size = tokenizer.pad_token_id
    align_tokens(config, GenerationConfig(), tokenizer)
    assert config.pad_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id


def test_generation_settings_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"cache_implementation": "none_such"}')
    LlamaConfig().save_pretrained(tmp_path)
    source = ModelSource(ModelConfig(name_or_path=str(tmp_path)), tmp_path)
    with pytest.raises(ModelError, match=r"generation_config.json of the model .* cannot be used"):
        _ = source.generation


def test_trained_weights_and_not_the_loaded_ones_are_exported(base, tmp_path):
    pieces = shards(base, 0, 2, 4)
    randomise(pieces)
    out = written(tmp_path, pieces)
    logits = stock_logits(load_cleanly(out))
    assert torch.equal(logits, chain_logits(pieces))
    assert not torch.equal(logits, stock_logits(stock(base)))
    assert (out / "model.safetensors").is_file()


def test_exported_names_do_not_depend_on_how_the_checkpoint_was_saved(tmp_path):
    base = save_model(tmp_path / "base", "mixtral")
    model = stock(base)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert files_of(tmp_path / "fused").keys() != files_of(base).keys()
    pieces = shards(tmp_path / "fused", 0, 2, 4)
    found = {k for piece in pieces for layer in export_layers(piece) for k in layer}
    assert found == set(expected_checkpoint_tensors(model.config)) == set(files_of(base))


def test_incomplete_checkpoint_is_never_written(base, tmp_path):
    pieces = shards(base, 0, 1, 3, 4)
    parts = parts_of(pieces)
    for given, said in (
        (parts[:1] + parts[2:], "missing tensors: model.layers.1"),
        (parts + parts[-1:], "two stages"),
        ([{**parts[0], "extra": torch.zeros(2)}], "does not have: extra"),
        ([{"model.norm.weight": torch.zeros(3)}], "wrong shape: model.norm.weight"),
    ):
        output = OutputDirectory(tmp_path / "out")
        with pytest.raises(CheckpointError, match=said):
            write_checkpoint(output, given, pieces[0].config, max_file_bytes=50_000)
        assert list(tmp_path.iterdir()) == []


def test_failing_disk_leaves_the_older_checkpoint(base, tmp_path, monkeypatch):
    pieces = shards(base, 0, 4)
    target = written(tmp_path, pieces)
    before = files_of(target)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    randomise(pieces)
    with pytest.raises(ResourceError, match="No space left"):
        written(tmp_path, pieces)
    assert list(tmp_path.iterdir()) == [target]
    assert all(torch.equal(t, before[k]) for k, t in files_of(target).items())


def test_the_writer_buffers_at_most_one_file_and_copies_tensors(base, tmp_path):
    (piece,) = shards(base, 0, 4)

    def reused() -> Any:
        for key, tensor in export_parts(piece):
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield {key: view.copy_(tensor)}
        buffer.zero_()

    buffer = torch.zeros(max(t.numel() for _, t in export_parts(piece)))
    write_checkpoint(OutputDirectory(tmp_path / "out"), reused(), piece.config)
    ours, theirs = files_of(tmp_path / "out"), files_of(base)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


# -- the directory of a result --------------------------------------------------------------------


def write_files(output: OutputDirectory, files: dict[str, str]) -> None:
    with output.writing() as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    own = [path for path in files if path.name != export.EXPORT_LIST]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in own}


def test_directory_that_is_not_empty_is_refused_without_overwrite(tmp_path):
    (tmp_path / "out").mkdir()
    write_files(OutputDirectory(tmp_path / "out"), {"a": "1"})
    with pytest.raises(CheckpointError, match=r"is not empty(.|\n)*--overwrite"):
        write_files(OutputDirectory(tmp_path / "out"), {"a": "2"})
    assert contents(tmp_path / "out") == {"a": "1"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        write_files(OutputDirectory(tmp_path / "file", overwrite=True), {"a": "2"})


def test_overwrite_replaces_our_files_and_keeps_the_users(tmp_path):
    out = OutputDirectory(tmp_path / "out", overwrite=True)
    write_files(out, {"a": "1", "b": "1"})
    (out.path / "keep.txt").write_text("mine")
    (out.path / "notes").mkdir()
    (out.path / "notes" / "x").write_text("mine")
    write_files(out, {"a": "2"})
    assert contents(out.path) == {"a": "2", "keep.txt": "mine", "notes/x": "mine"}
    with pytest.raises(CheckpointError, match=r"holds keep\.txt of another origin"):
        write_files(out, {"a": "3", "keep.txt": "ours"})
    assert contents(out.path) == {"a": "2", "keep.txt": "mine", "notes/x": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_without_our_list_replaces_exactly_the_same_files_only(tmp_path):
    out = OutputDirectory(tmp_path / "out", overwrite=True)
    out.path.mkdir()
    (out.path / "a").write_text("of an older version")
    write_files(out, {"a": "2"})
    assert contents(out.path) == {"a": "2"}
    (out.path / export.EXPORT_LIST).unlink()
    with pytest.raises(CheckpointError, match="holds a of another origin"):
        write_files(out, {"a": "3", "b": "3"})
    (out.path / "README.md").write_text("of a downloaded model")
    with pytest.raises(CheckpointError, match="holds a of another origin"):
        write_files(out, {"a": "3"})
    assert contents(out.path) == {"a": "2", "README.md": "of a downloaded model"}


def test_second_rename_that_fails_loses_neither_the_old_nor_the_new(tmp_path, monkeypatch):
    out = OutputDirectory(tmp_path / "out", overwrite=True)
    write_files(out, {"a": "1"})
    replace = os.replace

    def locked(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise PermissionError(13, "in use")
        replace(source, target)

    monkeypatch.setattr(os, "replace", locked)
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)  # as outside Linux
    with pytest.raises(ResourceError, match=r"out\.partial is complete; rename it"):
        write_files(out, {"a": "2"})
    assert contents(out.path) == {"a": "1"}
    assert contents(tmp_path / ".out.partial") == {"a": "2"}
    monkeypatch.undo()
    write_files(out, {"a": "3"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_replacement_killed_between_its_renames_is_put_back(tmp_path):
    out = OutputDirectory(tmp_path / "out", overwrite=True)
    write_files(out, {"a": "1"})
    (out.path / "keep.txt").write_text("mine")
    out.path.rename(tmp_path / ".out.old")
    write_files(out, {"a": "2"})
    assert contents(out.path) == {"a": "2", "keep.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
