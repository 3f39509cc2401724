from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pytest

from hetero_framework.core import link as link_module
from hetero_framework.core import link_bandwidth, timeouts
from hetero_framework.core import messages as m
from hetero_framework.core import stream as stream_module
from hetero_framework.core.bandwidth_scheduler import BandwidthScheduler
from hetero_framework.core.buffers import BufferPool
from hetero_framework.core.clock import Clock
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.frames import INSIDE, PIECE_BYTES, WireTensor
from hetero_framework.core.link import Link
from hetero_framework.core.messages import Control, Forward, Heartbeat, Message, decode
from hetero_framework.core.send_queue import CHECKSUM_BYTES, VOID
from hetero_framework.core.stream import PlainStream
from hetero_framework.core.threads import in_background
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.errors import HeteroError, OutOfMemory, PeerLostError, ProtocolError
from tests.cases import raising
from tests.fault_proxy import FaultProxy
from tests.framed import framed
from tests.waiting import WAIT_S, wait_until


def open_handles() -> int:
    process = psutil.Process()
    return process.num_handles() if hasattr(process, "num_handles") else process.num_fds()


@pytest.fixture(autouse=True)
def no_leaks():
    """Every test ends with the threads and file descriptors that it began with."""
    threads, handles = set(threading.enumerate()), open_handles()
    yield
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads ended")
    wait_until(lambda: open_handles() <= handles, "sockets closed")


class End:
    """A link with everything that it reported."""

    def __init__(self, sock: socket.socket, name: str, **options: Any) -> None:
        """`options` are those of `Link`, of `LinkDeadlines` and `max_queue_bytes`."""
        self.messages: list[Message] = []
        self.reasons: list[HeteroError | None] = []
        self.ended = threading.Event()
        self.on_message: Callable[[Message], None] = self.messages.append
        stream = PlainStream(sock)
        of_link = {key: options.pop(key) for key in [*options] if not key.endswith("_s")}
        most = of_link.pop("max_queue_bytes", Link.max_queue_bytes)
        of_link["deadlines"] = LinkDeadlines(**options)
        self.link = Link(stream, name, lambda body: self.on_message(body), self._close, **of_link)
        self.link.max_queue_bytes = most
        self.link.start()

    def _close(self, reason: HeteroError | None) -> None:
        self.reasons.append(reason)
        self.ended.set()

    def reason(self) -> HeteroError | None:
        assert self.ended.wait(WAIT_S), "the link did not end"
        assert len(self.reasons) == 1
        return self.reasons[0]

    def take(self, count: int = 1) -> list[Message]:
        wait_until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.messages


