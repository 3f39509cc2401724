"""Chromium without a window, steered through its debugging protocol by the standard library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Browser:
    """One tab. Errors of the console are kept in `errors`."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        wanted = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        wanted += f"Sec-WebSocket-Key: {key}\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        self._socket.sendall(f"GET {path} HTTP/1.1\r\n{wanted}".encode())
        while self._reader.readline() != b"\r\n":
            pass
        self._numbers, self._session = itertools.count(1), ""
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        question = {"id": number, "method": method, "params": parameters}
        self._send({**question, "sessionId": self._session} if self._session else question)
        while True:
            told = json.loads(self._receive())
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]))
            entry = told.get("params", {}).get("entry", {})
            if told.get("method") == "Log.entryAdded" and entry["level"] == "error":
                self.errors.append(entry["text"])

    def _send(self, question: Any) -> None:
        data, mask = json.dumps(question).encode(), os.urandom(4)
        size = bytes([0x80 | 127]) + struct.pack(">Q", len(data))
        masked = bytes(byte ^ mask[k % 4] for k, byte in enumerate(data))
        self._socket.sendall(b"\x81" + size + mask + masked)

    def _receive(self) -> bytes:
        message = b""
        while True:
            first, second = self._reader.read(2)
            size = second & 127
            if size > 125:
                size = int.from_bytes(self._reader.read(2 if size == 126 else 8), "big")
            message += self._reader.read(size)
            if first & 0x80:
                return message

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)

    def value(self, code: str) -> Any:
        wanted = {"expression": code, "awaitPromise": True, "returnByValue": True}
        found = self.ask("Runtime.evaluate", **wanted)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        code = f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"
        return str(self.value(code))

    def await_text(self, text: str, selector: str = "body") -> None:
        wait_until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def click(self, selector: str) -> None:
        """With the mouse, where the element is; not before it can be pressed."""
        found = f"document.querySelector({json.dumps(selector)})"
        wait_until(lambda: self.value(f"!!{found} && !{found}.disabled && !{found}.hidden"))
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, selector)

    def mouse(self, kind: str, selector: str, at: float = 0.5, clicks: int = 1) -> None:
        """An event of the mouse, at this share of the element's width."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'center'}})")
        place = self.value(
            f"(() => {{ const b = {found}.getBoundingClientRect();"
            f" return {{x: b.x + b.width * {at}, y: b.y + b.height / 2}} }})()"
        )
        button = {"button": "none"} if kind == "mouseMoved" else {"button": "left"}
        told = {"type": kind, **place, **button, "clickCount": clicks}
        self.ask("Input.dispatchMouseEvent", **told)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        found = f"document.querySelector({json.dumps(selector)})"
        code = f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('change'))"
        self.value(code)

    def look(self, width: int, *, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`."""
    assert PROGRAM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    options += ("--no-first-run", "--disable-extensions", "--remote-debugging-port=0")
    process = subprocess.Popen(
        [PROGRAM, *options, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = folder / "DevToolsActivePort"
        wait_until(lambda: told.exists() and told.read_text().count("\n"), "the browser")
        port, path = told.read_text().splitlines()[:2]
        browser = Browser(int(port), path)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(30)
