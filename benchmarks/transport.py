"""One tensor from process to process: `Link` against a bare socket loop and gloo; with TLS, against
Python's `ssl` alone; and as processes of one machine go on after TLS ("local").

    python -m benchmarks.transport --mb 16
    python -m benchmarks.transport --mb 16 --relay
    python -m benchmarks.transport --mb 0
    python -m benchmarks.transport --engines tls,ssl,local

Every engine has its own connection over the loopback from this process to a receiving one; with
`--relay` a third process stands between them and passes everything on. In each round all engines
send the tensor once, in changing order; a transfer lasts from before the send until the receiver's
acknowledgement is back in the thread that sends. With `--in-flight N` N tensors are sent before
the acknowledgements are awaited, and the time is divided by N. With `--mb 0` no tensor travels: a
small message goes there and one comes back. Afterwards each engine alone sends as many again, for
the CPU time of each process per transfer (all its threads).

The ratios are medians over the rounds: seconds of the other engine / seconds of the link, so 1
means that the link is as fast; `cpu_ratio_to` an engine compares the CPU time of all processes, the
link's / the other one's. Prints one JSON object per engine and one with the ratios; `--save`
keeps all of it under benchmarks/results. `--slow-ms` makes the link's receiver sleep, to see that
the measurement notices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.network import free_ports
from hetero_framework.core import tls
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.frames import WireTensor
from hetero_framework.core.link import Link
from hetero_framework.core.messages import Abort, Aborted, Forward, Message
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.errors import HeteroError

ENGINES = ("link", "bare", "gloo", "tls", "ssl", "local")
_DEFAULT = "link,bare,gloo"
_KEYED = {"tls", "ssl", "local"}
_AGAINST = {"link": ("bare", "gloo"), "tls": ("ssl", "bare"), "local": ("tls", "bare")}
_WARM_UP = 5  # buffers and the kernel's windows
_SMALL_BYTES = 40  # a message without a tensor has about as many
_RELAY_PIECE_BYTES = 1 << 18
_STEP = (1, 0)  # step, attempt
_TIMEOUT_S = 60.0

Transfer = Callable[[int], None]
"""Sends so many tensors, and returns when all are acknowledged."""


# ------------------------------------------------------------------------------- sockets, bare


def _bare_socket(sock: socket.socket) -> socket.socket:
    """As the system makes one: without the tick of a stream's calls."""
    sock.settimeout(None)
    if sys.platform != "win32":
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _receive_exactly(sock: socket.socket, view: memoryview) -> bool:
    got = 0
    while got < len(view):
        count = sock.recv_into(view[got:])
        if count == 0:
            return False
        got += count
    return True


def _bare_sender(sock: socket.socket, payload: memoryview) -> Transfer:
    def transfer(count: int) -> None:
        for _ in range(count):
            sock.sendall(payload)
        _receive_exactly(sock, memoryview(bytearray(count)))

    return transfer


def _bare_receiver(sock: socket.socket, nbytes: int) -> None:
    payload = memoryview(bytearray(nbytes))
    while _receive_exactly(sock, payload):
        sock.sendall(b"k")


def _bare_relay(inward: socket.socket, outward: socket.socket) -> None:
    piece = memoryview(bytearray(_RELAY_PIECE_BYTES))
    while count := inward.recv_into(piece):
        outward.sendall(piece[:count])
    with contextlib.suppress(OSError):
        outward.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------------------------------- link


def _ignore_close(reason: HeteroError | None) -> None:
    """The other side ends the benchmark by closing."""


_GREETING_S = 60.0


