"""`hetero watch`: shows a run in the browser while it goes on, or several islands on one page."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from hetero_framework.cluster.roles import with_own_devices
from hetero_framework.commands.options import DEFAULT_CONFIG, SET, value
from hetero_framework.config import load_config, with_saved_plan
from hetero_framework.core.addresses import LOOPBACK
from hetero_framework.errors import ConfigError, in_words
from hetero_framework.extras.watch.page_server import PageServer, news_of
from hetero_framework.file_trust import read_own

EXAMPLES = """
    hetero watch runs/default
    hetero watch attic.json garage.json
    """
_RUNS = "configuration or output_dir of a run on this machine, or the address of a page; several"
_RUNS += f" get one page (default: {DEFAULT_CONFIG})"
OPTIONS = (value("runs", "RUN", _RUNS, nargs="*"), SET)
_MOST_BYTES = 1 << 22
_ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):(\d{1,5})/#([\w-]+)", re.ASCII)
_DAMAGED = (ValueError, LookupError, TypeError, OverflowError, RecursionError, psutil.Error)
_BROKEN = (*_DAMAGED, OSError, http.client.HTTPException)
_LOOK_S = 1.0


def run(arguments: argparse.Namespace) -> None:
    runs = [RunBeside(place, arguments.set) for place in arguments.runs or [DEFAULT_CONFIG]]
    if len(runs) == 1 and (address := runs[0].address) is not None:
        print(f"the run's page: {address}")
        return
    with PageServer(runs) as page, suppress(KeyboardInterrupt):
        print(f"the page: {page.address}\nit is served until Ctrl-C", flush=True)
        while not page.closing.wait(1.0):
            pass


class RunBeside:
    """A run of this machine, by its configuration or `output_dir`, or a run behind an address. It
    is shown from its files, or through its own page."""

    def __init__(self, place: str, overrides: Sequence[str] = ()) -> None:
        """Raises ConfigError for a place without a run, and for a configuration with mistakes."""
        self._given = place if _ADDRESS.fullmatch(place) else None
        self.folder, self._shown = Path(place), dict[str, Any](steers=False)
        self.name: str = place.partition("#")[0] if self._given else self.folder.resolve().name
        if self._given is None and not self.folder.exists():
            raise ConfigError(
                f"there is no run and no configuration at {place}",
                hint="name the output_dir of a run, its configuration, or the address of its page",
            )
        if self._given is None and not self.folder.is_dir():
            config = with_saved_plan(with_own_devices(load_config(place, overrides)))
            self.folder = config.output_dir
            self.name = config.setting("island.name") or self.folder.name
            stages = config.plan.stages if config.is_planned else ()
            self._shown["machines"] = [{"owner": s.owner, "layers": [s.layers]} for s in stages]

    @property
    def address(self) -> str | None:
        """The address of the run's own page, while it has one."""
        with suppress(OSError):
            return self._page_of(self._process())
        return None

    def news(self, closing: threading.Event) -> Iterator[bytes]:
        """The news of the run's page, or of its files until there is a page."""
        if address := self.address:
            with suppress(*_BROKEN), _asked(address, "GET", "/news") as answer:
                while not closing.is_set() and (line := answer.readline(_MOST_BYTES)):
                    number, _, news = line.partition(b" ")
                    yield news if number == b"0" else b""
            return
        shown, look_at = dict(self._shown), 0.0
        for lines in news_of(self.folder, shown, closing):
            yield lines
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + _LOOK_S
            shown |= {"state": "unknown", "why": ""}
            try:
                shown["state"] = "running" if (process := self._process()) else "ended"
                if self._page_of(process):
                    return
            except OSError as error:
                shown["why"] = in_words(error)

    def act(self, action: str) -> str | None:
        try:
            process = self._process()
            if address := self._page_of(process):
                with _asked(address, "POST", f"/do/0/{action}") as answer:
                    why = answer.read(_MOST_BYTES).decode("utf-8", "replace")
                    return None if answer.status == 200 else why or "the run's page refuses"
            if action != "stop" or process is None or process.pid == os.getpid() or os.name == "nt":
                return "the run has no page of its own (training.page)"
            process.send_signal(signal.SIGTERM)
        except _BROKEN as error:
            return f"the run does not answer: {in_words(error)}"
        return None

    def _process(self) -> psutil.Process | None:
        """The process of the run on this machine. A later process with the same number does not
        count, nor one elsewhere or of a folder that was copied here. Raises OSError if others may
        have written the number."""
        file = self.folder / ".lock.json"
        with suppress(FileNotFoundError, *_DAMAGED):
            holder = json.loads(read_own(file, strictly=True))
            number, host = holder["process"], holder["host"]
            lock = self.folder / ".lock"
            is_copied = "lock" in holder and holder["lock"] != lock.stat().st_ino
            if type(number) is int and host == platform.node() and not is_copied:
                process = psutil.Process(number)
                began = process.create_time()
                started = holder.get("started", began if number > 1 else math.nan)
                if abs(began - started) < 2 and began <= file.stat().st_mtime + 1:
                    return process
        return None

    def _page_of(self, process: psutil.Process | None) -> str | None:
        """The address of the page that this process serves. Raises OSError as `_process` does."""
        with suppress(FileNotFoundError, *_DAMAGED):
            if self._given is None and process is not None:
                kept = json.loads(read_own(self.folder / "page.json", strictly=True))
                found = _ADDRESS.fullmatch(kept["address"])
                for one in process.net_connections("tcp4") if found else ():
                    if (
                        found
                        and one.status == psutil.CONN_LISTEN
                        and one.laddr.port == int(found[1])
                    ):
                        return found[0]
        return self._given


@contextmanager
def _asked(address: str, method: str, path: str) -> Iterator[http.client.HTTPResponse]:
    """The answer of a page to a request. Raises OSError, HTTPException."""
    if (found := _ADDRESS.fullmatch(address)) is None:
        raise ConnectionRefusedError("its address is none")
    with closing(http.client.HTTPConnection(LOOPBACK, int(found[1]), timeout=30)) as server:
        server.request(method, path, headers={"Authorization": f"Bearer {found[2]}"})
        yield server.getresponse()
