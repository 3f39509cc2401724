"""A disk that fails while a result is written leaves the old or the new result."""

from __future__ import annotations

import pytest

from tests.faults.export_sweep import SCENES
from tests.faults.syscall_sweep import MODES
from tests.faults.test_checkpoint_sweep import sweep


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_fourth_point_of_the_export_sweep() -> None:
    cases = sweep(4, "export_sweep")
    for mode in MODES:
        points = [cases[f"{scene}: {mode}"]["points"] for scene in SCENES]
        assert sum(points) >= 50, (mode, points)
    assert cases["over an older one: kill"]["old"] > 3
    assert cases["over an older one: kill"]["new"] > 0
