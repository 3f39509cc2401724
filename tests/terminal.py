"""A terminal for programs that look whether they have one; not on Windows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import pytest


@contextmanager
def terminal() -> Iterator[tuple[TextIO, bytearray]]:
    """A stream to a terminal, and what was written to it, which is whole after the block."""
    pty = pytest.importorskip("pty", reason="Windows has no such terminals")
    ours, theirs = pty.openpty()
    said = bytearray()

    def read() -> None:
        with suppress(OSError):  # Linux: the other side is closed
            while data := os.read(ours, 1 << 16):
                said.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w", encoding="utf-8") as stream:
            yield stream, said
    finally:
        reader.join()
        os.close(ours)
