"""The examples of docs/maintainers/extending.md, written into a copy of the package and run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_framework import control
from tests import pools
from tests.samples import save_llama, save_texts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "maintainers" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
PACKAGE = "hetero_framework"


def files(section: str) -> dict[str, str]:
    """The files of a section by their paths, which their first lines name."""
    blocks = re.findall(r"```\w+\n# ([\w./]+)\n(.*?)```", SECTIONS[section], re.DOTALL)
    assert blocks
    assert sum(len(text.splitlines()) for _, text in blocks) <= 40
    return dict(blocks)


def extended(folder: Path, section: str) -> Path:
    """A copy of the package with the files of a section."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE)
    package = f"{PACKAGE}/extras/acme/__init__.py"
    for path, text in {package: '"""Acme."""\n', **files(section)}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def hetero(folder: Path, *words: str) -> str:
    """The output of a command of the copy."""
    done = pools.hetero(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def configuration(folder: Path, **training: Any) -> str:
    """A run of one step in one process."""
    save_llama(folder / "model", layers=1)
    save_texts(folder / "texts.jsonl", 8)
    file = folder / "hetero_config.json"
    shared = {"output_dir": "run", "max_steps": 1, "optim": "sgd", "report_to": "none"}
    shared |= {"verify_architecture": False, "visualize": False, "timeline_steps": 0}
    shared |= {"save_strategy": "no"}
    raw = {
        "coordinator": {"ip": "127.0.0.1", "device": "cpu"},
        "shard_plan": [{"id": "local", "start": 0, "end": 1}],
        "model": {"name_or_path": "model"},
        "data": {"train": "texts.jsonl"},
        "training": {**shared, **training},
    }
    file.write_text(json.dumps(raw))
    return str(file)


def first_loss(folder: Path, run: str = "run") -> float:
    line = (folder / run / "metrics.jsonl").read_text().splitlines()[0]
    return float(json.loads(line)["loss"])


def test_an_objective(tmp_path):
    copy = extended(tmp_path, "An objective with a setting of its own")
    config = configuration(copy, objective="scaled", loss_scale=0.5)
    words = ["train", "--config", config]
    plain = ["--set", "training.objective=sft", "--set", "training.output_dir=plain"]
    code = f"from hetero_framework.cli import main; exit(main({words}) or main({words + plain}))"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    assert first_loss(copy) == first_loss(copy, "plain") / 2


@pytest.mark.long
def test_a_rule(tmp_path):
    copy = extended(tmp_path, "A rule that skips steps")
    hetero(copy, "train", "--config", configuration(copy, min_grad_norm=1e6))
    line = json.loads((copy / "run" / "metrics.jsonl").read_text())
    assert line["skipped"] == "rule"
    assert line["reason"].endswith("is below 1e+06")


@pytest.mark.long
def test_a_reporter(tmp_path):
    copy = extended(tmp_path, "A reporter")
    hetero(copy, "train", "--config", configuration(copy, report_to=["losses"]))
    assert (copy / "run" / "losses.txt").read_text() == f"1 {first_loss(copy)}\n"
    assert '"losses"' in hetero(copy, "schema")


def test_a_command(tmp_path):
    copy = extended(tmp_path, "A command")
    assert "print the layers of each stage" in hetero(copy, "--help")
    assert hetero(copy, "layers", "--config", configuration(copy)) == "coordinator layer 0\n"


def test_a_kind_of_file(tmp_path):
    copy = extended(tmp_path, "A kind of data file")
    (copy / "texts.bars").write_text('text|other\n"a line | and more"|1\nsecond|2\n')
    found = hetero(copy, "check", "--config", configuration(copy), "--set", "data.train=texts.bars")
    assert "2 examples" in found


def test_a_loss_of_pairs(tmp_path, monkeypatch):
    pair_losses = pytest.importorskip("hetero_framework.extras.preferences.pair_losses")
    monkeypatch.setattr(control, "_imported", [])
    known = {name: dict(losses) for name, losses in pair_losses.PAIR_LOSSES.items()}
    monkeypatch.setattr(pair_losses, "PAIR_LOSSES", known)
    ((path, text),) = files("A loss of pairs").items()
    (tmp_path / path).write_text(text)
    control.import_file(tmp_path / path)
    loss = known["dpo"]["squared"]
    ratios_B = torch.tensor([2.0, 3.0, 1.0, 5.0])
    found = loss(SimpleNamespace(beta=0.5), ratios_B, ratios_B, torch.ones(4))
    assert found.tolist() == [0.25, 4.0]


def test_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "acme", SimpleNamespace(device_count=lambda: 2), raising=False)
    (program,) = re.findall(r"```py\n(.*?)```", SECTIONS["A device of your own"], re.DOTALL)
    (tmp_path / "hetero_acme.py").write_text(program)
    monkeypatch.setattr(control, "_imported", [])
    monkeypatch.setattr(control, "_modules", [])
    control.import_file(tmp_path / "hetero_acme.py")
    first, second = control.named("devices")()
    assert (first.name, second.name, bool(first.four_bit())) == ("acme:0", "acme:1", True)
