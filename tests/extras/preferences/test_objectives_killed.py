"""A run of each objective that is killed with -9 goes on with the same command, to the same bits.

tests/extras/preferences/test_preference_processes.py has those with a reference.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification

from tests.extras.classification.test_classification_runs import (
    KINDS,
    save_pairs,
    save_rows,
    save_tagged,
)
from tests.extras.pictures.test_image_chain import CLASSIFIERS
from tests.extras.preferences.test_preference_processes import trained_by_command
from tests.faults.final_state import assert_same_run
from tests.integration.test_parity import LORA
from tests.samples import DEVICE, machines_here

ROOT = Path(__file__).resolve().parents[3]
TRAINING = {
    **{"max_steps": 4, "learning_rate": 1e-2, "gradient_accumulation_steps": 2},
    **{"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1},
    **{"eval_strategy": "steps", "eval_steps": 2, "report_to": "none", "visualize": False},
}
PICTURES = """
import torch
dice = torch.Generator().manual_seed(0)
train_set = [(torch.randn(3, 32, 32, generator=dice), k % 5) for k in range(24)]
test_set = train_set[:6]
"""


def sections(objective: str, place: Path, llama: Path) -> tuple[dict[str, Any], Path | None]:
    """The sections of a configuration, and the file of --import."""
    own = {"train": "train_set", "eval": "test_set"}
    if objective == "sequential":
        return {"model": {"chain": "resnet"}, "data": own}, ROOT / "examples" / "resnet.py"
    if objective == "image-classification":
        torch.manual_seed(0)
        model: Any = AutoModelForImageClassification.from_config(CLASSIFIERS["resnet"])
        model.save_pretrained(place / "resnet")
        (place / "pictures.py").write_text(PICTURES)
        model_section = {"name_or_path": str(place / "resnet")}
        return {"model": model_section, "data": own}, place / "pictures.py"
    if objective == "classification":
        rows = save_rows(place / "rows.jsonl", KINDS["classes"][0])
    elif objective == "token-classification":
        rows = save_tagged(place / "rows.jsonl")
    else:
        rows = save_pairs(place / "rows.jsonl")
    data = {"train": str(rows), "eval": str(rows), "max_length": 40}
    adapter = LORA if objective in ("orpo", "reward") else None
    return {"model": {"name_or_path": str(llama)}, "data": data, "adapter": adapter}, None


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [
        *("orpo", "cpo", "reward", "classification", "token-classification"),
        *("sequential", "image-classification"),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(objective, llama, tmp_path):
    parts, file = sections(objective, tmp_path, llama)

    def run(name: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
        training = {**TRAINING, "objective": objective, "output_dir": str(tmp_path / name)}
        raw = {**machines_here(("local", 2), ("local", 6), device=DEVICE), **parts}
        (tmp_path / "config.json").write_text(json.dumps({**raw, "training": training}))
        more = [] if file is None else ["--import", str(file)]
        return trained_by_command(tmp_path / "config.json", *more, HETERO_FAILPOINT=failpoint)

    whole = run("whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for point in ("commit-done@2", "backward@4"):
        killed = run("killed", f"coordinator/{point}")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    again = run("killed")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "goes on after step" in again.stdout + again.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
