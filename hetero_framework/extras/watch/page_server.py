"""Serves a page on the loopback, to clients that have its token, and sends it news.

The token is in the address's fragment, which browsers send to nobody. The page sends the token in a
header, which other sites cannot. Requests by a foreign name of the loopback (Host) or from another
site (Origin) are refused. A connection serves one request. The oldest connection that is no
viewer's gives way to others, and a viewer that does not read is given up. The run never waits.

The news of all runs come in one stream, since browsers open no more than six connections. Each line
has a run's number and JSON.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote

from hetero_framework.core.addresses import LOOPBACK
from hetero_framework.file_trust import not_through_links, untrusted_reason
from hetero_framework.log import EVENTS_FILE

ACTIONS = ("pause", "resume", "checkpoint", "stop")
_SILENCE_S, _LAST_S = 10.0, 1.0  # of a connection; for the last news
_MOST = 16  # most viewers, and most other connections
_FILES = {"/": "html", "/page.js": "javascript", "/curves.js": "javascript", "/page.css": "css"}
_METRICS = "metrics.jsonl"
_RECORDS = (_METRICS, EVENTS_FILE, "samples.jsonl")
_TICK_S, _MOST_BYTES, _SPREAD = 0.5, 1 << 18, 1000  # between news; read at the end; lines before
_MOST_PLACES, _MOST_LISTED = 2000, 50  # looked at for earlier runs in a folder; shown
_AGAIN_S = 2.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchedRun(Protocol):
    """A run that a page shows. `news` gives lines of JSON, or nothing, a few times a second, and
    the last lines after `closing`. If it ends before that, it is called again. `act` does one of
    ACTIONS, or returns the reason why it cannot. `folder` is the run's `output_dir`."""

    name: str
    folder: Path

    def news(self, closing: threading.Event) -> Iterator[bytes]: ...

    def act(self, action: str) -> str | None: ...


