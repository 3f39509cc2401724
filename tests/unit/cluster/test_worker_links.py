"""The coordinator's links to workers, without workers."""

from __future__ import annotations

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.cluster import worker_links
from hetero_framework.cluster.local_workers import LocalWorkers
from hetero_framework.cluster.worker_links import WorkerLinks
from hetero_framework.core import timeouts
from hetero_framework.core.messages import Bye, Connected, Error, Message, PeerResult, StepFailed
from hetero_framework.engine.hosts import HostEvent
from hetero_framework.engine.out_of_memory import StepOutOfMemory
from hetero_framework.errors import NetworkError, PeerLostError, ProtocolError, ResourceError
from tests.cases import raising
from tests.framed import framed
from tests.samples import free_ports
from tests.unit.cluster.conftest import star
from tests.waiting import WAIT_S


def links(**training: Any) -> WorkerLinks:
    worker = {"id": 1, "ip": "127.0.0.1", "port": free_ports(1)[0]}
    config = star([worker], ["local", 1], training={"connect_timeout_s": 0.3, **training})
    made = WorkerLinks(config, "run", 1 << 20)
    made.direct._workers = {**made._workers, 2: made._workers[1], 3: made._workers[1]}
    return made


def test_a_worker_started_here_is_not_reported_as_absent(monkeypatch, logged):
    monkeypatch.setattr(timeouts, "QUIET_S", 0.0)
    for is_child, reason in ((True, "its process starts"), (False, "the machine answers, but")):
        monkeypatch.setattr(LocalWorkers, "starts", lambda self, worker, own=is_child: own)
        with pytest.raises(NetworkError):
            links().connect_all()
        assert f"({reason}" in logged[0]
        assert any("hetero worker on its machine" in line for line in logged) != is_child
        logged.clear()


