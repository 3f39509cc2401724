"""An objective of the user's own, written from docs/objectives.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero_framework import control, registry
from hetero_framework.config import Config
from hetero_framework.errors import ConfigError
from hetero_framework.trainer.coordinator import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"


def test_the_pages_objective_trains(pool, llama, texts, tmp_path, monkeypatch):
    """On one process: the workers of the pool have not imported it."""
    monkeypatch.setattr(control, "_imported", [])  # workers of later tests follow it
    monkeypatch.setattr(registry, "_registered", {})
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (program,) = [text for text in programs if "register_objective" in text]

    def losses(objective: str) -> tuple[float, ...]:
        training = {"objective": objective, "max_steps": 2, "optim": "sgd"}
        sections = {"model": {"name_or_path": str(llama)}, "data": {"train": str(texts)}}
        raw = pool.config(tmp_path / objective, [], training=training, **sections)
        return train(Config.from_dict(raw)).losses

    with pytest.raises(ConfigError, match="there is no objective 'half'; there are sft, "):
        losses("half")
    (tmp_path / "own.py").write_text(program)
    control.import_file(tmp_path / "own.py")
    assert losses("half")[0] == losses("sft")[0] / 2
