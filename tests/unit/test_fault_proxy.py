"""The fault proxy changes bytes as it is told, and not otherwise. Plain sockets on both sides."""

from __future__ import annotations

import contextlib
import socket
import time
from contextlib import ExitStack

import pytest

from hetero_framework.core import messages as m
from hetero_framework.core.messages import Message
from tests.fault_proxy import FaultProxy, FrameCut
from tests.framed import framed

BYTES = bytes(range(256)) * 16
PATIENCE_S = 20.0
QUIET_S = 0.2
"""So long nothing may come through a black hole."""


@pytest.fixture
def proxy():
    """One to a listener, which is `proxy.target`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        with FaultProxy(listener.getsockname()) as proxy:
            proxy.target = listener
            yield proxy


@pytest.fixture
def pair(proxy):
    """Makes a connection through the proxy: the connecting end and the accepting one."""
    with ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            near = stack.enter_context(
                socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S)
            )
            far = stack.enter_context(proxy.target.accept()[0])
            far.settimeout(PATIENCE_S)
            return near, far

        yield make


def received(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or what came before the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < nbytes and (more := sock.recv(nbytes - len(data))):
            data += more
    return data


def is_quiet(sock: socket.socket) -> bool:
    sock.settimeout(QUIET_S)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE_S)
    return False


def test_without_faults_everything_passes_in_both_directions(proxy, pair):
    near, far = pair()
    near.sendall(BYTES)
    far.sendall(BYTES[::-1])
    assert received(far, len(BYTES)) == BYTES
    assert received(near, len(BYTES)) == BYTES[::-1]
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    far.sendall(b"still open")
    assert received(near, 10) == b"still open"
    # Bytes are counted when they have been passed on, and may be received before that.
    deadline = time.monotonic() + PATIENCE_S
    while proxy.down.seen < len(BYTES) + 10 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (proxy.up.seen, proxy.down.seen) == (len(BYTES), len(BYTES) + 10)


def test_pieces_are_delayed_and_small(proxy, pair):
    proxy.up.delay_s, proxy.up.slice_bytes = 0.01, 8
    near, far = pair()
    began = time.monotonic()
    near.sendall(BYTES[:80])
    assert received(far, 80) == BYTES[:80]
    assert time.monotonic() - began >= 10 * 0.01


def test_a_rate_bounds_the_bytes_per_second(proxy, pair):
    proxy.up.rate = 20_000
    near, far = pair()
    began = time.monotonic()
    near.sendall(BYTES)
    assert received(far, len(BYTES)) == BYTES
    assert time.monotonic() - began >= 0.9 * len(BYTES) / 20_000


@pytest.mark.parametrize("kind", ["cut_after", "reset_after"])
@pytest.mark.parametrize("after", [0, 1, 1000])
def test_a_connection_ends_after_the_given_bytes(kind, after, proxy, pair):
    setattr(proxy.up, kind, after)
    near, far = pair()
    near.sendall(BYTES)
    data = received(far, len(BYTES))
    # A reset may overtake bytes that the receiver has not read.
    assert BYTES.startswith(data)
    assert len(data) == after if kind == "cut_after" else len(data) <= after
    assert received(near, 1) == b""


def test_a_reset_is_no_orderly_end(proxy, pair):
    near, far = pair()
    near.sendall(b"x")
    assert received(far, 1) == b"x"
    proxy.up.reset_after = 1
    near.sendall(b"y")
    with pytest.raises(ConnectionResetError):
        far.recv(1)


def test_one_bit_is_flipped(proxy, pair):
    proxy.up.flip_at = 100
    near, far = pair()
    near.sendall(BYTES[:60])
    assert received(far, 60) == BYTES[:60]
    near.sendall(BYTES[60:])
    wanted = bytearray(BYTES)
    wanted[100] ^= 1
    assert BYTES[:60] + received(far, len(BYTES) - 60) == wanted


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_black_hole_of_one_direction_holds_bytes_until_it_ends(way, proxy, pair):
    near, far = pair()
    source, sink = (near, far) if way == "up" else (far, near)
    source.sendall(b"a")
    assert received(sink, 1) == b"a"
    getattr(proxy, way).blackhole = True
    source.sendall(b"b")
    sink.sendall(b"c")
    assert received(source, 1) == b"c"
    assert is_quiet(sink)
    getattr(proxy, way).blackhole = False
    assert received(sink, 1) == b"b"


def test_a_black_hole_hides_the_end_of_a_connection(proxy, pair):
    near, far = pair()
    proxy.up.blackhole = proxy.down.blackhole = True
    near.close()
    assert is_quiet(far)


@pytest.mark.parametrize("where", ["before", "middle", "after"])
def test_a_frame_is_cut_at_the_given_place(where, proxy, pair):
    first, second = framed(Message(m.Heartbeat())), framed(Message(m.Bye("enough")))
    proxy.cuts.append(FrameCut("up", m.Bye, where))
    near, far = pair()
    near.sendall(first + second)
    share = {"before": 0, "middle": len(second) // 2, "after": len(second)}[where]
    assert received(far, len(first + second) + 1) == (first + second)[: len(first) + share]
    assert not proxy.cuts


def test_all_connections_can_be_reset_at_once(proxy, pair):
    pairs = [pair(), pair()]
    for near, far in pairs:
        near.sendall(b"x")
        assert received(far, 1) == b"x"
    proxy.reset()
    for near, far in pairs:
        assert received(near, 1) == b""
        assert received(far, 1) == b""
    assert proxy.connections == 2
