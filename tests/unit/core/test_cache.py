"""Results cached between runs, without which everything works as well."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from hetero_framework.core.cache import cache_directory, recall, remember
from hetero_framework.core.threads import in_background
from tests.cases import raising
from tests.planting import plant
from tests.waiting import WAIT_S


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cached_answer_is_found_by_the_next_run_for_its_question(cache):
    assert recall("verdicts", "q") is None
    remember("verdicts", "q", {"passed": True})
    assert recall("verdicts", "q") == {"passed": True}
    assert recall("verdicts", "other") is None
    assert recall("digests", "q") is None
    remember("verdicts", "q", [1])
    assert recall("verdicts", "q") == [1]
    assert len(list((cache / "verdicts").iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"question": "x"}', "\udcff", "[" * 9999])
def test_damaged_file_is_no_answer_and_is_replaced(cache, text):
    remember("verdicts", "q", 1)
    (file,) = (cache / "verdicts").iterdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert recall("verdicts", "q") is None
    remember("verdicts", "q", 2)
    assert recall("verdicts", "q") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such owners and modes")
@pytest.mark.parametrize("how", ["owner", "mode", "link", "name"])
def test_answer_that_another_user_may_have_written_is_not_read(how, cache, tmp_path, logged):
    remember("verdicts", "q", {"passed": True})
    (file,) = (cache / "verdicts").iterdir()
    plant(file, how, tmp_path / "elsewhere")
    assert recall("verdicts", "q") is None
    assert len(logged) == 1
    assert str(file) in logged[0]
    remember("verdicts", "q", {"passed": False})
    assert recall("verdicts", "q") == {"passed": False}


def test_directory_that_cannot_be_written_is_no_cache(cache, monkeypatch):
    cache.write_text("a file is in the way")
    remember("verdicts", "q", 1)
    assert recall("verdicts", "q") is None
    cache.unlink()
    refused = PermissionError(13, "Read-only file system")
    monkeypatch.setattr(os, "replace", raising(refused))
    remember("verdicts", "q", 1)
    assert recall("verdicts", "q") is None
    assert list((cache / "verdicts").iterdir()) == []
    monkeypatch.setenv("HETERO_CACHE", "")
    remember("verdicts", "q", 1)
    assert recall("verdicts", "q") is None


def test_writers_at_once_leave_one_whole_answer(cache):
    answers = [list(range(n, n + 2000)) for n in range(8)]
    writers = [in_background(partial(remember, "v", "q", a), "write") for a in answers]
    assert [writer.result(WAIT_S) for writer in writers] == [None] * 8
    assert recall("v", "q") in answers
    assert len(list((cache / "v").iterdir())) == 1


@pytest.mark.parametrize(
    ("platform", "variables", "place"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/hetero_framework"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/h/.cache/hetero_framework"),
        ("darwin", {}, "/h/Library/Caches/hetero_framework"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/hetero_framework"),
        ("linux", {"HETERO_CACHE": "/c"}, "/c"),
    ],
)
def test_the_cache_directory_is_the_platforms_unless_chosen(
    platform, variables, place, monkeypatch
):
    monkeypatch.delenv("HETERO_CACHE")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/h"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(place)
