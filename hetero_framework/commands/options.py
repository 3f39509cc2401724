"""Options and helpers that several subcommands of `hetero` share.

Nothing heavy is imported at the top: the parser is built before it is known which command runs.
"""

from __future__ import annotations

import _thread
import argparse
import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_framework.core.files import refuse_output
from hetero_framework.errors import ConfigError
from hetero_framework.log import printable, set_level

DEFAULT_CONFIG = "hetero_config.json"
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    return names, settings


def value(name: str, metavar: str, help: str, **settings: Any) -> Option:
    return option(name, metavar=metavar, help=help, **settings)


def flag(name: str, help: str) -> Option:
    return option(name, action="store_true", help=help)


class OutputFile(str):
    """The type of an option that names a file which the command writes."""


class OutputFolder(str):
    """The type of an option that names a directory to write; the command itself checks it."""


def overwrite(help: str = "replace a file that is there") -> Option:
    return option("--overwrite", "--force", action="store_true", help=help)


def writes(help: str, *names: str, metavar: str = "FILE", **settings: Any) -> tuple[Option, Option]:
    """The option for a file that the command writes (--output), and --overwrite."""
    names = names or ("--output",)
    return option(*names, type=OutputFile, metavar=metavar, help=help, **settings), overwrite()


def check_outputs(arguments: argparse.Namespace, *more: str | Path) -> None:
    """Raise UserError if an output file, of the options or of `more`, exists and is not to be
    replaced, or if the command also reads it."""
    given = [
        getattr(arguments, action.dest, None)
        for action in arguments.parser._actions
        if action.choices is None
    ]
    given = [text for value in given for text in (value if isinstance(value, list) else [value])]
    inputs = [Path(t) for t in given if type(t) is str and t and len(t) < 1024 and "\0" not in t]
    if not getattr(arguments, "non_interactive", True):
        return  # `hetero init` asks
    for file in (*(text for text in given if isinstance(text, OutputFile)), *more):
        if str(file) != "-":
            refuse_output(Path(file), overwrite=arguments.overwrite, inputs=inputs)


def repeated(name: str, metavar: str, help: str, **settings: Any) -> Option:
    """An option that may be given several times."""
    return option(name, action="append", default=[], metavar=metavar, help=help, **settings)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


SET = repeated(
    "--set",
    "NAME=VALUE",
    "replace a setting of the file, as in training.max_steps=10; may be repeated",
)
CONFIG = (value("--config", "FILE", f"default: {DEFAULT_CONFIG}", default=DEFAULT_CONFIG), SET)
KEYS = option("--keys", metavar="DIR", help="default: hetero_keys beside the configuration")
ACCESS = (
    KEYS,
    flag("--insecure-plaintext", "disable encryption and authentication; the same on all machines"),
)
JSON = flag("--json", "print JSON")
WORKER_ID = option("--worker-id", metavar="ID", help="act as this worker")
ROLE_HELP = "role of this machine (default: by its addresses and host name)"
LIFE_LINE = flag(
    "--life-line", "end as after SIGTERM when standard input ends; `hetero launch` uses it"
)
IMPORT = repeated(
    "--import",
    "FILE",
    "run this Python file first, the same on every machine: callbacks, metrics (docs/python.md), a"
    " chain, a data set or an objective (docs/objectives.md), a model class (docs/models.md)",
    dest="imports",
)
OUTPUT_DIRECTORY = (
    option("--output", required=True, type=OutputFolder, metavar="DIR", help="new directory"),
    overwrite("replace an earlier result in DIR; other files in it stay"),
)


_DIRECTORIES = {"output_dir": "training.output_dir", "checkpoint_dir": "checkpoint_dir"}


