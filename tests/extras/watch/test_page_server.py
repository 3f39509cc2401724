"""Attacks on a page's server, and viewers that behave badly."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from hetero_framework.extras.watch import page_server
from hetero_framework.extras.watch.page_server import ACTIONS, PageServer
from tests.extras.watch.pages import Client
from tests.planting import plant
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_left_here")


class Told:
    """A run that tells what a test wants."""

    name = "a </script><script>alert(1)</script> run"
    folder = Path(__file__)  # a file: there are no runs beside it

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
    kinds = {"/": "html", "/page.js": "javascript", "/curves.js": "javascript", "/page.css": "css"}
    for path, kind in kinds.items():
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
    asked = [("GET", path) for path in ("/news", "/runs", "/earlier/0/")]
    for method, path in (("POST", "/do/0/stop"), *asked):
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


def earlier(place: Path, when: float = 1e9) -> Path:
    """A run with one step in this folder."""
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (place / "events.jsonl").write_text('{"what": "evaluation", "step": 1, "eval_loss": 3.0}\n')
    os.utime(place / "metrics.jsonl", (when, when))
    return place


@pytest.fixture
def runs(client, told, tmp_path):
    """The names of the earlier runs that the page of a run in tmp_path/"now" shows."""
    told.folder = earlier(tmp_path / "now")
    return lambda: json.loads(client.ask("/earlier/0/")[2])


def test_runs_beside_and_in_the_folder_can_be_compared(client, runs, tmp_path):
    earlier(tmp_path / "now" / "previous-1", 1e9 + 1)
    earlier(tmp_path / "50% & ü", 1e9 + 2)
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.txt").touch()
    assert runs() == ["50% & ü", "now/previous-1"]
    for name in runs():
        status, _, body = client.ask(f"/earlier/0/{quote(name, safe='')}")
        assert status == 200
        told = [json.loads(line) for line in body.splitlines()]
        assert [one["of"] for one in told] == ["metrics", "events"]
        assert [one["line"].get("loss", 3.0) for one in told] == [2.0, 3.0]


@pytest.mark.parametrize("name", ["..", "now", "../now", "data", "/etc", "%00", "x" * 5000, "1"])
def test_no_other_folder_is_read(client, runs, tmp_path, name):
    (tmp_path / "data").mkdir()
    assert client.ask(f"/earlier/0/{quote(name, safe='')}")[0] == 404
    assert client.ask("/earlier/1/now")[0] == 404


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither modes nor such owners")
@pytest.mark.parametrize("how", ["owner", "mode", "link", "name"])
@pytest.mark.parametrize("file", ["", "metrics.jsonl"])
def test_runs_that_others_may_have_written_are_not_shown(runs, tmp_path, how, file):
    place = earlier(tmp_path / "planted")
    assert runs() == ["planted"]
    if how != "name" or file:  # a folder has no second name
        plant(place / file, how, tmp_path / "elsewhere")
        assert "planted" not in runs()


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither modes nor such owners")
def test_of_an_earlier_run_each_file_is_checked(client, runs, tmp_path):
    plant(earlier(tmp_path / "then") / "events.jsonl", "mode", tmp_path / "elsewhere")
    told = client.ask("/earlier/0/then")[2].splitlines()
    assert [json.loads(line)["of"] for line in told] == ["metrics"]


def test_of_many_earlier_runs_the_newest_are_listed(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(page_server, "_MOST_LISTED", 2)
    for number in range(4):
        earlier(tmp_path / f"run{number}", 1e9 + number)
    assert runs() == ["run3", "run2"]
    monkeypatch.setattr(page_server, "_MOST_PLACES", 0)
    assert runs() == []


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
    monkeypatch.setattr(page_server, "_SILENCE_S", 0.1)
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
