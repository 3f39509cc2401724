"""The tensors that are read from a model's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.models.files import weights


def note_reads(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], object]) -> None:
    """Have `note` called with the name of each tensor, in the thread that reads it."""
    opened = weights._open

    class Noted:
        def __init__(self, path: Path) -> None:
            self._file = opened(path)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_slice(self, name: str) -> Any:
            note(name)
            return self._file.get_slice(name)

    monkeypatch.setattr(weights, "_open", Noted)