def sockets(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets; closed at the end of the test."""
    with closing(Listener("127.0.0.1", 0)) as listener:
        near = stack.enter_context(connect("127.0.0.1", listener.port, WAIT_S)._socket)
        far = stack.enter_context(listener.accept()._socket)
    return near, far


def end(stack: ExitStack, sock: socket.socket, name: str = "peer", **options: Any) -> End:
    made = End(sock, name, **options)
    stack.callback(made.link.close, 0.0)
    return made


def against(stack: ExitStack, name: str = "peer", **options: Any) -> tuple[socket.socket, End]:
    """A bare socket, and the link at its other end."""
    bare, own = sockets(stack)
    return bare, end(stack, own, name, **options)


def pair(stack: ExitStack, **options: Any) -> tuple[End, End]:
    near, far = sockets(stack)
    return end(stack, near, "worker", **options), end(stack, far, "coordinator", **options)


def proxied(stack: ExitStack, **options: Any) -> tuple[End, End, FaultProxy]:
    with closing(Listener("127.0.0.1", 0)) as listener:
        proxy = stack.enter_context(FaultProxy(("127.0.0.1", listener.port)))
        near = stack.enter_context(connect("127.0.0.1", proxy.port, WAIT_S)._socket)
        far = stack.enter_context(listener.accept()._socket)
    return end(stack, near, "worker", **options), end(stack, far, "coordinator", **options), proxy


def counted_pool() -> tuple[BufferPool, list[int]]:
    """A pool, and the sizes of the buffers that it has allocated."""
    allocated: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        allocated.append(nbytes)
        return memoryview(bytearray(nbytes))

    return BufferPool(allocate), allocated


def greet(sender: End, receiver: End) -> None:
    """As the start of a session does; the sender knows the round trip after it."""
    receiver.link.send(control())
    sender.take()
    sender.link.ping()
    wait_until(lambda: sender.link.clock.round_trip_s is not None, "a pong")


def control(nbytes: int = 0, number: int = 0) -> Message:
    data = bytes((number + i) % 251 for i in range(min(nbytes, 251)))
    payload = (data * (nbytes // 251 + 1))[:nbytes] if nbytes else b""
    tensors = [WireTensor("uint8", (nbytes,), memoryview(payload))] if nbytes else []
    return Message(Control("test", number), tensors)


def random_tensor(nbytes: int) -> WireTensor:
    return WireTensor("uint8", (nbytes,), memoryview(random.Random(nbytes).randbytes(nbytes)))


def frames_moved(*links: Link) -> list[tuple[str, int, float, float]]:
    """What these links will tell of their frames: way, number, begin and end."""
    moved: list[tuple[str, int, float, float]] = []
    for link in links:
        link.on_moved = lambda way, message, *times: moved.append((way, message.body.data, *times))
    return moved


def payload_of(message: Message) -> bytes:
    return bytes(message.tensors[0].data)


# ---------------------------------------------------------------------------- moving messages


def test_messages_arrive_in_order_both_ways(stack):
    a, b = pair(stack)
    for number in range(50):
        a.link.send(control(number * 100, number))
        b.link.send(control(7, number))
    assert [m.body.data for m in b.take(50)] == list(range(50))
    assert [m.body.data for m in a.take(50)] == list(range(50))
    assert all(payload_of(m) == payload_of(control(7, m.body.data)) for m in a.messages)


def test_large_frame_arrives_whole_and_is_counted(stack):
    a, b = pair(stack)
    written = threading.Event()
    message = control(20_000_000, 3)
    a.link.send(message, written.set)
    assert payload_of(b.take()[0]) == payload_of(message)
    assert written.wait(WAIT_S)
    size = len(framed(message))
    wait_until(lambda: a.link.stats.bytes_out == size, "bytes counted")
    assert b.link.stats.bytes_in == size
    assert a.link.stats.write_s > 0


def test_many_tensors_pass_the_limit_of_one_system_call(stack):
    a, b = pair(stack)
    tensors = [WireTensor("uint8", (1,), memoryview(bytes([i % 256]))) for i in range(3000)]
    a.link.send(Message(Control("x", None), tensors))
    received = b.take()[0].tensors
    assert [t.data[0] for t in received] == [i % 256 for i in range(3000)]


def test_without_sendmsg_the_same_bytes_travel(stack, monkeypatch):
    monkeypatch.setattr(stream_module, "_HAS_SENDMSG", False)
    monkeypatch.setattr(stream_module, "_CAN_TRY", False)
    a, b = pair(stack)
    tensors = [control(n, n).tensors[0] for n in (10, 200_000, 5, 7, 300_000)]
    a.link.send(Message(Control("x", None), tensors))
    assert [bytes(t.data) for t in b.take()[0].tensors] == [bytes(t.data) for t in tensors]


def test_released_buffers_are_used_again_and_kept_ones_are_not(stack):
    pool, allocated = counted_pool()
    near, far = sockets(stack)
    a, b = end(stack, near), end(stack, far, pool=pool)
    for number in range(4):
        a.link.send(control(50_000, number))
        b.take(number + 1)[number].release()
        b.messages[number].release()
    assert len(allocated) == 1
    for number in range(4, 7):
        a.link.send(control(50_000, number))
    assert [payload_of(m)[0] for m in b.take(7)[4:]] == [4, 5, 6]
    assert len(allocated) == 3


def test_frame_over_the_agreed_size_is_refused_on_both_sides(stack):
    near, far = sockets(stack)
    a, b = end(stack, near, max_frame_bytes=1 << 20), end(stack, far, max_frame_bytes=2000)
    a.link.send(control(100))
    b.take()
    with pytest.raises(ProtocolError, match="larger than the 2000 bytes"):
        b.link.send(control(3000))
    b.link.max_frame_bytes = 4000
    b.link.send(control(3000))
    a.take()
    a.link.send(control(5000))
    assert isinstance(b.reason(), ProtocolError)
    assert "at most 4000 are agreed" in str(b.reason())


def test_frame_that_its_sender_writes_does_not_wake_the_writer(stack, monkeypatch):
    """Two such wake-ups for each small frame made a step of many of them half as long again."""
    a, b = pair(stack)
    woken: list[int] = []
    notify = a.link._work.notify
    monkeypatch.setattr(a.link._work, "notify", lambda n=1: (woken.append(n), notify(n)))
    for number in range(20):
        a.link.send(control(number=number))
    b.take(20)
    assert woken == []


def test_slow_reader_holds_the_sender_back(stack):
    near, far = sockets(stack)
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    a = end(stack, near, max_queue_bytes=1_500_000)
    b = end(stack, far)
    go, arrived = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        arrived.set()
        assert go.wait(WAIT_S)
        b.messages.append(message)

    b.on_message = handle
    sent: list[int] = []

    def produce() -> None:
        for number in range(10):
            a.link.send(control(1_000_000, number))
            sent.append(number)

    producer = threading.Thread(target=produce)
    producer.start()
    assert arrived.wait(WAIT_S)
    wait_until(lambda: a.link._queue.nbytes > 0 and len(sent) >= 1, "queue filled")
    producer.join(0.2)
    assert producer.is_alive()
    assert len(sent) <= 4
    assert a.link._queue.nbytes <= 2_100_000
    go.set()
    producer.join(WAIT_S)
    assert [m.body.data for m in b.take(10)] == list(range(10))


def test_no_more_than_the_bound_waits_in_the_queue(stack, monkeypatch):
    _, a = against(stack, max_queue_bytes=1_000_000)
    a.link.send(control(30_000_000))  # nobody reads it, and it may pass alone
    waiting, wait = threading.Event(), a.link._room.wait
    monkeypatch.setattr(a.link._room, "wait", lambda timeout: (waiting.set(), wait(timeout)))

    def send() -> None:
        with contextlib.suppress(PeerLostError):
            a.link.send(control(1))

    sending = in_background(send, "send")
    assert waiting.wait(WAIT_S)
    a.link.end(drain_s=0)
    sending.result(WAIT_S)


def test_blocked_sender_waits_in_slices_and_is_freed_when_the_link_ends(stack, monkeypatch):
    """In slices, since on Windows Ctrl-C interrupts no wait without an end (L13)."""
    far, a = against(stack, max_queue_bytes=1000)
    waits: list[float | None] = []
    wait = a.link._room.wait

    def noted(timeout: float | None = None) -> bool:
        if threading.current_thread() is producer:
            waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(a.link._room, "wait", noted)
    raised: list[HeteroError] = []

    def produce() -> None:
        try:
            while True:
                a.link.send(control(10_000_000))
        except HeteroError as error:
            raised.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    wait_until(lambda: bool(waits), "the sender blocks")
    far.close()
    producer.join(WAIT_S)
    assert isinstance(raised[0], PeerLostError)
    assert isinstance(a.reason(), PeerLostError)
    assert all(wait is not None and wait <= 0.5 for wait in waits)


# ---------------------------------------------------------------------------- cut-through relay


class Relay:
    """A middle process: what comes from `source` goes to `target`, or where `to` says."""

    def __init__(self, stack: ExitStack, near: dict[str, Any], far: dict[str, Any]) -> None:
        self.announced: list[Message] = []
        self.to: Callable[[Message], Link | None] = lambda message: self.out.link
        self.source_socket, inward = sockets(stack)
        outward, self.target_socket = sockets(stack)
        self.out = end(stack, outward, "receiver", **far)
        self.into = end(stack, inward, "sender", route=self._route, **near)

    def _route(self, message: Message) -> Link | None:
        self.announced.append(message)
        return self.to(message)


@pytest.fixture
def relay(stack, request):
    """Its `param`, if any: the options of both of its links."""
    options = getattr(request, "param", {})
    return Relay(stack, options, options)


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    sock.settimeout(WAIT_S)
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"closed after {len(data)} of {count} bytes"
        data += piece
    return data


def test_routed_frame_goes_out_before_it_has_come_in(relay):
    frame = framed(control(1_000_000, 5))
    half = len(frame) // 2
    relay.source_socket.sendall(frame[:half])
    early = receive_exactly(relay.target_socket, half - link_module._RESERVE_BYTES)
    relay.source_socket.sendall(frame[half:])
    assert early + receive_exactly(relay.target_socket, len(frame) - len(early)) == frame
    assert relay.into.messages == []
    assert [(type(m.body), m.body.data, m.tensors) for m in relay.announced] == [(Control, 5, ())]


def test_routed_frame_reaches_a_receiver_that_reads_slowly(relay):
    for sock in (relay.target_socket, relay.out.link._stream._socket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20_000)
    frame = framed(Message(Control("x", 1), [random_tensor(4_000_000)]))
    received = b""
    for start in range(0, len(frame), 40_000):
        # More comes in than goes out, so that both threads of the relay write.
        relay.source_socket.sendall(frame[start : start + 40_000])
        received += receive_exactly(relay.target_socket, 20_000 if start else 10_000)
    received += receive_exactly(relay.target_socket, len(frame) - len(received))
    assert received == frame


def test_routed_frames_are_counted_and_told(relay):
    moved = frames_moved(relay.into.link, relay.out.link)
    frame = framed(control(2_000_000, 7))
    relay.source_socket.sendall(frame)
    assert receive_exactly(relay.target_socket, len(frame)) == frame
    wait_until(lambda: len(moved) == 2, "told")
    assert sorted(entry[:2] for entry in moved) == [("receive", 7), ("send", 7)]
    assert all(0 < began <= ended for _, _, began, ended in moved)
    wait_until(lambda: relay.out.link._queue.nbytes == 0, "written")
    assert relay.into.link.stats.bytes_in == relay.out.link.stats.bytes_out == len(frame)


def test_a_frame_without_a_route_is_received_whole(relay):
    relay.to = lambda message: relay.out.link if message.body.data == 2 else None
    for number in range(4):
        relay.source_socket.sendall(framed(control(10_000, number)))
    relay.source_socket.sendall(framed(control(0, 4)))
    assert [m.body.data for m in relay.into.take(4)] == [0, 1, 3, 4]
    assert payload_of(relay.into.messages[2]) == payload_of(control(10_000, 3))
    # A frame without tensor bytes is not asked about.
    assert [m.body.data for m in relay.announced] == [0, 1, 2, 3]
    frame = framed(control(10_000, 2))
    assert receive_exactly(relay.target_socket, len(frame)) == frame


def test_whole_frame_passes_one_that_waits_for_its_bytes(relay):
    frame = framed(control(500_000, 1))
    relay.source_socket.sendall(frame[:5000])  # too little to begin with
    wait_until(lambda: relay.out.link._queue.nbytes > 0, "queued")
    quick = framed(control(70_000, 2))
    relay.out.link.send(control(70_000, 2))
    assert receive_exactly(relay.target_socket, len(quick)) == quick
    relay.source_socket.sendall(frame[5000:])
    assert receive_exactly(relay.target_socket, len(frame)) == frame


@pytest.mark.parametrize("count", [60, 100, 40_000, 299_000])
def test_source_that_dies_in_a_frame_leaves_the_other_link_usable(count, relay):
    frame = framed(control(300_000, 1))
    relay.source_socket.sendall(frame[:count])
    wait_until(lambda: len(relay.announced) == 1, "announced")
    relay.source_socket.close()
    assert "in the middle of a message" in str(relay.into.reason())
    padded = receive_exactly(relay.target_socket, len(frame))
    relay.out.link.send(control(0, 2))
    assert padded.endswith(VOID)
    kept = len(padded[: -len(VOID)].rstrip(b"\0"))
    assert padded[:kept] == frame[:kept]
    assert kept <= count
    assert not relay.out.link.closed
    after = framed(control(0, 2))
    assert receive_exactly(relay.target_socket, len(after)) == after


def test_padding_bytes_come_after_the_report_of_the_loss(relay):
    """Else a receiver's answer to them could be taken for true."""
    frame = framed(control(300_000, 1))
    told, go = threading.Event(), threading.Event()
    real = relay.into.link._on_close

    def slow(reason: HeteroError | None) -> None:
        told.set()
        assert go.wait(WAIT_S)
        real(reason)

    relay.into.link._on_close = slow
    relay.source_socket.sendall(frame[:-1])
    wait_until(lambda: len(relay.announced) == 1, "announced")
    relay.source_socket.close()
    assert told.wait(WAIT_S)
    relay.target_socket.settimeout(0.2)
    got = 0
    with contextlib.suppress(TimeoutError):
        while got < len(frame):
            got += len(relay.target_socket.recv(len(frame)))
    assert got < len(frame)
    go.set()
    receive_exactly(relay.target_socket, len(frame) - got)


@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_receiver_that_dies_leaves_the_source_usable(when, relay):
    frame = framed(control(3_000_000, 1))
    begun = 0 if when == "before" else 1_500_000
    relay.source_socket.sendall(frame[:begun])
    if begun:
        receive_exactly(relay.target_socket, 100_000)
    relay.target_socket.close()
    assert isinstance(relay.out.reason(), PeerLostError)
    relay.source_socket.sendall(frame[begun:] + framed(control(50, 2)) + frame)
    relay.to = lambda message: None
    relay.source_socket.sendall(framed(control(50, 3)))
    assert relay.into.take()[-1].body.data in (1, 2, 3)
    wait_until(lambda: relay.into.messages[-1].body.data == 3, "the last one")
    assert not relay.into.link.closed


def test_frame_too_large_for_the_receiver_ends_the_source(stack):
    relay = Relay(stack, {}, {"max_frame_bytes": 2000})
    relay.source_socket.sendall(framed(control(3000)))
    reason = relay.into.reason()
    assert isinstance(reason, ProtocolError)
    assert "larger than the 2000 bytes agreed with receiver" in str(reason)
    assert not relay.out.link.closed


def test_error_of_the_route_is_the_reason(relay):
    relay.to = raising(ProtocolError("FORWARD out of order"))
    relay.source_socket.sendall(framed(control(3000)))
    assert str(relay.into.reason()) == "sender: FORWARD out of order"


@pytest.mark.parametrize("relay", [{"heartbeat_s": 0.05}], indirect=True)
def test_signs_of_life_come_also_in_the_middle_of_a_stalled_frame(relay):
    frame = framed(control(500_000, 1))
    relay.source_socket.sendall(frame[:200_000])
    sign = framed(Message(Heartbeat()))
    came = sign
    while came == sign:  # a silence before the frame may have lasted
        came = receive_exactly(relay.target_socket, len(sign))
    reserve = link_module._RESERVE_BYTES
    came += receive_exactly(relay.target_socket, 200_000 - reserve - len(sign))
    came += receive_exactly(relay.target_socket, 20)  # of the reserve, one by one
    relay.source_socket.sendall(frame[200_000:])
    assert came + receive_exactly(relay.target_socket, len(frame) - len(came)) == frame


def test_link_that_closes_does_not_wait_for_a_stalled_source(relay):
    frame = framed(control(500_000, 1))
    relay.source_socket.sendall(frame[:200_000])
    begun = receive_exactly(relay.target_socket, 50_000)
    relay.out.link.send(control(0, 9))
    closing = in_background(lambda: relay.out.link.close(2 * WAIT_S), "close")
    rest = receive_exactly(relay.target_socket, len(frame) - len(begun))
    assert (begun + rest)[200_001:] == bytes(len(frame) - 200_001 - CHECKSUM_BYTES) + VOID
    assert receive_exactly(relay.target_socket, len(framed(control(0, 9))))
    relay.target_socket.close()
    closing.result(WAIT_S)
    assert relay.out.reason() is None
    relay.source_socket.sendall(frame[200_000:] + framed(control(0, 2)))
    assert relay.into.take()[0].body.data == 2


def test_source_that_closes_in_the_middle_of_a_frame_pads_it(relay):
    frame = framed(control(500_000, 1))
    relay.source_socket.sendall(frame[:200_000])
    receive_exactly(relay.target_socket, 50_000)
    relay.into.link.close(drain_s=0.05)
    assert relay.into.reason() is None
    receive_exactly(relay.target_socket, len(frame) - 50_000)
    assert not relay.out.link.closed


def test_buffers_of_routed_frames_are_used_again(stack):
    pool, allocated = counted_pool()
    relay = Relay(stack, {"pool": pool}, {})
    for number in range(5):
        frame = framed(control(700_000, number))
        relay.source_socket.sendall(frame)
        assert receive_exactly(relay.target_socket, len(frame)) == frame
        wait_until(lambda: relay.out.link._queue.nbytes == 0, "written")
        wait_until(lambda: relay.into.link._pool._free_bytes > 0, "given back")
    assert len(allocated) == 1


def test_memory_for_a_routed_frame_is_taken_when_there_is_room(stack, monkeypatch):
    """A carrier whose peer does not read holds up no memory of the links behind it."""
    pool, allocated = counted_pool()
    relay = Relay(stack, {"pool": pool}, {"max_queue_bytes": 1000})
    waiting, wait = threading.Event(), relay.out.link._wait_for_room

    def noted(nbytes: int, source: Link | None = None) -> None:
        waiting.set()
        wait(nbytes, source)

    monkeypatch.setattr(relay.out.link, "_wait_for_room", noted)
    large, frame = framed(control(30_000_000)), framed(control(100_000))
    relay.out.link.send(control(30_000_000))  # nobody reads it yet
    relay.source_socket.sendall(frame)
    assert waiting.wait(WAIT_S)
    assert allocated == []
    assert receive_exactly(relay.target_socket, len(large)) == large
    assert receive_exactly(relay.target_socket, len(frame)) == frame
    assert len(allocated) == 1


def test_source_waits_for_room_no_longer_than_it_lives(stack):
    relay = Relay(stack, {}, {"max_queue_bytes": 1000})
    relay.out.link.send(control(30_000_000))  # nobody reads it
    relay.source_socket.sendall(framed(control(3_000)))
    wait_until(lambda: len(relay.announced) == 1, "announced")
    started = time.monotonic()
    relay.into.link.close(drain_s=0.05)
    assert relay.into.reason() is None
    assert time.monotonic() - started < WAIT_S


def test_frame_may_go_back_where_it_came_from(relay):
    relay.to = lambda message: relay.into.link
    frame = framed(control(400_000, 3))
    relay.source_socket.sendall(frame)
    assert receive_exactly(relay.source_socket, len(frame)) == frame


def send_all(sock: socket.socket, pieces: list[bytes]) -> None:
    for piece in pieces:
        sock.sendall(piece)


def test_two_sources_to_one_receiver_keep_their_frames_whole(stack):
    outward, far = sockets(stack)
    out, target = end(stack, outward, "receiver"), end(stack, far, "relay")
    rng = random.Random(3)
    senders = []
    for name in (0, 1000):
        near, inward = sockets(stack)
        end(stack, inward, f"sender {name}", route=lambda message: out.link)
        sizes = [rng.choice([1, 100, 5_000, 400_000]) for _ in range(60)]
        stream = b"".join(framed(control(n, name + k)) for k, n in enumerate(sizes))
        cuts = sorted(rng.randrange(len(stream)) for _ in range(40))
        pieces = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
        senders.append((near, pieces))
    sending = [in_background(partial(send_all, *sender), "send") for sender in senders]
    for number in range(20):
        out.link.send(control(0, 2000 + number))
    received = target.take(140)
    for sender in sending:
        sender.result(WAIT_S)
    for name, count in ((0, 60), (1000, 60), (2000, 20)):
        numbers = [m.body.data for m in received if name <= m.body.data < name + 1000]
        assert numbers == list(range(name, name + count))
    for message in received:
        if message.tensors:
            size = message.payload_bytes
            assert payload_of(message) == payload_of(control(size, message.body.data))


# --------------------------------------------------------------------------------------- ends


def test_close_drains_and_ends_both_sides(stack):
    a, b = pair(stack)
    for number in range(20):
        a.link.send(control(500_000, number))
    a.link.close()
    assert a.reason() is None
    assert len(b.take(20)) == 20
    reason = b.reason()
    assert isinstance(reason, PeerLostError)
    assert str(reason) == "coordinator closed the connection"
    with pytest.raises(PeerLostError, match="the link is closed"):
        a.link.send(control())
    a.link.close()


def test_a_link_that_ends_takes_no_more_and_hands_on_no_more(stack):
    far, a = against(stack)
    a.link.send(control(30_000_000))  # nobody reads it yet
    a.link.end(drain_s=WAIT_S)
    assert a.link.closed
    with pytest.raises(PeerLostError, match="the link is closed"):
        a.link.send(control())
    frame = framed(control(100))
    far.sendall(frame)
    wait_until(lambda: a.link.stats.bytes_in == len(frame), "it has come")
    assert len(receive_exactly(far, size := len(framed(control(30_000_000))))) == size
    far.shutdown(socket.SHUT_WR)  # until then it is read, for as long as the drain may take
    assert a.reason() is None
    assert a.messages == []


def test_errors_call_a_link_by_the_name_from_its_greeting(stack):
    near, far = pair(stack)
    far.link.name = "worker 2"  # as its greeting tells
    near.link.close()
    assert str(far.reason()) == "worker 2 closed the connection"


def test_link_closes_the_socket_that_it_was_given(stack):
    near, far = sockets(stack)
    a, b = end(stack, near), end(stack, far)
    a.link.close()
    a.reason()
    b.reason()
    assert near.fileno() == far.fileno() == -1


def test_close_from_the_handler_ends_the_link(stack):
    a, b = pair(stack)
    b.on_message = lambda message: b.link.close()
    a.link.send(control())
    assert b.reason() is None
    assert isinstance(a.reason(), PeerLostError)


def test_close_does_not_wait_for_a_handler_that_hangs(stack, monkeypatch, caplog):
    monkeypatch.setattr(timeouts, "EXIT_S", 0.05)
    a, b = pair(stack)
    hangs, go = threading.Event(), threading.Event()

    def hang(message: Message) -> None:
        hangs.set()
        go.wait(WAIT_S)

    b.on_message = hang
    a.link.send(control())
    assert hangs.wait(WAIT_S)
    b.link.close(drain_s=0)
    assert not b.ended.is_set()
    assert "the handler of a message hangs" in caplog.text
    go.set()
    assert b.reason() is None


@pytest.mark.parametrize("way", ["close", "end"])
def test_end_without_drain_does_not_wait_for_a_peer_that_does_not_read(stack, way):
    _, a = against(stack)
    given_back = threading.Event()
    a.link.send(control(30_000_000), given_back.set)
    started = time.monotonic()
    getattr(a.link, way)(drain_s=0.05)
    assert a.reason() is None
    assert time.monotonic() - started < WAIT_S
    assert given_back.is_set()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (KeyError("stage"), HeteroError, "the handler of a message failed: KeyError: 'stage'"),
        (RuntimeError("CUDA out of memory"), OutOfMemory, "memory ran out: CUDA out of memory"),
        (ProtocolError("STEP out of order"), ProtocolError, "STEP out of order"),
    ],
)
def test_an_error_of_the_handler_ends_the_link_with_its_cause(error, kind, said, stack):
    a, b = pair(stack)
    b.on_message = raising(error)
    a.link.send(control())
    reason = b.reason()
    assert type(reason) is kind
    assert str(reason).splitlines()[0].removeprefix("coordinator: ") == said
    assert kind is not HeteroError or reason.__cause__ is error
    assert isinstance(a.reason(), PeerLostError)


