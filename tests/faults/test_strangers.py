"""Strangers at the port of a worker: many, slow and loud ones, beside a run and at its log.

The stages sleep, so that a step's time is what the run's processes do with each other; strangers
take CPU of their own, as on another machine. Measured: steps before, beside and after them, over
the same workers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.machines import Machines
from benchmarks.network import Place, open_network
from benchmarks.pipeline import Engine, Product, Samples
from benchmarks.stages import Load
from benchmarks.tls import make_keys
from hetero_framework.core import messages as m
from hetero_framework.core.messages import Message
from tests.framed import framed
from tests.samples import machines_here

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

STEPS = 25
LOUD_STEPS = 60
ENGINE = Engine("direct")
LOAD = Load.of(3, 4, [0.010], [0.010], 64_000)
LIMIT_S = 120.0
CONNECTIONS = 2000
TEXT_BYTES = 1 << 30
MOST_GROWN_BYTES = 20 << 20
MOST_LOGGED_BYTES = 1 << 20
LOUD_S = 20.0
MOST_SLOWER = 1.5  # the goal is 1.10; other work on the machine is in it, too
HELLO = framed(Message(m.Hello("stranger", 1, process="p", epoch=1, max_frame_bytes=1 << 20)))
WRONG_HELLO = framed(Message(m.Hello("other", 9, process="p", epoch=1, max_frame_bytes=1 << 20)))


def connect(place: Place) -> socket.socket | None:
    """None where the system has no more ports or descriptors, or nobody answers in time."""
    try:
        return socket.create_connection((place.address, place.port), timeout=2.0)
    except OSError:
        return None


def crowd(connection: Connection, place: Place) -> None:
    """2,000 connections that say nothing, made by eight at once, of which 400 stay open."""

    def part(count: int) -> int:
        held: list[socket.socket] = []
        made = 0
        while made < count:
            sock = connect(place)
            if sock is not None:
                held.append(sock)
                made += 1
            if len(held) > 50:
                held.pop(0).close()
        for sock in held:
            sock.close()
        return made

    with ThreadPoolExecutor(8) as pool:
        connection.send(sum(pool.map(part, [CONNECTIONS // 8] * 8)))


def slow_senders(connection: Connection, place: Place) -> None:
    """A byte of a greeting each 100 ms, on 40 connections, for as long as 100 bytes take."""
    senders = [[connect(place), 0] for _ in range(40)]
    for _ in range(100):
        for sender in senders:
            sock, sent = sender
            try:
                if sock is None:
                    raise OSError(errno.ENOTCONN, "not connected")
                sock.sendall(HELLO[sent : sent + 1])
                sender[1] += 1
            except OSError:
                if sock is not None:
                    sock.close()
                sender[:] = [connect(place), 0]
        time.sleep(0.1)  # that is how slow they are
    for sock, _ in senders:
        if sock is not None:
            sock.close()
    connection.send(len(senders))


def text(connection: Connection, place: Place) -> None:
    """A gigabyte of text, over as many connections as it takes."""
    data = memoryview((b"GET / HTTP/1.1\r\nHost: worker\r\n" * 40_000)[: 1 << 20])
    connection.send(pour(place, data, TEXT_BYTES))


def pour(place: Place, data: memoryview, nbytes: int) -> int:
    """Send so much, however often the connection ends; what did not get out counts too."""
    sent = 0
    while sent < nbytes:
        sock = connect(place)
        if sock is None:
            continue
        with sock, contextlib.suppress(OSError):
            while sent < nbytes:
                sent += len(data)
                sock.sendall(data)
    return sent


def greetings(connection: Connection, place: Place) -> None:
    """Coordinators that mean another worker, without end: each is answered, and said."""
    while True:
        if (sock := connect(place)) is not None:
            with sock, contextlib.suppress(OSError):
                sock.sendall(WRONG_HELLO)
                sock.recv(1 << 16)


CROWDS: dict[str, Callable[[Connection, Place], None]] = {
    "2,000 connections": crowd,
    "slow senders": slow_senders,
    "1 GB of text": text,
}


class Meter:
    """The memory of some processes, read until the block ends."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._over = threading.Event()
        self.before = self._now()
        self.peak = list(self.before)
        self._thread = threading.Thread(target=self._read)

    def _now(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def _read(self) -> None:
        while not self._over.wait(0.05):
            self.peak = [max(pair) for pair in zip(self.peak, self._now(), strict=True)]

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return max(peak - before for peak, before in zip(self.peak, self.before, strict=True))


@pytest.fixture(scope="module")
def product():
    if sys.platform == "win32":
        pytest.skip("the benchmarks' processes need a system that forks")
    with (
        open_network("loopback", LOAD.devices, namespaces=False) as network,
        Product(network, LOAD) as product,
    ):
        product.run(ENGINE, STEPS, LIMIT_S)  # memory is what it will be
        yield product


def runs(product: Product) -> bool:
    """Whether the worker that is attacked has its coordinator and its neighbour."""
    worker = psutil.Process(product.pids[1])
    return sum(c.status == "ESTABLISHED" for c in worker.net_connections("tcp")) >= 2


@pytest.mark.alone
@pytest.mark.parametrize("what", CROWDS)
def test_strangers_cost_a_run_neither_time_nor_memory(what, product, figure):
    place = product.network.places[1]
    calm = product.run(ENGINE, STEPS, LIMIT_S).seconds
    with ThreadPoolExecutor() as pool, Machines() as strangers, Meter(product.pids[1:]) as meter:
        running = pool.submit(product.run, ENGINE, LOUD_STEPS, LIMIT_S)
        while not runs(product):
            assert not running.done(), running.result()
            time.sleep(0.02)  # nothing announces that another process has a connection
        began, done = time.perf_counter(), 0
        while not done or not running.done():  # a small crowd may be over before the first step
            done += strangers.start(place, CROWDS[what], place).receive(LIMIT_S)
        ended = time.perf_counter()
        samples = running.result()
    loud = beside(samples, began, ended)
    after = product.run(ENGINE, STEPS, LIMIT_S).seconds
    slower = statistics.median(loud) / statistics.median(calm + after)
    grown = meter.grown / (1 << 20)
    reached = f"{done:,}: step x {slower:.2f} over {len(loud)}, +{grown:.1f} MiB"
    figure(f"strangers: {what}", reached, "step x 1.10, +20 MiB, it answers afterwards")
    assert meter.grown < MOST_GROWN_BYTES
    assert slower < MOST_SLOWER


def beside(samples: Samples, began: float, ended: float) -> list[float]:
    """What the steps took that lie between these times."""
    found, at = [], samples.began_at
    for seconds in samples.seconds:
        if began <= at and at + seconds <= ended:
            found.append(seconds)
        at += seconds
    return found


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def worker(request, tmp_path):
    """A worker as a user starts it, and the directory of all that it writes."""
    config, logs = tmp_path / "config.json", tmp_path / "logs"
    settings = machines_here(("local", 1), (1, 2))
    config.write_text(json.dumps({**settings, "training": {"output_dir": str(logs / "run")}}))
    keys = ["--keys", str(make_keys(tmp_path, 1))] if request.param else []
    logs.mkdir()
    command = [sys.executable, "-m", "hetero_framework", "worker", "--keep", "--supervised"]
    command += ["--config", str(config), "--worker-id", "1", *keys]
    with (logs / "screen").open("wb") as screen:
        told = {"stdin": subprocess.PIPE, "stdout": screen, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=logs, **told)
        try:
            place = Place("127.0.0.1", settings["workers"][0]["port"], "lo")
            while (sock := connect(place)) is None:
                assert process.poll() is None, (logs / "screen").read_text()
                time.sleep(0.1)  # nothing announces that it listens
            sock.close()
            yield place, logs
            assert process.poll() is None, (logs / "screen").read_text()
        finally:
            process.stdin.close()
            process.wait(30)


def written_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_strangers_do_not_fill_a_log(worker, figure, request):
    place, logs = worker
    before = written_bytes(logs)
    with Machines() as machines:
        for attack in (*CROWDS.values(), greetings):
            machines.start(place, attack, place)
        time.sleep(LOUD_S)  # so long they try, all at once
    grown = written_bytes(logs) - before
    how = request.node.callspec.id
    what = f"strangers: log of a worker after {LOUD_S:.0f} s of all of them, {how}"
    figure(what, f"+{grown / 1024:.0f} KiB", "+1 MiB")
    assert grown < MOST_LOGGED_BYTES
