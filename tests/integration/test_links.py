"""Links between workers: used where possible, given up where they break, without effect on the
numbers."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.cluster.direct_links import DirectLinks
from hetero_framework.config import Config
from hetero_framework.core import messages as m
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.messages import Message
from hetero_framework.engine import boundary_io
from hetero_framework.errors import NetworkError
from hetero_framework.trainer.coordinator import train
from tests.fault_proxy import FaultProxy, FrameCut
from tests.framed import framed
from tests.integration.test_parity import LORA, assert_same_runs
from tests.pools import Notes, serving, with_own_worker
from tests.samples import plan_of, read_jsonl

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.usefixtures("nothing_left")]

INTERLEAVED = plan_of(("local", 1), (1, 2), (2, 3), ("local", 4), (1, 5), (2, 6))


@pytest.fixture
def run(configured):
    """Train into tmp_path/name; what the user read. `through`: ports instead of workers' own."""

    def go(
        name: str,
        cuts: list[int],
        through: dict[int, int] | None = None,
        notes: Notes | None = None,
        **sections: Any,
    ) -> Notes:
        sections.setdefault("adapter", LORA)
        raw = configured(cuts, name, **sections).to_dict()
        for worker in raw["workers"]:
            worker["port"] = (through or {}).get(worker["id"], worker["port"])
        notes = notes or Notes()
        train(Config.from_dict(raw), progress=notes)
        return notes

    return go


@pytest.fixture
def proxy(pool):
    """Between worker 1 and worker 2, when worker 2's port is the proxy's."""
    worker = pool.machines["workers"][1]
    with FaultProxy((worker["ip"], worker["port"])) as made:
        yield made


def relayed_bytes(output: Path) -> int:
    """What the workers' links with the coordinator have carried."""
    lines = read_jsonl(output / "metrics.jsonl")
    return sum(stage["bytes_in"] + stage["bytes_out"] for line in lines for stage in line["stages"])


@pytest.mark.parametrize(
    "plan", [None, pytest.param(INTERLEAVED, marks=pytest.mark.long)], ids=["chain", "interleaved"]
)
def test_direct_links_carry_the_tensors_and_change_nothing(run, tmp_path, plan):
    cuts = [2, 4] if plan is None else []
    run("whole", [])
    for links in ("relay", "auto", "direct"):
        notes = run(links, cuts, links=links, shard_plan=plan)
        assert not [line for line in notes.lines if "coordinator" in line]
        assert_same_runs(tmp_path / links, tmp_path / "whole")
    assert relayed_bytes(tmp_path / "direct") < 0.8 * relayed_bytes(tmp_path / "relay")
    assert relayed_bytes(tmp_path / "auto") < 0.8 * relayed_bytes(tmp_path / "relay")


@pytest.mark.long
def test_a_pair_with_two_boundaries_keeps_its_link(run, tmp_path):
    """Workers that dialled each other at once closed each other's link in most runs."""
    plan = plan_of(("local", 1), (1, 2), (2, 3), (1, 4), (2, 5), ("local", 6))
    for attempt in range(10):
        notes = run(
            f"run-{attempt}", [], links="direct", shard_plan=plan, training={"max_steps": 2}
        )
        assert not [line for line in notes.lines if "the link between" in line]


def test_links_are_chosen_per_boundary(run, tmp_path):
    plan = [dict(entry) for entry in INTERLEAVED]
    plan[2]["links"] = "relay"
    run("one", [], links="direct", shard_plan=plan)
    run("both", [], links="direct", shard_plan=INTERLEAVED)
    assert relayed_bytes(tmp_path / "both") < relayed_bytes(tmp_path / "one")
    assert_same_runs(tmp_path / "one", tmp_path / "both")