def test_peer_that_beats_but_does_not_read_is_lost_and_named(stack):
    far, a = against(stack, "worker 3", send_s=0.3, max_queue_bytes=1 << 20)
    stop = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                far.sendall(framed(Message(Heartbeat())))

    beats = in_background(beat, "beat")
    large = control(40_000_000)
    a.link.send(large)
    with pytest.raises(PeerLostError, match=r"worker 3 is alive, but has read nothing for 0 s"):
        a.link.send(large)
    stop.set()
    beats.result(WAIT_S)
    assert isinstance(a.reason(), PeerLostError)


@pytest.mark.parametrize("at", [70, 5_000, 299_000, -1])
def test_flipped_bit_is_noticed_by_the_receiver(at, stack):
    a, b, proxy = proxied(stack)
    sent = control(300_000, 1)
    proxy.up.flip_at = at % len(framed(sent))
    a.link.send(sent)
    assert "a frame arrived damaged (CONTROL, " in str(b.reason())
    assert b.messages == []


def test_flipped_bit_is_noticed_behind_a_relay(relay, stack):
    frame = bytearray(framed(control(300_000, 1)))
    frame[150_000] ^= 1
    relay.source_socket.sendall(frame)
    target = end(stack, relay.target_socket, "relay")
    assert "relay: a frame arrived damaged" in str(target.reason())
    assert not relay.into.link.closed


