"""Links between workers, over real sockets of this machine."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import torch

from hetero_framework import control
from hetero_framework.cluster import peer_links
from hetero_framework.cluster.peer_links import PeerLinks
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import Listener
from hetero_framework.core.frames import HANDSHAKE_MAX_FRAME_BYTES, WireTensor
from hetero_framework.core.identity import Identity
from hetero_framework.core.messages import Body, Message
from hetero_framework.core.stream import Stream
from hetero_framework.engine.stage_api import StepInfo
from hetero_framework.errors import HeteroError, NetworkError, ProtocolError
from tests.cases import raising
from tests.samples import boundary_message, free_ports
from tests.waiting import WAIT_S, wait_until

LARGEST = 1 << 20
INFO = StepInfo(step=3, attempt=1, train=True, micro_batches=4, num_items=8)
TENSOR = torch.arange(6.0).view(1, 2, 3)


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch):
    """Every test ends with the threads that it began with, and soon."""
    monkeypatch.setattr(timeouts, "TICK_S", 0.02)
    threads = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads ended")


def boundary(kind: type[Body] = m.Forward) -> Message:
    return boundary_message(kind, INFO, 2, 0, TENSOR)


class Machine:
    """A worker, as far as its peers can tell: it listens, and lets `PeerLinks` decide."""

    def __init__(self, me: int | str, run_id: str | None = "run") -> None:
        self.introduced: queue.SimpleQueue[tuple[m.PeerResult, ...]] = queue.SimpleQueue()
        self.links = PeerLinks(me, self._start, self.introduced.put)
        self.links.run_id = run_id
        self.tensors: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self.refusals: list[str] = []
        self.answers_hello = True
        self.identity: Identity | None = None  # what whoever dials has shown
        self.greeted = threading.Event()
        self.open: list[Connection] = []
        self._listener = Listener("127.0.0.1", 0)
        self.port = self._listener.port
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self.links.close()
        self.stop_listening()
        for link in self.open:
            link.close(drain_s=0)

    def stop_listening(self) -> None:
        self._listener.close()
        self._acceptor.join(WAIT_S)

    def entry(self, me: int | str, port: int | None = None) -> m.PeerAddress:
        return m.PeerAddress(me, "127.0.0.1", port or self.port)

    def dial(self, *peers: m.PeerAddress, timeout_s: float = WAIT_S) -> tuple[m.PeerResult, ...]:
        """Dial these and return the answer for the coordinator."""
        self.links.dial(peers, timeout_s, LARGEST)
        return self.introduced.get(timeout=WAIT_S)

    def _accept(self) -> None:
        while True:
            try:
                stream = self._listener.accept()
            except NetworkError:
                return
            self._start(stream, "somebody", HANDSHAKE_MAX_FRAME_BYTES, None)

    def _start(
        self, stream: Stream, name: str, max_frame_bytes: int, role: str | None = m.DIALLER
    ) -> Connection:
        made = Connection(
            stream, name, role, self._hear, self._gone, max_frame_bytes=max_frame_bytes
        )
        self.open.append(made)
        made.identity = self.identity if role is None else None
        made.start()
        return made

    def _gone(self, connection: Connection, reason: HeteroError | None) -> None:
        if (worker := self.links.lost(connection)) is not None:
            self.lost.put(worker)

    def _hear(self, connection: Connection, message: Message) -> None:
        body = message.body
        if isinstance(body, m.PeerHello):
            self._greet(connection, body)
        elif isinstance(body, m.Control):
            self.links.answer(connection, message)
        elif isinstance(body, m.Bye):
            self.links.lost(connection)
            connection.close(drain_s=0)
        else:
            self.tensors.put(message)

    def _greet(self, connection: Connection, hello: m.PeerHello) -> None:
        self.greeted.set()
        if not self.answers_hello:
            return
        try:
            self.links.accept(connection, hello)
        except HeteroError as error:
            self.refusals.append(error.message)
            connection.refuse("peer", error.message, error.hint)


@pytest.fixture
def machine(stack):
    def make(*args: Any) -> Machine:
        made = Machine(*args)
        stack.callback(made.close)
        return made

    return make


Pair = tuple[Machine, Machine]


@pytest.fixture
def pair(machine):
    return machine(1), machine("box")


@pytest.fixture
def linked(pair):
    link_up(*pair)
    return pair


def link_up(one: Machine, other: Machine, name: int | str = "box") -> None:
    assert one.dial(other.entry(name)) == (m.PeerResult(name, None),)


# ---- meeting


def test_a_hanging_dial_is_reported_in_time(pair, monkeypatch):
    """As a name server that does not answer has it."""
    one, other = pair
    go = threading.Event()

    def hang(*args: Any, **options: Any) -> Stream:
        go.wait(WAIT_S)
        raise NetworkError("at last")

    monkeypatch.setattr(peer_links, "connect", hang)
    try:
        (result,) = one.dial(other.entry("box"), timeout_s=0.05)
        assert result.problem is not None
        assert "in time" in result.problem
    finally:
        go.set()


@pytest.mark.parametrize("kind", [m.Forward, m.Backward])
def test_tensors_go_both_ways_over_the_link(linked, kind):
    one, other = linked
    for sender, receiver, name in ((one, other, "box"), (other, one, 1)):
        written = threading.Event()
        sender.links.send(name, boundary(kind), written.set)
        message = receiver.tensors.get(timeout=WAIT_S)
        assert type(message.body) is kind
        assert bytes(message.tensors[0].data) == bytes(boundary().tensors[0].data)
        assert written.wait(WAIT_S)
        assert sender.links.bytes_sent() > TENSOR.nbytes


def test_frames_up_to_the_agreed_size_pass(linked):
    """Both sides have left the small limit of the handshake; beyond the agreed one is an error."""
    one, other = linked
    large = torch.zeros(HANDSHAKE_MAX_FRAME_BYTES)
    for sender, receiver, name in ((one, other, "box"), (other, one, 1)):
        message = boundary_message(m.Forward, INFO, 2, 0, large)
        sender.links.send(name, message)
        assert receiver.tensors.get(timeout=WAIT_S).payload_bytes == large.nbytes
        message = boundary_message(m.Forward, INFO, 2, 0, torch.zeros(LARGEST // 4))
        with pytest.raises(ProtocolError, match="agreed"):
            sender.links.send(name, message)


def test_several_are_dialled_at_once_and_each_has_its_answer(machine):
    one, other, third = machine(1), machine(2), machine(3, "another run")
    [port] = free_ports(1)
    results = one.dial(other.entry(2), third.entry(3), other.entry(4, port), timeout_s=3.0)
    assert [entry.id for entry in results] == [2, 3, 4]
    assert results[0].problem is None
    assert "another run" in results[1].problem
    assert "worker 4" in results[2].problem
    assert "nothing listens on that port" in results[2].problem


def test_an_empty_list_to_dial_is_answered(machine):
    assert machine(1).dial() == ()


@pytest.mark.parametrize(
    ("other", "name", "problem"),
    [
        (("box", "another run"), "box", "this worker serves another run, or none"),
        (("box", None), "box", "this worker serves another run, or none"),
        (("tower",), "box", "this is worker tower, not box"),
    ],
)
def test_stranger_is_refused_and_both_sides_know_why(machine, other, name, problem):
    one, stranger = machine(1), machine(*other)
    assert one.dial(stranger.entry(name)) == (m.PeerResult(name, problem),)
    assert stranger.refusals == [problem]
    one.links.send(name, boundary())  # nobody is there; nothing happens
    assert one.links.bytes_sent() == stranger.links.bytes_sent() == 0


def test_a_certificate_of_another_worker_is_refused(pair):
    one, other = pair
    other.identity = Identity.of("home", 9)
    problem = "the certificate is that of worker 9, not worker 1"
    assert one.dial(other.entry("box")) == (m.PeerResult("box", problem),)
    assert other.refusals == [problem]
    other.identity = Identity.of("home", 1)
    assert one.dial(other.entry("box")) == (m.PeerResult("box", None),)


def test_number_and_text_of_an_id_are_the_same_worker(machine):
    one, other = machine(1), machine(2)
    assert one.dial(other.entry("2")) == (m.PeerResult("2", None),)


def test_other_version_is_refused(pair, monkeypatch):
    one, other = pair
    versions = {"protocol": 99, "package": "9"}
    monkeypatch.setattr(m.PeerHello.__init__, "__kwdefaults__", versions)
    [entry] = one.dial(other.entry("box"))
    assert "version 99" in entry.problem


def test_a_peer_that_does_not_answer_is_reported(pair):
    one, other = pair
    other.answers_hello = False
    (result,) = one.dial(other.entry("box"), timeout_s=0.3)
    assert result == m.PeerResult("box", "it did not answer")


def test_a_peer_that_hangs_up_is_reported_at_once(pair):
    one, other = pair
    other.answers_hello = False
    one.links.dial((other.entry("box"),), WAIT_S, LARGEST)
    assert other.greeted.wait(WAIT_S)
    began = time.monotonic()
    other.open[0].close(drain_s=0)
    [entry] = one.introduced.get(timeout=WAIT_S)
    assert entry.problem is not None
    assert time.monotonic() - began < WAIT_S / 2


def test_a_pair_is_linked_if_either_side_reaches_the_other(pair):
    one, other = pair
    other.stop_listening()
    [entry] = one.dial(other.entry("box"), timeout_s=0.3)
    assert entry.problem is not None
    link_up(other, one, 1)
    one.links.send("box", boundary())
    assert other.tensors.get(timeout=WAIT_S).name == "FORWARD"


def test_new_link_takes_the_place_of_the_old_one(linked):
    one, other = linked
    [first] = one.open
    link_up(one, other)
    wait_until(lambda: first.closed, "the first link closed")
    one.links.send("box", boundary())
    assert other.tensors.get(timeout=WAIT_S).name == "FORWARD"


# ---- while it lasts


def test_link_that_breaks_is_reported_at_both_ends(linked):
    one, other = linked
    one.open[0].link._stream.stop()
    assert one.lost.get(timeout=WAIT_S) == "box"
    assert other.lost.get(timeout=WAIT_S) == 1
    one.links.send("box", boundary())  # its loss has been reported
    assert not one.links.knows(one.open[0])


def test_sending_over_a_link_that_has_just_gone_is_no_error(linked):
    one, _ = linked
    one.open[0].close(drain_s=0)
    one.links.send("box", boundary())
    one.links.ping()


def test_goodbye_ends_the_link_without_a_report(linked):
    one, other = linked
    one.links.close()
    wait_until(lambda: other.open[0].closed, "the other end closed")
    assert not other.links.knows(other.open[0])
    for end in linked:
        with pytest.raises(queue.Empty):
            end.lost.get(timeout=0.05)
    assert one.links.run_id is None


def test_message_out_of_order_is_refused(linked):
    _, other = linked
    message = Message(m.Loss(INFO.step, INFO.attempt, 0, 0.5))
    with pytest.raises(ProtocolError, match="sent LOSS out of order: FLOWING"):
        other.open[0].accept(message)


def test_ping_measures_the_round_trip(linked):
    one, _ = linked
    assert one.links.round_trips() == {}
    one.links.ping()
    wait_until(lambda: "box" in one.links.round_trips(), "a round trip")
    assert 0 < one.links.round_trips()["box"] < WAIT_S


def test_frames_are_watched_with_the_name_of_the_peer(pair):
    one, other = pair
    seen: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    for end in pair:
        end.links.watch = lambda peer: lambda way, m, *_: seen.put((peer, way, m.name))
    link_up(one, other)
    one.links.send("box", boundary())
    found = {seen.get(timeout=WAIT_S), seen.get(timeout=WAIT_S)}
    assert found == {("box", "send", "FORWARD"), (1, "receive", "FORWARD")}


# ---- the end of a run


def test_dialling_stops_when_the_run_is_over(pair):
    """Nobody hears of it any more: the coordinator that asked is gone."""
    one, other = pair
    other.answers_hello = False
    one.links.dial((other.entry("box"),), 60.0, LARGEST)
    assert other.greeted.wait(WAIT_S)
    one.links.close()
    wait_until(lambda: "dial peers" not in {t.name for t in threading.enumerate()})
    assert one.introduced.empty()
    assert one.open[0].closed


def test_welcome_that_comes_when_the_run_is_over_opens_no_link(pair):
    one, other = pair
    greet = other.links.accept

    def late(link: Connection, hello: m.PeerHello) -> None:
        one.links.close()
        greet(link, hello)

    other.links.accept = late  # type: ignore[method-assign]
    one.links.dial((other.entry("box"),), WAIT_S, LARGEST)
    wait_until(lambda: bool(one.open) and one.open[0].closed, "the link closed")
    assert not one.links.knows(one.open[0])


# ---- questions


@pytest.fixture
def slow(monkeypatch):
    """Handlers of these tests; "slow" answers when the event is set."""
    monkeypatch.setattr(control, "_handlers", {})
    go_on = threading.Event()
    control.on("slow")(lambda data: go_on.wait(WAIT_S))
    control.on("double")(lambda data: 2 * data)
    control.on("bytes")(lambda data: control.WithTensors("raw", (raw(data),)))
    yield go_on
    go_on.set()


def raw(count: int) -> WireTensor:
    return WireTensor("uint8", (count,), memoryview(bytes(range(count))))


def test_peer_answers_with_data_and_bytes(linked, slow):
    one, other = linked
    question = control.request(5, "double", 21, (raw(7),))
    answer = one.links.ask("box", question, WAIT_S)
    assert (control.result(answer), answer.body.answers) == (42, 5)
    answer.release()
    answer = other.links.ask(1, control.request(6, "bytes", 9), WAIT_S)  # either side may ask
    assert control.result(answer) == "raw"
    assert bytes(answer.tensors[0].data) == bytes(range(9))
    answer.release()
    one.links.send("box", boundary())  # tensors pass as before
    other.tensors.get(timeout=WAIT_S).release()


def test_question_to_one_without_a_link_is_refused(machine):
    with pytest.raises(NetworkError, match="there is no link to worker 2"):
        machine(1).links.ask(2, control.request(1, "double", 1), WAIT_S)


def test_a_silent_peer_is_reported_and_its_late_answer_dropped(linked, slow, monkeypatch):
    one, other = linked
    handled: list[str] = []
    handle = control.answer

    def note(message: Message) -> Message | None:
        handled.append(message.body.name)
        return handle(message)

    monkeypatch.setattr(control, "answer", note)
    with pytest.raises(NetworkError, match=r"worker box did not answer in 0\.05 s"):
        one.links.ask("box", control.request(1, "slow", None), 0.05)
    slow.set()
    one.links.send("box", boundary())
    other.tensors.get(timeout=WAIT_S).release()  # so the late answer is on its way, or there
    other.links.send(1, boundary(m.Backward))
    one.tensors.get(timeout=WAIT_S).release()
    answer = one.links.ask("box", control.request(2, "double", 4), WAIT_S)
    assert control.result(answer) == 8
    answer.release()
    assert handled == ["slow", "double"]


def test_link_that_breaks_ends_the_question_and_is_reported(linked, slow):
    one, other = linked
    cut = threading.Timer(0.1, lambda: other.open[-1].close(drain_s=0))
    cut.start()
    began = time.monotonic()
    with pytest.raises(NetworkError, match="the link to worker box broke"):
        one.links.ask("box", control.request(1, "slow", None), WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2
    assert one.lost.get(timeout=WAIT_S) == "box"
    slow.set()
    cut.join()


def test_end_of_the_run_ends_the_question(linked, slow):
    one, other = linked
    end = threading.Timer(0.1, other.links.close)
    end.start()
    with pytest.raises(NetworkError, match=r"worker box answered BYE|the link to worker box broke"):
        one.links.ask("box", control.request(1, "slow", None), WAIT_S)
    slow.set()
    end.join()


@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), KeyError("x")])
def test_dialling_that_fails_in_any_way_is_answered(pair, monkeypatch, error):
    one, other = pair
    monkeypatch.setattr(one.links, "_begin", raising(error))
    [entry] = one.dial(other.entry("box"))
    assert type(error).__name__ in entry.problem


def test_dialling_without_a_thread_to_be_had_is_answered(pair, monkeypatch):
    one, other = pair
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "dial peers":
            real(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    [entry] = one.dial(other.entry("box"))
    assert entry.problem == "RuntimeError: can't start new thread"
