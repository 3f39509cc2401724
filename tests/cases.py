"""Parametrized cases of which some run by `make long` only, and functions that fail."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest


def seldom(cases: Collection[str], *names: str) -> list[Any]:
    """All cases, with `names` marked `long`: the others have all of their kinds."""
    assert set(names) <= set(cases)
    return [pytest.param(c, marks=pytest.mark.long) if c in names else c for c in cases]


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that takes anything and raises this."""

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail
