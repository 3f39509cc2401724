"""Parametrized cases of which some run by `make long` only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def seldom(cases: Collection[str], *names: str) -> list[Any]:
    """All cases, with `names` marked `long`: the others have all of their kinds."""
    assert set(names) <= set(cases)
    return [pytest.param(c, marks=pytest.mark.long) if c in names else c for c in cases]
