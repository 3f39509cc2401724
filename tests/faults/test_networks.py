"""Network faults in a run: a pulled cable, a partition that heals, one lost direction, a slow link,
lost packets, and a process that stands still. The result is that of an undisturbed run.

Nothing of it needs a new worker process. Times that are asserted are deadlines of the product with
much room; the table has what was measured.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from hetero_framework.config import TrainingConfig
from tests.faults import networked
from tests.faults.final_state import assert_same_run
from tests.faults.networked import event_after, events
from tests.samples import save_llama, save_texts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

LIVENESS_S = TrainingConfig().liveness_timeout_s
ROOM_S = 10.0
"""A busy machine may be so late to notice."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if problem := networked.needs():
        pytest.skip(problem)
    at = tmp_path_factory.mktemp("networks")
    model = save_llama(at / "llama")
    texts = save_texts(at / "texts.jsonl", 21)
    with networked.machines(model, texts, at) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(cluster):
    """The output of the run in one process."""
    with cluster.run("whole", whole=True) as run:
        run.finish()
    return run.output


@pytest.fixture(autouse=True)
def healed(cluster):
    yield
    cluster.heal()
    for machine in range(3):
        cluster.shape(machine, networked.NETWORK)


def losses(output: Path) -> list[str]:
    """The events of links that were lost."""
    return [e["what"] for e in events(output) if "lost" in e["what"]]


def test_f10_a_pulled_cable_is_noticed_at_both_ends_and_recovered(cluster, whole, figure):
    """Without a word from the network: neither end is told."""
    with cluster.run("f10") as run:
        run.after_step(3)
        cut = time.time()
        cluster.cut(1)
        here = event_after(run.output, "worker lost", cut, LIVENESS_S + ROOM_S)
        there = event_after(cluster.worker_logs(1), "coordinator lost", cut, LIVENESS_S + ROOM_S)
        cluster.heal()
        run.finish()
    figure("F10 a pulled cable is noticed", f"{here:.1f} s and {there:.1f} s", "15 s, both ends")
    assert max(here, there) <= LIVENESS_S + ROOM_S
    assert_same_run(run.output, whole)


@pytest.mark.parametrize("way", ["to the worker", "from the worker"])
def test_f12_one_lost_direction_is_noticed_and_recovered(way, cluster, whole, figure):
    ends = (0, 1) if way == "to the worker" else (1, 0)
    with cluster.run(f"f12 {way}") as run:
        run.after_step(3)
        cut = time.time()
        cluster.lose(*ends)
        here = event_after(run.output, "worker lost", cut, 2 * LIVENESS_S + ROOM_S)
        cluster.heal()
        run.finish()
    figure(f"F12 nothing passes {way}: noticed", f"{here:.1f} s", "15 s")
    assert_same_run(run.output, whole)


def test_f11_a_partition_that_heals_is_only_a_delay(cluster, whole, figure):
    with cluster.run("f11") as run:
        run.after_step(3)
        cluster.cut(1)
        time.sleep(5.0)  # the fault itself
        cluster.heal()
        run.finish()
    figure("F11 a partition of 5 s", f"{len(losses(run.output))} links lost", "0, bit-equal")
    assert losses(run.output) == []
    assert_same_run(run.output, whole)


def test_f13_a_slow_link_is_not_a_dead_one(cluster, whole, figure):
    """A thousandth of what it was, so that a step takes many times as long."""
    with cluster.run("f13") as run:
        run.after_step(3)
        began = time.monotonic()
        cluster.shape(1, "100kbit", burst="4kb")
        run.after_step(5)
        took = (time.monotonic() - began) / 2
        cluster.shape(1, networked.NETWORK)
        run.finish()
    reached = f"{len(losses(run.output))} links lost, {took:.1f} s per step"
    figure("F13 a link slows down from 100 to 0.1 Mbit/s", reached, "0 lost, bit-equal")
    assert losses(run.output) == []
    assert_same_run(run.output, whole)


def test_f14_lost_packets_only_cost_time(cluster, whole, figure):
    """A queue of two packets: what comes in a burst is lost."""
    with cluster.run("f14") as run:
        run.after_step(1)
        for machine in (0, 1):
            cluster.shape(machine, "8mbit", limit="4kb", burst="2kb")
        run.finish()
        dropped = cluster.dropped(0) + cluster.dropped(1)
    figure("F14 lost packets", f"{dropped}, {len(losses(run.output))} links lost", "0 links lost")
    assert dropped > 20
    assert losses(run.output) == []
    assert_same_run(run.output, whole)


def test_f16_a_process_that_stands_still_for_5_s_is_waited_for(cluster, whole, figure):
    with cluster.run("f16") as run:
        run.after_step(3)
        coordinator = psutil.Process(run.child.pid)
        before = coordinator.memory_info().rss
        with cluster.stopped(2):
            time.sleep(5.0)  # the fault itself
        grown = (coordinator.memory_info().rss - before) / (1 << 20)
        run.finish()
    reached = f"{len(losses(run.output))} links lost, coordinator +{grown:.1f} MiB"
    figure("F16, F33 a worker stands still for 5 s", reached, "0, memory flat")
    assert losses(run.output) == []
    assert_same_run(run.output, whole)


def test_a_network_that_drops_large_packets_costs_time_and_is_reported(cluster, whole):
    """Links break and come about again; after the second loss they have small packets."""
    with cluster.run("mtu", links="relay") as run:
        run.after_step(2)
        cluster.drop_large(1)
        run.finish()
    assert [line for line in run.said if "is reached with small packets from now on" in line]
    assert_same_run(run.output, whole)


@pytest.mark.parametrize("machine", [0, 1])
def test_doctor_reports_a_network_that_drops_large_packets(machine, cluster):
    cluster.drop_large(machine)
    said = "drops large packets without telling"
    found = [one for one in cluster.diagnosed() if said in one["what"]]  # a busy one is slow, too
    assert {one["check"] for one in found} == {"link"}
    assert "MTU" in found[0]["fix"]
    cluster.shape(machine, networked.NETWORK)
    assert not any("drops large" in one["what"] for one in cluster.diagnosed())
