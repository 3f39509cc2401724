"""Tests of the heart that use extras: skipped where the folder of one has been taken away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero_framework import registry

_MODULES = Path(__file__).parents[1] / "docs" / "maintainers" / "modules.md"


def needs(*extras: str) -> pytest.MarkDecorator:
    """Skips the test unless these extras are here."""
    away = [extra for extra in extras if not registry.is_installed(extra)]
    return pytest.mark.skipif(bool(away), reason=f"without {', '.join(away)}")


_listed = _MODULES.read_text(encoding="utf-8").partition("\n  extras/")[2]
whole = needs(*re.findall(r"^    (\w+)/", _listed, re.MULTILINE))
"""Skips the test unless all extras are here, of which docs/maintainers/modules.md has the list."""
