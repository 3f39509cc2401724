"""`hetero completions`: prints the shell code by which argcomplete completes `hetero`.

The shell then asks `hetero` itself, whose parser and options argcomplete reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from hetero_framework import registry
from hetero_framework.commands.options import option
from hetero_framework.config import effects
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero completions bash > ~/.local/share/bash-completion/completions/hetero
    hetero completions zsh > ~/.zfunc/_hetero
    hetero completions fish > ~/.config/fish/completions/hetero.fish
    """
OPTIONS = (option("shell", choices=("bash", "zsh", "fish"), help="the shell that is to complete"),)
_FILES = ("FILE", "PATH", "RUN")
_LISTS = ("workers", "shard_plan")  # names of their settings contain an index


def run(arguments: argparse.Namespace) -> None:
    code = _argcomplete().shellcode
    print(code(["hetero"], shell=arguments.shell, complete_arguments=["-o", "nospace"]))


def answer(parser: argparse.ArgumentParser) -> None:
    """Write the candidates for the line that a shell completes, and end the process."""
    _argcomplete().autocomplete(parser, default_completer=_values)


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ImportError as error:
        hint = 'pip install "hetero-framework[completions]"'
        raise UserError("shells complete by argcomplete, which is not here", hint=hint) from error
    return argcomplete


def _values(*, action: argparse.Action, prefix: str, **_: Any) -> Iterable[str]:
    """Candidates for the value of an option or argument without choices."""
    completers = _argcomplete().completers
    if "--set" in action.option_strings:
        return [f"{name}=" for name in effects.effects() if name.partition(".")[0] not in _LISTS]
    if "--objective" in action.option_strings:
        return registry.names("objectives")
    if action.metavar in _FILES or "--model" in action.option_strings:
        return list(completers.FilesCompleter()(prefix))
    if action.metavar == "DIR":
        return list(completers.DirectoriesCompleter()(prefix))
    return ()
