"""Sources of examples: files, folders, saved datasets, the hub.

JSON Lines and JSON are parsed here, so that an error names the file and the line; the rest is left
to pyarrow and `datasets`. Nothing that would be unpickled is ever opened. `splits` chooses the part
of a source that is read.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from hetero_framework import registry
from hetero_framework.config.strict_json import json_type, repeated_keys
from hetero_framework.errors import DataError
from hetero_framework.repository import PICKLED_SUFFIXES, mistaken_for

if TYPE_CHECKING:
    import pyarrow

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
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_HOW = (
    "use .jsonl, .json, .parquet, .txt, a folder of such files, or a hub name, or Megatron's .bin "
    "with its .idx"
)
_HEAD_BYTES = 512
_ABOUT = ("readme.md", "license", "license.md", "license.txt")
_ONE_A_LINE = "in a .jsonl file each line is one object; a JSON list goes into a .json file"


@dataclass(frozen=True)
class Record:
    """One raw example and where it stands, for error messages."""

    where: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.eval`, found but not read. `kind` is jsonl, json, parquet,
    text, saved (a `save_to_disk` folder), folder (of files), hub, or the name of a data set in
    several files, of the registry, of which `path` is the first; it may have a weight."""

    name: str
    kind: str
    path: Path | None = None
    weight: float | None = None

    @property
    def is_file(self) -> bool:
        return self.kind in _KINDS.values()

    @property
    def is_parted(self) -> bool:
        """Whether it is a data set in several files, of the registry."""
        return registry.has("parted", self.kind)


def find_sources(spec: str | tuple[str, ...] | list[str], base_dir: Path) -> list[Source]:
    """Resolve file names, patterns (sorted by name), folders and hub names, in the order given.
    Raises DataError for an entry that does not exist or cannot be read."""
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("the list of data files is empty", hint=_HOW)
    if (blend := _blend(entries, base_dir)) is not None:
        return blend
    return [source for entry in entries for source in _find(entry, base_dir)]


def read_file(source: Source) -> Iterator[Record]:
    """Stream the examples of a file. Raises DataError, with file and line, for anything that is not
    an example, and where there is none."""
    assert source.path is not None
    readers = {"parquet": _from_parquet, "text": _from_text, "json": _from_json}
    record = None
    for record in readers.get(source.kind, _from_jsonl)(source.path):
        yield record
    if record is None:
        raise DataError(f"{source.name} holds no example")


def _blend(entries: list[str], base_dir: Path) -> list[Source] | None:
    """Weights that alternate with data sets in several files."""
    if len(entries) % 2 or not all(map(_NUMBER.fullmatch, entries[::2])):
        return None
    blend = []
    for weight, entry in zip(map(float, entries[::2]), entries[1::2], strict=True):
        found = _find(entry, base_dir)
        if not found[0].is_parted:
            known = listed(map(_parts_of, registry.names("parted")))
            raise DataError(f"{entry} has a weight, and is not one of {known}")
        if not 0 < weight < math.inf:
            raise DataError(f"{entry}: the weight of a part of a blend is above 0, not {weight}")
        blend.append(replace(found[0], weight=weight))
    return blend


def _parted(entry: str, path: Path) -> Source | None:
    """The data set in several files that a path names: by their common prefix, or one of them."""
    for name in registry.names("parted"):
        suffixes = registry.facts("parted", name)["files"]
        prefix = path.with_suffix("") if path.suffix in suffixes else path
        files = [Path(f"{prefix}{suffix}") for suffix in suffixes]
        if all(map(Path.is_file, files)):
            return Source(entry, name, files[0])
        if path.suffix == suffixes[0] and path.is_file():
            others = " and ".join(file.name for file in files[1:])
            raise DataError(f"{entry} is a file of {name}'s without its {others}")
    return None


def _parts_of(name: str) -> str:
    """ "Megatron's .idx with .bin"."""
    return f"{name}'s {' with '.join(registry.facts('parted', name)['files'])}"


def _find(entry: str, base_dir: Path) -> list[Source]:
    path = base_dir / os.path.expanduser(entry)
    if (parted := _parted(entry, path)) is not None:
        return [parted]
    if path.is_dir():
        return [_folder(entry, path)]
    if path.exists():
        return [open_source(entry, path)]
    if glob.has_magic(entry):
        # root_dir: brackets in the name of the base folder are not part of the pattern.
        pattern = os.path.expanduser(entry)
        matches = sorted(glob.glob(pattern, root_dir=base_dir, recursive=True))
        files = [match for match in matches if (base_dir / match).is_file()]
        if not files:
            raise DataError(f"no file matches {entry}", hint=f"looked in {base_dir}")
        for match in set(matches).difference(files):
            if not any(file.startswith(os.path.join(match, "")) for file in files):
                hint = "add /** to the pattern, or choose one that does not match the folder"
                raise DataError(f"{entry} matches the folder {match}, which is not read", hint=hint)
        return [open_source(match, base_dir / match) for match in files]
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
    if not data_files(path):
        raise DataError(f"the folder {entry} holds no file that can be read", hint=_HOW)
    return Source(entry, "folder", path)