def test_void_frame_is_dropped(stack):
    near, b = against(stack)
    near.sendall(framed(control(5000, 1))[:-CHECKSUM_BYTES] + VOID + framed(control(5000, 2)))
    assert b.take()[0].body.data == 2
    assert len(b.messages) == 1


FRAME = framed(control(40, 1))


@pytest.mark.parametrize("count", range(len(FRAME) + 1))
def test_connection_cut_at_any_byte_gives_no_partial_message(count, stack):
    near, b = against(stack)
    near.sendall(FRAME + FRAME[:count])
    near.close()
    reason = b.reason()
    assert isinstance(reason, PeerLostError)
    in_between = count in (0, len(FRAME))
    assert str(reason).endswith("closed the connection" if in_between else "middle of a message")
    assert len(b.messages) == (2 if count == len(FRAME) else 1)


def test_reset_in_the_middle_of_a_message_is_a_lost_peer(stack):
    a, b, proxy = proxied(stack)
    proxy.up.reset_after = 100_000
    a.link.send(control(1_000_000))
    assert isinstance(b.reason(), PeerLostError)
    assert isinstance(a.reason(), PeerLostError)
    assert b.messages == []


def test_one_byte_segments_and_delay_arrive_whole(stack):
    a, b, proxy = proxied(stack)
    proxy.up.slice_bytes, proxy.up.delay_s = 1, 0.0005
    a.link.send(control(60, 9))
    assert payload_of(b.take()[0]) == payload_of(control(60, 9))


