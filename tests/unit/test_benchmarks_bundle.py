"""The benchmark of bundles sees what is slowed on purpose, and bytes that differ."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import bundle
from benchmarks.stages import Llama
from hetero_framework.core.tensors import to_wire
from hetero_framework.errors import HeteroError

TINY = Llama(layers=2, hidden_size=64, tokens=16)


def test_bookkeeping_that_is_slowed_shows(monkeypatch):
    crossing = bundle.crossing

    def slow(left: Any) -> Any:
        until = time.process_time() + 0.002
        while time.process_time() < until:
            pass
        return crossing(left)

    monkeypatch.setattr(bundle, "crossing", slow)
    found = bundle.measure(TINY, rounds=2)
    assert found["bundle_us"] - found["alone_us"] > 1900
    assert found["share"] > 0.01


def test_other_bytes_are_no_comparison(monkeypatch):
    monkeypatch.setattr(bundle, "to_wire", lambda tensor: to_wire(2 * tensor))
    with pytest.raises(HeteroError, match="not sent as the hidden state alone"):
        bundle.measure(TINY, rounds=1)
