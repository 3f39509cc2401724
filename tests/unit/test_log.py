"""Log lines that cannot harm a terminal, levels, and events that survive crashes."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_framework import log
from tests.samples import read_jsonl as read

LOGGER = logging.getLogger("hetero_framework.test")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x9b2J", r"\x1b]0;title\x07\x9b2J"),
        ("one\ntwo\r\x00\x7f", r"one\ntwo\r\x00\x7f"),
        ("left\u202eright\u2066\u200f", r"left\u202eright\u2066\u200f"),
        ("half \ud800 of a pair\u2028", r"half \ud800 of a pair\u2028"),
        ("größer 模型 🙂", "größer 模型 🙂"),
    ],
)
def test_one_line_escapes_control_characters(text, shown):
    assert log.one_line(text) == shown


@pytest.mark.parametrize("char", ["A", "ü", "🙂", "\x1b", "\u202e"])
def test_one_line_of_long_text_is_cut(char):
    line = log.one_line(char * 60_000)
    assert log.MAX_LINE_BYTES - 8 < len(line.encode()) <= log.MAX_LINE_BYTES
    assert line.endswith(" ...")
    whole = "x" * log.MAX_LINE_BYTES
    assert log.one_line(whole) == whole


def test_printable_keeps_lines_and_tabs():
    assert log.printable("ü\t\n\r\x00") == "ü\t\n\\r\\x00"


def test_peer_with_many_lines_is_limited_and_others_are_not(logged, monkeypatch):
    now = 100.0
    monkeypatch.setattr("hetero_framework.log.time.monotonic", lambda: now)
    for number in range(25):
        LOGGER.info("line %d", number, extra=log.said_by("host a"))
    LOGGER.info("mine")
    LOGGER.info("hers", extra=log.said_by("host b"))
    assert logged == [*(f"line {n}" for n in range(10)), "mine", "hers"]
    now += 1.0
    LOGGER.info("later", extra=log.said_by("host a"))
    assert logged[-2:] == ["host a: ... 15 more suppressed", "later"]


def test_suppressed_lines_are_counted_at_the_end():
    lines: list[str] = []
    with log.log_to("INFO", log.Lines(lambda level, text: lines.append(text))):
        for _ in range(12):
            LOGGER.info("again", extra=log.said_by("host a"))
    assert lines[-1] == "host a: ... 2 more suppressed"


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("DEBUG", ["debug: a", "b", "warning: c", "error: d"]),
        ("INFO", ["b", "warning: c", "error: d"]),
        ("WARNING", ["warning: c", "error: d"]),
        ("ERROR", ["error: d"]),
    ],
)
def test_levels_hide_lower_lines_but_no_event(tmp_path, level, shown, capsys):
    path = tmp_path / log.EVENTS_FILE
    with log.log_to(level, log.Lines(log.to_stderr), log.Events(path, "coordinator")):
        LOGGER.debug("a")
        LOGGER.info("b", extra=log.event("began"))
        LOGGER.warning("c")
        LOGGER.error("d")
    LOGGER.error("not ours any more")
    assert capsys.readouterr().err.splitlines()[: len(shown)] == shown
    assert [line["what"] for line in read(path)] == ["began"]


def test_inner_handlers_replace_outer_ones_until_the_block_ends(logged):
    inner: list[str] = []
    with log.log_to("DEBUG", log.Lines(lambda level, text: inner.append(text))):
        LOGGER.debug("in")
    LOGGER.debug("hidden")
    LOGGER.info("out")
    assert (inner, logged) == (["in"], ["out"])


def broken_pipe(level: str, text: str) -> None:
    raise BrokenPipeError


def full_disk(level: str, text: str) -> None:
    raise OSError(28, "No space left on device")


def closed_stream(level: str, text: str) -> None:
    stream = io.StringIO()
    stream.close()
    stream.write(text)


@pytest.mark.parametrize("write", [broken_pipe, full_disk, closed_stream])
def test_line_that_cannot_be_written_is_dropped(write):
    lines: list[str] = []

    def sometimes(level: str, text: str) -> None:
        if text == "lost":
            write(level, text)
        lines.append(text)

    with log.log_to("INFO", log.Lines(sometimes)):
        LOGGER.info("lost")
        LOGGER.info("kept")
    assert lines == ["kept"]


def test_traceback_is_escaped_line_by_line(logged):
    try:
        raise ValueError("a\x1b[2J\nb")
    except ValueError:
        LOGGER.exception("it failed")
    assert logged[:2] == ["it failed", "Traceback (most recent call last):"]
    assert logged[-2:] == [r"ValueError: a\x1b[2J", "b"]


def test_event_holds_step_process_and_plain_fields(tmp_path, logged):
    path = tmp_path / "logs" / log.EVENTS_FILE
    log.set_step(7)
    try:
        with log.log_to("INFO", log.Events(path, "worker 1")):
            fields = {"loss": float("nan"), "seconds": 0.5, "path": Path("a"), "n": 3, "none": None}
            LOGGER.info("lost \x1b it", extra=log.event("worker lost", "connect again", **fields))
            LOGGER.info("", extra=log.event("evaluation", step=4))
    finally:
        log.set_step(None)
    first, second = read(path)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "process": "worker 1",
        "step": 7,
        "what": "worker lost",
        "action": "connect again",
        "loss": None,
        "seconds": 0.5,
        "path": "a",
        "n": 3,
        "none": None,
        "text": r"lost \x1b it",
    }
    assert second["step"] == 4
    assert "text" not in second


def test_events_wait_until_the_file_is_open(tmp_path):
    path = tmp_path / log.EVENTS_FILE
    events = log.Events(path, "coordinator")
    with log.log_to("INFO", events):
        LOGGER.info("", extra=log.event("one"))
        assert not path.exists()
        events.open()
        LOGGER.info("", extra=log.event("two"))
        assert [line["what"] for line in read(path)] == ["one", "two"]


def test_event_after_a_torn_line_begins_a_new_one(tmp_path):
    path = tmp_path / log.EVENTS_FILE
    path.write_text('{"what": "compl', encoding="utf-8")
    with log.log_to("INFO", log.Events(path, "coordinator")):
        LOGGER.info("", extra=log.event("next"))
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1])["what"] == "next"


def test_lines_that_cannot_be_written_are_told_once(tmp_path):
    path, text = tmp_path / log.EVENTS_FILE, tmp_path / "run.log"
    path.mkdir()
    events, said = log.Events(path, "coordinator"), list[str]()
    screen = log.Lines(lambda level, line: said.append(line))
    with log.log_to("INFO", events, log.FileLines(text), screen):
        events.open()
        for number in range(3):
            LOGGER.info("line %d", number, extra=log.event("lost"))
        path.rmdir()
        LOGGER.info("line 3", extra=log.event("kept"))
    assert [line["what"] for line in read(path)] == ["kept"]
    refused = said[0]
    assert refused.startswith(f"cannot write {path}: ")
    again = f"{path} is written again; 3 lines are lost"
    assert said == [refused, "line 0", "line 1", "line 2", again, "line 3"]
    written = text.read_text(encoding="utf-8")
    assert written.count(refused) == written.count(again) == 1


def test_two_processes_append_whole_lines(tmp_path):
    path = tmp_path / log.EVENTS_FILE
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hetero_framework.log import append_line\n"
        "for n in range(300):\n"
        "    append_line(Path(sys.argv[1]), sys.argv[2] * 900)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "ab"]
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == ["a" * 900] * 300 + ["b" * 900] * 300


def test_a_handler_of_the_application_gets_the_lines_of_a_run():
    heard: list[str] = []
    own = log.Lines(lambda level, text: heard.append(text))
    package = logging.getLogger("hetero_framework")
    package.addHandler(own)
    try:
        with log.log_to("INFO", log.Lines(lambda level, text: None)):
            package.info("inside")
    finally:
        package.removeHandler(own)
    assert heard == ["inside"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_work_is_shown_on_a_terminal_only_and_gone_at_the_end(stream, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    with log.at_work("tokenising") as show:
        show("1,000 examples")
        with log.at_work("loading"), log.log_to("INFO", log.Lines(log.to_stderr)):
            LOGGER.info("a line")
            assert not stream.isatty() or stream.getvalue().endswith("\rloading ...")
    said = stream.getvalue()
    assert ("tokenising: 1,000 examples" in said) == ("loading ..." in said) == stream.isatty()
    assert "\ra line\n\r" in said or said == "a line\n"
    assert said.rpartition("\r")[2] in ("", "a line\n")


def test_a_large_import_is_shown_on_a_terminal_until_it_is_done(tmp_path, monkeypatch):
    (tmp_path / "peft.py").write_text(
        "import gc, sys\nseen = sys.stderr.getvalue(), gc.isenabled()"
    )
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert log.SlowImports().find_spec("json", None) is None
    spec = log.SlowImports().find_spec("peft", [str(tmp_path)])
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    assert module.seen[0].endswith("\rloading torch and transformers ...")
    assert module.seen[1] is False
    assert terminal.getvalue().endswith("\r")
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
