"""Every row of bad_inputs.py: the exit code, a message that names the file, key or worker and says
what to do, in few lines, with nothing in it that could steer a terminal."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_framework import versions
from hetero_framework.cli import main
from hetero_framework.cluster import cluster, roles
from tests.integration.bad_inputs import ROWS, Row, configuration
from tests.samples import save_llama, save_texts

MOST_LINES = 5  # three and a hint, and for JSON the marked place


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"), layers=4)


@pytest.fixture
def folder(tmp_path, model, monkeypatch):
    """A working directory with a model of its own and data; nothing but files may be left in it."""
    shutil.copytree(model, tmp_path / "model")
    save_texts(tmp_path / "good.jsonl", 6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(row: Row, folder: Path) -> int:
    file = folder / "config.json"
    text = json.dumps(configuration(row.config)) if row.text is None else row.text
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    row.prepare(folder)
    try:
        return main([row.command, "--config", str(file), *row.options])
    except SystemExit as ended:  # of the command line's own reader
        return int(str(ended.code))


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_bad_input(row, folder, capsys, monkeypatch):
    if row.elsewhere:
        monkeypatch.setattr(cluster, "local_worker_ids", lambda config: ())
        monkeypatch.setattr(roles, "local_worker_ids", lambda config, identity: ())
    code = run(row, folder)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert code == row.code, shown
    assert "Traceback" not in shown
    assert "This is a bug" not in shown
    message = shown
    if code:
        _, found, message = captured.err.rpartition("error: ")
        assert found, shown
        assert len(message.splitlines()) <= MOST_LINES, message
        assert is_harmless(message), message
        assert not (folder / "run" / "metrics.jsonl").exists()
    for text in row.says:
        assert re.search(text, message), shown


def test_ids_are_numbers_of_the_table_and_unique():
    ids = [row.id for row in ROWS]
    assert len(set(ids)) == len(ids)
    assert all(25 <= int(re.match(r"\d+", id)[0]) <= 110 for id in ids)  # type: ignore[index]


ESCAPES = ["\x1b[2J", "\x07", "\r\nhetero: error: no", "\x9b1m", "\u202e", "$(touch x)", "%s{0}"]
FIELDS = ["model.name_or_path", "data.train", "training.output_dir", "training.optim"]
FIELDS += ["coordinator.device", "adapter.target_modules", "nonsense", "training.nonsense"]


@pytest.mark.parametrize("text", ESCAPES, ids=ascii)
@pytest.mark.parametrize("place", FIELDS)
def test_no_text_of_the_file_steers_the_terminal_or_runs(place, text, folder, capsys):
    section, _, name = place.rpartition(".")
    changes = {section: {name: text}} if section else {name: text}
    code = run(Row("56", (), changes, command="check"), folder)
    captured = capsys.readouterr()
    assert is_harmless(captured.out + captured.err)
    assert captured.err.count("hetero: error: ") == (code != 0)
    assert "Traceback" not in captured.err
    assert not (folder / "x").exists()


# -- the screen, and versions ---------------------------------------------------------------------


@pytest.fixture
def valid(folder):
    (folder / "config.json").write_text(json.dumps(configuration({})))
    return str(folder / "config.json")


def test_97_no_command_shows_the_help(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("usage: hetero", "COMMAND", "train"))


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the descriptors")
@pytest.mark.parametrize("closed", ["| true", "1>&-", "1>&- 2>&-"])
def test_102_a_process_whose_screen_is_gone(closed):
    words = ["sh", "-c", f'"$0" -m hetero_framework schema {closed}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_102_closed_screens_are_no_error(closed, valid, monkeypatch):
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    try:
        assert main(["check", "--config", valid]) == 0
        assert main(["check", "--config", "none.json"]) == 2
    finally:
        for name in closed:
            getattr(sys, name).close()


@pytest.mark.parametrize("words", [["check"], ["check", "--json"], ["diagram", "--output", "-"]])
def test_102_a_screen_of_one_column(words, valid, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setenv("LINES", "1")
    assert main([*words, "--config", valid]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.9.1"), ("transformers", "4.57.0"), ("Python", "3.9.7")]
)
def test_110_an_old_package_is_named_with_the_needed_version(
    name, version, valid, capsys, monkeypatch
):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda n: version if n == name else real(n))
    if name == "Python":
        monkeypatch.setattr(platform, "python_version", lambda: version)
    assert main(["check", "--config", valid]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"too old .*: {name} {version} \(needed: >=\d", error), error
    assert len(error.splitlines()) <= MOST_LINES
    assert main(["schema"]) == 0
