"""Where examples come from: files, saved datasets, the hub. All become a stream of `Record`.

JSON Lines and JSON are parsed here, so that an error names the file and the line; the rest is left
to pyarrow and `datasets`. Nothing that would be unpickled is ever opened.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hetero_framework.config.strict_json import json_type
from hetero_framework.errors import DataError
from hetero_framework.repository import PICKLED_SUFFIXES

MAX_LINE_BYTES = 16 * 2**20

_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_DATA_LIST = re.compile(r'\{\s*"data"\s*:\s*\[')
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"PAR1", "Parquet"),
    (b"ARROW1", "Arrow"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    *((b"\x80" + bytes([version]), "pickle") for version in range(2, 6)),
)
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_HOW = "use .jsonl, .json, .parquet, .txt, a folder of datasets.save_to_disk, or a hub name"


@dataclass(frozen=True)
class Record:
    """One raw example and where it stands, for error messages."""

    where: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.eval`, found but not read. `kind` is jsonl, json, parquet,
    text, saved (a `save_to_disk` folder) or hub."""

    name: str
    kind: str
    path: Path | None = None


def find_sources(spec: str | tuple[str, ...] | list[str], base_dir: Path) -> list[Source]:
    """Resolve file names, patterns (sorted by name), folders and hub names, in the order given.
    Raises DataError for what does not exist or is of a kind that cannot be read."""
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("the list of data files is empty", hint=_HOW)
    return [source for entry in entries for source in _find(entry, base_dir)]


def read_records(
    source: Source, *, split: str = "train", dataset_config: str | None = None
) -> Iterator[Record]:
    """Stream the examples of one source; only hub names and saved folders have splits. Raises
    DataError, with file and line, for anything that is not an example."""
    if source.path is None:
        return _from_hub(source.name, split, dataset_config)
    if source.kind == "saved":
        return _from_saved(source.path, split)
    readers = {"parquet": _from_parquet, "text": _from_text, "json": _from_json}
    return readers.get(source.kind, _from_jsonl)(source.path)


def _find(entry: str, base_dir: Path) -> list[Source]:
    path = base_dir / os.path.expanduser(entry)
    if path.is_dir():
        return [_folder(entry, path)]
    if path.exists():
        return [_file(entry, path)]
    if glob.has_magic(entry):
        # root_dir: brackets in the name of the base folder are not part of the pattern.
        pattern = os.path.expanduser(entry)
        matches = sorted(glob.glob(pattern, root_dir=base_dir, recursive=True))
        files = [match for match in matches if (base_dir / match).is_file()]
        if not files:
            raise DataError(f"no file matches {entry}", hint=f"looked in {base_dir}")
        return [_file(match, base_dir / match) for match in files]
    if not _may_be_on_hub(entry, path):
        raise DataError(f"data file not found: {entry}", hint=f"looked at {path}")
    return [Source(entry, "hub")]


def _may_be_on_hub(entry: str, path: Path) -> bool:
    """Whether a name that is no file can be a hub name, without asking the hub: a misspelt file
    name must not end in minutes of connection attempts."""
    suffix = path.suffix.lower()
    if suffix in {*_KINDS, *PICKLED_SUFFIXES, ".gz"} or not _HUB_NAME.fullmatch(entry):
        return False
    return not path.parent.is_dir() if "/" in entry else not suffix


def _folder(entry: str, path: Path) -> Source:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return Source(entry, "saved", path)
    raise DataError(
        f"{entry} is a folder, but not one that datasets.save_to_disk wrote",
        hint=f"for the files in a folder give a pattern, such as {entry.rstrip('/')}/*.jsonl",
    )


def _file(entry: str, path: Path) -> Source:
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in PICKLED_SUFFIXES:
        raise DataError(
            f"{entry} is a pickled format, which can run code when it is read", hint=_HOW
        )
    content = _magic(path)
    if content == "Parquet":
        return Source(entry, "parquet", path)
    if content not in (None, "gzip"):
        raise DataError(f"{entry} holds {content} data, which is not read here", hint=_HOW)
    if suffix not in _KINDS:
        raise DataError(f"{entry}: unknown kind of file {suffix or '(no suffix)'}", hint=_HOW)
    if suffix == ".parquet":
        raise DataError(f"{entry} is not a Parquet file (it does not begin with PAR1)")
    return Source(entry, _KINDS[suffix], path)


