"""What commands write: a new file, or with --overwrite in place of another one; never what they
read, and never through a link. The parser says what there is, so that no option is forgotten."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero_framework import registry
from hetero_framework.cli import build_parser, main
from hetero_framework.commands.options import OutputFile, OutputFolder
from tests.installed import needs

FILES = {
    ("init", "--output"): ["--non-interactive", "--layers", "4"],
    ("convert", "--output"): ["in/recipe.yml"],
    ("diagram", "--output"): ["--format", "mmd", "--config", "in/hetero_config.json"],
    ("plan", "--save-profile"): ["--dry-run", "--config", "in/hetero_config.json"],
    ("plot", "--output"): ["in/metrics.jsonl"],
    ("generate", "--output"): ["--prompts", "in/prompts.jsonl"],
    ("verify", "--output"): ["--all"],
}
"""Options that name a file to write, each with what else the command needs."""
THERE = registry.names("commands")  # an extra may be taken away
FILES = {key: words for key, words in FILES.items() if key[0] in THERE}
FOLDERS = {  # each command looks at them itself; see its own tests
    *(
        ("demo", "--output"),
        ("launch", "--output"),
        ("keys", "--output"),
        ("export", "--output"),
        ("merge", "--output"),
    )
}
FOLDERS = {key for key in FOLDERS if key[0] in THERE}
CHANGED = {  # a run's own directories, and files that are there to be changed
    *(("train", "--output-dir"), ("train", "--checkpoint_dir"), ("join", "--config"))
}
READ = {
    *("--config", "--keys", "--import", "--result", "--prompts", "--profile", "--evaluate"),
    *("--checkpoint", "--gguf", "--llama-cpp", "--adapter", "--data", "--directory", "--hetero"),
    "--image",
    *("file", "runs", "place", "address"),
}
PLACES = ("FILE", "DIR", "PATH", "RUN")


def actions() -> Iterator[tuple[str, str, argparse.Action]]:
    subparsers = next(a for a in build_parser()._actions if a.dest == "command")
    assert isinstance(subparsers.choices, dict)
    assert list(subparsers.choices) == registry.names("commands")
    for command, parser in subparsers.choices.items():
        for action in parser._actions:
            yield command, (action.option_strings or [action.dest])[-1], action


def test_every_option_that_names_a_place_is_known_to_be_read_or_written():
    of_type = {
        kind: {(command, name) for command, name, action in actions() if action.type is kind}
        for kind in (OutputFile, OutputFolder)
    }
    assert of_type == {OutputFile: set(FILES), OutputFolder: FOLDERS}
    places = {(c, n) for c, n, action in actions() if action.metavar in PLACES}
    others = places - set(FILES) - FOLDERS - CHANGED
    assert {name for _, name in others} <= READ, "read, or written?"
    overwriting = {command for command, name, _ in actions() if name == "--force"}
    assert overwriting == {command for command, _ in {*FILES, *FOLDERS}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name in ("recipe.yml", "prompts.jsonl", "profile.json", "metrics.jsonl"):
        (tmp_path / "in" / name).write_text("precious")
    assert main(["init", "--non-interactive", "--layers", "4", "--output", "first.json"]) == 0
    (tmp_path / "first.json").rename(tmp_path / "in" / "hetero_config.json")
    (tmp_path / "precious").write_text("precious")
    return tmp_path


def plain(target: Path, precious: Path) -> None:
    target.write_bytes(precious.read_bytes())


TAKEN: dict[str, Callable[[Path, Path], None]] = {
    "a file": plain,
    "a hard link": lambda target, precious: os.link(precious, target),
    "a link": lambda target, precious: target.symlink_to(precious),
    "a dangling link": lambda target, precious: target.symlink_to("nowhere"),
    "a directory": lambda target, precious: target.mkdir(),
}


def names_of(target: Path) -> tuple[int, ...]:
    entry = target.lstat()
    return entry.st_ino, entry.st_mode, entry.st_size, entry.st_mtime_ns


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize(("command", "option"), FILES)
def test_what_is_there_stays(command, option, taken, folder, capsys):
    target = folder / "out.svg"
    TAKEN[taken](target, folder / "precious")
    before = names_of(target)
    assert main([command, *FILES[command, option], option, str(target)]) == 2
    said = capsys.readouterr().err
    assert ("is not a file" if taken == "a directory" else "exists already") in said
    assert names_of(target) == before
    assert (folder / "precious").read_text() == "precious"
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize(
    ("command", "option"), [key for key in FILES if key[0] not in ("init", "verify")]
)
def test_a_command_never_overwrites_what_it_reads(command, option, folder, capsys):
    words = FILES[command, option]
    file = folder / next(word for word in words if word.startswith("in"))
    before = file.read_bytes()
    other = folder / "another name of it"
    os.link(file, other)
    for name in (file, other):
        assert main([command, *words, option, str(name), "--overwrite"]) == 2
        assert "is read by this command" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("taken", ["a file", "a hard link", "a link", "a dangling link"])
@pytest.mark.parametrize("command", ["init", pytest.param("diagram", marks=needs("observe"))])
def test_overwrite_replaces_a_name_and_nothing_behind_it(command, taken, folder):
    target, words = folder / "out", FILES[command, "--output"]
    TAKEN[taken](target, folder / "precious")
    assert main([command, *words, "--output", str(target), "--overwrite"]) == 0
    assert "coordinator" in target.read_text().lower()
    assert not target.is_symlink()
    assert (folder / "precious").read_text() == "precious"
    assert not (folder / "nowhere").exists()


@needs("observe")
def test_default_names_are_no_exception(folder):
    config = ["--config", "in/hetero_config.json"]
    for words in (["diagram", "--format", "mmd", *config], ["init", *FILES["init", "--output"]]):
        assert main(words) == 0
        assert main(words) == 2
        assert main([*words, "--overwrite"]) == 0


@needs("talking")
def test_a_machine_without_a_role_generates_alone(folder, capsys):
    raw = json.loads((folder / "in" / "hetero_config.json").read_text())
    raw["coordinator"] |= {"ip": "203.0.113.9", "hostname": "elsewhere"}
    raw["model"] = {"name_or_path": "org/model"}
    (folder / "in" / "hetero_config.json").write_text(json.dumps(raw))
    words = ["generate", "--config", "in/hetero_config.json", "--prompts", "p", "--output", "o"]
    for more, said in (([], "names this machine"), (["--local"], "no adapter or model")):
        assert main([*words, *more]) != 0
        assert said in capsys.readouterr().err
