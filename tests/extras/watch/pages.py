"""A page's client without a browser, and a run that is steered by it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetero_framework.config import Config
from hetero_framework.trainer.coordinator import RunSummary, train
from hetero_framework.trainer.progress import Progress
from tests.waiting import WAIT_S


class Client:
    """Asks a page, as its own page would unless told otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address
        place, _, self.token = address.partition("/#")
        self.host = place.removeprefix("http://")

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=WAIT_S)) as server:
            told = {"Authorization": f"Bearer {self.token}"}
            told |= {name.replace("_", "-"): value for name, value in headers.items()}
            server.request(method, path, headers={k: v for k, v in told.items() if v})
            answer = server.getresponse()
            return answer.status, answer.headers, answer.read()

    def connect(self) -> contextlib.closing[socket.socket]:
        name, _, port = self.host.partition(":")
        return contextlib.closing(socket.create_connection((name, int(port)), timeout=WAIT_S))

    def act(self, action: str, run: int = 0) -> tuple[int, str]:
        status, _, body = self.ask(f"/do/{run}/{action}", "POST")
        return status, body.decode()

    def news(self, run: int = 0) -> Iterator[dict[str, Any]]:
        """Of one run, as they come; until the page ends them."""
        return (news for number, news in self.told() if number == run)

    def told(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The runs' numbers and their news."""
        with contextlib.closing(http.client.HTTPConnection(self.host, timeout=WAIT_S)) as server:
            headers = {"Authorization": f"Bearer {self.token}"}
            server.request("GET", "/news", headers=headers)
            answer = server.getresponse()
            assert answer.status == 200
            while line := answer.readline():
                number, _, news = line.partition(b" ")
                if news:
                    yield int(number), json.loads(news)

    def until(self, fits: Callable[[dict[str, Any]], bool], run: int = 0) -> dict[str, Any]:
        """The first news that fit."""
        return next(filter(fits, self.news(run)))

    def state(self, wanted: str, run: int = 0) -> None:
        """Wait until the run is in this state."""
        self.until(lambda news: news.get("state") == wanted, run)


class Halting(Progress):
    """Waits after a step, in the thread of the run, until somebody else has done his part."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._halt, self.reached, self.goes_on = step, threading.Event(), threading.Event()

    def step(self, metrics: Any) -> None:
        if metrics["step"] == self._halt:
            self.reached.set()
            assert self.goes_on.wait(WAIT_S)

    def message(self, text: str) -> None:
        pass


def steered(
    raw: dict[str, Any], steer: Callable[[Client, Halting], object], halt: int = 3, **options: Any
) -> RunSummary:
    """Train, and `steer` from another thread when step `halt` is done and waits; an error there is
    raised here."""
    config, progress, failures = Config.from_dict(raw), Halting(halt), list[BaseException]()

    def drive() -> None:
        try:
            assert progress.reached.wait(WAIT_S)
            steer(Client(address_of(config.output_dir)), progress)
        except BaseException as error:
            failures.append(error)
        finally:
            progress.goes_on.set()

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        return train(config, progress=progress, **options)
    finally:
        progress.reached.set()
        driver.join()
        if failures:
            raise failures[0]


def address_of(output: Path) -> str:
    return str(json.loads((output / "page.json").read_text())["address"])