def data_files(folder: Path) -> list[Path]:
    """The files of a folder that have the name of a readable kind, hidden ones aside."""
    return [file for file in visible_files(folder) if _suffix(file) in _KINDS]


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder that may hold data."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.name.lower() not in _ABOUT
        and file.is_file()
    ]


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def open_source(entry: str, path: Path) -> Source:
    """The file at `path`, whose kind is told by its name and its first bytes."""
    suffix = _suffix(path)
    if (parted := _parted(entry, path)) is not None:
        return parted
    if suffix in PICKLED_SUFFIXES:
        raise DataError(
            f"{entry} is a pickled format, which can run code when it is read", hint=_HOW
        )
    if suffix in (".csv", ".tsv"):
        raise DataError(
            f"{entry} is a table of text, in which no cell has a type; it is not read here",
            hint="convert it: datasets.load_dataset('csv', data_files=...)['train'].to_json(...)",
        )
    if suffix not in _KINDS and _magic(_head(path)) != "Parquet":
        raise DataError(f"{entry}: unknown kind of file {suffix or '(no suffix)'}", hint=_HOW)
    head = _head(path)
    zipped = _magic(head) == "gzip"
    if zipped:
        with _reading(path) as file:
            head = file.read(_HEAD_BYTES)
    _check_content(entry, head, suffix)
    if _magic(head) == "Parquet" or suffix == ".parquet":
        if zipped:
            raise DataError(f"{entry} is compressed Parquet", hint="decompress it with gunzip")
        if head and not head.startswith(b"PAR1"):
            raise DataError(f"{entry} is not a Parquet file (it does not begin with PAR1)")
        return Source(entry, "parquet", path)
    return Source(entry, _KINDS[suffix], path)


def _check_content(entry: str, head: bytes, suffix: str) -> None:
    """DataError for first bytes that no kind of file here has."""
    if not head:
        raise DataError(f"{entry} holds no example: it is empty")
    content = _magic(head)
    if content == "UTF-16 text" or (content is None and b"\0" in head[:4]):
        raise DataError(f"{entry} holds UTF-16 text or binary data", hint="save it as UTF-8")
    if content not in (None, "Parquet"):
        raise DataError(f"{entry} holds {content} data, which is not read here", hint=_HOW)
    if suffix not in (".txt", ".text") and (mistaken := mistaken_for(head)) is not None:
        raise DataError(f"{entry} is {mistaken[0]}, not the data", hint=mistaken[1])


