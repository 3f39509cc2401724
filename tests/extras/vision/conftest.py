"""Tiny models of language and vision for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.vision.seeing import FAMILIES


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that gives the checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp(family))
        return made[family]

    return model