def test_flipped_length_byte_is_a_protocol_error(stack):
    a, b, proxy = proxied(stack)
    proxy.up.flip_at = 0
    a.link.send(control())
    assert isinstance(b.reason(), ProtocolError)
    assert "not a hetero peer" in str(b.reason())


def test_blackholed_peer_is_lost_on_both_sides(stack):
    a, b, proxy = proxied(stack, heartbeat_s=0.05, liveness_s=0.4)
    a.link.send(control())
    b.take()
    proxy.up.blackhole = proxy.down.blackhole = True
    for side in (a, b):
        assert "has been silent for" in str(side.reason())


def test_f32_both_ends_send_100_mb_at_once(stack):
    """Each has queued all of it before it reads any."""
    a, b = pair(stack)
    tensor = random_tensor(25 << 20)
    for side in (a, b):
        for number in range(4):
            side.link.send(Message(Control("test", number), [tensor]))
    for side in (a, b):
        assert all(message.tensors[0].data == tensor.data for message in side.take(4))


@pytest.mark.faults
@pytest.mark.alone
def test_silence_is_noticed_within_the_liveness_timeout(stack):
    """Not at the first look after that."""
    a, b, proxy = proxied(stack, heartbeat_s=60.0, liveness_s=1.2)
    a.link.send(control())
    b.take()
    began = time.monotonic()
    proxy.up.blackhole = proxy.down.blackhole = True
    assert "has been silent for 1 s" in str(b.reason())
    assert time.monotonic() - began < 1.2