def _magic(head: bytes) -> str | None:
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    """Open for reading bytes; a gzip file is recognised by its first bytes, not by its name."""
    if _magic(_head(path)) == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _lines(path: Path, *, of_text: bool = False) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line, without its end. A line `of_text` also ends at a
    carriage return alone."""
    with _reading(path) as file:
        # What is not UTF-8 passes through, to be named with its line.
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape") if of_text else None
        number = 0
        while line := _line(file if text is None else text):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                    hint=_ONE_A_LINE,
                )
            yield number, _decode(line.removeprefix(_BOM) if number == 1 else line, where)


def _line(file: BinaryIO | io.TextIOWrapper) -> bytes:
    line = file.readline(MAX_LINE_BYTES + 1)
    return line if isinstance(line, bytes) else line.encode("utf-8", "surrogateescape")


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
    for number, line in _lines(path, of_text=True):
        yield Record(f"{path}:{number}", {"text": line})


def _from_jsonl(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        if line.strip():
            where = f"{path}:{number}"
            start = _skip(line, 0)
            if line.startswith("[", start):
                raise _not_an_object(where, "a list", line, _ONE_A_LINE)
            value, end = _parse(line, start, _LineCounter(path, line, number).at, _ONE_A_LINE)
            if (rest := _skip(line, end)) < len(line):
                raise DataError(
                    f"{where}: not JSON after column {end}: {shorten(line[rest:])}",
                    hint=_ONE_A_LINE,
                )
            yield _record(where, value, line)


class _RepeatedKeyError(ValueError):
    """One of two values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _RepeatedKeyError
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(
    text: str, index: int, where: Callable[[int], str], hint: str | None = None
) -> tuple[Any, int]:
    """The value that begins at `index`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, index)
    except _RepeatedKeyError as error:
        path = repeated_keys(text, index)[0]
        key = re.split(r"[.\]]", path)[-1]
        raise DataError(
            f'{where(index)}: {path}: the key "{key}" is given twice in one object; keep one'
        ) from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise DataError(
            f"{where(error.pos)}: not JSON ({what} at column {error.colno}): "
            f"{shorten(text[index:])}",
            hint=hint,
        ) from error
    except (RecursionError, ValueError) as error:
        # ValueError: a number of more digits than Python converts.
        raise DataError(
            f"{where(index)}: too deep or too long a value: {shorten(text[index:])}"
        ) from error


def json_value(text: str, where: str) -> Any:
    """The JSON value that `text` is. Raises DataError as for a line of a file."""
    value, end = _parse(text, _skip(text, 0), lambda _: where)
    if _skip(text, end) < len(text):
        raise DataError(f"{where}: not JSON after column {end}: {shorten(text[end:])}")
    return value


def _record(where: str, value: Any, shown: str) -> Record:
    if not isinstance(value, dict):
        hint = 'an example is an object with named fields, such as {"text": "..."}'
        raise _not_an_object(where, json_type(value), shown, hint)
    return Record(where, value)


def _not_an_object(where: str, kind: str, shown: str, hint: str) -> DataError:
    return DataError(f"{where}: expected a JSON object, found {kind}: {shorten(shown)}", hint=hint)


def _from_json(path: Path) -> Iterator[Record]:
    """A list of objects, {"data": [...]}, one object, or JSON Lines under the name .json."""
    with _reading(path) as file:
        text = _decode(file.read().removeprefix(_BOM), str(path))
    start = _skip(text, 0)
    wrapped = _DATA_LIST.match(text, start)
    if wrapped is not None:
        start = wrapped.end() - 1
    if start < len(text) and text[start] not in "[{":
        raise DataError(
            f"{path}: expected a list of objects, found: {shorten(text[start:])}",
            hint='write [{"text": "..."}, ...], {"data": [...]}, or one object per line (.jsonl)',
        )
    return _json_items(path, text, start, wrapped is not None)


def _json_items(path: Path, text: str, start: int, wrapped: bool) -> Iterator[Record]:
    """The objects of the list at `start`, which may be `wrapped` in an object, or those that follow
    one another, one at a time."""
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
    if in_list:
        _check_end(text, _skip(text, index + 1), wrapped, line)


def _check_end(text: str, index: int, wrapped: bool, line: _LineCounter) -> None:
    """DataError where more examples may follow a list: text behind it is not read."""
    rest, where = text[index:], line.at(index)
    if wrapped and rest.startswith((",", "}")):  # the other keys of {"data": [...], ...}
        others, end = _parse("{" + rest.removeprefix(","), 0, lambda _: where)
        if "data" in others:
            raise DataError(f'{where}: the key "data" is given twice; keep one')
        rest = ("{" + rest.removeprefix(","))[end:]
    if rest.strip():
        raise DataError(f"{where}: not JSON, more follows the list: {shorten(rest)}")


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
                for row in plain_rows(batch, file.schema_arrow):
                    number += 1
                    yield Record(f"{path} row {number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged Parquet file after row {number} ({error})") from error


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters of `text` on one line, for an error message."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + "..."


def listed(names: Iterable[Any], most: int = 12) -> str:
    """The first of these names, and how many more there are; "none" without any."""
    found = list(names)
    more = f" and {len(found) - most:,} more" * (len(found) > most)
    return ", ".join(shorten(str(name)) for name in found[:most]) + more or "none"


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


class ClassNumber(int):
    """The number of a class, whose data set also says what all of them are called."""

    names: tuple[str, ...] = ()


def class_names(features: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Of columns with (lists of) a `ClassLabel` of `datasets`, what the classes are called."""
    found = {}
    for column, feature in (features or {}).items():
        while hasattr(feature, "feature"):
            feature = feature.feature
        if (names := getattr(feature, "names", None)) is not None:
            found[column] = tuple(names)
    return found


def with_class_names(row: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The row whose numbers of classes know their names."""
    return {**row, **{name: _named(row[name], names[name]) for name in names.keys() & row.keys()}}


def _named(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    if type(value) is int:
        value = ClassNumber(value)
        value.names = names
    return value


def plain_rows(
    table: pyarrow.Table | pyarrow.RecordBatch, schema: pyarrow.Schema
) -> Iterator[dict[str, Any]]:
    """The rows of a part of a table as JSON would have them; `schema` is that of the file, which
    knows the features of `datasets`. A column of objects has one type for all rows, so that each
    object has every key: nulls that fill it up are left out, as TRL's `remove_none_values` does.
    Columns of JSON (the `Json` feature of `datasets`) hold texts, which are parsed."""
    names = {}
    if b"huggingface" in (schema.metadata or {}):
        from datasets import Features  # slow

        features = Features.from_arrow_schema(schema)
        schema, names = features.arrow_schema, class_names(features)
    types = {field.name: field.type for field in schema}
    for row in table.to_pylist():
        plain = {name: _plain(value, types.get(name)) for name, value in row.items()}
        yield with_class_names(plain, names)


def _plain(value: Any, kind: Any) -> Any:
    if value is None or kind is None:
        return value
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value) if isinstance(value, str) else value
    if types.is_struct(kind) and isinstance(value, dict):
        fields = {field.name: field.type for field in kind}
        return {
            key: _plain(item, fields.get(key)) for key, item in value.items() if item is not None
        }
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_plain(item, kind.value_type) for item in value]
    return value
