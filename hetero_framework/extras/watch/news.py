"""News of a run as lines of JSON: those of its files, as they are, and values that no file has."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hetero_framework.log import EVENTS_FILE

_FILES = ("metrics.jsonl", EVENTS_FILE, "samples.jsonl")
_TICK_S = 0.25
_MOST_BYTES = 1 << 18
"""From the end of a file; before it about _SPREAD lines are read."""
_SPREAD = 1000


def news_of(folder: Path, values: Mapping[str, Any], closing: threading.Event) -> Iterator[bytes]:
    """The news of an `output_dir`, all the time; after `closing` the last ones."""
    places: dict[str, tuple[int, int]] = {}
    told: dict[str, Any] = {}
    is_last = False
    while True:
        now = dict(values)
        new = {k: v for k, v in now.items() if k not in told or told[k] != v}
        first = [json.dumps(new).encode() + b"\n"] if new else []
        yield b"".join([*first, *_written(folder, places)])
        if is_last:
            return
        told, is_last = now, closing.wait(_TICK_S)


def _written(folder: Path, places: dict[str, tuple[int, int]]) -> Iterator[bytes]:
    """What was added to the files since the last call; `places` has each one's inode, and how far
    it was read. After one was replaced, as by a run that goes back to a step, all of them."""
    for name in _FILES:
        try:
            with (folder / name).open("rb") as file:
                entry = os.fstat(file.fileno())
                inode, place = places.get(name, (entry.st_ino, 0))
                if inode != entry.st_ino or entry.st_size < place:
                    places.clear()
                    yield b'{"anew": true}\n'
                    yield from _written(folder, places)
                    return
                lines, place = _lines(file, place, entry.st_size)
        except OSError:  # it is not there yet
            continue
        places[name] = entry.st_ino, place
        kind = name.removesuffix(".jsonl").encode()
        yield from (b'{"of": "%b", "line": %b}\n' % (kind, line.strip()) for line in lines)


def _lines(file: BinaryIO, place: int, size: int) -> tuple[list[bytes], int]:
    """The whole lines from a place on, and where the last one ends; before the last _MOST_BYTES
    some that are about equally far from each other."""
    recent, lines = max(place, size - _MOST_BYTES), list[bytes]()
    distance = (recent - place) // _SPREAD
    file.seek(place)
    while file.tell() < recent:
        lines.append(file.readline())
        if distance > len(lines[-1]):
            file.seek(min(recent, file.tell() + distance - len(lines[-1])))
            file.readline()
    place, data = file.tell(), file.read(2 * _MOST_BYTES)
    data = data[: data.rfind(b"\n") + 1]  # the last line may be under way
    return lines + data.splitlines(), place + len(data)
