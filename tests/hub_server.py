"""A model hub on the loopback: as much of its API as huggingface_hub uses to upload folders."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_" + "Tq7" * 11 + "x"
_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>\w+)/(?P<revision>[^/]+))?")


class HubServer(ThreadingHTTPServer):
    """Repositories by name, each with its files; `fail` decides how it misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.branches: set[str] = {"main"}
        self.commits: list[tuple[str, str, list[str]]] = []  # revision, message, paths
        self.tokens: set[str | None] = set()
        self.bodies = b""  # of all requests
        self.fail: int | str | None = None  # a status, "close" the connection, or "hang"
        self.is_asked = threading.Event()
        self.goes_on = threading.Event()  # ends the hanging
        self.objects: dict[str, bytes] = {}

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), name="hub").start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.goes_on.set()
        self.shutdown()
        self.server_close()

    def environment(self) -> dict[str, str]:
        """For the process that uploads."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.bodies += body
        path = urlsplit(self.path).path
        if path.startswith(("/api/models/", "/api/repos/")) or ".git/" in path:
            hub.tokens.add(self.headers.get("Authorization"))
        hub.is_asked.set()
        if hub.fail == "hang":
            hub.goes_on.wait(120)
        if hub.fail == "close":
            self.close_connection = True
            return self.connection.close()
        if isinstance(hub.fail, int):
            return self._answer({"error": f"no, {self.headers.get('Authorization')}"}, hub.fail)
        return self._answer(*self._result(path, body))

    def _result(self, path: str, body: bytes) -> tuple[Any, int]:
        hub = self.server
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        if path.startswith("/objects/"):
            hub.objects[path.rpartition("/")[2]] = body
            return {}, 200
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return {"objects": [{**one, **self._place(one["oid"])} for one in wanted]}, 200
        match = _MODEL.fullmatch(path)
        if match is None or match["repo"] not in hub.repositories:
            return {"error": f"nothing at {path}"}, 404
        repo, what, revision = match["repo"], match["what"], match["revision"]
        if what in ("tree", "preupload", "commit") and revision not in hub.branches:
            return {"error": f"no branch {revision}"}, 404
        files = hub.repositories[repo]
        if what == "branch":
            hub.branches.add(revision)
            return {}, 200
        if what == "tree":
            return [{"type": "file", "path": p, "size": 1, "oid": "0"} for p in files], 200
        if what == "preupload":
            given = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in given}
            named = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
            return {"files": named}, 200
        if what == "commit":
            return self._commit(files, revision, [json.loads(line) for line in body.splitlines()])
        return {"id": repo, "private": hub.private[repo], "sha": "0" * 40}, 200

    def _create(self, asked: dict[str, Any]) -> tuple[Any, int]:
        hub, repo = self.server, f"{asked.get('organization') or 'me'}/{asked['name']}"
        answer = {"url": f"{hub.address}/{repo}", "name": repo}
        if repo in hub.repositories:
            return answer, 409
        hub.repositories[repo] = {}
        private = asked.get("private") is True or asked.get("visibility") == "private"
        hub.private[repo] = private
        return answer, 200

    def _place(self, oid: str) -> dict[str, Any]:
        href = f"{self.server.address}/objects/{oid}?X-Signature=abc"
        return {"actions": {"upload": {"href": href}}}

    def _commit(self, files: dict[str, bytes], revision: str, lines: Any) -> tuple[Any, int]:
        paths = []
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                continue
            paths.append(value["path"])
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.server.commits.append((revision, message, paths))
        place = f"{self.server.address}/me/result/commit/{'1' * 40}"
        return {"success": True, "commitOid": "1" * 40, "commitUrl": place}, 200

    def _answer(self, content: Any, status: int) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that this process and its children upload to."""
    with HubServer() as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
