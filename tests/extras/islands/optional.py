"""Packages that are not installed everywhere."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from hetero_framework.extras.islands.quorums import import_torchft


def need_torchft() -> None:
    """Skips the test where torchft is not installed. One that is, and cannot be imported, is an
    error: whatever needs it would be skipped, and nobody would notice."""
    if find_spec("torchft") is None:
        pytest.skip("torchft is not installed")
    import_torchft()
