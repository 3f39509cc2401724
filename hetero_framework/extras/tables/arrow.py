"""Reads Arrow's files and streams, which `datasets` writes, and Feather files, a kind of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.data.files.parquet import table_records
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError
from hetero_framework.units import size

if TYPE_CHECKING:
    import pyarrow

_FILE, _OLD = b"ARROW1", b"FEA1"
_MOST_BYTES, _MOST_TIMES = 2**28, 16
"""The most that a part may decompress to: bytes, or times the part's bytes in the file."""


def records(path: Path) -> Iterator[Record]:
    """The rows, read by batches. Raises DataError, with the last row, for a damaged file."""
    import pyarrow

    def batches(schema: list[pyarrow.Schema]) -> Iterator[pyarrow.RecordBatch]:
        with pyarrow.memory_map(str(path)) as file:
            if file.read(len(_OLD)) == _OLD:
                text = f"{path} is a Feather file of version 1, which is not read"
                raise DataError(text, hint="save it anew; pyarrow writes version 2")
            file.seek(0)
            _check_sizes(path, file)
            for batch in _batches(file):
                schema.append(batch.schema)
                yield batch

    return table_records(str(path), batches, "Arrow file")


def _check_sizes(path: Path, file: Any) -> None:
    """Raise DataError for a part that decompresses to much more than it takes in the file. A file
    has the messages of a stream after its first 8 bytes."""
    import pyarrow

    if file.read(len(_FILE)) == _FILE:
        file.seek(8)
    else:
        file.seek(0)
    # A damaged or short file is reported later, with the last row before the damage.
    with suppress(pyarrow.ArrowException, OSError, struct.error, IndexError):
        for message in pyarrow.ipc.MessageReader.open_stream(file):
            if message.type not in ("record batch", "dictionary") or not message.body:
                continue
            body, whole = message.body, 0
            for offset, length in _buffers(message.metadata.to_pybytes(), message.type):
                head = body.slice(offset, min(length, 8)).to_pybytes()
                whole += max(0, int.from_bytes(head, "little", signed=True))
            if whole > max(_MOST_BYTES, _MOST_TIMES * body.size):
                text = f"{path}: a batch of rows takes {size(whole)} once it is decompressed"
                raise DataError(text, hint="write it in smaller batches (max_chunksize)")
    file.seek(0)


def _buffers(table: bytes, kind: str) -> list[tuple[int, int]]:
    """Offset and length of the compressed buffers of a message, a flatbuffer
    (format/Message.fbs of Arrow); none where they are not compressed."""

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, table, at)[0])

    def field(at: int, index: int) -> int:
        """The place of a field, 0 where it is left out."""
        entries = at - number("<i", at)
        there = 4 + 2 * index < number("<H", entries) and number("<H", entries + 4 + 2 * index)
        return at + there if there else 0

    def inner(at: int) -> int:
        return at + number("<I", at)

    batch = inner(field(inner(0), 2))
    if kind == "dictionary":
        batch = inner(field(batch, 1))
    if not field(batch, 3):
        return []
    vector = inner(field(batch, 2))
    first = vector + 4
    return [struct.unpack_from("<qq", table, first + 16 * k) for k in range(number("<I", vector))]


def _batches(file: Any) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    is_file = file.read(len(_FILE)) == _FILE
    file.seek(0)
    if not is_file:
        yield from pyarrow.ipc.open_stream(file)
        if file.tell() < file.size():
            raise pyarrow.ArrowInvalid("more follows the end of its stream")
        return
    reader = pyarrow.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