def test_an_idle_link_holds_no_memory_of_what_it_has_sent(stack):
    a, b = pair(stack, heartbeat_s=10 * WAIT_S, liveness_s=20 * WAIT_S)
    data = np.zeros(16 << 20, np.uint8)  # more than the system takes at once
    kept = weakref.ref(data)
    tensor = WireTensor("uint8", data.shape, memoryview(data))
    a.link.send(Message(Forward(0, 0, 1, 0), [tensor]))
    del data, tensor
    b.take()
    wait_until(lambda: kept() is None)


def test_heartbeats_keep_an_idle_link_alive(stack):
    a, b = pair(stack, heartbeat_s=0.1, liveness_s=5.0)
    a.link.send(control())
    b.link.send(control())
    most = 60 * len(framed(Message(Heartbeat())))
    wait_until(lambda: b.link.stats.bytes_in >= most, "heartbeats")
    assert not b.link.closed
    assert not a.link.closed
    assert len(a.messages) == len(b.messages) == 1


def test_pings_measure_the_round_trip_and_the_offset_of_the_clocks(stack, monkeypatch):
    a, b, proxy = proxied(stack)
    proxy.up.delay_s = proxy.down.delay_s = 0.02
    assert a.link.clock == Clock(None, None)
    real, ahead = time.perf_counter, b.link._reader

    def clock_s() -> float:
        return real() + 100.0 * (threading.current_thread() is ahead)

    monkeypatch.setattr(time, "perf_counter", clock_s)
    for count in range(3):
        a.link.ping()
        wait_until(lambda: len(a.link._pings._round_trips) > count, "an answer")  # noqa: B023
    clock = a.link.clock
    assert clock.round_trip_s is not None
    assert clock.offset_s is not None
    assert clock.round_trip_s >= 0.04
    assert abs(clock.offset_s - 100) <= clock.round_trip_s / 2
    assert clock.round_trip_s == min(a.link._pings._round_trips)[0]
    assert a.messages == b.messages == []
    assert b.link.clock == Clock(None, None)


