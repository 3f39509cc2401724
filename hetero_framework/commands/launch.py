"""`hetero launch`: writes what starts every process of a configuration, and starts them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hetero_framework.commands import train
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    IMPORT,
    LIFE_LINE,
    WORKER_ID,
    flag,
    load,
    option,
    repeated,
)
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero launch --ssh --config cluster.json
    hetero launch --ssh --run --config cluster.json --hetero .venv/bin/hetero
    hetero launch --ssh --run --host 1=ann@gpu1 --ssh-option Port=2222 -- --resume latest
    """
OPTIONS = (
    flag("--ssh", "a script of ssh commands"),
    flag("--run", "with --ssh: write nothing, start all processes here and now"),
    *CONFIG,
    *ACCESS,
    IMPORT,
    option("--output", default="launch", metavar="DIR", help="directory to write (launch)"),
    flag("--force", "replace a directory that an earlier launch has written"),
    repeated(
        "--host",
        "ID=HOST",
        "--ssh: where ssh reaches a process, as in 1=ann@gpu1 (local: the coordinator); default:"
        " its ip in the configuration",
        dest="hosts",
    ),
    repeated("--ssh-option", "KEY=VALUE", "--ssh: an option of ssh's -o", dest="ssh_options"),
    option(
        "--directory",
        metavar="DIR",
        help="--ssh: directory on the other machines (hetero_launch/NAME of the configuration)",
    ),
    option(
        "--hetero",
        default="hetero",
        metavar="PATH",
        help="where hetero is on the other machines (default: in the PATH that their ssh has)",
    ),
    option(
        "train_options",
        nargs="*",
        metavar="-- OPTION",
        help="options of hetero train for the coordinator",
    ),
)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments.train_options)
    if os.name == "nt":
        raise UserError("hetero launch needs Linux or macOS", hint="use it in WSL")
    config = load(arguments, saved_plan=False)
    config.require("model", "data")
    from hetero_framework.commands import launch_plan, launch_ssh

    file, output = Path(arguments.config), Path(arguments.output)
    if not arguments.ssh:
        raise UserError("say how to launch: --ssh")
    arguments.directory = arguments.directory or f"hetero_launch/{file.stem}"
    hosts = launch_plan.by_id(arguments.hosts, "--host")
    launch = launch_plan.planned(config, arguments, together=True, hosts=hosts)
    if arguments.run:
        return launch_ssh.run(launch)
    files = {"ssh.sh": launch_ssh.script(launch).encode()}
    launch_plan.write(output, files, force=arguments.force)
    print(f"wrote {output}; next: sh {output / 'ssh.sh'} prepare")
    return 0


def _check(train_options: Sequence[str]) -> None:
    """End with the usage of those options of hetero train that can be given here."""
    parser = argparse.ArgumentParser("hetero launch [OPTION ...] --", add_help=False)
    ours = (*CONFIG, *ACCESS, IMPORT, LIFE_LINE, WORKER_ID)
    for names, settings in train.OPTIONS:
        if (names, settings) not in ours and names != ("--role",):
            parser.add_argument(*names, **settings)
    parser.parse_args(train_options)