def load(arguments: argparse.Namespace, *, saved_plan: bool = True, devices: bool = True) -> Any:
    """The configuration. With `saved_plan`, the plan that the run saved replaces an "auto" plan;
    with `devices`, the names of this machine's devices replace "all"."""
    from hetero_framework.cluster.roles import with_own_devices
    from hetero_framework.config import load_config, with_saved_plan

    overrides = [*getattr(arguments, "set", ())]
    for name, setting in _DIRECTORIES.items():
        if getattr(arguments, name, None):
            # Paths on the command line start at the current folder, those in a file at its folder.
            path = Path(getattr(arguments, name)).absolute()
            overrides.append(f"{setting}={json.dumps(str(path))}")
    if getattr(arguments, "save_every_n_steps", None):
        overrides += [f"training.save_steps={arguments.save_every_n_steps}"]
        overrides += ['training.save_strategy="steps"']
    config = load_config(
        arguments.config or DEFAULT_CONFIG, overrides, getattr(arguments, "base_dir", None)
    )
    config.require(name=str(arguments.config or DEFAULT_CONFIG))
    config = with_own_devices(config) if devices else config
    set_level(config.training.log_level)
    if not config.training.reads_text:
        from hetero_framework.models.cut.family import decided

        config = decided(config)
    return with_saved_plan(config) if saved_plan else config


def report(
    arguments: argparse.Namespace, data: dict[str, Any], text: Callable[[dict[str, Any]], str]
) -> None:
    print(json.dumps(data, indent=2) if arguments.json else printable(text(data)))


def access_for(config: Any, process: int | str, arguments: argparse.Namespace) -> Any:
    from hetero_framework.security.access import access_of

    return access_of(config, process, key_options(arguments))


def role_of(
    config: Any, options: Any, role: str | None = None, worker_id: int | str | None = None
) -> Any:
    """The role of this machine, as told or as `decide_role` finds it with the keys' `options`."""
    from hetero_framework.cluster.roles import decide_role
    from hetero_framework.security import access

    keys = access.key_directory(config, options).processes()
    return decide_role(config, role=role, worker_id=worker_id, keys=keys)


def role_here(config: Any, worker_id: int | str | None = None, options: Any = None) -> Any:
    """The role of this machine, or of the worker `worker_id`; None where nothing decides it."""
    with suppress(ConfigError):  # any machine may check a configuration
        return role_of(config, options, worker_id=worker_id)
    return None


def key_directory(arguments: argparse.Namespace) -> Any:
    """The directory of --keys, or the one beside the configuration."""
    from hetero_framework.security.keys import FOLDER, KeyDirectory

    beside = Path(arguments.config).absolute().parent / FOLDER
    return KeyDirectory(Path(arguments.keys).absolute() if arguments.keys else beside)


def import_files(arguments: argparse.Namespace) -> None:
    """Run the files of --import, where the command has it."""
    if files := getattr(arguments, "imports", None):
        from hetero_framework import control

        for file in files:
            control.import_file(Path(file))


def keep_life_line(arguments: argparse.Namespace) -> None:
    """With --life-line, let the end of standard input send SIGTERM to the main thread, where the
    signal interrupts any wait."""
    if getattr(arguments, "life_line", False):
        from hetero_framework.cluster.child import watch_parent

        main = threading.main_thread().ident or 0
        # On Windows the signal interrupts no wait: it is heard when the wait ends.
        ends = getattr(signal, "pthread_kill", lambda _, number: _thread.interrupt_main(number))
        watch_parent(on_gone=lambda: ends(main, signal.SIGTERM))


def key_options(arguments: argparse.Namespace) -> Any:
    from hetero_framework.security.access import KeyOptions

    directory = Path(arguments.keys) if arguments.keys is not None else None
    return KeyOptions(directory, arguments.insecure_plaintext)


def check_coordinator(config: Any, arguments: argparse.Namespace) -> None:
    """Raise UserError on a machine that has only workers."""
    from hetero_framework.cluster import roles

    role = role_of(config, key_options(arguments), arguments.role)
    roles.check_coordinator(role, f"hetero {arguments.command}")