def test_pongs_without_a_ping_change_nothing(stack):
    a, b = pair(stack)
    for fields in ({"pong": 1.0, "at": 2.0}, {"pong": 1.0}, {}):
        a.link.send(Message(Heartbeat(**fields)))
    a.link.send(control())
    b.take()
    assert b.link.clock == Clock(None, None)
    a.link.close()
    a.link.ping()  # nothing to ask any more


@pytest.mark.parametrize("signal", [Heartbeat(ping=1.0), m.AskTurn(1 << 20, 2)])
def test_peer_that_does_not_read_gets_few_answers(signal, stack):
    near, b = against(stack, max_queue_bytes=1000)
    b.link.send(control(30_000_000))  # nobody reads it
    size = b.link._queue.nbytes
    question = framed(Message(signal))
    near.sendall(question * 200 + framed(control()))
    b.take()
    assert b.link.stats.bytes_in == 200 * len(question) + len(framed(control()))
    assert b.link._queue.nbytes < size + 16 * 80


def test_on_moved_tells_when_tensor_frames_moved(stack):
    a, b = pair(stack)
    moved = frames_moved(a.link, b.link)
    before = time.perf_counter()
    for number, nbytes in enumerate((0, 1000, 5_000_000)):
        a.link.send(control(nbytes, number))
    b.take(3)
    wait_until(lambda: len(moved) == 4, "all told")
    told = [("receive", 1), ("receive", 2), ("send", 1), ("send", 2)]
    assert sorted(entry[:2] for entry in moved) == told
    assert all(before <= began <= ended <= time.perf_counter() for _, _, began, ended in moved)


# ---------------------------------------------------------------------------- turns


LARGE = framed(control(300_000))
BEGUN = LARGE[: len(LARGE) - 300_000 - 2 - CHECKSUM_BYTES + PIECE_BYTES]
"""Up to the mark behind its first piece."""


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (b"\x02", "between two pieces of a frame stands b'\\x02'"),
        (INSIDE + framed(control()), "CONTROL inside of another frame"),
        (INSIDE + framed(Message(Heartbeat(ping=1.0)))[:-1] + b"?", "a frame arrived damaged"),
    ],
)
def test_only_a_whole_heartbeat_may_stand_inside_of_a_frame(between, said, stack):
    near, receiver = against(stack)
    near.sendall(BEGUN + between)
    assert said in str(receiver.reason())


def test_heartbeat_inside_of_a_frame_is_answered_at_once(stack):
    near, receiver = against(stack)
    pong = framed(Message(Heartbeat(pong=1.0, at=0.0)))
    near.sendall(BEGUN + INSIDE + framed(Message(Heartbeat(ping=1.0))))
    answer = receive_exactly(near, len(pong))
    assert decode(answer[:-CHECKSUM_BYTES]).body.pong == 1.0
    near.sendall(LARGE[len(BEGUN) :])
    assert payload_of(receiver.take()[0]) == payload_of(control(300_000))


def forward(nbytes: int, number: int = 0, stage: int = 1, attempt: int = 0) -> Message:
    tensor = WireTensor("uint8", (nbytes,), memoryview(bytes(nbytes)))
    return Message(Forward(0, attempt, stage, number), [tensor])


class SlowLine(PlainStream):
    """One that takes 64 KiB at a time, at 20 MB/s."""

    def write(self, buffers: deque[memoryview]) -> int:
        time.sleep(0.0032)
        return super().write(deque([next(view for view in buffers if view)[: 1 << 16]]))


class SessionStart:
    """Two pairs of links, the senders or the receivers of one process; when their frames moved."""

    def __init__(self, stack: ExitStack, *, senders_share: bool) -> None:
        shared = BandwidthScheduler()
        self.schedulers = [shared]
        self.attempt = 0
        self.spans: list[tuple[int, float, float]] = []
        self.ends: list[tuple[End, End]] = []
        for k in range(2):
            near, far = sockets(stack)
            own = BandwidthScheduler()
            self.schedulers += [] if senders_share else [own]  # of each sender
            sender = end(stack, near, bandwidth=shared if senders_share else own)
            receiver = end(stack, far, bandwidth=own if senders_share else shared)
            sender.link._stream.__class__ = SlowLine
            (sender if senders_share else receiver).link.on_moved = self._note(k)
            self.ends.append((sender, receiver))

    def _note(self, k: int) -> Callable[[str, Message, float, float], None]:
        return lambda way, message, began, ended: self.spans.append((k, began, ended))

    def send(self, links: Iterable[int], count: int) -> None:
        """`count` frames of 2 MB on each of these links, for stage 1 or 2, all at once."""
        before = [len(receiver.messages) for _, receiver in self.ends]
        self.spans.clear()
        for number in range(count):
            for k in links:
                self.ends[k][0].link.send(forward(2_000_000, number, k + 1, self.attempt))
        for k in links:
            self.ends[k][1].take(before[k] + count)
        wait_until(lambda: len(self.spans) == count * len(list(links)), "all moved")

    def learn(self) -> None:
        for sender, receiver in self.ends:
            greet(sender, receiver)
        for k in range(2):
            self.send([k], 2)

    def overlap_s(self) -> float:
        """The longest time that two frames were on their way together."""
        spans = sorted(self.spans, key=lambda span: span[1])
        return max(a[2] - b[1] for a, b in pairwise(spans))

    def plan(self, links: list[int], order_timeout_s: float) -> None:
        """From now on the frames of these links are to go in this order."""
        self.attempt += 1
        lanes = [("forward", k + 1) for k in links]
        for scheduler in self.schedulers:
            scheduler.plan(self.attempt, lanes, lanes, order_timeout_s)


