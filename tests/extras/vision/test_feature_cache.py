"""Features of pictures that are kept on disk change no bit, and are not believed when damaged."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_framework.config import Config
from hetero_framework.errors import UserError
from hetero_framework.extras.vision import feature_cache
from hetero_framework.trainer.coordinator import train
from tests.cases import raising, seldom
from tests.extras.vision.seeing import FAMILIES, LAYERS, save_rows
from tests.integration.test_parity import assert_same_runs
from tests.samples import machines_here

WHOLE, CUT = [("local", LAYERS)], [("local", 1), (1, LAYERS)]
ROWS = 6  # four have pictures
TRAINING = {
    **{"objective": "image-text-to-text", "num_train_epochs": 2, "learning_rate": 1e-2},
    **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "report_to": "none"},
    **{"save_strategy": "no", "visualize": False},
}


@pytest.fixture
def run(models, tmp_path, monkeypatch):
    """A function that trains for two epochs into a directory."""
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    rows = save_rows(tmp_path / "rows", ROWS)

    def trained(family: str, name: str, parts: Any = WHOLE, keep: bool = True) -> Path:
        raw = machines_here(*parts)
        raw["model"] = {"name_or_path": str(models(family))}
        raw["data"] = {"train": str(rows), "cache_image_features": keep}
        raw["training"] = {**TRAINING, "output_dir": str(tmp_path / name)}
        train(Config.from_dict(raw))
        return tmp_path / name

    return trained


@pytest.fixture
def computed(monkeypatch):
    """How often features were computed."""
    calls: list[None] = []
    made = feature_cache.weakly

    def counting(method: Any) -> Any:
        compute = made(method)
        return lambda *args, **how: calls.append(None) or compute(*args, **how)

    monkeypatch.setattr(feature_cache, "weakly", counting)
    return calls


def kept(folder: Path) -> dict[Path, int]:
    files = (folder / "cache" / "features").glob("*/*")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("family", seldom([*FAMILIES], *({*FAMILIES} - {"llava", "qwen3_vl"})))
def test_features_of_an_earlier_epoch_have_the_same_bits(family, run, computed, tmp_path):
    plain = run(family, "plain", keep=False)
    assert not kept(tmp_path)
    assert_same_runs(run(family, "kept"), plain)
    assert len(computed) == len(kept(tmp_path)) == 4
    assert_same_runs(run(family, "again"), plain)
    assert len(computed) == 4


def test_another_cut_reads_them_and_damaged_ones_are_computed_anew(run, computed, tmp_path):
    plain = run("llava", "plain", keep=False)
    run("llava", "kept")
    before = kept(tmp_path)
    assert_same_runs(run("llava", "cut", CUT), plain)
    assert kept(tmp_path) == before
    first, second, third, fourth = sorted(before)
    shutil.copy(second, first)  # complete, but of other pictures
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    third.write_bytes(content[:20])
    assert_same_runs(run("llava", "mended"), plain)
    assert len(computed) == 4 + 3
    assert [fourth] == [path for path, time in kept(tmp_path).items() if time == before[path]]


@pytest.mark.parametrize("what", ["limit", "disk", "error"])
def test_without_room_the_run_goes_on(what, run, computed, monkeypatch, capfd, tmp_path):
    plain = run("llava", "plain", keep=False)
    monkeypatch.setattr(feature_cache, "MOST_BYTES", 0 if what == "limit" else 1 << 30)
    monkeypatch.setattr(feature_cache, "_FREE", float(what == "disk"))
    if what == "error":
        monkeypatch.setattr(feature_cache, "rename", raising(OSError(errno.ENOSPC, "it is full")))
    assert_same_runs(run("llava", "full"), plain)
    assert not kept(tmp_path)
    assert len(computed) == 8
    said = "".join(capfd.readouterr())
    assert said.count("no more features are kept: it is full") == (what == "error")


def test_features_of_other_models_go_first(tmp_path, monkeypatch):
    """Those that were used last stay."""
    monkeypatch.setattr(feature_cache, "MOST_BYTES", 150)
    for number in range(4):
        cache = feature_cache.FeatureCache(print, str(number).encode(), tmp_path)
        (cache._folder / "one").write_bytes(bytes(60))
        os.utime(cache._folder, (number, number))
    assert cache._room == 150
    assert feature_cache.FeatureCache(print, b"3", tmp_path)._room == 90
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize(
    ("towers", "changes", "said"),
    [
        ({}, {}, "is trained"),
        ({"weight": torch.ones(1, requires_grad=True)}, {}, "is trained"),
        ({"norm.running_mean": torch.ones(1)}, {}, "has statistics that change"),
        ({"weight": torch.ones(1)}, {"attention_dropout": 0.5}, "draws random numbers"),
        ({"weight": torch.ones(1)}, {}, None),
    ],
)
def test_what_changes_from_epoch_to_epoch_is_refused(towers, changes, said):
    """Dropout of the text does not count."""
    seeing = transformers.CLIPVisionConfig(**changes)
    text = transformers.LlamaConfig(attention_dropout=0.5)
    about = transformers.LlavaConfig(vision_config=seeing, text_config=text)
    assert (feature_cache._problem(about, towers) or "").startswith(said or "")
    assert bool(said) == bool(feature_cache._problem(about, towers))


def test_features_need_a_folder(run, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE", "")
    with pytest.raises(UserError, match="HETERO_CACHE is empty"):
        run("llava", "run")


def test_where_no_folder_can_be_made_the_run_goes_on(run, monkeypatch, capfd, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "file"))
    run("llava", "run")
    assert "no features are kept: Not a directory" in "".join(capfd.readouterr())
