"""Kept results of benchmarks: the commit that each is of, and a warning where that is long ago."""

from __future__ import annotations

import json
import warnings

import pytest

from benchmarks.environment import RESULTS, commits_since, describe

_OLD = 100
"""Commits to the package."""


def test_kept_results_are_not_old():
    ages = {
        p.stem: commits_since(json.loads(p.read_text())) for p in sorted(RESULTS.glob("*.json"))
    }
    old = [name for name, age in ages.items() if age is None or age > _OLD]
    if old:
        warnings.warn(f"kept results of benchmarks are old: {', '.join(old)}", stacklevel=1)


def test_age_of_a_result_is_counted_from_its_commit():
    environment = describe()
    if environment["commit"] is None:
        pytest.skip("no git here")
    assert commits_since({"environment": environment}) == 0
    for unknown in ({}, {"environment": {"commit": None}}, {"environment": {"commit": "0" * 12}}):
        assert commits_since(unknown) is None
