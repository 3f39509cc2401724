"""Small results cached between runs, in the user's cache directory or in a run's own.

Nothing depends on the cache: where the directory cannot be written, or a file is damaged or could
have been written by another user, results are computed again. Several processes may write at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_framework.core.files import write_file
from hetero_framework.file_trust import untrusted_reason

_log = logging.getLogger(__name__)


def cache_directory() -> Path | None:
    """HETERO_CACHE, else the platform's place for caches; None where HETERO_CACHE is empty."""
    chosen = os.environ.get("HETERO_CACHE")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home directory
        return None
    return base / "hetero_framework"


def recall(kind: str, question: str, directory: Path | None = None) -> Any:
    """The answer (JSON data) that `remember` was given; None where there is none."""
    if (place := _place(kind, question, directory)) is None:
        return None
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        if (wrong := untrusted_reason(place)) is not None:
            _log.warning("%s %s and is not read; %s", place, wrong.problem, wrong.mend)
            return None
        kept = json.loads(place.read_text("utf-8"))
        if kept["question"] == question:
            return kept["answer"]
    return None


def remember(kind: str, question: str, answer: Any, directory: Path | None = None) -> None:
    """Keep an answer where that is possible, in `directory` or in the user's cache."""
    if (place := _place(kind, question, directory)) is not None:
        with suppress(OSError):
            write_file(place, json.dumps({"question": question, "answer": answer}).encode())


def _place(kind: str, question: str, directory: Path | None) -> Path | None:
    directory = directory or cache_directory()
    digest = hashlib.sha256(question.encode()).hexdigest()
    return None if directory is None else directory / kind / f"{digest}.json"
