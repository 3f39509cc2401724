"""Arrow's files and streams, which `datasets` writes, and Feather's, which are such files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_framework.data.files.parquet import plain_rows
from hetero_framework.data.sources import Record
from hetero_framework.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_FILE = b"ARROW1"


def records(path: Path) -> Iterator[Record]:
    """The rows, a batch at a time. Raises DataError for a damaged file, with the last row."""
    import pyarrow

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file:
            for batch in _batches(file):
                for part in range(0, len(batch), 1000):
                    for row in plain_rows(batch.slice(part, 1000), batch.schema):
                        number += 1
                        yield Record(f"{path} row {number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged Arrow file after row {number} ({error})") from error


def _batches(file: Any) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    is_file = file.read(len(_FILE)) == _FILE
    file.seek(0)
    if not is_file:
        yield from pyarrow.ipc.open_stream(file)
        return
    reader = pyarrow.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
