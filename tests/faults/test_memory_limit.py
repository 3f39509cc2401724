"""A worker that its machine's memory limit ends: the kernel kills it, and the run goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.faults.test_signals import WAIT_S, Site, made, whole  # noqa: F401

pytestmark = pytest.mark.faults
_ROOTS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


@pytest.fixture
def limited():
    """A control group whose processes may take hardly more memory than they have."""
    for root, limit in _ROOTS.items():
        group = root / f"hetero-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(1 << 20))
            yield group / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_f31_a_worker_killed_over_its_memory_limit_changes_no_result(
    made,  # noqa: F811
    whole,  # noqa: F811
    limited,
    figure,
):
    site: Site = made("memory limit")
    point = "worker-1/forward@3:sleep:3"
    process = site.coordinator(point)
    site.await_text(f"{point} fires")
    started = re.search(r"worker 1: started as process (\d+)", site.said())
    assert started is not None, site.said()
    limited.write_text(started[1])
    assert process.wait(WAIT_S) == 0, site.said()
    said = r"worker 1: it ended with signal SIGKILL \(out of memory.*\); it is started again"
    assert re.search(said, site.said()), site.said()
    assert site.weights() == whole
    figure("a memory limit on a worker", "killed, bit-equal", "bit-equal")
