"""`hetero serve` in a process of its own."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tests.samples import free_ports, machines_here
from tests.waiting import WAIT_S


class Server:
    """`hetero serve` in a process of its own, which a test may kill and start again."""

    def __init__(
        self, folder: Path, model: Path, *parts: tuple[str | int, int], host: str | None = None
    ) -> None:
        """`parts` are those of `machines_here`; none: one process for the two layers."""
        self.host = [] if host is None else ["--host", host]
        training = {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4}
        whole = {"name_or_path": str(model)}
        machines = machines_here(*(parts or (("local", 2),)))
        raw = {**machines, "model": whole, "training": training}
        self.file, (self.port,) = folder / "cluster.json", free_ports(1)
        self.file.write_text(json.dumps(raw))
        self.start()

    def start(self) -> None:
        words = ["serve", "--config", str(self.file), "--port", str(self.port), *self.host]
        command = [sys.executable, "-m", "hetero_framework", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("export "), line
        self.told = dict(part.split("=") for part in line.split()[1:])
        self.url, self.key = self.told["TINKER_BASE_URL"], self.told["TINKER_API_KEY"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status and the answer; `body` is JSON data or bytes."""
        connection = http.client.HTTPConnection(urlparse(self.url).netloc, timeout=WAIT_S)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = {"X-API-Key": self.key, **headers}
        connection.request("POST", f"/api/v1/{path}", raw, told)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        is_json = "json" in answer.headers.get("Content-Type", "")
        return answer.status, json.loads(text) if is_json else text

    def result(self, path: str, body: Any) -> Any:
        """The result of a call."""
        status, promise = self.ask(path, body)
        assert status == 200, promise
        return self.retrieved(promise["request_id"])

    def retrieved(self, id: str) -> Any:
        status, answer = self.ask("retrieve_future", {"request_id": id})
        while status == 408:
            status, answer = self.ask("retrieve_future", {"request_id": id})
        assert status == 200, answer
        return answer


@contextmanager
def served(
    folder: Path, model: Path, *parts: tuple[str | int, int], **how: Any
) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    server = Server(folder, model, *parts, **how)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGINT)
        try:
            server.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
