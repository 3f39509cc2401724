"""Sources of examples: files, folders, saved datasets, the hub.

Files are read by the modules of the registry's table "files", the rest by `datasets`. Nothing that
would be unpickled is ever opened. `splits` chooses the part of a source that is read.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from hetero_framework import registry
from hetero_framework.errors import DataError
from hetero_framework.repository import PICKLED_SUFFIXES, mistaken_for

MAX_LINE_BYTES = 16 * 2**20
_XZ_BYTES = 256 * 2**20

BOM = b"\xef\xbb\xbf"
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"ARROW1", "Arrow"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    *((bytes([first]) + b"\x2a\x4d\x18", "zstandard") for first in range(0x50, 0x60)),  # skipped
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    *((b"\x80" + bytes([version]), "pickle") for version in range(2, 6)),
)
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_HEAD_BYTES = 512
_ABOUT = ("readme.md", "license", "license.md", "license.txt", "dataset_info.json")
_COMPRESSED = (".gz", ".xz", ".zst")
ONE_A_LINE = "in a .jsonl file each line is one object; a JSON list goes into a .json file"


@dataclass(frozen=True)
class Record:
    """One raw example and where it stands, for error messages."""

    where: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Numeric:
    """Names of columns. The first of these that has cells holds numbers, or true and false; with
    `or_names` it may hold names instead; true and false are names where they are in `names`."""

    columns: tuple[str, ...] = ()
    or_names: bool = False
    names: tuple[str, ...] = ()


TEXTS = Numeric()
"""For tables whose cells all stay texts."""


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.eval`, found but not read. `kind` is saved (a
    `save_to_disk` folder), folder (of files), hub, or a name in the registry's tables "files" and
    "parted". A "parted" source has its first file as `path`, and may have a weight."""

    name: str
    kind: str
    path: Path | None = None
    weight: float | None = None

    @property
    def is_file(self) -> bool:
        return registry.has("files", self.kind)

    @property
    def is_parted(self) -> bool:
        """Whether the source is a data set in several files, of the registry's table "parted"."""
        return registry.has("parted", self.kind)


def find_sources(spec: str | tuple[str, ...] | list[str], base_dir: Path) -> list[Source]:
    """Resolve file names, patterns (sorted by name), folders and hub names, in the order given.
    Raises DataError for an entry that does not exist or cannot be read."""
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("the list of data files is empty", hint=_how())
    if (blend := _blend(entries, base_dir)) is not None:
        return blend
    return [source for entry in entries for source in _find(entry, base_dir)]


def read_file(source: Source, numeric: Numeric = TEXTS) -> Iterator[Record]:
    """Stream the examples of a file; `numeric` is for a table whose cells are texts. Raises
    DataError, with file and line, for anything that is no example, and for a file without any."""
    assert source.path is not None
    told = (numeric,) * bool(registry.facts("files", source.kind).get("untyped"))
    record = None
    for record in registry.find("files", source.kind)(source.path, *told):
        yield record
    if record is None:
        raise DataError(f"{source.name} holds no example")


def _blend(entries: list[str], base_dir: Path) -> list[Source] | None:
    """The sources of a list in which weights and data sets in several files alternate, or None."""
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
    """The data set in several files that `path` names: the files' common prefix, or one file."""
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
    """A kind and its files, as in: Megatron's .idx with .bin."""
    return f"{name}'s {' with '.join(registry.facts('parted', name)['files'])}"


def _find(entry: str, base_dir: Path) -> list[Source]:
    path = base_dir / os.path.expanduser(entry)
    if (parted := _parted(entry, path)) is not None:
        return [parted]
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return [Source(entry, "saved", path)]
        if not data_files(path):
            raise DataError(f"the folder {entry} holds no file that can be read", hint=_how())
        return [Source(entry, "folder", path)]
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
    if suffix in {
        *registry.names("files"),
        *PICKLED_SUFFIXES,
        *_COMPRESSED,
    } or not _HUB_NAME.fullmatch(entry):
        return False
    return not path.parent.is_dir() if "/" in entry else not suffix


def data_files(folder: Path) -> list[Path]:
    """The visible files of a folder whose suffix belongs to a readable kind."""
    return [file for file in visible_files(folder) if registry.has("files", _suffix(file))]


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
    name = path.name.lower()
    for end in _COMPRESSED:
        name = name.removesuffix(end)
    return Path(name).suffix


