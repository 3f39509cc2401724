"""Attacks on a page's server, and viewers that behave badly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from hetero_framework.extras.watch import page_server
from hetero_framework.extras.watch.page_server import ACTIONS, PageServer
from tests.extras.watch.pages import Client
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_here")


class Told:
    """A run that tells what a test wants."""

    name = "a </script><script>alert(1)</script> run"

    def __init__(self) -> None:
        self.lines, self.done = [b'{"state": "running"}\n'], list[str]()
        self.line = b""  # told without end
        self.views = 0

    def news(self, closing: threading.Event) -> Iterator[bytes]:
        self.views += 1
        try:
            yield b"".join(self.lines)
            while not closing.wait(0.001):
                yield self.line
            yield b'{"state": "finished"}\n'
        finally:
            self.views -= 1

    def act(self, action: str) -> str | None:
        self.done.append(action)
        return "it is too late" if action == "resume" else None


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def client(told):
    with PageServer([told]) as server:
        yield Client(server.address)


def test_the_page_needs_no_token_and_says_nothing(client):
    for path, kind in (("/", "html"), ("/page.js", "javascript"), ("/page.css", "css")):
        status, headers, body = client.ask(path, Authorization="")
        assert (status, headers["Content-Type"]) == (200, f"text/{kind}; charset=utf-8")
        assert client.token.encode() not in body
        assert b"script>alert" not in body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_it_listens_on_the_loopback_alone(client):
    assert client.host.startswith("127.0.0.1:")
    with PageServer([]) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer \xe4\xf6"}, 401),
        ({"Authorization": "Basic x"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Host": "[::1]"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Content_Length": "5"}, 413),
        ({"Transfer_Encoding": "chunked"}, 413),
    ],
)
def test_a_strange_request_does_nothing(client, told, headers, status):
    for method, path in (("POST", "/do/0/stop"), ("GET", "/news"), ("GET", "/runs")):
        found, sent, body = client.ask(path, method, **headers)
        assert (found, body) == (status, b"")
        assert "frame-ancestors 'none'" in sent["Content-Security-Policy"]
    assert told.done == []
    assert told.views == 0


def test_the_token_in_the_address_is_none(client):
    assert client.ask(f"/runs?token={client.token}", Authorization="")[0] == 401


@pytest.mark.parametrize(
    "path",
    ["/do/1/stop", "/do/0/exec", "/do/0/stop/", "/do/-1/stop", "/news", "/../page.json", "/x"],
)
def test_only_known_actions_are_done(client, told, path):
    assert client.ask(path, "POST")[0] == 404
    assert told.done == []


@pytest.mark.parametrize("path", ["/news/0", "/news/", "/news/x", "/page.py", "/%2e%2e/page.json"])
def test_only_known_places_are_read(client, path):
    assert client.ask(path)[0] == 404


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "HEAD", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.ask("/do/0/stop", method)[0] == 501


def test_two_hosts_are_refused(client):
    with client.connect() as connection:
        hosts = f"Host: {client.host}\r\nHost: evil.example\r\n"
        token = f"Authorization: Bearer {client.token}\r\n"
        connection.sendall(f"POST /do/0/stop HTTP/1.1\r\n{hosts}{token}\r\n".encode())
        assert b" 421 " in connection.recv(100)


def test_a_request_too_long_is_refused(client, told):
    for text in (b"GET /" + b"x" * 70_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"):
        with client.connect() as connection:
            connection.sendall(text)
            assert connection.recv(100).split()[1][:1] == b"4"


def test_every_action_reaches_the_run(client, told):
    answers = [client.act(action) for action in ACTIONS]
    assert answers == [(200, ""), (409, "it is too late"), (200, ""), (200, "")]
    assert told.done == list(ACTIONS)
    assert json.loads(client.ask("/runs")[2]) == [told.name]


def test_viewers_get_the_last_news(told):
    with PageServer([told]) as server:
        news = Client(server.address).news()
        assert next(news) == {"state": "running"}
    assert list(news) == [{"state": "finished"}]


def test_one_connection_has_the_news_of_all_runs():
    """A browser opens no more than six."""
    runs = [Told() for _ in range(9)]
    for number, run in enumerate(runs):
        run.lines = [b'{"total": %d}\n{"state": "running"}\n' % number]
    with PageServer(runs) as server:
        client = Client(server.address)
        tabs = [client.told(), client.told()]
        for tab in tabs:
            found = [next(tab) for _ in range(18)]
            for number in range(9):
                own = [news for run, news in found if run == number]
                assert own == [{"total": number}, {"state": "running"}]
        assert client.act("pause", 8) == (200, "")
        assert [run.done for run in runs] == [[]] * 8 + [["pause"]]
        assert [run.views for run in runs] == [2] * 9
    ends = [list(tab) for tab in tabs]
    assert all(sorted(end) == [(n, {"state": "finished"}) for n in range(9)] for end in ends)


def test_news_that_end_are_told_again_and_stop_no_others(monkeypatch):
    monkeypatch.setattr(page_server, "_AGAIN_S", 0.01)
    runs = [Told(), Told()]
    runs[0].news = lambda closing: iter([b'{"state": "x"}\n', b""])  # type: ignore[method-assign]
    with PageServer(runs) as server:
        news = Client(server.address).news(0)
        assert [next(news) for _ in range(3)] == [{"state": "x"}, {"anew": True}, {"state": "x"}]
        assert runs[1].views == 1


def test_one_that_does_not_read_is_given_up(client, told, monkeypatch):
    monkeypatch.setattr(page_server._Request, "timeout", 0.2)
    told.line = b"x" * 65536 + b"\n"
    with client.connect() as connection:
        token = f"Authorization: Bearer {client.token}\r\n"
        connection.sendall(f"GET /news HTTP/1.1\r\nHost: {client.host}\r\n{token}\r\n".encode())
        wait_until(lambda: told.views == 1)
        wait_until(lambda: told.views == 0)


def test_the_number_of_viewers_is_limited(client, told, monkeypatch):
    monkeypatch.setattr(page_server, "_MOST", 2)
    viewers = [client.news() for _ in range(2)]
    for viewer in viewers:
        next(viewer)
    assert client.ask("/news")[::2] == (503, b"too many pages are open")
    viewers[0].close()
    told.line = b"\n"  # so that it is noticed
    wait_until(lambda: told.views == 1)
    told.line = b""
    assert next(client.news()) == {"state": "running"}


def test_the_oldest_that_says_nothing_gives_way(client, monkeypatch):
    monkeypatch.setattr(page_server._Request, "timeout", None)
    with ExitStack() as stack:
        idle = [stack.enter_context(client.connect()) for _ in range(40)]
        assert client.act("pause") == (200, "")
        for connection in idle[:20]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
