"""An event of one worker while another one is busy: the run has the undisturbed result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import programs
from tests.faults.event_sweep import EVENTS, FEW, STATES

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the processes are forked")


def swept(at: Path, pairs: list[str]) -> list[dict[str, Any]]:
    done = programs.run("event_sweep", at, *pairs)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [one for one in found if one["differences"] or one["end"] != "finished"]
    ends = "\n".join(f"{one['pair']}: {one['differences']} {one['end']}" for one in wrong)
    assert [one["pair"] for one in found] == pairs, done.stderr[-3000:]
    assert not wrong, ends
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_few_event_pairs_end_with_the_undisturbed_result(tmp_path):
    swept(tmp_path, FEW)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("state", STATES)
def test_every_event_pair_ends_with_the_undisturbed_result(state, tmp_path, figure):
    found = swept(tmp_path, [f"{state}/{event}" for event in EVENTS])
    longest = max(one["s"] for one in found)
    figure(f"{', '.join(EVENTS)} while {state}", f"bit-equal, <= {longest:.0f} s", "bit-equal")
