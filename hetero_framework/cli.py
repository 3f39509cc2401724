"""The `hetero` command: its parser, and `main`, which turns exceptions into exit codes.

registry.py lists the subcommands.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from hetero_framework import errors, registry, versions
from hetero_framework._version import __version__
from hetero_framework.commands.options import check_outputs, flag, import_files, keep_life_line
from hetero_framework.errors import GroupFinished, HeteroError, StoppedEarly
from hetero_framework.log import Lines, log_to, one_line, to_stderr
from hetero_framework.trainer.signals import STOPPED, StopRequest, hearing

_PATHS = (
    *("config", "keys", "output", "output_dir", "adapter", "checkpoint", "place"),
    *("profile", "save_profile", "evaluate", "picture", "file", "result", "prompts"),
)
INTERRUPTED = 130  # the exit code of a shell for SIGINT
_MAX_MESSAGE_LINES = 40
_ANY_VERSION = ("doctor", "schema", "init")  # they run with missing or old libraries


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    with hearing(words) as stop:
        return _main(words, stop)
    return STOPPED


def _main(words: Sequence[str], stop: StopRequest | None) -> int:
    _prepare_screens()
    given = registry.names("commands")
    is_asked = "_ARGCOMPLETE" in os.environ and "completions" in given  # by a shell
    if is_asked:
        words = os.environ["COMP_LINE"].split()
    try:
        parser = build_parser(only=next((word for word in words if word in given), ""))
        if is_asked:
            registry.command("completions").answer(parser)
    except HeteroError as error:  # the command's extra is absent
        _say_error(str(error))
        return error.exit_code
    arguments = _parsed(parser, words, given)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        return _run(arguments)
    except BrokenPipeError:  # `hetero ... | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        if arguments.debug:
            traceback.print_exc()
        if stop is not None:
            raise
        _say_error("interrupted")
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        known = errors.as_hetero_error(error)
        if known is not None:
            kind = _KINDS.get(type(known), "error")
            _say_error(str(known).removeprefix("stopped "), kind=kind)
            return known.exit_code
        _say_error(
            f"{type(error).__name__}: {error}\n  This is a bug; run with --debug for details."
        )
        return HeteroError.exit_code


def _parsed(
    parser: argparse.ArgumentParser, words: Sequence[str], given: Sequence[str]
) -> argparse.Namespace:
    """The arguments. Ends the process with the usage and a hint where they are wrong."""
    if words and not words[0].startswith("-") and words[0] not in given:
        near = _did_you_mean(words[0], given)
        parser.error(f"there is no command {words[0]!r}{near or '; hetero --help lists them'}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:  # print the usage of this command alone
        command = getattr(arguments, "parser", parser)
        shown = [action for action in command._actions if action.help is not argparse.SUPPRESS]
        options = [name for action in shown for name in action.option_strings]
        first = unknown[0].partition("=")[0]
        if first in options:  # it stands before the command
            command.error(f"{first} goes after the command: {command.prog} {first}")
        near = _did_you_mean(first, options)
        if "--config" in options and not first.startswith("-"):
            near = f"; did you mean --config {first}?"
        command.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    for name in _PATHS:  # a shell does not replace ~ in --output=~/x
        if isinstance(value := getattr(arguments, name, None), str):
            setattr(arguments, name, type(value)(os.path.expanduser(value)))
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command not in _ANY_VERSION:
        versions.check()
    with log_to("INFO", Lines(to_stderr)):
        keep_life_line(arguments)
        check_outputs(arguments)
        import_files(arguments)
        code = registry.command(arguments.command).run(arguments)
    sys.stdout.flush()
    return int(code or 0)


_KINDS: dict[type[HeteroError], str] = {StoppedEarly: "stopped", GroupFinished: "done"}
"""Errors with which a command ends as it should, and the word printed for each."""


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


class _Parser(argparse.ArgumentParser):
    """A parser in which an abbreviation never means a hidden option."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return [one for one in found if one[0].help is not argparse.SUPPRESS]


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. With `only`, just that command's module is imported, for its
    options. With "" none is imported: `hetero --help` needs no options."""
    parser = _Parser(
        prog="hetero",
        description="Train one language model over several machines.",
        epilog="Exit codes: 0 done, 1 a bug, 2 what you can fix, 3 identity or keys,"
        " 4 peers lost, 5 numeric,"
        " 6 memory or disk, 75 stopped early and resumable.",
    )
    parser.add_argument("--version", action="version", version=f"hetero {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, entry in registry.entries("commands").items():
        summary = entry.text
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            _add_options(command, registry.command(name))
    return parser


def _add_options(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    examples = textwrap.indent(textwrap.dedent(command.EXAMPLES).strip(), "  ")
    parser.epilog = f"examples:\n{examples}"
    parser.set_defaults(parser=parser)
    for names, settings in (flag("--debug", "show tracebacks"), *command.OPTIONS):
        parser.add_argument(*names, **settings)


def _say_error(message: str, kind: str = "error") -> None:
    lines = [one_line(line) for line in message.splitlines()] or [""]
    if len(lines) > _MAX_MESSAGE_LINES:
        lines = [*lines[: _MAX_MESSAGE_LINES - 1], "  ... (all of it with --debug)"]
    with contextlib.suppress(OSError):
        print(f"hetero: {kind}: " + "\n".join(lines), file=sys.stderr, flush=True)


def _prepare_screens() -> None:
    """Make printing safe anywhere: a console's encoding may lack letters of a file name, and a
    process may have been started without any screen (`1>&-`, a service)."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
