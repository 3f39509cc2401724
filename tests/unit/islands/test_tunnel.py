"""The way to a lighthouse: an echo server stands in for torchft's."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import ISLANDS
from hetero_framework.core.stream import PlainStream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, NetworkError
from hetero_framework.islands import notes
from hetero_framework.islands import tunnel as module
from hetero_framework.islands.rendezvous import Finished
from hetero_framework.islands.tunnel import Entrance, Tunnel, splice
from hetero_framework.security import authority as x509
from hetero_framework.security.access import LOOPBACK_ONLY, Access, Keyed
from tests.certificates import keys_of

WAIT_S = 30.0


class EchoServer:
    """Answers with what it gets, and then with END when the other side has ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._echo, args=[connection]))
            self._threads[-1].start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in [self._accepting, *self._threads]:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with closing(EchoServer()) as server:
        yield server


@pytest.fixture
def keyed(tmp_path: Path) -> Callable[..., Keyed]:
    def made(process: str, of: str = "own") -> Keyed:
        keys = keys_of(tmp_path / f"{of}-{process}", process, of=of, kind=ISLANDS)
        return Keyed(keys, process, None)

    return made


class Way:
    """From an island to the echo server."""

    def __init__(self, echo: EchoServer, lighthouse: Access, island: Access, id: str = "") -> None:
        listener = Listener("127.0.0.1", 0)
        self.port = listener.port
        self.entrance = Entrance(listener, lighthouse, echo.port)
        self.tunnel = Tunnel(("127.0.0.1", self.port), island, id)

    def dial(self) -> socket.socket:
        port = int(self.tunnel.url.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)

    def echoes(self) -> bool:
        """Whether a new connection reaches the server."""
        with self.dial() as connection:
            return said(connection, b"hello") == b"hello"

    def close(self) -> None:
        self.tunnel.close()
        self.entrance.close()


def said(connection: socket.socket, data: bytes) -> bytes:
    """What comes back for `data`; less where the connection ends."""
    got = b""
    try:
        connection.sendall(data)
        while len(got) < len(data) and (more := connection.recv(1 << 16)):
            got += more
    except OSError:
        pass
    return got


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["tls", "plain"])
def way(
    request: pytest.FixtureRequest,
    echo: EchoServer,
    keyed: Callable[..., Keyed],
    quick_ticks: None,
) -> Iterator[Way]:
    tls = request.param == "tls"
    lighthouse = keyed("local") if tls else LOOPBACK_ONLY
    island = keyed("garage") if tls else LOOPBACK_ONLY
    with closing(Way(echo, lighthouse, island)) as made:
        yield made


def test_what_is_said_on_one_side_comes_out_on_the_other_and_back(way: Way) -> None:
    with way.dial() as one, way.dial() as other:
        assert said(one, b"x") == b"x"
        data = bytes(range(256)) * 8192  # 2 MB, more than all buffers between them
        back = in_background(lambda: said(other, data), "other")
        assert said(one, data[::-1]) == data[::-1]
        assert back.result(WAIT_S) == data


def test_end_of_one_side_ends_the_other_and_nothing_is_left(way: Way, echo: EchoServer) -> None:
    before = threading.active_count()
    with way.dial() as connection:
        assert said(connection, b"x") == b"x"
        assert way.entrance.links == way.tunnel.links == 1
    wait_until(lambda: way.entrance.links == way.tunnel.links == 0)
    wait_until(lambda: threading.active_count() == before)
    assert way.echoes()


def test_closing_ends_open_links_on_both_sides(way: Way) -> None:
    with way.dial() as connection:
        assert said(connection, b"x") == b"x"
        started = time.monotonic()
        way.entrance.close()
        assert connection.recv(1) == b""
        way.entrance.close()
        assert time.monotonic() - started < 5  # its thread was told, and did not have to find out
    way.tunnel.close()
    with pytest.raises(OSError):
        way.dial()