class PageServer(ThreadingHTTPServer):
    """Serves the page of these runs within its `with` block."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        super().__init__((LOOPBACK, 0), _Request)
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        self.address = f"http://{LOOPBACK}:{self.server_address[1]}/#{self.token}"
        self.closing = threading.Event()
        self._open: dict[Any, bool] = {}  # connections, and whether they are viewers
        self._left = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="page")

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End the server. Pages get the last news, if they take it within _LAST_S."""
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self._left:
            self._left.wait_for(lambda: not any(self._open.values()), _LAST_S)
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(2)  # both ways
            self._left.wait_for(lambda: not self._open, 1.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._left:
            self._open[request] = False
            others = [connection for connection, views in self._open.items() if not views]
            if len(others) > _MOST:
                del self._open[others[0]]  # its thread may be slow to notice, and one more may come
                with suppress(OSError):
                    others[0].shutdown(2)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._left:
            self._open.pop(request, None)
            self._left.notify_all()

    def admits(self, connection: Any) -> bool:
        """Whether there is room for one more viewer. If so, this connection becomes a viewer."""
        with self._left:
            self._open[connection] = sum(self._open.values()) < _MOST
            return self._open[connection]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are not reported."""


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "hetero", ""
    timeout = _SILENCE_S

    def do_GET(self) -> None:
        runs = self.server.runs
        if (refusal := self._refusal()) is not None:
            self._say(refusal)
        elif self.path in _FILES:
            body = Path(__file__).with_name(self.path[1:] or "page.html").read_bytes()
            self._say(HTTPStatus.OK, body, f"text/{_FILES[self.path]}; charset=utf-8")
        elif self.path == "/runs":
            self._say(HTTPStatus.OK, json.dumps([run.name for run in runs]).encode())
        elif place := re.fullmatch(r"/earlier/(\d{1,3})/(.*)", self.path):
            found = earlier_runs(runs[int(place[1])].folder) if int(place[1]) < len(runs) else {}
            if not place[2]:
                self._say(HTTPStatus.OK, json.dumps([*found]).encode())
            elif folder := found.get(unquote(place[2])):
                self._say(HTTPStatus.OK, b"".join(_written(folder, {}, is_own=True)))
            else:
                self._say(HTTPStatus.NOT_FOUND)
        elif self.path != "/news":
            self._say(HTTPStatus.NOT_FOUND)
        elif not self.server.admits(self.connection):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, b"too many pages are open")
        else:
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            turn = threading.Lock()
            about = [(turn, number, run) for number, run in enumerate(runs)]
            tellers = [threading.Thread(target=self._tell, args=a, daemon=True) for a in about]
            for teller in tellers:
                teller.start()
            for teller in tellers:
                teller.join()

    def _tell(self, turn: threading.Lock, number: int, run: WatchedRun) -> None:
        """Send the news of a run. If the news end before the page does, send all of them again."""
        closing, head, anew = self.server.closing, b"%d " % number, b""
        told_at = time.monotonic()
        try:
            while True:
                for lines in run.news(closing):
                    if lines := lines.rstrip(b"\n"):
                        lines = head + (anew + lines).replace(b"\n", b"\n" + head)
                        anew = b""
                    if lines or time.monotonic() - told_at > _SILENCE_S / 2:
                        with turn:
                            self.wfile.write(lines + b"\n")  # empty lines find viewers gone
                        told_at = time.monotonic()
                if closing.wait(_AGAIN_S):
                    return
                anew = b'{"anew": true}\n'
        except OSError:  # the viewer is gone, and the threads of the other runs are to notice it
            with suppress(OSError):
                self.connection.shutdown(2)

    def do_POST(self) -> None:
        runs, place = self.server.runs, re.fullmatch(r"/do/(\d{1,3})/([a-z]+)", self.path)
        if (refusal := self._refusal()) is not None:
            self._say(refusal)
        elif place is None or int(place[1]) >= len(runs) or place[2] not in ACTIONS:
            self._say(HTTPStatus.NOT_FOUND)
        else:
            why = runs[int(place[1])].act(place[2])
            self._say(HTTPStatus.CONFLICT if why else HTTPStatus.OK, (why or "").encode())

    def _refusal(self) -> HTTPStatus | None:
        """The status for a request that is refused: for another host, or, except for the page's own
        files, from another site, without the token or with a body. None for other requests."""
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if len(hosts) != 1 or not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", hosts[0]):
            return HTTPStatus.MISDIRECTED_REQUEST
        if self.command == "GET" and self.path in _FILES:
            return None
        if origin not in (None, f"http://{hosts[0]}") or site not in ("none", "same-origin"):
            return HTTPStatus.FORBIDDEN
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return HTTPStatus.UNAUTHORIZED
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return None

    def _say(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def news_of(folder: Path, values: Mapping[str, Any], closing: threading.Event) -> Iterator[bytes]:
    """The news of an `output_dir`, without end; after `closing` only the last news."""
    places, told, is_last = dict[str, tuple[int, int]](), dict[str, Any](), False
    while True:
        now = dict(values)
        new = {k: v for k, v in now.items() if k not in told or told[k] != v}
        first = json.dumps(new).encode() + b"\n" if new else b""
        yield first + b"".join(_written(folder, places))
        if is_last:
            return
        told, is_last = now, closing.wait(_TICK_S)


def earlier_runs(folder: Path) -> dict[str, Path]:
    """The folders with metrics beside this `output_dir` and in it, the newest first. Left out are
    folders that somebody else may have written."""
    folder, found = folder.resolve(), list[tuple[float, Path]]()
    for around in (folder.parent, folder):
        with suppress(OSError), os.scandir(around) as entries:
            for place in (Path(entry.path) for entry in islice(entries, _MOST_PLACES)):
                with suppress(OSError):
                    files = place, place / _METRICS
                    if place != folder and not any(map(untrusted_reason, files)):
                        found.append((files[1].lstat().st_mtime, place))
    newest = sorted(found, reverse=True)[:_MOST_LISTED]
    return {place.relative_to(folder.parent).as_posix(): place for _, place in newest}


def _written(
    folder: Path, places: dict[str, tuple[int, int]], *, is_own: bool = False
) -> Iterator[bytes]:
    """The lines added to the files since the last call. `places` has each file's inode, and how far
    it was read. Yields all lines again if a file was replaced, as when a run goes back. With
    `is_own`, files that somebody else may have written are left out."""
    for name in _RECORDS:
        path = folder / name
        try:
            entry = path.lstat()
            if places.get(name) == (entry.st_ino, entry.st_size):
                continue  # nothing is new, and opening costs more
            with open(path, "rb", opener=not_through_links) as file:
                entry = os.fstat(file.fileno())
                if is_own and untrusted_reason(path, entry=entry):
                    continue
                inode, place = places.get(name, (entry.st_ino, 0))
                if inode != entry.st_ino or entry.st_size < place:
                    places.clear()
                    yield b'{"anew": true}\n'
                    yield from _written(folder, places, is_own=is_own)
                    return
                lines, place = _lines(file, place, entry.st_size)
        except OSError:  # the file is not there yet
            continue
        places[name] = entry.st_ino, place
        kind = name.removesuffix(".jsonl").encode()
        yield from (b'{"of": "%b", "line": %b}\n' % (kind, line.strip()) for line in lines)


def _lines(file: BinaryIO, place: int, size: int) -> tuple[list[bytes], int]:
    """The whole lines from a place on, and the place where the last line ends. Of what comes before
    the last _MOST_BYTES, only some lines are taken, about equally far from each other."""
    recent, lines = max(place, size - _MOST_BYTES), list[bytes]()
    distance = (recent - place) // _SPREAD
    file.seek(place)
    while file.tell() < recent and (line := file.readline(_MOST_BYTES)):
        lines += [line] * line.endswith(b"\n")  # of a longer line nothing is told
        if distance > len(line):
            file.seek(min(recent, file.tell() + distance - len(line)))
            file.readline(_MOST_BYTES)
    place, data = file.tell(), file.read(2 * _MOST_BYTES)
    data = data[: data.rfind(b"\n") + 1]  # the last line may be under way
    return lines + data.splitlines(), place + len(data)
