"""Many light workers: processes that send back what they get, over the product's links and, in the
same run, over bare sockets.

    python -m tests.faults.echo_load WORKERS BYTES SECONDS

Prints a JSON object: frames per second of both, and the round trips of the links in seconds. The
workers are forked before anything else, so that each is small; none of it imports torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hetero_framework.core import messages as m
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.link import Link
from hetero_framework.core.messages import Message

ROUNDS = 2


def serve_links(listener: Listener) -> None:
    """Send every message back, until the peer leaves."""
    over = threading.Event()

    def back(message: Message) -> None:
        tensors = [WireTensor(t.dtype, t.shape, t.data) for t in message.tensors]
        link.send(Message(message.body, tensors), message.release)

    link = Link(listener.accept(), "parent", back, lambda reason: over.set())
    link.start()
    over.wait()


def serve_bare(listener: socket.socket) -> None:
    sock = listener.accept()[0]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := sock.recv(1 << 16):
        sock.sendall(data)


class LinkWorker:
    """One link, over which one frame goes there and back again and again."""

    def __init__(self, port: int, nbytes: int) -> None:
        self.data = memoryview(bytes(nbytes))
        self.trips: list[float] = []
        self.going = False
        self.over = threading.Event()
        self.greeted = threading.Event()  # before it nobody may speak of turns
        stream = connect("127.0.0.1", port, 10)
        self.link = Link(stream, f"worker at {port}", self._back, lambda reason: None)
        self.link.start()
        self.link.send(Message(m.Control("test", 0)))
        assert self.greeted.wait(30)

    def begin(self) -> None:
        self.going = True
        self.over.clear()
        self._send()

    def _send(self) -> None:
        self.sent = time.perf_counter()
        tensor = WireTensor("uint8", (len(self.data),), self.data)
        self.link.send(Message(m.Forward(0, 0, 1, 0), [tensor]))

    def _back(self, message: Message) -> None:
        if not self.greeted.is_set():
            self.greeted.set()
            return
        self.trips.append(time.perf_counter() - self.sent)
        message.release()
        if self.going:
            self._send()
        else:
            self.over.set()


class BareWorker:
    """The same over a socket, in a thread that waits for the answer."""

    def __init__(self, port: int, nbytes: int) -> None:
        self.data, self.trips = bytes(nbytes), 0
        self.sock = socket.create_connection(("127.0.0.1", port), 10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.view = memoryview(bytearray(nbytes))

    def go(self, until: float) -> None:
        while time.perf_counter() < until:
            self.sock.sendall(self.data)
            got = 0
            while got < len(self.view):
                got += self.sock.recv_into(self.view[got:])
            self.trips += 1


def forked(count: int, serve: Callable[[Any], None], listen: Callable[[], Any]) -> list[int]:
    """The ports of so many processes that each serve one connection."""
    ports = []
    for _ in range(count):
        listener = listen()
        ports.append(listener.port if isinstance(listener, Listener) else listener.getsockname()[1])
        if os.fork() == 0:
            serve(listener)
            os._exit(0)
        listener.close()
    return ports


def measure(count: int, nbytes: int, seconds: float) -> dict[str, Any]:
    bare_ports = forked(count, serve_bare, lambda: socket.create_server(("127.0.0.1", 0)))
    link_ports = forked(count, serve_links, lambda: Listener("127.0.0.1", 0))
    bare = [BareWorker(port, nbytes) for port in bare_ports]
    links = [LinkWorker(port, nbytes) for port in link_ports]
    rates: dict[str, list[float]] = {"bare": [], "links": []}
    for _ in range(ROUNDS):
        began, before = time.perf_counter(), sum(worker.trips for worker in bare)
        threads = [threading.Thread(target=w.go, args=(began + seconds,)) for w in bare]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        rates["bare"].append((sum(worker.trips for worker in bare) - before) / took)
        began, before = time.perf_counter(), sum(len(worker.trips) for worker in links)
        for worker in links:
            worker.begin()
        time.sleep(seconds)  # the measurement
        for worker in links:
            worker.going = False
        for worker in links:
            assert worker.over.wait(30)
        took = time.perf_counter() - began
        rates["links"].append((sum(len(worker.trips) for worker in links) - before) / took)
    for one in links:
        one.link.close()
    for other in bare:
        other.sock.close()
    for _ in range(2 * count):
        assert os.wait()[1] == 0
    trips = sorted(trip for worker in links for trip in worker.trips)
    each = [len(worker.trips) for worker in links]
    return {
        "bare_per_s": max(rates["bare"]),
        "links_per_s": max(rates["links"]),
        "median_s": trips[len(trips) // 2],
        "p99_s": trips[len(trips) * 99 // 100],
        "fairness": min(each) / max(each),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
