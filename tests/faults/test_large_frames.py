"""Frames of 100 MB and more: both ways at once, and to a process that does not read (F32, F33)."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from benchmarks.machines import Machines
from benchmarks.network import open_network
from benchmarks.pipeline import Engine, Product
from benchmarks.replanning import Here
from benchmarks.stages import Load
from benchmarks.tls import make_keys
from hetero_framework.core import messages as m
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.link import Link
from hetero_framework.core.messages import Message
from tests.faults.test_strangers import Meter

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

FRAME_BYTES = 100 << 20
SMALL_BUFFERS = 64 << 10
LIMIT_S = 180.0
STANDS_STILL_S = 10.0
SLACK_BYTES = 16 << 20  # buffers are rounded up
RELAYED = Engine("relay")


@pytest.fixture(autouse=True)
def forks():
    if sys.platform == "win32":
        pytest.skip("the benchmarks' processes need a system that forks")


GREETING = Message(m.Control("test", 0))
"""Ends that have not greeted each other may not speak of turns."""


def exchange(connection: Connection, port: int | None) -> None:
    """One end of a link: sends a frame at once, and says how long the other end's took."""
    if port is None:
        listener = Listener("127.0.0.1", 0)
        connection.send(listener.port)
        stream = listener.accept()
        listener.close()
    else:
        stream = connect("127.0.0.1", port, LIMIT_S)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        stream._socket.setsockopt(socket.SOL_SOCKET, option, SMALL_BUFFERS)  # type: ignore[attr-defined]
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = Link(stream, "the other end", came.put, came.put)
    tensor = WireTensor("uint8", (FRAME_BYTES,), memoryview(os.urandom(1 << 20) * 100))
    began = time.perf_counter()
    link.start()
    link.send(GREETING)
    came.get(timeout=LIMIT_S)
    link.send(Message(m.Forward(0, 0, 1, 0), [tensor]))
    message = came.get(timeout=LIMIT_S)
    assert isinstance(message, Message), message  # its checksum is right
    connection.send((message.payload_bytes, time.perf_counter() - began))
    connection.recv()  # the other end has its frame, too
    link.close()


def test_f32_both_ends_of_a_link_send_a_large_frame_at_once(figure):
    with Machines() as machines:
        one = machines.start(Here(), exchange, None)
        other = machines.start(Here(), exchange, one.receive(LIMIT_S))
        came = [end.receive(LIMIT_S) for end in (one, other)]
        for end in (one, other):
            end.send("over")
        assert [nbytes for nbytes, _ in came] == [FRAME_BYTES] * 2
    slowest = max(seconds for _, seconds in came)
    figure("F32: 100 MiB both ways at once, buffers of 64 KiB", f"{slowest:.1f} s", "completes")


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "TLS"])
def test_f32_large_tensors_cross_in_both_directions(keyed, tmp_path, figure):
    """Each micro-batch's hidden state meets the gradient of the one before."""
    load = Load.of(2, 3, [0.001], [0.001], FRAME_BYTES)
    keys = str(make_keys(tmp_path, load.devices)) if keyed else None
    with (
        open_network("loopback", load.devices, namespaces=False) as network,
        Product(network, load, keys=keys) as product,
    ):
        [seconds] = product.run(RELAYED, 1, LIMIT_S).seconds
    what = f"F32: 3 x 100 MiB each way in a step, {'TLS' if keyed else 'plain'}"
    figure(what, f"{seconds:.1f} s", "completes")


def read(connection: Connection, count: int) -> None:
    """The end that may stand still: says when so many frames have come."""
    listener = Listener("127.0.0.1", 0)
    connection.send(listener.port)
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    link = Link(listener.accept(), "sender", came.put, came.put)
    link.start()
    link.send(GREETING)
    listener.close()
    for _ in range(count):
        message = came.get(timeout=LIMIT_S)
        assert isinstance(message, Message), message
        message.release()
    connection.send("all")
    link.close()


def relay(connection: Connection, port: int) -> None:
    """Passes on what comes, as the coordinator does between two workers."""
    listener = Listener("127.0.0.1", 0)
    out = Link(connect("127.0.0.1", port, LIMIT_S), "reader", lambda _: None, lambda _: None)
    out.start()
    connection.send(listener.port)
    link = Link(listener.accept(), "sender", out.send, lambda _: None, route=lambda _: out)
    link.start()
    link.send(GREETING)
    listener.close()
    connection.recv()
    for each in (link, out):
        each.close()


def send(connection: Connection, port: int, count: int) -> None:
    """Each frame has memory of its own, as results of a stage have; the first is there before."""
    link = Link(connect("127.0.0.1", port, LIMIT_S), "reader", lambda _: None, lambda _: None)
    link.start()
    data = bytearray(b"x") * FRAME_BYTES
    connection.send("ready")
    connection.recv()
    for _ in range(count):
        tensor = WireTensor("uint8", (FRAME_BYTES,), memoryview(data))
        link.send(Message(m.Forward(0, 0, 1, 0), [tensor]))
        del tensor
        data = bytearray(b"x") * FRAME_BYTES
    connection.recv()
    link.close()


@pytest.mark.parametrize("relayed", [False, True], ids=["sent", "relayed"])
def test_f33_a_worker_that_does_not_read_costs_two_frames(relayed, figure):
    """Ten are sent to it. The rest waits where it is made, or is not read."""
    count = 10
    with Machines() as machines:
        reader = machines.start(Here(), read, count)
        port = reader.receive(LIMIT_S)
        middle = machines.start(Here(), relay, port) if relayed else None
        to = middle.receive(LIMIT_S) if middle is not None else port
        sender = machines.start(Here(), send, to, count)
        sender.receive(LIMIT_S)
        stopped = psutil.Process(reader.pid)
        stopped.send_signal(signal.SIGSTOP)
        with Meter([(middle or sender).pid]) as meter:
            try:
                sender.send("go")
                time.sleep(STANDS_STILL_S)
            finally:
                stopped.send_signal(signal.SIGCONT)
            assert reader.receive(LIMIT_S) == "all"  # nobody was taken for dead
        for child in filter(None, (sender, middle)):
            child.send("over")
    what = f"F33: 10 frames of 100 MiB {'relayed' if relayed else 'sent'} to who stands still 10 s"
    figure(what, f"+{meter.grown >> 20} MiB", "2 frames")
    assert meter.grown <= 2 * FRAME_BYTES + SLACK_BYTES
