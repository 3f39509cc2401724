from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from hetero_framework.core import messages as m
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.connection import Connection, Waiting
from hetero_framework.core.frames import PROTOCOL_VERSION, WireTensor
from hetero_framework.core.messages import COORDINATOR, WORKER, Body, Message
from hetero_framework.core.send_queue import LinkStats
from hetero_framework.core.session import Phase
from hetero_framework.errors import HeteroError, PeerLostError, ProtocolError
from tests.framed import framed
from tests.unit.core.test_stream import over_tcp
from tests.waiting import WAIT_S

HELLO = m.Hello("run", 1, "p", 1, 1 << 20)
WELCOME = m.Welcome("2", "cpu", "cpu", 1, 1)
SET_UP = (HELLO, WELCOME, m.Setup({}, (1,)), m.Ready(()))
INPUTS = m.Inputs(0, 0, 1, 0, (), {"a": (1,)})


class Side:
    """A connection with all that it was told."""

    def __init__(self, stack: ExitStack, stream: Any, role: str | None, **options: Any) -> None:
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[HeteroError | None] = queue.SimpleQueue()
        self.answer: Callable[[Message], None] = lambda message: None
        self.connection = Connection(
            stream, "peer", role, self._hear, lambda _, reason: self.ends.put(reason), **options
        )
        stack.callback(self.connection.close, 0)
        self.connection.start()

    def _hear(self, connection: Connection, message: Message) -> None:
        self.heard.put(message)
        self.answer(message)

    def send(self, body: Body) -> None:
        self.connection.send(Message(body))

    def end(self) -> HeteroError | None:
        return self.ends.get(timeout=WAIT_S)


Sides = tuple[Side, Side]


@pytest.fixture
def sides():
    """The one who dials, a coordinator, and the one who was dialled."""
    threads = set(threading.enumerate())
    with ExitStack() as stack:
        near, far = over_tcp()
        yield Side(stack, near, COORDINATOR), Side(stack, far, None)
    for thread in set(threading.enumerate()) - threads:
        thread.join(WAIT_S)


def test_the_answer_goes_to_ask_alone(sides):
    near, far = sides
    far.answer = lambda message: far.send(WELCOME)
    answer = near.connection.ask(Message(HELLO), WAIT_S)
    assert answer is not None
    assert answer.body == WELCOME
    assert near.connection.phase is far.connection.phase is Phase.WELCOMED
    assert near.heard.empty()


def test_ask_without_an_answer_ends_in_time(sides):
    assert sides[0].connection.ask(Message(HELLO), 0.05) is None


def test_ask_raises_why_the_link_ended(sides):
    near, far = sides
    far.answer = lambda message: far.connection.close(drain_s=0)
    with pytest.raises(PeerLostError):
        near.connection.ask(Message(HELLO), WAIT_S)


SIGNALS = (m.AskTurn(1_000_000, 2), m.Turn(True, True), m.ArrivalRate(1e9, False))


@pytest.mark.parametrize("body", [INPUTS, WELCOME, m.Bye("x"), m.Control("x"), *SIGNALS])
def test_a_message_before_the_greeting_reaches_no_handler(body, sides):
    near, far = sides
    near.connection.link.send(Message(body))
    assert "came before a greeting" in str(far.end())
    assert far.heard.empty()


def test_a_second_greeting_reaches_no_handler(sides):
    near, far = sides
    near.send(HELLO)
    near.connection.link.send(Message(HELLO))
    reason = far.end()
    assert isinstance(reason, ProtocolError)
    assert "out of order" in str(reason)
    assert far.heard.get(timeout=WAIT_S).body == HELLO
    assert far.heard.empty()


def test_line_that_crosses_our_goodbye_is_no_fault_of_the_peer(sides):
    near, far = sides
    far.answer = lambda message: far.send(WELCOME)
    assert near.connection.ask(Message(HELLO), WAIT_S) is not None
    near.connection.peer = WORKER
    far.answer = lambda message: None
    near.send(m.Bye("paused"))
    assert far.heard.get(timeout=WAIT_S).body == HELLO
    far.connection.link.send(Message(m.Log("INFO", "the coordinator left")))
    far.connection.close()
    assert "closed the connection" in str(near.end())
    assert near.connection.fault is None
    assert near.heard.empty()


def test_an_accepted_peer_is_sent_its_error(sides):
    near, far = sides
    far.connection.peer = COORDINATOR
    near.send(HELLO)
    far.heard.get(timeout=WAIT_S)
    near.connection.link.send(Message(INPUTS))
    error = near.heard.get(timeout=WAIT_S).expect(m.Error)
    assert (error.kind, "INPUTS out of order" in error.message) == ("ProtocolError", True)


@pytest.mark.parametrize(("version", "older"), [(11, "the peer"), (99, "this machine")])
def test_other_version_is_refused_with_both_numbers(version, older, sides):
    near, far = sides
    other = m.Hello("run", 1, "p", 1, 1 << 20, protocol=version, package="9.9")
    answer = near.connection.ask(Message(other), WAIT_S)
    assert answer is not None
    refusal = answer.expect(m.Reject)
    assert refusal.code == "protocol"
    assert f"version {version}" in refusal.message
    assert f"speaks {PROTOCOL_VERSION}" in refusal.message
    assert f"{older} is the older one" in str(refusal.hint)
    assert far.heard.empty()


def test_the_dialled_side_cannot_begin_with_tensors(stack):
    """Else what listens at a worker's port would have a coordinator take a gigabyte."""
    near, far = over_tcp()
    stack.callback(far.close)
    dials = Side(stack, near, COORDINATOR)
    tensor = WireTensor("int8", (1,), memoryview(b"x"))
    far.write(deque([memoryview(framed(Message(m.Forward(0, 0, 1, 0), [tensor])))]))
    assert "FORWARD came before a greeting" in str(dials.end())
    assert dials.heard.empty()


