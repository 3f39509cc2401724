"""Cache of tokenised examples, by files, tokenizer and settings.

An entry is a directory of memory-mapped arrays, named by a digest of all that the tokens depend on.
An entry gets its name when it is complete, so several processes may write at once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_framework._version import __version__
from hetero_framework.core.cache import cache_directory
from hetero_framework.data.examples import Examples
from hetero_framework.data.sources import Source
from hetero_framework.file_trust import untrusted_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
WORTH_BYTES = 2 << 20  # smaller sources are tokenised in about a second
MOST_BYTES = 16 << 30
_UNFINISHED = ".tmp"
_ABANDONED_S = 24 * 3600  # an older unfinished entry belongs to a killed process
_ARRAYS = ("ids", "trained", "offsets", "targets")
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


@dataclass(frozen=True)
class Entry:
    """The place of one set of examples in the cache, whether or not it is filled yet."""

    path: Path

    def read(self) -> tuple[Examples, list[str]] | None:
        """The examples and the lines to show with them; None where the examples must be made."""
        if not self.path.is_dir():
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, EOFError):
            for place in (self.path, *sorted(self.path.iterdir())):
                if (wrong := untrusted_reason(place)) is not None:
                    _log.warning("%s %s: the data are tokenised anew", place, wrong.problem)
                    return None
            entry = json.loads((self.path / "entry.json").read_text("utf-8"))
            names = [name for name in _ARRAYS if (self.path / f"{name}.npy").exists()]
            arrays = {name: np.load(self.path / f"{name}.npy", mmap_mode="r") for name in names}
            examples = Examples(**arrays)
            if examples.fingerprint == entry["fingerprint"]:
                os.utime(self.path)  # the least recently used is deleted first
                return examples, [str(line) for line in entry["report"]]
        shutil.rmtree(self.path, ignore_errors=True)  # it was changed after it was written
        return None

    def write(self, examples: Examples, report: Sequence[str]) -> None:
        """Keep the examples; without effect where the files cannot be written."""
        entry = {"fingerprint": examples.fingerprint, "report": list(report)}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(suffix=_UNFINISHED, dir=self.path.parent))
            try:
                for name in _ARRAYS:
                    if (values := getattr(examples, name)) is not None:
                        np.save(unfinished / f"{name}.npy", values)
                (unfinished / "entry.json").write_text(json.dumps(entry), encoding="utf-8")
                make_room(self.path.parent, MOST_BYTES)
                os.rename(unfinished, self.path)  # fails where another process was first
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)


def find_entry(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, settings: Any
) -> Entry | None:
    """The place of these sources' examples. None where keeping them does not pay, and for inputs
    that cannot be compared: a data set of the hub, a tokenizer written in Python."""
    directory, content = cache_directory(), tokenizer_text(tokenizer)
    paths = [source.path for source in sources if source.path is not None]
    if directory is None or content is None or len(paths) < len(sources):
        return None
    try:
        files = [file for path in paths for file in _files(path)]
        if sum(file.stat().st_size for file in files) < WORTH_BYTES:
            return None
        digest = hashlib.sha256(b"tokens 3")
        versions = [__version__, *map(_version, _LIBRARIES)]
        names = [[source.name, source.kind, str(source.path)] for source in sources]
        for part in (content, json.dumps([versions, names, settings], default=str)):
            digest.update(hashlib.sha256(part.encode()).digest())
        for file in files:
            digest.update(hashlib.sha256(file.name.encode()).digest())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError:
        return None  # reading the data reports the fault
    return Entry(directory / "tokens" / digest.hexdigest())


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """All of a tokenizer that its tokens depend on; None for one written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = [type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.init_kwargs]
    return str(backend.to_str()) + json.dumps([*parts, tokenizer.chat_template], default=str)


def _version(library: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)
    return ""


def make_room(directory: Path, most: int) -> None:
    """Delete the least recently used entries until the others take at most `most` bytes."""
    entries = [path for path in directory.iterdir() if path.is_dir()]
    taken = 0
    for entry in sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True):
        taken += sum(file.stat().st_size for file in entry.iterdir())
        is_new = entry.stat().st_mtime > time.time() - _ABANDONED_S
        if taken > most and not (entry.suffix == _UNFINISHED and is_new):
            shutil.rmtree(entry, ignore_errors=True)
