"""The process that reads and tokenises a stream: `python -m hetero_framework.extras.streams.child`.

Its standard input is one line of JSON, a `Job`, and stays open as its life line. It answers with
frames, each its length in 4 bytes and a map of msgpack, and goes on until nobody reads them.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgpack
import numpy as np

from hetero_framework import control
from hetero_framework.cluster.child import watch_parent
from hetero_framework.config import Config
from hetero_framework.data.kinds import formatter_for
from hetero_framework.data.sources import listed
from hetero_framework.data.splits import renamed
from hetero_framework.data.tokenizer import TokenizersErrors, load_tokenizer
from hetero_framework.data.train_data import Reader, unused
from hetero_framework.errors import DataError, UserError
from hetero_framework.extras.streams.reading import (
    Facts,
    Row,
    batches,
    compare,
    mixed,
    order_seed,
    source_readers,
)

HEADER = struct.Struct(">I")
_ROWS, _TOKENS = 64, 2**18  # of a frame


class Job(TypedDict):
    """The process's task. It begins at `state` (see `batches`); `shards` are the first files."""

    config: dict[str, Any]
    base_dir: str
    imports: list[str]
    vocab_size: int | None
    state: Any
    shards: Facts | None


class _Tokeniser:
    """Makes examples of rows, by the settings of each row's source."""

    def __init__(self, config: Config, vocab_size: int | None, first: Sequence[Row]) -> None:
        """`first` has one row of each source, which tells the source's format."""
        assert config.data is not None
        tokenizer = load_tokenizer(config)
        self.counts: Counter[str] = Counter()
        self._sources = []
        self._lines: list[str] = []
        self._said = set[str]()
        for part, (number, record) in zip(config.data.parts, first, strict=True):
            if part.columns:
                record = renamed(record, part.columns)
            formatter = formatter_for("text", record, tokenizer, part)
            formatter.rows([record])  # texts or messages: the first row tells
            reader = Reader(part, config.base_dir, tokenizer, vocab_size, [])
            self._sources.append((reader, formatter))
            name = f"train ({config.data.sources[number].label})" if len(first) > 1 else "train"
            fields = listed(record.fields)
            self._lines += [f"{name}: format {formatter.name} (fields {fields})"]
            self._lines += unused(name, formatter.unused)

    def frame(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The examples that these rows make, in their order, and lines for the user."""
        made = []
        for number, (reader, formatter) in enumerate(self._sources):
            columns = reader.data.columns
            places = [place for place, (source, _) in enumerate(rows) if source == number]
            records = [rows[place][1] for place in places]
            if columns:
                records = [renamed(record, columns) for record in records]
            place_of = {id(record): place for record, place in zip(records, places, strict=True)}
            kept = reader.kept(records, formatter, self.counts) if records else ()
            for record, [tokens], _ in kept:
                made.append((place_of[id(record)], number, record.where, *tokens))
        made.sort()
        return {
            "lengths": np.array([len(ids) for *_, ids, _ in made], np.int64).tobytes(),
            "ids": np.array([n for *_, ids, _ in made for n in ids], np.int32).tobytes(),
            "trained": np.array([bit for *_, bits in made for bit in bits], np.bool_).tobytes(),
            "sources": bytes(number for _, number, *_ in made),
            "where": [where for _, _, where, *_ in made],
            "counts": dict(self.counts),
            "lines": list(self._new_lines()),
        }

    def _new_lines(self) -> Iterator[str]:
        for _, formatter in self._sources:
            notes = [f"train: {line}" for line in formatter.notes]
            notes += [f"warning: {line}" for line in formatter.idle]
            for line in (*self._lines, *notes):
                if (remark := line.partition(" (first ")[0]) not in self._said:
                    self._said.add(remark)
                    yield line


def _frames(job: Job) -> Iterator[dict[str, Any]]:
    """The frames of a job. Raises DataError, also for an epoch with no example to learn from."""
    for file in job["imports"]:
        control.import_file(Path(file))
    config = Config.from_dict(job["config"], job["base_dir"])
    readers, facts = source_readers(config, seed := order_seed(config))
    if job["shards"] is not None:
        compare(job["shards"], facts)
    yield {"shards": facts}
    assert config.data is not None
    first = []
    for part, reader in zip(config.data.parts, source_readers(config, None)[0], strict=True):
        found = next(reader(0, None), None)
        if found is None:
            paths = [part.paths] if isinstance(part.paths, str) else part.paths
            raise DataError(f"{listed(paths)} holds no example")
        first.append(found[0])
    count = max(1, min(_ROWS, _TOKENS // (config.data.max_length or 1)))
    kept = 0 if job["state"] is None else -1
    with TokenizersErrors():
        tokeniser = _Tokeniser(config, job["vocab_size"], first)
        for state, rows in batches(mixed(config, readers), seed, count, job["state"]):
            yield {"state": json.dumps(state), **tokeniser.frame(rows)}
            if not rows and tokeniser.counts["kept"] == kept:
                raise DataError(
                    f"data.train: none of the {tokeniser.counts['read']:,} examples of an epoch has"
                    " a token to learn from",
                    hint="compare answers and data.max_length with `hetero check --show 3`",
                )
            kept = kept if rows else tokeniser.counts["kept"]


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 2**16) or sys.exit("no job came")
    watch_parent()
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what a library prints is no frame

        def send(frame: dict[str, Any]) -> None:
            data = msgpack.packb(frame)
            pipe.write(HEADER.pack(len(data)) + data)
            pipe.flush()

        try:
            for frame in _frames(json.loads(line)):
                send(frame)
        except UserError as error:
            send({"error": error.message, "hint": error.hint})


if __name__ == "__main__":
    main()
