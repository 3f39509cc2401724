"""Shells complete `hetero` by what `hetero completions` prints: typed into real shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_framework.cli import main

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config"],
}
START = {
    "bash": "source completions.bash",
    "zsh": "autoload -Uz compinit; compinit -u -d ./dump; source completions.zsh",
}


PROGRAM = f"""#!/bin/sh
[ -z "$_ARGCOMPLETE" ] || exec {sys.executable} -m hetero_framework
printf '<%s>' "$@"
echo '|end'
"""
"""Stands for `hetero`: answers a shell, else prints the words that it is called with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the scripts for the shells, the program, and files to complete."""
    place = tmp_path_factory.mktemp("shell")
    (place / "my config.json").write_text("{}")
    (place / "runs").mkdir()
    (place / "runs.txt").write_text("")
    (place / "hetero").write_text(PROGRAM)
    (place / "hetero").chmod(0o755)
    return place


@pytest.fixture(autouse=True)
def printed(folder, capsys):
    for shell in SHELLS:
        assert main(["completions", shell]) == 0
        (folder / f"completions.{shell}").write_text(capsys.readouterr().out, encoding="utf-8")


def lacks(shell: str) -> bool:
    """Whether the shell is not here; a bash without compopt offers files for everything."""
    if os.name == "nt" or shutil.which(shell) is None:
        return True
    return shell == "bash" and subprocess.run(["bash", "-c", "type -t compopt"]).returncode != 0


def typed(shell: str, line: str, folder: Path) -> list[str]:
    """The words that `hetero` is called with where this line is typed, \t and all."""
    import pty  # not on Windows

    screen, inside = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "", "HISTFILE": "", "INPUTRC": os.devnull}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    ends = {"stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen(
        SHELLS[shell], cwd=folder, env=environment, start_new_session=True, **ends
    ):
        os.close(inside)
        os.write(screen, b"%s\n" % START[shell].encode())
        os.write(screen, b"echo rea''dy\n")
        _until(screen, b"\nready\r\n")
        os.write(screen, line.encode() + b"\n")
        said = _until(screen, b">|end").decode()
        os.close(screen)
    return re.findall("<(.*?)>", re.findall(r"(<[^\n]*>)\|end", said)[-1])


def _until(screen: int, end: bytes) -> bytes:
    said = b""
    while end not in said:
        said += os.read(screen, 65536)
    return said


def plain(words: list[str]) -> list[str]:
    """Without the equals signs that zsh writes, and the slash that it takes away at the end."""
    parts = [word.split("=") if word.startswith("--") else [word.rstrip("/")] for word in words]
    return [one for part in parts for one in part]


LINES = {
    "tra\t": ["train"],
    "train --rol\tcoor\t": ["train", "--role", "coordinator"],
    "train --conf\tmy\t": ["train", "--config", "my config.json"],
    "train --config=my\t": ["train", "--config=my config.json"],
    "train --keys ru\t": ["train", "--keys", "runs/"],
    "train --set training.max_st\t7": ["train", "--set", "training.max_steps=7"],
    "keys rev\t": ["keys", "revoke"],
    "init --objective kt\t": ["init", "--objective", "kto"],
}
NUMBER = {"check --show my\t": ["check", "--show", "my"]}
"""No file is offered for a number."""
VALUES = {
    f"{words[:-1]}\t{words[-1]}": words.split()
    for words in (
        "train --set training.lr_scheduler_type=c",
        "train --set=training.lr_scheduler_type=c",
        "plan --device local=c",
        "init --worker box:-",
        "init --worker box:1:c",
    )
}
"""No option is typed into a value."""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (3 <= k < len(LINES)), id=case[0])
        for k, case in enumerate((LINES | NUMBER | VALUES).items())
    ],
)
def test_a_typed_line_is_completed(shell, line, words, folder):
    if lacks(shell):
        pytest.skip(f"without {shell}, or with the one of 2007 that macOS has")
    assert plain(typed(shell, f"hetero {line}", folder)) == plain(words)


def asked(line: str, folder: Path) -> list[str]:
    """The candidates of fish for a line."""
    command = [*SHELLS["fish"], "-c", f"source completions.fish; complete -C '{line}'"]
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [found.partition("\t")[0] for found in done.stdout.splitlines()]


@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=lambda x: str(x))
def test_fish_has_the_same_candidates(line, words, folder):
    if lacks("fish"):
        pytest.skip("without fish")
    typed_so_far = ""
    for part, word in zip(line.split("\t")[:-1], words[-line.count("\t") :], strict=True):
        typed_so_far = f"{typed_so_far} {part}".strip()
        assert asked(f"hetero {typed_so_far}", folder) == [re.sub(r"=\d$", "=", word)]
        typed_so_far = typed_so_far.rpartition(" ")[0] + f" {word}"