def _link_sender(stream: Stream, payload: memoryview) -> tuple[Transfer, Link]:
    acknowledged: queue.SimpleQueue[Message] = queue.SimpleQueue()
    link = Link(stream, "receiver", acknowledged.put, _ignore_close)
    link.start()
    link.send(Message(Abort(*_STEP)))  # as the greeting: before it nobody may speak of turns
    acknowledged.get(timeout=_GREETING_S)
    tensor = WireTensor("bfloat16", (len(payload) // 2,), payload)

    def message() -> Message:
        if not payload:
            return Message(Abort(*_STEP))
        return Message(Forward(*_STEP, stage=1, micro_batch=0), (tensor,))

    def transfer(count: int) -> None:
        for _ in range(count):
            link.send(message())
        for _ in range(count):
            acknowledged.get()

    return transfer, link


def _link_receiver(stream: Stream, slow_ms: float) -> Link:
    def acknowledge(message: Message) -> None:
        if slow_ms:
            time.sleep(slow_ms / 1000)
        message.release()
        link.send(Message(Aborted(*_STEP)))

    link = Link(stream, "sender", acknowledge, _ignore_close)
    link.start()
    return link


def _link_relay(inward: socket.socket, outward: socket.socket) -> list[Link]:
    links: list[Link] = []

    def back(message: Message) -> None:
        links[1].send(Message(message.body))

    links.append(Link(PlainStream(outward), "receiver", back, _ignore_close))
    links.append(
        Link(
            PlainStream(inward),
            "sender",
            lambda message: links[0].send(Message(message.body)),
            _ignore_close,
            route=lambda message: links[0],
        )
    )
    for link in links:
        link.start()
    return links


# ----------------------------------------------------------------------------------------- TLS


def _keys(folder: Path) -> None:
    from hetero_framework.security.certificates import ensure_authority, issue_missing
    from hetero_framework.security.keys import KeyDirectory

    keys = KeyDirectory(folder)
    ensure_authority(keys)
    issue_missing(keys, [1])


def _context(folder: str, *, server: bool) -> ssl.SSLContext:
    name = "coordinator.pem" if server else "worker-1.pem"
    return tls.context(Path(folder) / name, server=server)


def _stream(engine: str, sock: socket.socket, keys: str, *, server: bool) -> Stream:
    """What the link of an engine goes through."""
    plain = PlainStream(sock)
    if engine == "link":
        return plain
    os.environ[tls.OFF] = "on" if engine == "local" else "off"
    context = _context(keys, server=server)
    if server:
        return tls.accept(plain, context, lambda *_: None, {})[0]
    return tls.dial(plain, context, lambda *_: None, {}, "the sender")


def _socket(engine: str, sock: socket.socket, keys: str, *, server: bool) -> socket.socket:
    """What an engine without a link uses."""
    bare = _bare_socket(sock)
    if engine == "bare":
        return bare
    return _context(keys, server=server).wrap_socket(bare, server_side=server)


# ---------------------------------------------------------------------------------------- gloo


class _Gloo:
    """torch.distributed's send and recv between neighbouring ranks."""

    def __init__(self, port: int, rank: int, ranks: int, nbytes: int) -> None:
        if sys.platform == "linux":  # else it looks for the machine's name in the network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        self._dist = dist
        self._rank = rank
        self._tensor = torch.ones(max(1, nbytes // 2), dtype=torch.bfloat16)
        self._small = torch.ones(1)

    def transfer(self, count: int) -> None:
        for _ in range(count):
            self._dist.send(self._tensor, self._rank + 1)
        for _ in range(count):
            self._dist.recv(self._small, self._rank + 1)

    def receive(self, count: int) -> None:
        for _ in range(count):
            self._dist.recv(self._tensor, self._rank - 1)
            self._dist.send(self._small, self._rank - 1)

    def relay(self, count: int) -> None:
        for _ in range(count):
            self._dist.recv(self._tensor, self._rank - 1)
            self._dist.send(self._tensor, self._rank + 1)
            self._dist.recv(self._small, self._rank + 1)
            self._dist.send(self._small, self._rank - 1)

    def close(self) -> None:
        self._dist.destroy_process_group()


# ----------------------------------------------------------------------------- other processes


def serve(options: argparse.Namespace) -> None:
    """The receiving or relaying process. It answers each line of its input with its CPU seconds
    so far, and ends when the input does.

    It connects to its predecessor once for each engine with sockets, in the order of `engines`; a
    relay prints the port where its successor may do the same.
    """
    engines = options.engines.split(",")
    nbytes = int(options.mb * 1e6)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(Listener("127.0.0.1", 0)))
        print(listener.port, flush=True)
        threads: list[threading.Thread] = []
        for engine in engines:
            if engine == "gloo":
                rank = 1 if options.serve == "relay" else options.ranks - 1
                gloo = _Gloo(options.gloo_port, rank, options.ranks, nbytes)
                stack.callback(gloo.close)
                work = gloo.relay if options.serve == "relay" else gloo.receive
                threads.append(threading.Thread(target=work, args=(options.transfers,)))
                continue
            inward = connect("127.0.0.1", options.port, _TIMEOUT_S)._socket
            if options.serve == "relay":
                outward = _accepted(listener)
                if engine == "link":
                    for link in _link_relay(inward, outward):
                        stack.callback(link.close)
                else:
                    pair = [stack.enter_context(_bare_socket(s)) for s in (inward, outward)]
                    threads.append(threading.Thread(target=_bare_relay, args=pair))
                    threads.append(threading.Thread(target=_bare_relay, args=pair[::-1]))
            elif engine in _AGAINST:
                stream = _stream(engine, inward, options.keys, server=False)
                stack.callback(_link_receiver(stream, options.slow_ms).close)
            else:
                bare = stack.enter_context(_socket(engine, inward, options.keys, server=False))
                arguments = (bare, nbytes or _SMALL_BYTES)
                threads.append(threading.Thread(target=_bare_receiver, args=arguments))
        for thread in threads:
            thread.start()
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
        for thread in threads:
            thread.join(_TIMEOUT_S)


class _Child:
    """A process of `serve`."""

    def __init__(
        self, kind: str, port: int, options: argparse.Namespace, gloo_port: int, keys: str
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.transport", "--serve", kind]
        command += ["--port", str(port), "--gloo-port", str(gloo_port), "--keys", keys]
        command += ["--ranks", str(2 + options.relay), "--engines", options.engines]
        command += ["--mb", str(options.mb), "--slow-ms", str(options.slow_ms)]
        command += ["--transfers", str(_transfers(options))]
        self.name = kind
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.communicate(timeout=_TIMEOUT_S)


# ------------------------------------------------------------------------------------ measuring


def _transfers(options: argparse.Namespace) -> int:
    return (_WARM_UP + 2 * options.rounds) * options.in_flight


def _accepted(listener: Listener) -> socket.socket:
    """The next connection; NetworkError when nobody comes in _TIMEOUT_S."""
    give_up = threading.Timer(_TIMEOUT_S, listener.close)
    give_up.start()
    try:
        return listener.accept()._socket
    finally:
        give_up.cancel()


@contextlib.contextmanager
def _opened(options: argparse.Namespace) -> Iterator[tuple[dict[str, Transfer], list[_Child]]]:
    """The engines, connected, and the other processes."""
    engines = options.engines.split(",")
    payload = memoryview(os.urandom(int(options.mb * 1e6) // 2 * 2))
    (gloo_port,) = free_ports(1)
    transfers: dict[str, Transfer] = {}
    with contextlib.ExitStack() as stack:
        keys = stack.enter_context(tempfile.TemporaryDirectory())
        if _KEYED & set(engines):
            _keys(Path(keys))
        listener = stack.enter_context(contextlib.closing(Listener("127.0.0.1", 0)))
        children: list[_Child] = []
        for kind in ("relay", "receiver") if options.relay else ("receiver",):
            port = children[-1].port if children else listener.port
            children.append(_Child(kind, port, options, gloo_port, keys))
            stack.callback(children[-1].close)
        for engine in engines:
            if engine == "gloo":
                gloo = _Gloo(gloo_port, 0, 2 + options.relay, len(payload))
                stack.callback(gloo.close)
                transfers[engine] = gloo.transfer
                continue
            sock = _accepted(listener)
            if engine in _AGAINST:
                stream = _stream(engine, sock, keys, server=True)
                transfers[engine], link = _link_sender(stream, payload)
                stack.callback(link.close)
            else:
                bare = stack.enter_context(_socket(engine, sock, keys, server=True))
                transfers[engine] = _bare_sender(bare, payload or memoryview(bytes(_SMALL_BYTES)))
        yield transfers, children


def measure(
    options: argparse.Namespace,
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of one transfer for each engine and round (the mean of those in flight), and for
    each engine the CPU seconds of one transfer in each process."""
    with _opened(options) as (engines, children):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        names = list(engines)
        for round_number in range(-_WARM_UP, options.rounds):
            for name in names if round_number % 2 else names[::-1]:
                started = time.perf_counter()
                engines[name](options.in_flight)
                elapsed = time.perf_counter() - started
                if round_number >= 0:
                    seconds[name].append(elapsed / options.in_flight)
        cpu: dict[str, dict[str, float]] = {}
        for name, transfer in engines.items():
            before = _cpu_seconds(children)
            for _ in range(options.rounds):
                transfer(options.in_flight)
            count = options.rounds * options.in_flight
            cpu[name] = {
                process: (after - before[process]) / count
                for process, after in _cpu_seconds(children).items()
            }
    return seconds, cpu


def _cpu_seconds(children: list[_Child]) -> dict[str, float]:
    return {"sender": time.process_time(), **{child.name: child.cpu_s() for child in children}}


def summarise(
    seconds: dict[str, list[float]], cpu: dict[str, dict[str, float]], payload_bytes: int
) -> dict[str, Any]:
    engines = [
        {
            "engine": name,
            "median_ms": round(statistics.median(values) * 1e3, 4),
            "min_ms": round(min(values) * 1e3, 4),
            "max_ms": round(max(values) * 1e3, 4),
            "gb_per_s": round(payload_bytes / statistics.median(values) / 1e9, 3),
            "cpu_ms": {process: round(used * 1e3, 3) for process, used in cpu[name].items()},
            "rounds": len(values),
        }
        for name, values in seconds.items()
    ]
    ratios = {}
    for ours, others in _AGAINST.items():
        for name in set(others) & seconds.keys() if ours in seconds else ():
            pairs = zip(seconds[name], seconds[ours], strict=True)
            cpu_ratio = sum(cpu[ours].values()) / (sum(cpu[name].values()) or math.inf)
            suffix = name if ours == "link" else f"{name}_of_{ours}"
            ratios[f"ratio_to_{suffix}"] = round(statistics.median(a / b for a, b in pairs), 3)
            ratios[f"cpu_ratio_to_{suffix}"] = round(cpu_ratio, 3)
    return {"engines": engines, **ratios}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=16.0, help="tensor size in 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--in-flight", type=int, default=1, help="tensors before waiting")
    parser.add_argument("--engines", default=_DEFAULT, help="some of " + ", ".join(ENGINES))
    parser.add_argument("--relay", action="store_true", help="a third process in the middle")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="slow the link's receiver")
    parser.add_argument("--save", action="store_true", help="keep the result as a file")
    parser.add_argument("--serve", choices=("relay", "receiver"), help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    for name in ("--port", "--gloo-port", "--ranks", "--transfers"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    unknown = set(options.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"--engines: {', '.join(sorted(unknown))} is none of {', '.join(ENGINES)}")
    if options.relay and set(options.engines.split(",")) & _KEYED:
        parser.error("--relay: only with link, bare and gloo")
    if options.serve:
        serve(options)
        return
    result = summarise(*measure(options), int(options.mb * 1e6))
    for engine in result["engines"]:
        print(json.dumps(engine))
    print(json.dumps({name: value for name, value in result.items() if name != "engines"}))
    if options.save:
        from benchmarks import environment  # imports torch, which the other processes do not need

        names = ("mb", "rounds", "in_flight", "relay", "slow_ms")
        settings = {name: getattr(options, name) for name in names}
        whole = {**result, "settings": settings, "environment": environment.describe()}
        suffix = "-relay" if options.relay else "" if options.mb else "-small"
        suffix += f"-{options.in_flight}-in-flight" if options.in_flight > 1 else ""
        print(f"saved {environment.save('transport' + suffix, whole)}", file=sys.stderr)


if __name__ == "__main__":
    main()
