"""A disk that fails while keys are rotated leaves the old or the new set of them, whole."""

from __future__ import annotations

import pytest

from tests.faults.syscall_sweep import MODES
from tests.faults.test_checkpoint_sweep import sweep


@pytest.mark.long
def test_every_37th_point_of_the_sweep() -> None:
    cases = sweep(37, "keys_sweep")
    assert all(counts["points"] >= 3 for counts in cases.values())
    assert len(cases) == 4 * len(MODES)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_every_point_of_the_sweep() -> None:
    for name, counts in sweep(1, "keys_sweep").items():
        assert counts["points"] >= 80, name
        if "ENOSPC" not in name and "EIO" not in name:
            assert min(counts["old"], counts["new"]) > 3, name
