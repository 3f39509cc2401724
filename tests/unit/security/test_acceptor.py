"""Unauthenticated connections: their number, their rate, and which of them is closed."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import Identity
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError
from hetero_framework.security.acceptor import MAX_STRANGERS, Acceptor, RateLimit, _Stranger
from hetero_framework.security.access import LOOPBACK_ONLY
from tests.waiting import WAIT_S, wait_until


class Slow:
    """Admits who sends "A", refuses who sends "B", fails at "C", and waits for the others."""

    encrypts = True

    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]:
        view = memoryview(bytearray(1))
        while (count := stream.read(view)) is None:
            pass
        said = bytes(view[:count])
        if said == b"C":
            raise ValueError("nobody expected this")
        if said != b"A":
            stream.close()
            raise IdentityError("no") if said == b"B" else ConnectionResetError()
        return stream, Identity("00" * 16)


class Opened:
    def __init__(self, access: Any) -> None:
        self.inside: list[Stream] = []
        self.listener = Listener("127.0.0.1", 0)
        self.acceptor = Acceptor(access, lambda stream, identity: self.inside.append(stream))
        self._running = in_background(lambda: self.acceptor.run(self.listener), "accept")
        self._sockets: list[socket.socket] = []

    def connect(self, said: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.listener.port), WAIT_S)
        self._sockets.append(sock)
        sock.sendall(said)
        return sock

    def close(self) -> None:
        self.acceptor.close()
        self.listener.close()
        self._running.result(WAIT_S)
        for sock in self._sockets:
            sock.close()
        for stream in self.inside:
            self.acceptor.gone(stream)
            stream.close()
        wait_until(lambda: not self.acceptor.strangers)


@pytest.fixture
def opened(stack):
    def open_for(access: Any) -> Opened:
        made = Opened(access)
        stack.callback(made.close)
        return made

    return open_for


def test_slow_handshakes_do_not_delay_others(opened, logged):
    found = opened(Slow())
    silent = [found.connect() for _ in range(8)]
    found.connect(b"A")
    wait_until(lambda: len(found.inside) == 1)
    assert found.acceptor.strangers == len(silent) + 1  # the one inside has yet to be known
    found.acceptor.gone(found.inside[0])
    assert found.acceptor.strangers == len(silent)


def test_refused_connections_are_logged_and_forgotten(opened, logged):
    found = opened(Slow())
    assert found.connect(b"B").recv(1) == b""
    assert found.connect(b"C").recv(1) == b""
    wait_until(lambda: not found.acceptor.strangers and len(logged) == 2)
    unexpected, refused = sorted(logged)  # each in a thread of its own
    assert refused.startswith("refused 127.0.0.1:")
    assert refused.endswith(": no")
    assert "ValueError('nobody expected this')" in unexpected
    assert found.inside == []


@pytest.mark.parametrize("access", [Slow(), LOOPBACK_ONLY])
def test_newcomer_takes_a_place_when_all_are_taken(access, opened):
    found = opened(access)
    socks = [found.connect() for _ in range(MAX_STRANGERS)]
    wait_until(lambda: found.acceptor.strangers == MAX_STRANGERS)
    found.connect(b"A")
    wait_until(lambda: len(found.inside) == (1 if access is not LOOPBACK_ONLY else 17))
    assert found.acceptor.strangers == MAX_STRANGERS
    for sock in socks:
        sock.settimeout(0.01)
    sent_away = []
    for sock in socks:
        try:
            sent_away.append(sock.recv(1))
        except TimeoutError:
            continue
    assert sent_away == [b""]


def test_address_with_most_strangers_gives_way():
    acceptor = Acceptor(LOOPBACK_ONLY, lambda *_: None)
    many = [f"10.0.0.9:{port}" for port in range(1, 6)]
    for number, peer in enumerate(["10.0.0.1:7", *many]):
        acceptor._strangers[number] = _Stranger(None, peer)  # type: ignore[index, arg-type]
    assert {acceptor._most_of_one().peer for _ in range(4)} < set(many)
    assert acceptor.strangers == 2


@pytest.mark.parametrize(
    ("peer", "group"),
    [
        ("10.0.0.1:7", "10.0.0.1"),
        ("2001:db8:1:2:3::4:7", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1:7", "10.0.0.1"),
        ("somebody who is gone", "None"),
    ],
)
def test_addresses_of_one_machine_are_one_group(peer, group):
    assert _Stranger(None, peer).group == group  # type: ignore[arg-type]


def test_the_rate_limit_allows_a_burst_and_then_a_fixed_rate():
    pace = RateLimit()
    assert [pace.allows("a", 0.0) for _ in range(65)] == [True] * 64 + [False]
    assert pace.allows("b", 0.0)
    assert [pace.allows("a", 1.0) for _ in range(21)] == [True] * 20 + [False]
    assert pace.allows("a", 100.0)


def test_pace_of_many_addresses_is_bounded():
    pace = RateLimit()
    for number in range(5000):
        pace.allows(str(number), 0.0)
    assert len(pace._left) == 1024


def test_a_closed_acceptor_admits_no_connection(opened):
    found = opened(Slow())
    waiting = found.connect()
    wait_until(lambda: found.acceptor.strangers == 1)
    found.acceptor.close()
    assert waiting.recv(1) == b""
    with closing(found.connect()) as late:
        assert late.recv(1) == b""