def open_source(entry: str, path: Path) -> Source:
    """The file at `path`, whose kind is told by its name and its first bytes."""
    suffix = _suffix(path)
    if (parted := _parted(entry, path)) is not None:
        return parted
    if suffix in PICKLED_SUFFIXES:
        raise DataError(
            f"{entry} is a pickled format, which can run code when it is read", hint=_how()
        )
    head = _head(path)
    if not registry.has("files", _by_content(head) or suffix):
        raise DataError(f"{entry}: unknown kind of file {suffix or '(no suffix)'}", hint=_how())
    zipped = _magic(head) in _OPENED
    if zipped:
        with reading(path) as file:
            head = file.read(_HEAD_BYTES)
    if (kind := _by_content(head)) is None:
        kind = suffix
        if registry.facts("files", kind).get("binary"):
            if zipped:
                raise DataError(f"{entry} is a compressed table", hint="decompress it first")
        else:
            _check_content(entry, head, kind)
    if begin := registry.facts("files", kind).get("begins"):
        name = kind[1:].capitalize()
        if zipped:
            raise DataError(f"{entry} is compressed {name}", hint="decompress it first")
        if not head.startswith(begin.encode()):
            raise DataError(f"{entry} is not a {name} file (it does not begin with {begin})")
    return Source(entry, kind, path)


def _by_content(head: bytes) -> str | None:
    """The kind of a file with these first bytes, whatever its name; None if they do not tell."""
    for kind in registry.names("files"):
        begin = registry.facts("files", kind).get("begins")
        if begin is not None and head.startswith(begin.encode()):
            return kind
    return None


def _how() -> str:
    kinds = ", ".join(registry.names("files"))
    others = "".join(f", or {_parts_of(name)}" for name in registry.names("parted"))
    return f"use {kinds}, a folder of such files, or a hub name{others}"


def _check_content(entry: str, head: bytes, kind: str) -> None:
    """Raise DataError for first bytes that no kind of file here has."""
    if not head:
        raise DataError(f"{entry} holds no example: it is empty")
    content = _magic(head)
    if content == "UTF-16 text" or (content is None and b"\0" in head[:4]):
        raise DataError(f"{entry} holds UTF-16 text or binary data", hint="save it as UTF-8")
    if content is not None:
        raise DataError(f"{entry} holds {content} data, which is not read here", hint=_how())
    is_text = registry.facts("files", kind).get("any_text", False)
    if not is_text and (mistaken := mistaken_for(head)) is not None:
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
    """Open for reading bytes; a compressed file is recognised by its first bytes, not by its
    name."""
    compression = _magic(_head(path))
    if compression in _OPENED:
        return cast(BinaryIO, _OPENED[compression](path))
    return path.open("rb")


class _Xz(io.RawIOBase):
    """A file of xz, whose decoder takes at most _XZ_BYTES of memory: `xz -9` needs 65 MiB."""

    def __init__(self, path: Path) -> None:
        self._file, self._decoder = path.open("rb"), lzma.LZMADecompressor(memlimit=_XZ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            given = self._decoder.unused_data
            if self._decoder.eof:  # another stream may follow, behind zeros
                while not (given := given.lstrip(b"\0")):
                    if not (given := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                self._decoder = lzma.LZMADecompressor(memlimit=_XZ_BYTES)
            elif self._decoder.needs_input and not (
                given := self._file.read(io.DEFAULT_BUFFER_SIZE)
            ):
                raise EOFError("its end is missing")
            data = self._decoder.decompress(given, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstandard(path: Path) -> Any:
    import pyarrow  # has zstandard, which Python has from 3.14 on

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_OPENED: dict[str | None, Callable[[Path], Any]] = {
    "gzip": gzip.open,
    "xz": lambda path: io.BufferedReader(_Xz(path)),
    "zstandard": _zstandard,
}


def lines(path: Path, *, newline: str | None = "\n", hint: str = "") -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line, without its end. With a `newline` of None or "" a line
    also ends at a carriage return alone; with "" lines keep their ends. `hint` is for a line that
    is too long."""
    with reading(path) as file:
        # Bytes that are not UTF-8 pass through here, so that the error can name their line.
        text = None
        if newline is None or not newline:
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline)
        number = 0
        while line := _line(file if text is None else text):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                    hint=hint or "break it into several lines",
                )
            found = _decode(line.removeprefix(BOM) if number == 1 else line, where)
            yield number, found if newline == "" else found.rstrip("\r\n")


def text_records(path: Path) -> Iterator[Record]:
    """The examples of a file of text: its lines."""
    for number, line in lines(path, newline=None):
        yield Record(f"{path}:{number}", {"text": line})


def _line(file: BinaryIO | io.TextIOWrapper) -> bytes:
    line = file.readline(MAX_LINE_BYTES + 1)
    return line if isinstance(line, bytes) else line.encode("utf-8", "surrogateescape")


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """An open file whose errors become DataError."""
    try:
        with _open(path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged {_magic(_head(path))} file ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} is not valid UTF-8", hint="save the file as UTF-8"
        ) from error


def shorten(text: str, limit: int = 60) -> str:
    """At most `limit` characters of `text` on one line, for an error message."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + "..."


def listed(names: Iterable[Any]) -> str:
    """The first 12 names, and how many more there are; "none" without names. A name with spaces
    around it stands between quotes."""
    found = list(names)
    shown = (shorten(n) if n == n.strip() else repr(n[:60]) for n in map(str, found[:12]))
    more = f" and {len(found) - 12:,} more" * (len(found) > 12)
    return ", ".join(shown) + more or "none"


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
