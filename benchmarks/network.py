"""Networks for benchmarks: machines with one shaped port each, delays, and byte counters.

    python -m benchmarks.network --network 1gbit --delay-ms 20

As root on Linux every machine is a network namespace with a single virtual Ethernet port into a
bridge; `tc tbf` shapes both ends of it, so that a machine sends and receives at most at that rate,
both at once; machines may have rates of their own. The loopback gets a namespace of its own, for
its byte counters. Without root, a shaped network paces every TCP connection by itself with
SO_MAX_PACING_RATE (Linux only), which flatters whoever has several connections: `Network.how` says
so, and so does every result.

Delays come from a proxy in front of each machine's port: what passes it waits for half the round
trip in each direction, plus a random part drawn for each burst; bandwidth is not limited.

Nothing outlives the block that opened a network: a namespace lives as long as the process that
holds it, and that process reads a pipe which closes when the benchmark ends in whatever way.

As a program it measures what it makes: seconds of a transfer, round trip of a byte, bytes counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machines import Machines, run_program
from hetero_framework.errors import UserError

RATES_BIT_S: dict[str, float | None] = {"loopback": None, "1gbit": 1e9, "100mbit": 1e8}
"""Networks by name: bits per second of a machine's port, each way; None: not limited."""

# A full frame carries 1448 bytes of data in 1514 that tbf counts (IPv4, TCP time stamps).
DATA_SHARE = 1448 / 1514
# What a port passes at once after a pause: seconds, 256 KiB at 1 Gbit/s, and
_BURST_S = 8 * 256 * 1024 / 1e9
# the least bytes, however slow it is: the kernel splits a segment that is larger than the burst in
# software, and with 64 KiB a port of 250 Mbit/s carried half of its rate
# (docs/maintainers/experiments/wire.md).
_LEAST_BURST_BYTES = 128 * 1024
_QUEUE_BYTES = 1024 * 1024
# What Linux, macOS and Windows have by default, whatever this machine is set to.
_CONGESTION_CONTROL = "cubic"
_SUBNET = "10.77.0"
_FIRST_PORT = 5001
_SO_MAX_PACING_RATE = 47
_CLONE_NEWNET = 0x40000000
_PIECE_BYTES = 512 * 1024
_MOST_DELAYED_BYTES = 512 * 1024 * 1024
_FLOW_SETTLE_S = 0.3
_FLOW_S = 1.0
_FLOW_LIMIT_S = 30.0
_BURST_GAP_S = 0.002


@dataclass(frozen=True)
class Place:
    """Where a process of one machine lives: its address, its port, and the namespace to enter."""

    address: str
    port: int
    interface: str
    namespace_pid: int | None = None
    pacing_bytes_s: int | None = None

    def enter(self) -> None:
        """Move this process there; before it starts a thread or opens a socket."""
        if self.namespace_pid is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{self.namespace_pid}/ns/net") as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        if self.pacing_bytes_s is not None:
            _pace_new_sockets(self.pacing_bytes_s)


@dataclass(frozen=True)
class Counters:
    """Reads how many bytes all machines have sent so far, from the kernel's interface counters."""

    files: tuple[str, ...]
    interface: str
    crossings: int = 1

    def read(self) -> int | None:
        """Bytes, headers included; None where the system has no such counter."""
        total = 0
        for name in self.files:
            try:
                lines = Path(name).read_text(encoding="ascii").splitlines()
            except FileNotFoundError:
                return None
            for line in lines:
                interface, colon, figures = line.partition(":")
                if colon and interface.strip() == self.interface:
                    total += int(figures.split()[8])
        return total // self.crossings


