"""`hetero completions`: a script for a shell, made from the options of all commands.

The scripts hold all words, so that a shell starts no Python when it completes.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import Any

from hetero_framework import registry
from hetero_framework.commands.options import flag, option
from hetero_framework.config import effects
from hetero_framework.errors import ConfigError

EXAMPLES = """
    hetero completions bash > ~/.local/share/bash-completion/completions/hetero
    hetero completions zsh > ~/.zfunc/_hetero
    hetero completions fish > ~/.config/fish/completions/hetero.fish
    """
_FILES = ("FILE", "PATH", "RUN")
_LISTS = ("workers", "shard_plan")  # their settings have an index in between


def run(arguments: argparse.Namespace) -> None:
    print(_SHELLS[arguments.shell]())


@dataclass(frozen=True)
class _Option:
    """An option, or an argument without `flags`. Its value is one of `words`, or of `kind` "files",
    "folders" or "settings"; it has none where `kind` is ""."""

    flags: tuple[str, ...]
    help: str
    name: str
    kind: str
    words: tuple[str, ...]
    repeats: bool


def _options(command: str) -> Iterator[_Option]:
    common = (
        flag("--debug", "show tracebacks"),
        option("-h", "--help", action="help", help="show the options"),
    )
    given: tuple[Any, ...] = ()
    with suppress(ConfigError):  # it needs an extra that is not here
        given = tuple(registry.command(command).OPTIONS)
    for names, settings in (*given, *common):
        if settings.get("help") != argparse.SUPPRESS:
            yield _option(names, settings)


def _option(names: tuple[str, ...], settings: dict[str, Any]) -> _Option:
    metavar, action = settings.get("metavar", names[-1]), settings.get("action", "store")
    words, kind = tuple(map(str, settings.get("choices", ()))), "other"
    if action not in ("store", "append"):
        kind = ""
    elif "--set" in names:
        kind = "settings"
    elif "--objective" in names:
        words = tuple(registry.names("objectives"))
    elif metavar in _FILES or "--model" in names:
        kind = "files"
    elif metavar == "DIR":
        kind = "folders"
    repeats = action.startswith("append") or settings.get("nargs") in ("*", "+")
    flags = names if names[0].startswith("-") else ()
    return _Option(flags, settings.get("help", ""), metavar, kind, words, repeats)


def _commands() -> dict[str, tuple[str, list[_Option]]]:
    """Summary and options of each command."""
    entries = registry.entries("commands")
    return {name: (entries[name].text, list(_options(name))) for name in entries}


def _settings() -> list[str]:
    return [f"{name}=" for name in effects.effects() if name.partition(".")[0] not in _LISTS]


def _bash() -> str:
    cases = []
    for name, (_, options) in _commands().items():
        flags = " ".join(one for o in options for one in o.flags)
        values = [
            f"{'|'.join(o.flags)}) {_bash_value(o)} ;;" for o in options if o.flags and o.kind
        ]
        free = next((_bash_value(o) for o in options if not o.flags and o.kind), "")
        free = f"-*) words={quote(flags)} ;; *) {free or f'words={quote(flags)}'} ;;"
        other = f"*) case $current in {free} esac ;;"
        cases.append(f"{name}) case $previous in {' '.join(values)} {other} esac ;;")
    return _BASH % (
        quote(" ".join(_commands())),
        "\n    ".join(cases),
        quote(" ".join(_settings())),
    )


def _bash_value(o: _Option) -> str:
    return f"words={quote(' '.join(o.words))}" if o.words else f"kind={o.kind}"


_BASH = textwrap.dedent(r"""
    _hetero() {
      local current=${COMP_WORDS[COMP_CWORD]} at=$COMP_CWORD kind= words=
      # Readline takes a word apart at = and :, of which the first part is an option or a value.
      while [[ ${COMP_WORDS[at]} == [=:]* || ${COMP_WORDS[at-1]} == [=:]* ]]; do ((at--)); done
      local previous=${COMP_WORDS[at-1]}
      if ((at < COMP_CWORD)); then
        previous=${COMP_WORDS[at]}
        if [[ $current == = ]]; then current=; fi
        if [[ $previous != -* ]] || ((COMP_CWORD > at + 2)); then return; fi
      fi
      if ((COMP_CWORD == 1)); then words=%s" --help --version"
      else case ${COMP_WORDS[1]} in
        %s
      esac; fi
      if [[ $kind == files ]]; then return; fi  # by readline
      compopt +o default 2>/dev/null
      if [[ $kind == folders ]]; then compopt -o dirnames 2>/dev/null; return; fi
      if [[ $kind == settings ]]; then words=%s; compopt -o nospace 2>/dev/null; fi
      COMPREPLY=($(compgen -W "$words" -- "$current"))
    }
    complete -o default -F _hetero hetero""").strip()


def _zsh() -> str:
    actions = {"files": "_files", "folders": "_files -/", "settings": "_hetero_settings"}
    cases = []
    for name, (_, options) in _commands().items():
        specs = []
        for o in options:
            action = f"({' '.join(o.words)})" if o.words else actions.get(o.kind, " ")
            value = f":{_escaped(o.name)}:{action}" if o.kind else ""
            help = f"[{_escaped(o.help)}]"
            star = "*" if o.repeats else ""
            for one in o.flags:
                equals = "=" if o.kind and one.startswith("--") else ""
                specs.append(f"{star}{one}{equals}{help}{value}")
            if not o.flags:
                specs.append(f"{star}{value}")
        cases.append(f"{name}) _arguments {' '.join(map(quote, specs))} ;;")
    named = (f"{name}:{_escaped(summary)}" for name, (summary, _) in _commands().items())
    return _ZSH % (" ".join(_settings()), " ".join(map(quote, named)), "\n    ".join(cases))


def _escaped(text: str) -> str:
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    return text


_ZSH = textwrap.dedent(r"""
    #compdef hetero
    _hetero_settings() { compadd -S '' -- %s }
    _hetero() {
      if ((CURRENT == 2)); then
        local -a commands=(%s)
        _describe command commands
        return
      fi
      shift words
      ((CURRENT--))
      case $words[1] in
        %s
      esac
    }
    if [[ $funcstack[1] == _hetero ]]; then _hetero "$@"
    else compdef _hetero hetero; fi""").strip()


def _fish() -> str:
    lines = [_FISH % " ".join(_settings())]
    actions = {"files": "-r -F", "folders": "-x -a '(__fish_complete_directories)'"}
    actions |= {"settings": "-x -a '$__hetero_settings'", "other": "-x"}
    for name, (summary, options) in _commands().items():
        lines.append(f"complete -c hetero -n __hetero_first -a {name} -d {quote(summary)}")
        for o in options:
            value = f"-x -a {quote(' '.join(o.words))}" if o.words else actions.get(o.kind, "")
            if not o.flags:
                value = value.replace("-r ", "").replace("-x", "")
            flags = [f"-l {one[2:]}" if one[:2] == "--" else f"-s {one[1:]}" for one in o.flags]
            told = f"-d {quote(o.help)}" if o.flags and o.help else ""
            condition = f"-n '__hetero_is {name}'"
            if flags or value.strip():
                lines.append(" ".join(["complete -c hetero", condition, *flags, value, told]))
    return "\n".join(lines)


_FISH = textwrap.dedent("""
    function __hetero_first; test (count (commandline -opc)) -eq 1; end
    function __hetero_is; set -l words (commandline -opc); test "$words[2]" = $argv[1]; end
    set -g __hetero_settings %s
    complete -c hetero -f""").strip()
_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
OPTIONS = (option("shell", choices=tuple(_SHELLS), help="the shell that is to complete"),)