@pytest.fixture(params=[False, True], ids=["receivers share", "senders share"])
def meeting(request, stack, monkeypatch):
    monkeypatch.setattr(link_bandwidth, "_ASKS_TRIPS", 0)  # however busy the machine is
    made = SessionStart(stack, senders_share=request.param)
    made.learn()
    return made


@pytest.mark.faults
@pytest.mark.alone
def test_large_frames_that_meet_go_one_after_the_other(meeting):
    meeting.send([0, 1], 3)
    longest = max(ended - began for _, began, ended in meeting.spans)
    assert meeting.overlap_s() < longest / 2
    order = [k for k, _, _ in sorted(meeting.spans, key=lambda span: span[1])]
    assert order in ([0, 1] * 3, [1, 0] * 3)


def test_large_frames_go_in_the_planned_order(meeting):
    planned = [1, 1, 0, 1, 0, 0]
    meeting.plan(planned, order_timeout_s=5.0)
    meeting.send([0, 1], 3)
    assert [k for k, _, _ in sorted(meeting.spans, key=lambda span: span[1])] == planned


def test_a_missing_frame_is_waited_for_up_to_the_timeout(meeting):
    meeting.plan([1, 0, 0], order_timeout_s=0.5)
    began = time.monotonic()
    meeting.send([0], 1)
    assert time.monotonic() - began >= 0.5
    began = time.monotonic()
    meeting.send([0], 1)  # once is enough
    assert time.monotonic() - began < timeouts.TURN_S


def test_a_frame_that_arrives_slowly_asks_for_a_turn(stack, monkeypatch):
    """As the receiver has said of an earlier one, which shared its network."""
    monkeypatch.setattr(link_bandwidth, "_ASKS_TRIPS", 0)
    sender, receiver = pair(stack)
    greet(sender, receiver)
    asked: list[m.Signal] = []
    heard = receiver.link._bandwidth.heard
    monkeypatch.setattr(receiver.link._bandwidth, "heard", lambda s: asked.append(s) or heard(s))
    sender.link.send(forward(2_000_000))
    receiver.take(1)
    assert not asked
    pacing = sender.link._bandwidth._pacing
    with sender.link._lock:  # as if none had been reported yet, however busy the machine is
        pacing._all.clear()
        pacing.heard(1e6, alone=False)
    sender.link.send(forward(2_000_000, 1))
    receiver.take(2)
    assert [asking.lane for asking in asked if isinstance(asking, m.AskTurn)] == [2]
    assert not pacing.pause_s()


@pytest.mark.parametrize("meeting", [True], indirect=True)
def test_a_frame_that_stalls_holds_up_others_for_a_while_only(meeting, monkeypatch):
    monkeypatch.setattr(timeouts, "TURN_S", 1.0)
    (stalling, _), (sender, receiver) = meeting.ends
    line, tick = stalling.link._stream, threading.Event()
    write, bandwidth = line.write, stalling.link._bandwidth
    monkeypatch.setattr(
        line, "write", lambda b: tick.wait(0.01) + 0 if bandwidth._has_turn else write(b)
    )
    stalling.link.send(forward(2_000_000))
    wait_until(sender.link._bandwidth._way_out.awaits_room, "it stalls in its turn")
    began = time.monotonic()
    sender.link.send(forward(2_000_000))
    receiver.take(len(receiver.messages) + 1)
    assert time.monotonic() - began >= 1.0
    assert not stalling.link.idle


def test_a_frame_is_written_no_faster_than_the_network_took_those_before(stack):
    sender, receiver, proxy = proxied(stack)
    receiver.link.send(control())  # as the greeting
    sender.take()
    proxy.up.rate = 10e6
    for number in range(3):
        sender.link.send(forward(2_000_000, number))
    receiver.take(3)
    pacing = sender.link._bandwidth._pacing
    wait_until(lambda: pacing._rate > 0, "a rate is reported")
    proxy.up.rate = 1e9  # from now on only the sender is slow
    written_s: list[float] = []
    sender.link.on_moved = lambda way, message, began, ended: written_s.append(ended - began)
    sender.link.send(forward(2_000_000, 3))
    wait_until(lambda: bool(written_s), "a frame is written")
    # Nothing is waited for after the last of its pieces.
    assert written_s[0] > 0.7 * 2_000_000 / pacing._rate


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /"])
def test_http_at_the_port_is_named(data, stack):
    near, b = against(stack, "10.0.0.9")
    near.sendall(data)
    assert str(b.reason()) == "10.0.0.9: not a hetero peer (got 'GET /')"
    assert isinstance(b.reason(), ProtocolError)


def test_silent_connection_misses_the_handshake(stack):
    near, b = against(stack, handshake_s=0.2)
    near.sendall(b"\x00")
    assert "did not complete the handshake in 0.2 s" in str(b.reason())