@dataclass(frozen=True)
class Network:
    """Machines that can reach each other.

    `places[k]` is machine k. `reach[k]` is the address and port at which the others reach it; with
    a delay that is its proxy. `bytes_s` is the data rate of a port each way, None: not limited;
    `port_bytes_s` those of single machines, where they differ.
    """

    name: str
    how: str
    places: tuple[Place, ...]
    reach: tuple[tuple[str, int], ...]
    counters: Counters
    bytes_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    port_bytes_s: tuple[float, ...] = ()

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that `nbytes` of data keep a port busy."""
        return nbytes / self.bytes_s if self.bytes_s is not None else 0.0

    @property
    def is_shared(self) -> bool:
        """Whether the counters also see what other programs send."""
        return self.places[0].namespace_pid is None


@contextmanager
def open_network(
    name: str,
    machines: int,
    *,
    delay_s: float = 0.0,
    jitter_s: float = 0.0,
    namespaces: bool | None = None,
    ports_bit_s: Sequence[float] = (),
) -> Iterator[Network]:
    """`machines` machines on a network of `RATES_BIT_S`, taken down when the block ends.

    `delay_s` is the round trip that every connection takes longer, `jitter_s` at most as much
    again for each burst and direction. `namespaces` (default: if this process may make them) can
    be false to have what other users have. `ports_bit_s` are the rates of single machines in place
    of the network's; they need namespaces. Raises UserError where a shaped network cannot be had.
    """
    if name not in RATES_BIT_S:
        raise UserError(f"there is no network {name!r}; there are: {', '.join(RATES_BIT_S)}")
    rate = RATES_BIT_S[name]
    namespaces = can_make_namespaces() if namespaces is None else namespaces
    if ports_bit_s and not namespaces:
        raise UserError("ports of different rates need network namespaces: root on Linux")
    with ExitStack() as stack:
        if namespaces and rate is None and not ports_bit_s:
            places = stack.enter_context(_own_loopback(machines))
            how = "loopback of its own namespace"
        elif namespaces:
            assert rate is not None or ports_bit_s
            rates = ports_bit_s or [rate or 0.0] * machines
            places = stack.enter_context(_bridged(rates))
            how = "namespaces on a bridge, each port shaped by tbf both ways, cubic"
        else:
            if rate is not None and sys.platform != "linux":
                raise UserError(f"the network {name} needs Linux", hint="use --network loopback")
            pacing = int(rate / 8 * DATA_SHARE) if rate is not None else None
            ports = free_ports(machines)
            places = tuple(Place("127.0.0.1", port, "lo", None, pacing) for port in ports)
            how = "loopback" + ("" if rate is None else ", each connection paced on its own")
        reach = tuple((place.address, place.port) for place in places)
        delayed = delay_s > 0 or jitter_s > 0
        if delayed:
            reach = stack.enter_context(_proxies(places, delay_s / 2, jitter_s))
            how += ", delayed by a proxy"
        holders = dict.fromkeys(
            str(place.namespace_pid) if place.namespace_pid is not None else "self"
            for place in places
        )
        # On the loopback a delayed byte crosses the same interface twice.
        crossings = 2 if delayed and places[0].interface == "lo" else 1
        counters = Counters(
            tuple(f"/proc/{holder}/net/dev" for holder in holders), places[0].interface, crossings
        )
        bytes_s = rate / 8 * DATA_SHARE if rate is not None else None
        own = tuple(port / 8 * DATA_SHARE for port in ports_bit_s)
        yield Network(name, how, places, reach, counters, bytes_s, delay_s, jitter_s, own)


def can_make_namespaces() -> bool:
    """Whether this process can have namespaces: root on Linux with iproute2 and util-linux."""
    tools = all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
    if sys.platform != "linux" or not tools or os.geteuid() != 0:
        return False
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return probe.returncode == 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody on this machine has at the moment."""
    in_flight = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in in_flight]
    for sock in in_flight:
        sock.close()
    return ports


# -- namespaces ---------------------------------------------------------------------------------


@contextmanager
def _own_loopback(machines: int) -> Iterator[tuple[Place, ...]]:
    with hold_namespaces(1) as (pid,):
        _batch(pid, ["link set lo up"])
        yield tuple(Place("127.0.0.1", _FIRST_PORT + k, "lo", pid) for k in range(machines))


