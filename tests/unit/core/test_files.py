"""Renames that wait for Windows, and directories that are replaced as a whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hetero_framework.core import files
from hetero_framework.core.files import put_back, rename, replace_directory


def windows_error(code: int) -> PermissionError:
    error = PermissionError(13, "The process cannot access the file")
    error.winerror = code  # type: ignore[attr-defined]
    return error


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.fixture
def slept(monkeypatch):
    """Time that passes only while something waits."""
    waits: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waits.append)
    monkeypatch.setattr(files.time, "monotonic", lambda: sum(waits))
    return waits


@pytest.mark.parametrize("code", [5, 32, 33])
def test_rename_waits_for_a_file_that_windows_holds_open(code, slept, tmp_path, monkeypatch):
    answers = [windows_error(code), windows_error(code)]
    replace = os.replace

    def busy(source: Path, target: Path) -> None:
        if answers:
            raise answers.pop()
        replace(source, target)

    monkeypatch.setattr(os, "replace", busy)
    rename(folder(tmp_path / "a", "1"), tmp_path / "b")
    assert (tmp_path / "b" / "file").read_text() == "1"
    assert len(slept) == 2


def test_rename_gives_up_after_seconds_and_at_once_for_other_refusals(slept, tmp_path, monkeypatch):
    refusals: list[Exception] = [windows_error(32)]

    def refuse(source: Path, target: Path) -> None:
        raise refusals[-1]

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        rename(tmp_path / "a", tmp_path / "b")
    assert 4 < sum(slept) < 6
    waits = len(slept)
    for other in (PermissionError(13, "Permission denied"), windows_error(1314)):
        refusals.append(other)
        with pytest.raises(PermissionError):
            rename(tmp_path / "a", tmp_path / "b")
    assert len(slept) == waits


def test_replaced_directory_is_the_new_one_and_the_old_is_gone(tmp_path):
    target = folder(tmp_path / "x", "old")
    replace_directory(folder(tmp_path / "new", "new"), target, tmp_path / "x.old")
    assert (target / "file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges names")
def test_replacing_on_linux_leaves_no_moment_without_a_directory(tmp_path, monkeypatch):
    target = folder(tmp_path / "x", "old")
    replace = os.replace

    def watched(source: Path, aim: Path) -> None:
        replace(source, aim)
        assert (target / "file").read_text() == "new"

    monkeypatch.setattr(os, "replace", watched)
    replace_directory(folder(tmp_path / "new", "new"), target, tmp_path / "x.old")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges names")
def test_a_failed_exchange_of_directories_changes_nothing(tmp_path):
    target = folder(tmp_path / "x", "old")
    with pytest.raises(OSError, match="No such file"):
        replace_directory(tmp_path / "new", target, tmp_path / "x.old")
    assert (target / "file").read_text() == "old"


def test_replacement_that_fails_puts_the_old_back_and_keeps_the_new(tmp_path, monkeypatch):
    target, new = folder(tmp_path / "x", "old"), folder(tmp_path / "new", "new")
    replace = os.replace

    def refuse_new(source: Path, aim: Path) -> None:
        if Path(source) == new:
            raise OSError(5, "Input/output error")
        replace(source, aim)

    monkeypatch.setattr(os, "replace", refuse_new)
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)  # as outside Linux
    with pytest.raises(OSError, match="Input/output"):
        replace_directory(new, target, tmp_path / "x.old")
    assert (target / "file").read_text() == "old"
    assert (new / "file").read_text() == "new"


def test_put_back_renames_only_where_the_place_is_empty(tmp_path):
    old = folder(tmp_path / "x.old", "old")
    assert put_back(tmp_path / "x", old)
    folder(old, "left over")
    assert not put_back(tmp_path / "x", old)
    assert (tmp_path / "x" / "file").read_text() == "old"
