"""A run with everything switched on, whose processes stand still, whose clock jumps, whose disk is
full for a while: it ends with what the undisturbed one has."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress

import psutil
import pytest

from tests.faults import random_kills
from tests.faults.random_kills import Victims, begin, different, found
from tests.faults.soak import small_disk

STILL_S = 30.0
"""Twice what a peer may be silent for."""
DAY_S = 86_400.0
CLOCK = """
import time
now = time.time
def jumping():
    try:
        return now() + float(open({offset!r}).read() or 0)
    except (OSError, ValueError):
        return now()
time.time = jumping
"""

pytestmark = [
    pytest.mark.faults,
    pytest.mark.xdist_group("everything"),
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    at = tmp_path_factory.mktemp("everything")
    random_kills.prepare(at)
    return at


@pytest.fixture(scope="module")
def whole(place):
    """The records and weights of an undisturbed run."""
    ended(begin("everything", place, "whole"))
    return found(place / "whole")


def ended(run: Victims) -> None:
    """Wait for the end of the run, and end it whatever comes."""
    try:
        run.until(0.0, sys.maxsize)
    finally:
        run.train.end()


@pytest.fixture
def running(request, place):
    """A run of which four steps are done."""
    name = re.sub(r"\\W", "-", request.node.name)
    run = begin("everything", place, name)
    try:
        assert run.until(0.0, 4), run.train.said()
        yield run
    finally:
        run.train.end()


@pytest.mark.parametrize("who", ["worker", "coordinator"])
def test_f16_a_process_that_stands_still_for_30_s_changes_nothing(who, running, whole):
    """A worker is taken for dead and started again; a coordinator finds its workers waiting."""
    pids = [running.train.process.pid] if who == "coordinator" else []
    (process,) = map(psutil.Process, pids or [worker.pid for worker in running.workers()])
    process.suspend()
    try:
        random_kills.stand_still(STILL_S)
    finally:
        with suppress(psutil.NoSuchProcess):  # a worker that was taken for dead
            process.resume()
    ended(running)
    assert different(found(running.output), whole) == []


def test_f28_a_clock_that_jumps_forward_and_back_changes_nothing(place, whole):
    """By a day, in all processes of the run."""
    offset, site = place / "offset", place / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(CLOCK.format(offset=str(offset)))
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    run = begin("everything", place, "clock", PYTHONPATH=paths)
    try:
        for step, seconds in ((3, DAY_S), (6, -DAY_S), (10, 0.0), (13, 2 * DAY_S)):
            assert run.until(0.0, step), run.train.said()
            offset.write_text(str(seconds))
    finally:
        ended(run)
    assert different(found(run.output), whole) == []
    history = map(json.loads, (run.output / "log_history.jsonl").read_text().splitlines())
    assert all(value >= 0 for line in history for name, value in line.items() if "_per_" in name)


def test_f24_a_disk_that_is_full_for_a_while_costs_records_and_checkpoints_only(place, whole):
    """All that a run writes is on it, the cache as well."""
    with small_disk(place / "disk") as mounted:
        if not mounted:
            pytest.skip("mounting a file system needs Linux and root")
        run = begin("everything", place, "disk", HETERO_CACHE=str(place / "disk" / "cache"))
        ballast = place / "disk" / "ballast"
        try:
            assert run.until(0.0, 5), run.train.said()
            while len(re.findall("checkpoint \\d+ could not be written", run.train.said())) < 2:
                random_kills.fill(ballast)
                assert not run.train.is_over(), run.train.said()
        finally:
            ballast.unlink(missing_ok=True)
            ended(run)
        left, said = found(run.output), run.train.said()
    assert "Traceback" not in said
    assert run.train.given == 1
    for name in ("metrics.jsonl", "log_history.jsonl", "samples.jsonl"):
        assert all(line in whole[name] for line in left[name]), name
        assert left[name][-1] == whole[name][-1]
    for name in ("adapter/adapter_model.safetensors", "checkpoint 16"):
        assert left[name] == whole[name]
