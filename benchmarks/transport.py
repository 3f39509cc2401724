"""One bfloat16 tensor from process to process: `Link` against a bare socket loop.

    python -m benchmarks.transport --mb 16

Both engines have a connection to one receiving process over the loopback. In each round both send
the tensor once, in alternating order; a transfer lasts from before the send until the receiver's
acknowledgement is back. With `--in-flight N` N tensors are sent before the acknowledgements are
awaited, and the time is divided by N. The ratio is the median of the rounds' ratios
bare seconds / link seconds: 1 means that the link costs nothing. Prints one JSON object per engine
and one with the ratio; `--save` keeps all of it under benchmarks/results. `--slow-ms` makes the
link's receiver sleep, to see that the measurement notices.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import environment
from hetero_framework.core.protocol import Message, MessageType
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.core.transport import Link, Listener, connect
from hetero_framework.errors import HeteroError

_HEAD_BYTES = 12
_STEP = {"step": 1, "attempt": 0}


def _ignore_close(reason: HeteroError | None) -> None:
    """The other side ends the benchmark by closing."""


def _receive_exactly(sock: socket.socket, view: memoryview) -> bool:
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if count == 0:
            return False
        got += count
    return True


def _send_all(sock: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        sent = sock.sendmsg(buffers)
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = buffers[0][sent:]


def serve(port: int, payload_bytes: int, slow_ms: float) -> None:
    """The receiving process: the first connection is bare, the second one a link."""
    bare = connect("127.0.0.1", port, timeout_s=30)
    bare.settimeout(None)
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def acknowledge(message: Message) -> None:
        from_wire(message.tensors[0])
        time.sleep(slow_ms / 1000)
        message.release()
        link.send(Message(MessageType.ABORTED, _STEP))

    link = Link(connect("127.0.0.1", port, timeout_s=30), "sender", acknowledge, _ignore_close)
    head = memoryview(bytearray(_HEAD_BYTES))
    payload = memoryview(bytearray(payload_bytes))
    while _receive_exactly(bare, head):
        _receive_exactly(bare, payload)
        bare.sendall(b"k")
    link.close()
    bare.close()


def measure(mb: float, rounds: int, in_flight: int, slow_ms: float) -> dict[str, list[float]]:
    """Seconds of one transfer for each engine and round (the mean of those in flight)."""
    tensor = torch.randn(int(mb * 1e6) // 2).to(torch.bfloat16)
    wire = to_wire(tensor)
    head = memoryview(bytes([1]) * _HEAD_BYTES)
    with Listener("127.0.0.1", 0) as listener:
        command = [sys.executable, "-m", "benchmarks.transport", "--serve", str(listener.port)]
        command += ["--payload-bytes", str(wire.nbytes), "--slow-ms", str(slow_ms)]
        with subprocess.Popen(command) as child:
            bare = listener.accept(60)
            bare.settimeout(None)
            bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            acknowledged: queue.SimpleQueue[float] = queue.SimpleQueue()
            acknowledgements = memoryview(bytearray(in_flight))

            def note_arrival(message: Message) -> None:
                acknowledged.put(time.perf_counter())

            link = Link(listener.accept(60), "receiver", note_arrival, _ignore_close)

            def send_bare() -> float:
                started = time.perf_counter()
                for _ in range(in_flight):
                    _send_all(bare, [head, wire.data])
                _receive_exactly(bare, acknowledgements)
                return (time.perf_counter() - started) / in_flight

            def send_link() -> float:
                fields = {**_STEP, "stage": 1, "micro_batch": 0}
                started = time.perf_counter()
                for _ in range(in_flight):
                    link.send(Message(MessageType.FORWARD, fields, (wire,)))
                arrived = [acknowledged.get() for _ in range(in_flight)]
                return (arrived[-1] - started) / in_flight

            seconds = _interleave({"bare": send_bare, "link": send_link}, rounds)
            bare.close()
            link.close()
            child.wait(timeout=60)
    return seconds


def _interleave(engines: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    warm_up = 5  # buffers and the kernel's windows
    for round_number in range(-warm_up, rounds):
        for name in names if round_number % 2 else names[::-1]:
            elapsed = engines[name]()
            if round_number >= 0:
                seconds[name].append(elapsed)
    return seconds


def summarise(seconds: dict[str, list[float]], payload_bytes: int) -> dict[str, Any]:
    engines = {
        name: {
            "engine": name,
            "median_ms": round(statistics.median(values) * 1e3, 3),
            "min_ms": round(min(values) * 1e3, 3),
            "gb_per_s": round(payload_bytes / statistics.median(values) / 1e9, 3),
            "rounds": len(values),
        }
        for name, values in seconds.items()
    }
    ratios = [bare / link for bare, link in zip(seconds["bare"], seconds["link"], strict=True)]
    return {"engines": list(engines.values()), "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=16.0, help="tensor size in 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--in-flight", type=int, default=1, help="tensors before waiting")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="slow the link's receiver")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--payload-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.payload_bytes, options.slow_ms)
        return
    seconds = measure(options.mb, options.rounds, options.in_flight, options.slow_ms)
    result = summarise(seconds, int(options.mb * 1e6))
    for engine in result["engines"]:
        print(json.dumps(engine))
    print(json.dumps({"ratio": result["ratio"], "target": 0.9}))
    if options.save:
        names = ("mb", "rounds", "in_flight", "slow_ms")
        settings = {name: getattr(options, name) for name in names}
        whole = {**result, "settings": settings, "environment": environment.describe()}
        suffix = f"-{options.in_flight}-in-flight" if options.in_flight > 1 else ""
        print(f"saved {environment.save('transport' + suffix, whole)}", file=sys.stderr)


if __name__ == "__main__":
    main()