def test_an_unreachable_worker_is_relayed_to_with_auto_and_refused_with_direct(
    run, pool, tmp_path, monkeypatch
):
    """The coordinator reaches worker 2 at its port; to worker 1 it names one where nobody is."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    real = DirectLinks._order

    def elsewhere(self, pairs, timeout_s):
        kept, self._workers = (
            self._workers,
            {
                key: worker.model_copy(update={"port": nobody})
                for key, worker in self._workers.items()
            },
        )
        try:
            real(self, pairs, 0.5)
        finally:
            self._workers = kept

    monkeypatch.setattr(DirectLinks, "_order", elsewhere)
    (line,) = [line for line in run("auto", [2, 4]).lines if "go through the coordinator" in line]
    assert "worker 1 cannot reach worker 2" in line
    assert "worker 2 cannot reach worker 1" in line
    assert "nothing listens on that port" in line
    with pytest.raises(
        NetworkError, match=r"no direct link between layers 2-3 and layers 4-5"
    ) as e:
        run("direct", [2, 4], links="direct")
    assert e.value.exit_code == 2
    assert 'set links to "auto" or "relay"' in str(e.value.hint)


def deaths() -> Iterator[Any]:
    """All of them; of the default suite two that differ in each value."""
    usual = {(m.Backward, "before", True), (m.Forward, "after", False)}
    for one in itertools.product((m.Forward, m.Backward), ("before", "middle", "after"), (0, 1)):
        kind, where, reset = one
        name = f"{kind.spec.name}-{where}-{'reset' if reset else 'closed'}"
        marks = () if one in usual else pytest.mark.long
        yield pytest.param(kind, where, bool(reset), marks=marks, id=name)


@pytest.mark.parametrize(("kind", "where", "reset"), list(deaths()))
def test_a_direct_link_that_dies_costs_a_repeated_step(run, proxy, tmp_path, kind, where, reset):
    """The proxy also stands before worker 2's link with the coordinator, which carries neither."""
    direction = "up" if kind is m.Forward else "down"
    proxy.cuts.append(FrameCut(direction, kind, where, reset))
    notes = run("cut", [2, 4], {2: proxy.port})
    assert not proxy.cuts
    (line,) = [line for line in notes.lines if "lost the link between" in line]
    assert "between workers 1 and 2" in line
    assert "go through the coordinator until" in line
    assert not re.search(r"\(coordinator", line)
    assert any("the link between workers" in line and "is back" in line for line in notes.lines)
    run("whole", [])
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
def test_a_direct_link_that_falls_silent_is_given_up(run, proxy, tmp_path):
    """No byte and no end: the other link through the same proxy is opened again."""

    class Hole(Notes):
        def step(self, metrics: Any) -> None:
            super().step(metrics)
            if metrics["step"] == 3:
                proxy.up.blackhole = proxy.down.blackhole = True

        def message(self, text: str) -> None:
            super().message(text)
            if "connecting again" in text:
                proxy.up.blackhole = proxy.down.blackhole = False

    notes = run("cut", [2, 4], {2: proxy.port}, Hole(), training={"liveness_timeout_s": 3.0})
    assert any("has been silent" in line for line in notes.lines)
    run("whole", [])
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


def test_all_links_lost_at_once_cost_a_repeated_step(run, proxies, tmp_path):
    """All links run through the proxies: no worker can tell the coordinator that the one between
    them is gone too."""

    def outage(step: int) -> None:
        if step in (2, 5):
            for proxy in proxies.values():
                proxy.reset()

    through = {worker: proxy.port for worker, proxy in proxies.items()}
    notes = run("cut", [2, 4], through, Notes(outage), training={"step_timeout_s": 5.0})
    assert any("go through the coordinator until" in line for line in notes.lines)
    run("whole", [])
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_link_lost_while_tensors_wait_to_be_encoded_changes_nothing(
    run, pool, tmp_path, monkeypatch, direction
):
    """The thread that encodes is behind when the link is open again."""
    # No dropout: worker and coordinator share this process's random numbers.
    sections = {
        "wire": {"activations": "int8", "gradients": "int8"},
        "adapter": None,
        "links": "relay",
        "training": {"max_steps": 3},
    }
    run("calm", [2, 4], **sections)
    quick, pause = boundary_io._message, threading.Event()

    def slow(body: m.BoundaryTensor, parts: Any) -> Message:
        pause.wait(0.1 if body.step == 1 else 0.0)
        return quick(body, parts)

    monkeypatch.setattr(boundary_io, "_message", slow)
    here = with_own_worker(Config.from_dict(pool.config(Path("unused"), [3])))
    with serving(here), FaultProxy(("127.0.0.1", here.workers[0].port)) as proxy:
        commit = m.Commit if direction == "up" else m.Committed
        proxy.cuts.append(FrameCut(direction, commit, "after"))
        proxy.cuts.append(FrameCut(direction, m.Forward, "after"))
        notes = run("cut", [2, 4], {1: proxy.port}, **sections)
        assert not proxy.cuts
    assert sum("lost the link to worker 1" in line for line in notes.lines) == 2
    assert_same_runs(tmp_path / "cut", tmp_path / "calm")


def test_unknown_connections_at_a_workers_port_are_refused_as_peers(run, pool, tmp_path):
    """Before every step: other runs, other workers, frames without a greeting."""
    address = ("127.0.0.1", pool.machines["workers"][1]["port"])
    hello = m.PeerHello("stranger", 2, from_id=1, max_frame_bytes=1 << 40)
    tensor = WireTensor("float32", (1,), memoryview(b"1234"))
    greetings = [
        Message(hello),
        Message(replace(hello, worker_id=3, from_id="box")),
        Message(replace(hello, protocol=99)),
        Message(m.PeerWelcome()),
        Message(m.Forward(step=1, attempt=99, stage=2, micro_batch=0), [tensor]),
        Message(m.PeerLost(1, "none")),
    ]

    strangers: list[socket.socket] = []

    def come(step: int) -> None:
        for greeting in greetings:
            strangers.append(socket.create_connection(address))
            strangers[-1].sendall(framed(greeting) * 2)

    notes = run("cut", [2, 4], notes=Notes(come), links="direct")
    for stranger in strangers:
        stranger.close()
    assert not [line for line in notes.lines if "lost the link" in line]
    run("whole", [])
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
