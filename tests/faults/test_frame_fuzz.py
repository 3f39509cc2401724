"""Mutated frames: only ProtocolError (or the loss of the peer), no memory, no time."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.frame_fuzz import SLOW_S
from tests.faults.programs import told

MOST_GROWN_BYTES = 10 << 20

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its memory is read with getrusage")


def check(measured: dict[str, Any]) -> None:
    assert measured["grown_bytes"] < MOST_GROWN_BYTES, measured
    assert measured["slowest_s"] < SLOW_S, measured
    # Most are wrong in some way; some are not, or it would be the first byte that refuses all.
    ends, frames = measured["ends"], measured["frames"]
    assert ends["ProtocolError"] > frames / 2, measured
    assert ends["none"] > frames / 100, measured


def test_20_000_mutated_frames():
    [measured] = told("frame_fuzz", 20_000, 1)
    check(measured)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_2_million_mutated_frames(figure):
    with ThreadPoolExecutor() as pool:
        parts = [*pool.map(lambda seed: told("frame_fuzz", 1_000_000, seed)[0], (2, 3))]
    grown = max(part["grown_bytes"] for part in parts) / (1 << 20)
    slowest = max(part["slowest_s"] for part in parts) * 1e3
    frames = sum(part["frames"] for part in parts)
    reached = f"{frames:,}: only these errors, memory +{grown:.1f} MiB, slowest {slowest:.1f} ms"
    figure("mutated frames", reached, "2 million: only ProtocolError, +< 10 MiB, 10 ms")
    for part in parts:
        check(part)