@contextmanager
def _bridged(rates_bit_s: Sequence[float]) -> Iterator[tuple[Place, ...]]:
    with hold_namespaces(len(rates_bit_s) + 1) as (switch, *pids):
        _batch(switch, ["link add bridge type bridge", "link set bridge up"])
        for k, (pid, rate_bit_s) in enumerate(zip(pids, rates_bit_s, strict=True)):
            burst = burst_bytes(rate_bit_s)
            # Both ends are made inside the switch, so that no name is ever seen outside.
            _batch(
                switch,
                [
                    f"link add eth0 netns {pid} type veth peer name port{k}",
                    f"link set port{k} master bridge up",
                ],
            )
            own = f"{_SUBNET}.{k + 1}"
            _batch(
                pid,
                [
                    "link set lo up",
                    f"addr add {own}/24 dev eth0",
                    "link set eth0 up",
                    f"route change {_SUBNET}.0/24 dev eth0 src {own} congctl {_CONGESTION_CONTROL}",
                ],
            )
            for holder, interface in ((pid, "eth0"), (switch, f"port{k}")):
                shape = (
                    f"qdisc add dev {interface} root tbf rate {int(rate_bit_s)}bit "
                    f"burst {burst} limit {_QUEUE_BYTES}"
                )
                _run(["nsenter", "-t", str(holder), "-n", "tc", *shape.split()])
        yield tuple(
            Place(f"{_SUBNET}.{k + 1}", _FIRST_PORT + k, "eth0", pid) for k, pid in enumerate(pids)
        )


def burst_bytes(rate_bit_s: float) -> int:
    """What a shaped port passes at once."""
    return max(_LEAST_BURST_BYTES, round(rate_bit_s / 8 * _BURST_S))


@contextmanager
def hold_namespaces(count: int) -> Iterator[list[int]]:
    """Process ids that hold one new network namespace each. `cat` ends when its pipe closes."""
    with ExitStack() as stack:
        holders = []
        for _ in range(count):
            holder = subprocess.Popen(
                ["unshare", "--net", "cat"], stdin=subprocess.PIPE, start_new_session=True
            )
            stack.callback(_release, holder)
            holders.append(holder)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                if time.monotonic() > deadline:
                    raise UserError("a network namespace could not be made in 10 s")
                time.sleep(0.001)
        yield [holder.pid for holder in holders]


def _release(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    try:
        holder.wait(5)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def _batch(pid: int, commands: list[str]) -> None:
    text = "".join(f"{command}\n" for command in commands)
    _run(["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"], text)


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")


# -- without root -------------------------------------------------------------------------------


def _pace_new_sockets(bytes_s: int) -> None:
    """Have every TCP socket that Python opens or accepts in this process paced by the kernel."""
    original = socket.socket.__init__

    def paced(self: socket.socket, *args: int, **kwargs: int) -> None:
        original(self, *args, **kwargs)
        if self.type == socket.SOCK_STREAM and self.family in (socket.AF_INET, socket.AF_INET6):
            self.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_s)

    socket.socket.__init__ = paced  # type: ignore[method-assign, assignment]


# -- delay --------------------------------------------------------------------------------------


@contextmanager
def _proxies(
    places: tuple[Place, ...], one_way_s: float, jitter_s: float
) -> Iterator[tuple[tuple[str, int], ...]]:
    """A proxy in front of every machine but the first, which dials; where each is reached."""
    with Machines() as machines:
        reach = [(places[0].address, places[0].port)]
        children = [
            machines.start(
                *(place, pass_on, (place.address, 0), (place.address, place.port)),
                *(one_way_s, jitter_s),
            )
            for place in places[1:]
        ]
        for place, child in zip(places[1:], children, strict=True):
            reach.append((place.address, int(child.receive(30))))
        yield tuple(reach)


def pass_on(
    connection: Connection,
    at: tuple[str, int],
    to: tuple[str, int],
    one_way_s: float = 0.0,
    jitter_s: float = 0.0,
) -> None:
    """A process that listens at one address and passes everything on to another, late.

    Sends the port that it has on `connection`; serves until it is ended.
    """
    listener = socket.create_server(at)
    connection.send(listener.getsockname()[1])
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(to, timeout=10)
        except OSError:
            near.close()
            continue
        far.settimeout(None)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        DelayLine(near, far, one_way_s, jitter_s)
        DelayLine(far, near, one_way_s, jitter_s)