def _magic(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def _open(path: Path) -> BinaryIO:
    """Open for reading bytes; a gzip file is recognised by its first bytes, not by its name."""
    if _magic(path) == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line, without its end."""
    with _reading(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                    hint="a line is one example; a JSON list goes into a file named .json",
                )
            yield number, _decode(line.removeprefix(_BOM) if number == 1 else line, where)


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """An open file whose errors become DataError."""
    try:
        with _open(path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} is not valid UTF-8", hint="save the file as UTF-8"
        ) from error


def _from_text(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        yield Record(f"{path}:{number}", {"text": line})


def _from_jsonl(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        if line.strip():
            where = f"{path}:{number}"
            value, end = _parse(line, _skip(line, 0), _LineCounter(path, line, number).at)
            if (rest := _skip(line, end)) < len(line):
                raise DataError(f"{where}: not JSON after column {end}: {shorten(line[rest:])}")
            yield _record(where, value, line)


def _parse(text: str, index: int, where: Callable[[int], str]) -> tuple[Any, int]:
    """The value that begins at `index`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, index)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise DataError(
            f"{where(error.pos)}: not JSON ({what} at column {error.colno}): "
            f"{shorten(text[index:])}"
        ) from error
    except (RecursionError, ValueError) as error:
        # ValueError: a number of more digits than Python converts.
        raise DataError(
            f"{where(index)}: too deep or too long a value: {shorten(text[index:])}"
        ) from error


def _record(where: str, value: Any, shown: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: expected a JSON object, found {json_type(value)}: {shorten(shown)}",
            hint='an example is an object with named fields, such as {"text": "..."}',
        )
    return Record(where, value)


def _from_json(path: Path) -> Iterator[Record]:
    """A list of objects, {"data": [...]}, one object, or JSON Lines under the name .json."""
    with _reading(path) as file:
        text = _decode(file.read().removeprefix(_BOM), str(path))
    start = _skip(text, 0)
    if data := _DATA_LIST.match(text, start):
        start = data.end() - 1
    if start < len(text) and text[start] not in "[{":
        raise DataError(
            f"{path}: expected a list of objects, found: {shorten(text[start:])}",
            hint='write [{"text": "..."}, ...], {"data": [...]}, or one object per line (.jsonl)',
        )
    return _json_items(path, text, start)


def _json_items(path: Path, text: str, start: int) -> Iterator[Record]:
    """The objects of the list at `start`, or those that follow one another, one at a time."""
    line = _LineCounter(path, text)
    in_list = text.startswith("[", start)
    index = _skip(text, start + in_list)
    while index < len(text) and not (in_list and text.startswith("]", index)):
        value, end = _parse(text, index, line.at)
        if not in_list and isinstance(value, dict) and isinstance(value.get("data"), list):
            for number, item in enumerate(value["data"], 1):
                yield _record(f"{path}: item {number}", item, str(item))
        else:
            yield _record(line.at(index), value, text[index:end])
        index = _skip(text, end)
        if not in_list or text.startswith("]", index):
            continue
        if not text.startswith(",", index):
            raise DataError(
                f"{line.at(index)}: not JSON, expected ',' or ']' at: {shorten(text[index:])}"
            )
        index = _skip(text, index + 1)
        if text.startswith("]", index):
            raise DataError(f"{line.at(index)}: not JSON, a comma before the closing bracket")
    if in_list and index >= len(text):
        raise DataError(f"{line.at(len(text))}: not JSON, the list does not end")


_DECODER = json.JSONDecoder()


def _skip(text: str, index: int) -> int:
    return _JSON_SPACE.match(text, index).end()  # type: ignore[union-attr]


class _LineCounter:
    """Line numbers of growing positions, without counting from the start each time."""

    def __init__(self, path: Path, text: str, number: int = 1) -> None:
        self.path, self.text = path, text
        self.position, self.number = 0, number

    def at(self, position: int) -> str:
        self.number += self.text.count("\n", self.position, position)
        self.position = position
        return f"{self.path}:{self.number}"


def _from_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged Parquet file after row {number} ({error})") from error


def _from_saved(path: Path, split: str) -> Iterator[Record]:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a folder of datasets.save_to_disk ({error})") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise DataError(
                f"{path} has no split {split!r}, only {', '.join(map(repr, dataset))}",
                hint="set data.train_split or data.eval_split",
            )
        dataset = dataset[split]
    yield from _rows(dataset, str(path))


def _from_hub(name: str, split: str, dataset_config: str | None) -> Iterator[Record]:
    import datasets

    try:
        dataset = datasets.load_dataset(name, dataset_config, split=split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{name!r} is neither a file or folder here nor a dataset on the hub ({error})",
            hint="check the path (relative paths count from the configuration file's folder)",
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # ConnectionError and the offline mode's error are OSErrors.
        raise DataError(
            f"cannot load the dataset {name!r}, split {split!r}, from the hub: {error}",
            hint="without a network, give local files or a folder of datasets.save_to_disk",
        ) from error
    yield from _rows(dataset, f"{name}[{split}]")


def _rows(dataset: Any, name: str) -> Iterator[Record]:
    for number, row in enumerate(dataset.with_format(None), 1):
        yield Record(f"{name} row {number}", row)


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters of `text` on one line, for an error message."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + "..."


def check_unicode(text: str, where: str) -> str:
    """`text` itself; DataError when it cannot be written as UTF-8 (JSON can escape such text)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair at character {error.start + 1}, "
            "which is not text"
        ) from error
    return text
