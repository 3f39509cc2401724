"""News of a run's files while they are written."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hetero_framework.extras.watch import page_server as news
from hetero_framework.trainer.metrics import StepLines


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(news, "_TICK_S", 0)


def read(chunks: Iterator[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(chunks).splitlines()]


def steps(told: list[dict[str, Any]]) -> list[int]:
    return [one["line"]["step"] for one in told if one.get("of") == "metrics"]


def test_each_value_comes_when_it_has_changed(tmp_path):
    values: dict[str, Any] = {"state": "running", "total": 3}
    told = news.news_of(tmp_path, values, threading.Event())
    assert read(told) == [{"state": "running", "total": 3}]
    assert read(told) == []
    values |= {"state": "paused", "total": 3}
    assert read(told) == [{"state": "paused"}]


def test_after_the_end_come_the_last_ones(tmp_path):
    values, closing = {"state": "running"}, threading.Event()
    told = news.news_of(tmp_path, values, closing)
    next(told)
    values["state"] = "finished"
    closing.set()
    assert b"".join(told) == b'{"state": "finished"}\n'


def test_a_line_under_way_waits(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    told = news.news_of(tmp_path, {}, threading.Event())
    assert read(told) == [{"of": "metrics", "line": {"step": 1, "loss": 2.0}}]
    assert read(told) == []
    with file.open("a") as more:
        more.write('ss": 1.0}\n')
    assert read(told) == [{"of": "metrics", "line": {"step": 2, "loss": 1.0}}]


def test_a_damaged_line_is_one_line(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'}, "of": "metrics"\n\xff\n{"what": "run started"}\n')
    (line, other, last) = next(news.news_of(tmp_path, {}, threading.Event())).splitlines()
    assert [line.count(b"{"), other.count(b"{")] == [1, 1]
    assert json.loads(last) == {"of": "events", "line": {"what": "run started"}}


def test_of_a_line_without_end_nothing_is_told(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(1 << 40)  # far more than there is memory
        file.seek(0, 2)
        file.write(b'\n{"step": 2}\n')
    assert steps(read(news.news_of(tmp_path, {}, threading.Event()))) == [1, 2]


def test_a_run_that_goes_back_is_told_anew(tmp_path):
    lines = StepLines(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        lines.write({"step": step, "loss": 1.0})
    told = news.news_of(tmp_path, {}, threading.Event())
    assert steps(read(told)) == [1, 2, 3, 4, 5]
    lines.resume(3)
    for step in range(4, 10):  # more than there was
        lines.write({"step": step, "loss": 0.5})
    again = read(told)
    assert again[0] == {"anew": True}
    assert steps(again) == [*range(1, 10)]


def test_of_a_long_run_all_parts_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(news, "_MOST_BYTES", 5000)
    monkeypatch.setattr(news, "_SPREAD", 50)
    text = "".join(json.dumps({"step": k, "loss": 1.0 / k}) + "\n" for k in range(1, 3001))
    (tmp_path / "metrics.jsonl").write_text(text)
    told = news.news_of(tmp_path, {}, threading.Event())
    found = steps(read(told))
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-100:] == list(range(2901, 3001))
    assert 100 < len(found) < 400
    assert max(b - a for a, b in itertools.pairwise(found)) < 150
    assert read(told) == []