class DelayLine:
    """Passes what comes in at one socket on to another, each piece when its time has come."""

    def __init__(
        self, source: socket.socket, target: socket.socket, delay_s: float, jitter_s: float
    ) -> None:
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._pieces: deque[tuple[float, bytearray | None]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._take_in, daemon=True).start()
        threading.Thread(target=self._hand_on, daemon=True).start()

    def _take_in(self) -> None:
        due, last, extra_s = 0.0, 0.0, 0.0
        data: bytearray | None = bytearray()
        while data is not None:
            data = bytearray(_PIECE_BYTES)
            try:
                count = self._source.recv_into(data)
            except OSError:
                count = 0
            now = time.perf_counter()
            if now - last > _BURST_GAP_S:
                extra_s = random.random() * self._jitter_s
            last = now
            due = max(due, now + self._delay_s + extra_s)
            if count:
                del data[count:]
            else:
                data = None
            with self._changed:
                self._pieces.append((due, data))
                self._held += count
                self._changed.notify()
                self._changed.wait_for(lambda: self._held < _MOST_DELAYED_BYTES)

    def _hand_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pieces))
                due, data = self._pieces.popleft()
            time.sleep(max(0.0, due - time.perf_counter()))
            if data is None:
                with contextlib.suppress(OSError):
                    self._target.shutdown(socket.SHUT_WR)
                return
            try:
                self._target.sendall(data)
            except OSError:
                # The other side is gone: what is still to come has nowhere to go.
                with contextlib.suppress(OSError):
                    self._source.shutdown(socket.SHUT_RD)
            with self._changed:
                self._held -= len(data)
                self._changed.notify()


# -- what the network carries -------------------------------------------------------------------

Flow = tuple[int, int]
"""(sending machine, receiving machine)."""


def flows_of(links: str, machines: int) -> list[Flow]:
    """Who sends to whom in a pipeline of so many machines, both ways: neighbours with direct
    links, else everybody with the coordinator."""
    pairs = [(k - 1 if links == "direct" else 0, k) for k in range(1, machines)]
    return [flow for a, b in pairs for flow in ((a, b), (b, a))]


def carried(network: Network, flows: list[Flow]) -> float | None:
    """The share of its rate that the busiest NIC carries with bare sockets, all `flows` at once.

    None where no rate is set. Well below 1 the machine cannot emulate this network, and what a
    benchmark measures on it is the emulation.
    """
    if network.bytes_s is None:
        return None
    with Machines() as machines:
        children = {}
        for k in sorted({machine for flow in flows for machine in flow}):
            place = network.places[k]
            to = [(*network.reach[other], k) for sender, other in flows if sender == k]
            expected = sum(receiver == k for _, receiver in flows)
            children[k] = machines.start(place, _flow, place.address, place.port, to, expected)
        for child in children.values():
            child.receive(_FLOW_LIMIT_S)  # it listens
        for child in children.values():
            child.send("connect")
        for child in children.values():
            child.receive(_FLOW_LIMIT_S)  # its connections stand
        began = time.perf_counter() + _FLOW_SETTLE_S
        for child in children.values():
            child.send(began)
        received = {k: child.receive(_FLOW_LIMIT_S) for k, child in children.items()}
    nics: dict[tuple[str, int], list[float]] = {}
    for sender, receiver in flows:
        rate = received[receiver][sender] / _FLOW_S
        nics.setdefault(("out", sender), []).append(rate)
        nics.setdefault(("in", receiver), []).append(rate)
    most = max(map(len, nics.values()))
    return min(sum(rates) for rates in nics.values() if len(rates) == most) / network.bytes_s


