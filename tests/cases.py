"""Parametrized cases of which some run by `make long` only, and functions that fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest


def seldom(cases: Collection[Any], *names: Any) -> list[Any]:
    """All cases, with `names` marked `long`: the others have all of their kinds."""
    assert set(names) <= set(cases)
    return [pytest.param(c, marks=pytest.mark.long) if c in names else c for c in cases]


def spread(first: Collection[Any], second: Collection[Any]) -> list[Any]:
    """All pairs of the entries of two tables, of which only as many are not `long` as it takes to
    have each entry of either. A mapping's values are tried under their names."""
    pairs, fewer = [], min(len(first), len(second))
    for i, (name, one) in enumerate(_named(first)):
        for j, (other_name, other) in enumerate(_named(second)):
            marks = [pytest.mark.long] if (i - j) % fewer else []
            pairs.append(pytest.param(one, other, id=f"{name}-{other_name}", marks=marks))
    return pairs


def _named(table: Collection[Any]) -> list[tuple[str, Any]]:
    return [*table.items()] if isinstance(table, Mapping) else [(str(each), each) for each in table]


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that takes anything and raises this."""

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail
