"""The calls of an endpoint on the disk, so that a killed coordinator does them again.

    calls/000000012.call     one line of JSON (id, kind), then the message as it came
    calls/000000012.answer   one line of JSON (kind of body), then the answer
    endpoint.json            sessions, the model, and what was saved, by name

These files outlive the process but not a power cut, like those of the durable step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_framework.core.files import rename, write_file
from hetero_framework.errors import ResourceError, in_words
from hetero_framework.file_trust import read_own

MOST_BYTES = 1 << 26
"""Bytes of a call or of an answer, at most."""
KEPT_ANSWERS = 1000
"""Answers that stay for clients that ask again."""


@dataclass(frozen=True)
class KeptCall:
    """A call: its place in the order of all calls, its id, its kind and the message."""

    number: int
    id: str
    kind: str
    body: bytes


Answer = bytes | dict[str, Any]
"""A message of the protocol buffers, or JSON data."""


class Journal:
    """The calls and answers below one folder. Raises ResourceError where it cannot write."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._state = folder / "calls", folder / "endpoint.json"
        self._folder.mkdir(0o700, parents=True, exist_ok=True)

    def load(self) -> dict[str, Any]:
        """What `keep` was given last; empty if nothing."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(read_own(self._state))
            return found
        return {}

    def keep(self, state: Mapping[str, Any]) -> None:
        write_file(self._state, json.dumps(state, indent=1).encode() + b"\n")

    def entries(self) -> list[KeptCall]:
        """All calls that are kept, in order."""
        found = []
        for path in sorted(self._folder.glob("*.call")):
            head, _, body = read_own(path, most_bytes=MOST_BYTES).partition(b"\n")
            id, kind = json.loads(head)
            found.append(KeptCall(int(path.stem), id, kind, body))
        return found

    def answers(self) -> dict[str, tuple[int, Answer]]:
        """The kept answers by the ids of their calls, with the calls' numbers."""
        found: dict[str, tuple[int, Answer]] = {}
        for path in sorted(self._folder.glob("*.answer")):
            head, _, body = read_own(path, most_bytes=MOST_BYTES).partition(b"\n")
            id, is_bytes = json.loads(head)
            found[id] = int(path.stem), body if is_bytes else json.loads(body)
        return found

    def add(self, entry: KeptCall) -> None:
        self._write(f"{entry.number:09d}.call", [entry.id, entry.kind], entry.body)

    def answered(self, entry: KeptCall, answer: Answer) -> None:
        is_bytes = isinstance(answer, bytes)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._write(f"{entry.number:09d}.answer", [entry.id, is_bytes], body)

    def forget(self, number: int, *, answer: bool = False) -> None:
        """Drop a call, which will not be done again, or its `answer`."""
        path = self._folder / f"{number:09d}.{'answer' if answer else 'call'}"
        path.unlink(missing_ok=True)

    def _write(self, name: str, head: list[Any], body: bytes) -> None:
        path, unfinished = self._folder / name, self._folder / f".{name}.tmp"
        try:
            unfinished.write_bytes(json.dumps(head).encode() + b"\n" + body)
            rename(unfinished, path)
        except OSError as error:
            raise ResourceError(f"a call cannot be kept in {path}: {in_words(error)}") from error