class NoMemory(BufferPool):
    """Gives none."""

    def take(self, nbytes: int) -> Any:
        raise AssertionError(f"{nbytes} bytes were taken")


def refusing(connection: Connection, frame: m.FrameHeader) -> None:
    raise ProtocolError(f"not {frame.body.spec.name} of {frame.payload_bytes} bytes")


def state_sent(stack: ExitStack, data: bytes, *before: Body, flip: int | None = None) -> Side:
    """A coordinator that gets STATE with `data` behind what it has sent and got `before`; a bit of
    byte `flip` of the frame is another one."""
    near, far = over_tcp()
    stack.callback(far.close)
    dials = Side(stack, near, COORDINATOR, awaited=refusing, pool=NoMemory())
    dials.connection.peer = 1
    for body in before:
        if body.spec.sender == COORDINATOR:
            dials.send(body)
        else:
            far.write(deque([memoryview(framed(Message(body)))]))
            dials.heard.get(timeout=WAIT_S)
    state = m.State(1, "checkpoint", 0, True, ("w",), {})
    frame = bytearray(framed(Message(state, [WireTensor("int8", (len(data),), memoryview(data))])))
    if flip is not None:
        frame[flip] ^= 1
    view = memoryview(bytes(frame))
    while view:
        view = view[far.write(deque([view])) :]
    return dials


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("before", "text"),
    [
        pytest.param((HELLO, WELCOME), "the worker sends STATE out of order", id="out of order"),
        pytest.param(SET_UP, "not STATE of", id="not awaited"),
    ],
)
def test_tensors_that_may_not_come_are_refused_without_memory_for_them(before, text, nbytes, stack):
    dials = state_sent(stack, bytes(nbytes), *before)
    assert text in str(dials.end())
    assert text in str(dials.connection.fault)
    assert dials.heard.empty()


def test_header_that_was_damaged_on_the_way_is_no_fault_of_the_peer(stack):
    # The last byte of the part's number.
    at = framed(Message(m.State(1, "checkpoint", 0, True, (), {}))).index(b"part") + 4
    dials = state_sent(stack, b"x", *SET_UP, flip=at)
    reason = dials.end()
    assert isinstance(reason, PeerLostError)
    assert "a frame arrived damaged (STATE" in reason.message
    assert dials.connection.fault is None


def test_ask_after_another_version_has_answered_says_so(stack):
    """A worker of another version may have greeted and been refused before it is asked."""
    near, far = over_tcp()
    stack.callback(far.close)
    asked_by = Side(stack, near, COORDINATOR)
    asked_by.connection.peer = 1
    welcome = m.Welcome("2", "cpu", "cpu", 1, 1, protocol=99, package="9.9")
    far.write(deque([memoryview(framed(Message(welcome)))]))
    far.end_writes()
    asked_by.end()  # it has been refused
    with pytest.raises(ProtocolError, match="speaks protocol version 99"):
        asked_by.connection.ask(Message(HELLO), WAIT_S)


def test_send_out_of_order_is_our_own_bug(sides):
    with pytest.raises(ProtocolError, match="we tried to send START out of order"):
        sides[0].send(m.Start((), 1))


def test_send_over_a_link_that_is_gone_is_a_lost_peer(sides):
    near, far = sides
    far.connection.close(drain_s=0)
    near.end()
    with pytest.raises(PeerLostError):
        near.send(HELLO)


def test_counters_go_on_over_a_new_link():
    stats = LinkStats()
    size = len(framed(Message(HELLO)))
    for round_number in (1, 2):
        with ExitStack() as stack:
            near, far = over_tcp()
            one, other = Side(stack, near, COORDINATOR, stats=stats), Side(stack, far, None)
            one.send(HELLO)
            other.heard.get(timeout=WAIT_S)
            assert stats.bytes_out == round_number * size


def received(body: m.Control | m.Loss, *tensors: WireTensor) -> Message:
    return m.decode(b"".join(m.encode(Message(body, tensors))))


def test_waiting_messages_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr("hetero_framework.core.connection.MOST_MESSAGES", 3)
    link, first = Waiting(), received(m.Loss(1, 2, 3, 0.5))
    link.came(first)
    link.came(received(m.Loss(1, 2, 4, 0.5)))
    link.came(received(m.Loss(1, 2, 5, 0.5)))
    with pytest.raises(ProtocolError, match="faster than it is heard: more than 3 messages wait"):
        link.came(received(m.Loss(1, 2, 6, 0.5)))
    first.seen()
    link.came(received(m.Loss(1, 2, 7, 0.5)))
    assert link.messages == 3


def test_waiting_messages_are_bounded_by_the_memory_of_fields():
    link = Waiting()
    large = received(m.Control("x", [{}] * 500_000))
    link.came(large)
    with pytest.raises(ProtocolError, match="more than 64 MiB of fields wait"):
        link.came(received(m.Control("x", [{}] * 500_000)))
    large.seen()
    link.came(received(m.Control("x", [{}] * 500_000)))
    assert (link.messages, link.tensor_bytes) == (1, 0)


def test_waiting_messages_are_bounded_by_tensor_bytes():
    tensor = WireTensor("uint8", (100,), memoryview(bytes(100)))
    link = Waiting()
    link.most_tensor_bytes = 150 << 20
    link.came(received(m.Control("x"), tensor))
    link.most_tensor_bytes = 150
    with pytest.raises(ProtocolError, match="MiB of tensors wait"):
        link.came(received(m.Control("x"), tensor))
    assert (link.messages, link.tensor_bytes) == (1, 100)
