"""The findings of `hetero doctor` on programs that draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_framework.extras.observe import pictures
from tests.unit.commands.test_diagnosis import found, view


def test_program_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawn = {"visualize": True}
    made = view(tmp_path, training=drawn)
    assert found(pictures.findings, made) == []
    assert "the package graphviz gives a better one" in made.notes[0]
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    assert "no diagram is drawn" in found(pictures.findings, view(tmp_path, training=drawn))[0]
    text = {"visualize": True, "visualization_format": "mmd"}
    assert found(pictures.findings, view(tmp_path, training=text)) == []
