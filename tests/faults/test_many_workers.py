"""Many workers: 32 real ones equal one process, and 64 light ones are all answered."""

import sys

import pytest

from tests.faults.programs import told

MOST_GROWN_BYTES = 8 << 20

pytestmark = [
    pytest.mark.faults,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked"),
]


def test_32_workers_equal_one_process(tmp_path, figure):
    *_, found = told("many_workers", 32, 20, tmp_path)
    grown, seconds = found["grown_bytes"] / (1 << 20), found["seconds"]
    equal = "bit-equal" if found["equal"] else "NOT equal"
    reached = f"{found['steps']} steps, {equal}, {seconds:.0f} s, memory +{grown:.1f} MiB"
    figure("32 worker processes", reached, "20 steps, bit-equal, memory flat, 150 s")
    assert found["equal"]
    assert found["steps"] == 20
    assert found["grown_bytes"] < MOST_GROWN_BYTES


@pytest.mark.parametrize("nbytes", [4096, 1 << 18], ids=["4 KiB", "256 KiB"])
def test_64_light_workers_are_all_answered(nbytes, figure):
    """Its times are those of a machine whose cores are all taken by 128 echoing processes."""
    *_, found = told("echo_load", 64, nbytes, 3)
    share = found["links_per_s"] / found["bare_per_s"]
    reached = (
        f"p99 {found['p99_s'] * 1e3:.0f} ms, {found['links_per_s']:,.0f} frames/s, "
        f"{share:.0%} of sockets, fairness {found['fairness']:.2f}"
    )
    figure(f"64 light workers, {nbytes >> 10} KiB", reached, "p99 50 ms, 50 % of sockets, 0.6")
    assert found["fairness"] > 0.1
