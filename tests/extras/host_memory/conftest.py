from __future__ import annotations

import pytest

from hetero_framework.core.devices import Device


@pytest.fixture
def own_memory(monkeypatch):
    """The CPU counts as a device with a memory of its own."""
    monkeypatch.setattr(Device, "one_memory", False)
