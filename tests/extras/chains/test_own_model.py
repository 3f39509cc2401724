"""A model class of the user's own, from a file that --import names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_framework import cli, control

ROOT = Path(__file__).parents[3]


def test_a_class_of_ones_own_is_cut_to_the_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(control, "_imported", [])
    config = ["--config", str(ROOT / "examples" / "own_model.json")]
    assert cli.main(["verify", "--model-type", "running_mean_mixer"]) != 0
    assert "--import" in capsys.readouterr().err
    assert cli.main(["verify", *config, "--import", str(ROOT / "examples/own_model.py")]) == 0
    assert "bit-equal; layers 0-1 | layers 2-3" in capsys.readouterr().out


@pytest.mark.long
def test_the_example_trains(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    how: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}

    def run(*command: str) -> None:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stdout + done.stderr

    lines = (tmp_path / "examples" / "own_model.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    run("examples/own_model.py")
    own = ["--config", "examples/own_model.json", "--import", "examples/own_model.py"]
    run("-m", "hetero_framework", "train", *own)
    loading = (
        "import sys; sys.path.insert(0, 'examples'); import own_model;"
        "own_model.MixerForCausalLM.from_pretrained('runs/own_model/result/model')"
    )
    run("-c", loading)
