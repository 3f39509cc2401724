"""The bounds of the package's sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.samples import module_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    module = module_of(DOCS / "lines.py")
    sizes = {"whole": {"heart": 99, "tests": 50}, "shape": {"functions_over_50_lines": 3}}
    monkeypatch.setattr(module, "sizes", lambda: sizes)
    monkeypatch.setattr(module, "BOUNDS", tmp_path / "bounds.toml")
    return module


def called(lines: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lines.py", *options])
    code: int = lines.main()
    return code


def bounds(heart: int, tests: int) -> dict[str, dict[str, int]]:
    return {"whole": {"heart": heart, "tests": tests}, "shape": {"functions_over_50_lines": 3}}


@pytest.mark.parametrize(("heart", "tests", "code"), [(99, 50, 0), (98, 50, 1), (200, 49, 1)])
def test_a_size_above_its_bound_fails(heart, tests, code, lines, monkeypatch, capsys):
    lines.BOUNDS.write_text(lines.written(bounds(heart, tests)))
    assert called(lines, monkeypatch) == code
    assert ("above its bound" in capsys.readouterr().out) == bool(code)


def test_a_size_without_a_bound_fails(lines, monkeypatch):
    lines.BOUNDS.write_text(lines.written({"whole": {"heart": 99, "tests": 50}}))
    assert called(lines, monkeypatch) == 1


def test_bounds_over_two_percent_too_high_are_lowered(lines, monkeypatch):
    lines.BOUNDS.write_text(lines.written(bounds(100, 52) | {"extras": {"gone": 7}}))
    assert called(lines, monkeypatch) == 0
    assert called(lines, monkeypatch, "--lower") == 0
    assert lines.BOUNDS.read_text() == lines.written(bounds(100, 50))


def test_the_package_is_measured(lines, monkeypatch):
    monkeypatch.undo()
    shape = lines.shape()
    assert set(shape) == {
        "functions_over_50_lines",
        "attributes_of_the_largest_class",
        "modules_with_one_importer",
    }
    assert all(size > 0 for size in shape.values())