def test_no_error_of_dialling_is_swallowed(monkeypatch):
    made = links()
    monkeypatch.setattr(made, "_open", raising(RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        made.connect_all()


@pytest.mark.parametrize("other", [7, 1])
def test_a_link_to_no_worker_of_the_run_is_refused(other):
    with pytest.raises(ProtocolError, match=f"worker 1 has reached {other}, no worker"):
        links().direct.note(1, connected(other))


def connected(other: int) -> Connected:
    return Connected((PeerResult(other, None),))


def orders(made: WorkerLinks, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The pairs of each order to dial, all of which are obeyed."""
    ordered: list[list[Any]] = []

    def obeyed(pairs: Any, timeout_s: float) -> None:
        ordered.append(list(pairs))
        for dialler, other in ordered[-1]:
            made.direct.note(dialler, connected(other))

    monkeypatch.setattr(made.direct, "_order", obeyed)
    return ordered


def test_pair_that_meets_at_two_boundaries_dials_once(monkeypatch):
    """Both workers dialling each other at once would each close the link that the other kept."""
    made = links()
    dialled = orders(made, monkeypatch)
    assert made.direct.connect([(1, 2), (2, 1), (2, 3)], 1.0) == {}
    assert sorted(map(sorted, dialled[0])) == [[1, 2], [2, 3]]
    assert dialled[1] == []
    assert made.direct.open == {frozenset((1, 2)), frozenset((2, 3))}


def test_lost_link_between_workers_is_dialled_again_more_and_more_seldom(monkeypatch):
    made = links()
    ordered: list[Any] = []
    now = 0.0
    monkeypatch.setattr(made.direct, "_order", lambda pairs, timeout_s: ordered.extend(pairs))
    monkeypatch.setattr(worker_links.time, "monotonic", lambda: now)
    pair = frozenset((1, 2))
    made.direct.note(1, connected(2))
    made.direct.drop(pair)
    assert made.direct.open == set()
    made.direct.dial_again(5.0)
    made.direct.dial_again(5.0)  # the first attempt may still be on its way
    assert ordered == [(1, 2)]
    now = 6.0
    made.direct.dial_again(5.0)  # nobody answered
    assert ordered == [(1, 2), (2, 1)]
    made.direct.note(2, connected(1))
    assert made.direct.open == set()  # in this step
    now = 100.0
    made.direct.dial_again(5.0)
    assert made.direct.open == {pair}
    assert len(ordered) == 2
    made.direct.drop(pair)
    made.direct.dial_again(5.0)  # lost again: not at once
    assert len(ordered) == 2
    now = 101.0
    made.direct.dial_again(5.0)
    assert len(ordered) == 3


def test_links_of_a_process_that_is_gone_are_opened_anew(monkeypatch):
    """Also where the other end has not noticed."""
    made = links()
    dialled = orders(made, monkeypatch)
    made.direct.note(2, connected(1))
    made.direct.note(2, connected(3))
    made.direct.forget(1)
    assert made.direct.connect([(1, 2), (2, 3)], 1.0) == {}
    assert [pair for order in dialled for pair in order] == [(1, 2)]
    assert made.direct.open == {frozenset((1, 2)), frozenset((2, 3))}


def test_dial_that_hangs_ends_the_wait_for_all(monkeypatch):
    made = links(connect_timeout_s=0.05)
    go = threading.Event()
    monkeypatch.setattr(timeouts, "HANDSHAKE_S", 0.01)
    monkeypatch.setattr(made, "_open_when_free", lambda worker: go.wait(WAIT_S))
    try:
        with pytest.raises(NetworkError, match="address of worker 1 could not be found out"):
            made.connect_all()
    finally:
        go.set()


@pytest.mark.parametrize(("given_s", "longest_s"), [(30.0, 30.0), (None, math.inf)])
def test_worker_is_dialled_for_as_long_as_an_outage_may_last(given_s, longest_s, monkeypatch):
    """An outage may begin or end within a handshake; that ends no run before its time."""
    made = links(rejoin_wait_s=given_s)
    left: list[float] = []

    def open_(worker: Any, timeout_s: float, *, again: bool) -> Any:
        left.append(timeout_s)
        if len(left) < 4:
            raise worker_links._NotOpened("stranger", "it accepts, but says nothing")
        return reached("run")

    monkeypatch.setattr(timeouts, "ANSWER_TICK_S", 0.001)
    monkeypatch.setattr(made, "_open", open_)
    assert made.reconnect(1)
    assert len(left) == 4
    assert all(longest_s - 1.0 <= seconds <= longest_s for seconds in left)


def test_worker_that_stays_away_is_given_up_when_its_time_is_over(monkeypatch):
    made = links(rejoin_wait_s=0.05)
    strange = worker_links._NotOpened("stranger", "it accepts, but says nothing")
    monkeypatch.setattr(timeouts, "ANSWER_TICK_S", 0.01)
    monkeypatch.setattr(made, "_open", raising(strange))
    with pytest.raises(PeerLostError, match="worker 1 does not come back: it accepts, but"):
        made.reconnect(1)


def reached(run_id: str | None, closed: bool = False) -> worker_links._Reached:
    """As worker 1 is that serves this run, or none yet."""
    parts = SimpleNamespace(peer=1, closed=closed), SimpleNamespace(run_id=run_id, own_port=None)
    return worker_links._Reached(*parts)  # type: ignore[arg-type]


def test_an_awaited_worker_counts_only_while_its_link_is_open(monkeypatch):
    """Nothing is heard of it before; one that is gone again by then is dialled again."""
    made, answers = links(), [reached("run", closed=True), reached("run")]
    monkeypatch.setattr(made, "_open", lambda *args, **named: answers.pop(0))
    made.await_in_background(1)
    wait(made._awaited.values(), 30.0)
    assert made.generation(1) is None
    assert made.returned() == {}
    wait(made._awaited.values(), 30.0)
    assert made.generation(1) is None
    assert [welcome.run_id for welcome in made.returned().values()] == ["run"]
    assert made.generation(1) is not None
    assert (made.returned(), answers) == ({}, [])


def test_f8_worker_that_dies_in_its_first_greeting_is_dialled_again(monkeypatch, logged):
    """Its machine starts it again; a program that always hangs up is none."""
    made, dialled = links(), 0

    def open_(worker: Any, timeout_s: float) -> Any:
        nonlocal dialled
        dialled += 1
        if dialled < lives_at:
            raise worker_links._NotOpened("hung up", "worker 1 closed the connection")
        return reached(None)

    monkeypatch.setattr(timeouts, "BUSY_PAUSE_S", 0.001)
    monkeypatch.setattr(made, "_open", open_)
    lives_at = 5
    assert made.connect_all()[1].run_id is None
    assert dialled == 5
    (line,) = logged
    assert "hangs up; trying again for up to 0 s" in line
    monkeypatch.setattr(timeouts, "HANDSHAKE_S", 0.05)
    dialled, lives_at = 0, 10**9
    with pytest.raises(NetworkError, match="closed the connection"):
        made.connect_all()
    assert dialled > 1


def test_worker_of_this_machine_that_is_killed_while_it_starts_is_started_again(monkeypatch):
    """One that ends by itself would do so again."""
    made, revived = links(), []

    def open_(worker: Any, timeout_s: float) -> Any:
        if not revived:
            raise worker_links._NotOpened("ended", "worker 1 did not start: signal SIGKILL")
        return reached(None)

    monkeypatch.setattr(made, "_open", open_)
    monkeypatch.setattr(LocalWorkers, "revive", lambda self, worker, stop: revived.append(worker))
    with pytest.raises(NetworkError, match="did not start"):
        made.connect_all()
    monkeypatch.setattr(LocalWorkers, "was_told_to_end", lambda self, worker: True)
    made.connect_all()
    assert revived == [1]


def test_memory_that_ran_out_in_a_reader_is_raised_as_that():
    """To dial again would not help."""
    made, wire = links(), SimpleNamespace(peer=1, stream=None, fault=None)
    made._closed(wire, ResourceError("memory ran out"))  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="memory ran out"):
        made.receive(0)


def test_a_workers_protocol_error_is_raised_as_such():
    """It would do it again."""
    fault = ProtocolError("STATE out of order")
    wire = SimpleNamespace(peer=1, name="worker 1", stream=None, fault=fault)
    made = links()
    made._closed(wire, ProtocolError("worker 1: STATE out of order"))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"^worker 1: STATE out of order$"):
        made.receive(0)


def test_only_a_failure_of_the_present_attempt_is_raised():
    made, link = links(), object()
    made._wires[1] = link  # type: ignore[assignment]
    made.expect(4, 8)
    for attempt in (7, 8, 8):
        failed = Message(StepFailed(4, attempt, "stage 1, forward: memory ran out", "fewer layers"))
        made._inbox.put(HostEvent(1, link, failed))
    with pytest.raises(StepOutOfMemory, match=r"^worker 1: stage 1, forward: ") as caught:
        made.receive(0)
    assert (caught.value.attempt, caught.value.worker) == ((4, 8), 1)
    assert caught.value.hint == "fewer layers"
    made.expect(4, -1)  # it is aborted
    assert made.receive(0) is None


def test_out_of_memory_on_arrival_is_no_failure_of_the_link():
    """Raised in the reader thread it would close the link, and be taken for the network's fault."""
    made = links()
    made._unpack = raising(ResourceError("stage 0, BACKWARD of micro-batch 3: out of memory"))
    made._received(SimpleNamespace(peer=1), Message(connected(2)))  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="stage 0, BACKWARD of micro-batch 3"):
        made.receive(0)


@pytest.mark.parametrize(
    ("liveness_s", "answer_s"), [(3.0, 5.0), (30.0, 0.5)], ids=["its link", "its answer"]
)
def test_a_worker_that_accepts_but_never_answers_counts_as_deaf(liveness_s, answer_s, monkeypatch):
    """A process that stands still still accepts: only its end helps, and another one."""
    made = links(liveness_timeout_s=liveness_s)
    monkeypatch.setattr(timeouts, "REHANDSHAKE_S", answer_s)
    worker = made._workers[1]
    with closing(socket.create_server(("127.0.0.1", worker.port))):
        with pytest.raises(worker_links._NotOpened) as found:
            made._open(worker, 5.0, again=True)
        assert found.value.kind == "deaf"
    made.close(Message(Bye("over")), 1.0)


def test_a_greeting_that_is_answered_with_an_error_leaves_no_link_behind():
    made = links()
    worker = made._workers[1]
    with closing(socket.create_server(("127.0.0.1", worker.port))) as listener:

        def serve() -> bytes:
            """All that comes, up to the end of the connection."""
            got = b""
            with closing(listener.accept()[0]) as peer:
                peer.settimeout(WAIT_S)
                got += peer.recv(1 << 16)
                peer.sendall(framed(Message(Error("HeteroError", "it ends"))))
                while more := peer.recv(1 << 16):
                    got += more
            return got

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            with pytest.raises(ProtocolError):
                made._open(worker, 5.0, again=True)
            assert served.result(WAIT_S)
    made.close(Message(Bye("over")), 1.0)