def _flow(
    connection: Connection,
    address: str,
    port: int,
    receivers: list[tuple[str, int, int]],
    expected: int,
) -> None:
    """One machine of `carried`: sends to all `receivers` at once, counts what `expected` others
    send it. All processes share one clock."""
    with socket.create_server((address, port), backlog=64) as listener, ExitStack() as stack:
        connection.send("listening")
        connection.recv()
        outgoing = []
        for host, to, own in receivers:
            sock = stack.enter_context(socket.create_connection((host, to), timeout=10))
            sock.sendall(bytes([own]))
            outgoing.append(sock)
        listener.settimeout(10)
        incoming = [stack.enter_context(listener.accept()[0]) for _ in range(expected)]
        senders = [sock.recv(1)[0] for sock in incoming]
        connection.send("connected")
        began: float = connection.recv()
        counts = dict.fromkeys(senders, 0)
        end = began + _FLOW_S

        def receive(sock: socket.socket, sender: int) -> None:
            buffer = bytearray(1 << 20)
            sock.settimeout(2 * _FLOW_S)
            with contextlib.suppress(OSError):
                while (now := time.perf_counter()) < end:
                    count = sock.recv_into(buffer)
                    if began <= now:
                        counts[sender] += count

        def send(sock: socket.socket) -> None:
            data = bytes(1 << 18)
            sock.settimeout(2 * _FLOW_S)
            with contextlib.suppress(OSError):
                while time.perf_counter() < end:
                    sock.sendall(data)

        threads = [threading.Thread(target=send, args=(sock,)) for sock in outgoing]
        threads += [
            threading.Thread(target=receive, args=pair)
            for pair in zip(incoming, senders, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.send(counts)


# -- as a program -------------------------------------------------------------------------------


def _echo(connection: Connection, address: str, port: int, nbytes: int) -> None:
    """The receiving machine of `measure`: answers each message of `nbytes` with one byte."""
    with socket.create_server((address, port)) as listener:
        connection.send("ready")
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 20)
        for size in (1, nbytes):
            while True:
                got = 0
                while got < size and (
                    count := sock.recv_into(buffer, min(len(buffer), size - got))
                ):
                    got += count
                if got < size or buffer[0] == 1:
                    break
                sock.sendall(b"k")


def _talk(
    connection: Connection, address: str, port: int, nbytes: int, counters: Counters, rounds: int
) -> None:
    """The sending machine: seconds per small and per large message, and the bytes of one."""
    with socket.create_connection((address, port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        figures: list[float | None] = []
        for size in (1, nbytes):
            payload, taken = bytes(size), []
            before = counters.read()
            for _ in range(rounds):
                began = time.perf_counter()
                sock.sendall(payload)
                sock.recv(1)
                taken.append(time.perf_counter() - began)
            after = counters.read()
            figures.append(sorted(taken)[rounds // 2])
            sock.sendall(bytes([1]) + bytes(size - 1))
        moved = (after - before) / rounds if before is not None and after is not None else None
        connection.send((*figures, moved))


def measure(network: Network, nbytes: int, rounds: int = 5) -> dict[str, Any]:
    """Round trip of one byte, seconds and bytes of `nbytes`, between the first two machines."""
    with Machines() as machines:
        place = network.places[1]
        echo = machines.start(place, _echo, place.address, place.port, nbytes)
        echo.receive(30)
        talk = machines.start(
            network.places[0], _talk, *network.reach[1], nbytes, network.counters, rounds
        )
        small_s, large_s, moved = talk.receive(120)
    return {
        "network": network.name,
        "how": network.how,
        "delay_ms": network.delay_s * 1e3,
        "round_trip_ms": round(small_s * 1e3, 3),
        "payload_bytes": nbytes,
        "transfer_s": round(large_s, 4),
        "expected_s": round(network.transfer_s(nbytes) + network.delay_s, 4),
        "interface_bytes": round(moved) if moved is not None else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--network", choices=sorted(RATES_BIT_S), default="loopback")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip added")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="most added per burst")
    parser.add_argument("--mb", type=float, default=8.4, help="10^6 bytes per transfer")
    options = parser.parse_args()
    delay_s, jitter_s = options.delay_ms / 1e3, options.jitter_ms / 1e3
    with open_network(options.network, 2, delay_s=delay_s, jitter_s=jitter_s) as network:
        print(json.dumps(measure(network, int(options.mb * 1e6))))


if __name__ == "__main__":
    run_program(main)
