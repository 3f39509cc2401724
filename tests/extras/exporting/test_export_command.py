"""The result of a checkpoint, beside that of a run that ends at its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cli import main
from hetero_framework.config import Config
from hetero_framework.errors import CheckpointError
from hetero_framework.trainer.coordinator import train
from tests.samples import save_llama, save_texts

ENDS = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}


def files_in(folder: Path) -> dict[str, bytes]:
    """All but the card, which says how far the run came."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def make(folder: Path, name: str, steps: int, **changes: Any) -> Config:
    return Config.from_dict(
        {
            "coordinator": {"hostname": "localhost", "ip": "127.0.0.1", "device": "cpu"},
            "workers": [],
            "shard_plan": [{"id": "local", "start": 0, "end": 2}],
            "model": {"name_or_path": "model"},  # relative to the configuration
            "data": {"train": "texts.jsonl", "max_length": 32},
            "training": {
                **{"output_dir": name, "max_steps": steps, "per_device_train_batch_size": 2},
                **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_steps": 2},
                **{"save_strategy": "steps", "report_to": "none", "visualize": False},
                "verify_architecture": False,
            },
            **changes,
        },
        folder,
    )


@pytest.mark.parametrize(
    ("tied", "adapter"),
    [
        pytest.param(False, None, marks=pytest.mark.long),
        (True, None),
        (False, {"r": 4, "target_modules": "all-linear"}),
        (False, ENDS),
    ],
    ids=["full", "tied", "adapter", "adapted ends"],
)
def test_result_of_a_checkpoint_is_that_of_a_run_that_ends_there(tied, adapter, tmp_path):
    save_llama(tmp_path / "model", layers=2, tie_word_embeddings=tied)
    save_texts(tmp_path / "texts.jsonl", 8)
    train(make(tmp_path, "long", 3, adapter=adapter))
    train(make(tmp_path, "short", 2, adapter=adapter))
    result, out = "model" if adapter is None else "adapter", tmp_path / "out"
    step = tmp_path / "long" / "checkpoints" / "step_2"
    assert main(["export", "--checkpoint", str(step), "--output", str(out)]) == 0
    assert files_in(out) == files_in(tmp_path / "short" / result)
    latest = ["export", "--checkpoint", str(tmp_path / "long"), "--output", str(out)]
    assert main(latest) == 2
    assert main([*latest, "--overwrite"]) == 0
    assert files_in(out) == files_in(tmp_path / "long" / result)


def test_place_without_a_checkpoint_is_named(tmp_path, capsys):
    for place, said in (("none", "there is no directory"), ("", "There is no checkpoint in")):
        output = ["--output", str(tmp_path / "out")]
        assert main(["export", "--checkpoint", str(tmp_path / place), *output]) == 2
        assert said.lower() in capsys.readouterr().err.lower()


def test_resume_over_other_weights_is_refused(tmp_path):
    save_llama(tmp_path / "model", layers=2)
    save_texts(tmp_path / "texts.jsonl", 8)
    train(make(tmp_path, "run", 2))
    save_llama(tmp_path / "model", layers=2, seed=7)
    with pytest.raises(CheckpointError, match="began with other weights"):
        train(make(tmp_path, "run", 3), resume=2)
