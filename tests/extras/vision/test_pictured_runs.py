"""Runs with pictures beside other settings: what changes no bit of texts changes none here."""

from __future__ import annotations

import pytest

from tests.integration.pairs import Runs

pytestmark = pytest.mark.xdist_group("pool2")


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    machines = pool.machines
    folder = tmp_path_factory.mktemp("pairs")
    return Runs(folder, machines["workers"][:1], machines["coordinator"]["port"])


@pytest.mark.parametrize("case", ["image-text-to-text mix+evals", "image-dpo mix+eval"])
def test_cuts_offloading_and_a_resume_change_no_bit(case, runs, verdicts):
    """`Runs` has the list of what else changes none."""
    objective, _, settings = case.partition(" ")
    assert runs.try_neutral(objective, (*settings.split("+"),)) == "trained"