def test_tunnel_finds_a_lighthouse_that_was_started_again(
    echo: EchoServer, keyed: Callable[..., Keyed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DIAL_S", 0.2)
    with closing(Way(echo, keyed("local"), keyed("garage"))) as way:
        assert way.echoes()
        way.entrance.close()
        assert not way.echoes()
        trouble = way.tunnel.trouble()
        assert isinstance(trouble, NetworkError)
        assert f"cannot reach the lighthouse at 127.0.0.1:{way.port}" in trouble.message
        assert "hetero lighthouse" in str(trouble.hint)
        way.entrance = Entrance(Listener("127.0.0.1", way.port), keyed("local"), echo.port)
        assert way.echoes()
        assert way.tunnel.trouble() is None


def test_island_is_here_while_its_link_is_and_by_its_own_name_alone(
    echo: EchoServer, keyed: Callable[..., Keyed]
) -> None:
    with closing(Way(echo, keyed("local"), keyed("garage"), "garage:1")) as way:
        here = way.entrance._presence.here
        with way.dial() as connection:
            assert said(connection, b"x") == b"x"
            assert here() == {"garage:1"}
        wait_until(lambda: here() == set())
    with closing(Way(echo, keyed("local"), keyed("garage"), "attic:1")) as way:
        assert not way.echoes()
        assert way.entrance._presence.here() == set()


def refused(echo: EchoServer, lighthouse: Access, island: Access) -> IdentityError:
    with closing(Way(echo, lighthouse, island)) as way:
        assert not way.echoes()
        wait_until(lambda: way.tunnel.trouble() is not None)
        trouble = way.tunnel.trouble()
    assert echo.connections == 0
    assert isinstance(trouble, IdentityError)
    return trouble


def test_island_of_another_group_is_refused(echo: EchoServer, keyed: Callable[..., Keyed]) -> None:
    trouble = refused(echo, keyed("local"), keyed("garage", of="other"))
    assert "the lighthouse has keys of another cluster" in trouble.message


def test_revoked_island_is_refused(echo: EchoServer, keyed: Callable[..., Keyed]) -> None:
    lighthouse, island = keyed("local"), keyed("garage")
    lighthouse.keys.revoke([x509.serial_of(island.keys.read("island-garage.pem"))])
    assert "was revoked" in refused(echo, lighthouse, island).message


def test_island_in_the_place_of_the_lighthouse_is_not_taken_for_it(
    echo: EchoServer, keyed: Callable[..., Keyed]
) -> None:
    trouble = refused(echo, keyed("attic"), keyed("garage"))
    assert "that of island attic, expected the lighthouse" in trouble.message


def answers(browser: http.client.HTTPConnection) -> bool:
    with closing(browser):
        try:
            browser.request("GET", "/")
            browser.getresponse()
        except (http.client.HTTPException, OSError):
            return False
    return True


def test_who_has_no_certificate_gets_nothing_from_the_web_page(
    echo: EchoServer, keyed: Callable[..., Keyed]
) -> None:
    """torchft's page can kill members; a browser must not get it, with or without TLS."""
    with closing(Way(echo, keyed("local"), keyed("garage"))) as way:
        assert not answers(http.client.HTTPConnection("127.0.0.1", way.port, timeout=WAIT_S))
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        for protocol in ("http/1.1", "h2", "hetero/1"):
            trusting.set_alpn_protocols([protocol])
            assert not answers(
                http.client.HTTPSConnection("127.0.0.1", way.port, timeout=WAIT_S, context=trusting)
            )
        assert way.entrance.links == 0
        assert echo.connections == 0
        assert way.echoes()


def test_notes_are_kept_at_the_entrance_and_asked_for_through_the_keyed_door(way: Way) -> None:
    done = Finished("run", "facts", 9, ("a", "b" * 64))
    assert notes.found(way.tunnel.ask(notes.looking("run", "facts", 0.0))) is None
    way.tunnel.ask(notes.noting(done))
    assert notes.found(way.tunnel.ask(notes.looking("run", "facts", 0.0))) == done
    assert way.echoes()


def test_the_entrance_says_for_how_long_islands_have_been_there(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notes.since_s(way.tunnel.ask(notes.SINCE)) == 0
    monkeypatch.setattr(way.entrance._presence, "since_s", lambda: 2.5)
    assert notes.since_s(way.tunnel.ask(notes.SINCE)) == 2.5


def test_of_a_lighthouse_that_is_gone_there_are_no_notes(way: Way) -> None:
    way.entrance.close()
    assert notes.found(way.tunnel.ask(notes.looking("run", "facts", 0.0))) is None
    assert notes.since_s(way.tunnel.ask(notes.SINCE)) == 0


def test_one_island_has_so_many_links_and_no_more(way: Way) -> None:
    most = module.MAX_LINKS_OF_ONE
    opened = [way.dial() for _ in range(most)]
    assert all(said(connection, b"x") == b"x" for connection in opened)
    assert not way.echoes()
    opened.pop().close()
    wait_until(lambda: way.entrance.links == most - 1)
    assert way.echoes()
    for connection in opened:
        connection.close()


def test_link_on_which_nothing_comes_from_the_network_is_ended() -> None:
    """Also while the other side goes on writing: the network may be gone without a word."""
    network, far = socket.socketpair()
    local, near = socket.socketpair()
    streams = PlainStream(network), PlainStream(local)
    for stream in streams:
        stream.set_tick(0.05)
    spliced = in_background(lambda: splice(*streams, patience_s=0.5), "splice")
    with far, near:
        near.settimeout(WAIT_S)
        far.sendall(b"x")
        assert near.recv(1) == b"x"
        started = time.monotonic()
        while not spliced.done():
            said_s = time.monotonic() - started
            assert said_s < WAIT_S
            try:
                near.sendall(b"y")
            except OSError:
                break
            time.sleep(0.01)
        spliced.result(WAIT_S)
        assert 0.3 < time.monotonic() - started < 10


def test_who_comes_and_goes_is_said(
    echo: EchoServer, keyed: Callable[..., Keyed], logged: list[str]
) -> None:
    with closing(Way(echo, keyed("local"), keyed("garage"))) as way:
        with way.dial() as one, way.dial() as other:
            assert said(one, b"x") + said(other, b"y") == b"xy"
        wait_until(lambda: way.entrance.links == 0)
        wait_until(lambda: "island garage has left" in logged)
    assert [line.partition(", from")[0] for line in logged] == [
        "island garage is here",
        "island garage has left",
    ]
