"""`hetero launch`: writes files that start a configuration's processes, and starts them."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from hetero_framework.commands import train
from hetero_framework.commands.options import (
    ACCESS,
    CONFIG,
    IMPORT,
    Option,
    OutputFolder,
    flag,
    load,
    option,
    overwrite,
    repeated,
    value,
)
from hetero_framework.errors import UserError

EXAMPLES = """
    hetero launch --ssh --run --config cluster.json --hetero '~/hetero/.venv/bin/hetero'
    hetero launch --ssh --run --host 1=ann@gpu1 --ssh-option Port=2222 -- --resume latest
    hetero launch --slurm --resources "1=--partition=a100 --gpus=1"
    hetero launch --compose --run
    hetero launch --sky --resources 1=L4:1
    """


def _way(name: str, help: str) -> Option:
    return option(f"--{name}", action="append_const", const=name, dest="how", help=help)


OPTIONS = (
    _way("ssh", "a script that starts all over ssh"),
    _way("slurm", "a batch script for sbatch"),
    _way("compose", "a file for docker compose, on this machine"),
    _way("sky", "tasks for SkyPilot, whose workers dial the coordinator"),
    flag("--run", "start all processes and wait (--ssh and --compose; --ssh then writes nothing)"),
    *CONFIG,
    *ACCESS,
    IMPORT,
    value("--output", "DIR", "directory to write (launch)", default="launch", type=OutputFolder),
    overwrite("replace what an earlier launch has written there"),
    repeated(
        "--host",
        "ID=HOST",
        "--ssh: where ssh reaches a worker (default: its ip), or the coordinator (ID: local)",
        dest="hosts",
    ),
    repeated("--ssh-option", "KEY=VALUE", "--ssh: an option of ssh's -o", dest="ssh_options"),
    value("--directory", "DIR", "--ssh: where on the other machines (hetero_launch/NAME)"),
    value("--hetero", "PATH", "the program on the other machines", default="hetero"),
    repeated("--resources", "ID=TEXT", "options of #SBATCH, or accelerators of SkyPilot"),
    value("train_options", "-- OPTION", "options of hetero train", nargs="*"),
)


def run(given: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser("hetero launch ... --", add_help=False)
    for names, settings in train.OPTIONS:
        parser.add_argument(*names, **settings)
    parser.parse_args(given.train_options)
    given.how = given.how[0] if len(given.how or ()) == 1 else None
    if given.how is None or (given.run and given.how not in ("ssh", "compose")):
        raise UserError(
            "give one of --ssh, --slurm, --compose and --sky, and --run with --ssh or --compose"
        )
    if os.name == "nt":
        raise UserError("hetero launch needs Linux or macOS", hint="use it in WSL")
    if given.run and shutil.which(program := "ssh" if given.how == "ssh" else "docker") is None:
        raise UserError(f"there is no {program} in PATH")
    config = load(given, saved_plan=False)
    config.require("model", "data")
    from hetero_framework.cluster.stop_signals import signals_passed_to
    from hetero_framework.extras.launch import launch_files, launch_ssh

    given.config, given.output = map(os.path.abspath, (given.config, given.output))
    given.imports = [os.path.abspath(file) for file in given.imports]
    given.directory = given.directory or f"hetero_launch/{Path(given.config).stem}"
    processes = launch_files.planned(config, given)
    if given.how == "ssh" and given.run:
        return launch_ssh.run(given, processes)
    command = {
        "slurm": ["sbatch", f"{given.output}/slurm.sh"],
        "compose": ["docker", "compose", "-f", f"{given.output}/compose.yaml", "up", "--build"],
    }.get(given.how, ["sh", f"{given.output}/{given.how}.sh"])
    command += ["--exit-code-from", "coordinator"] * (given.how == "compose")
    make = launch_ssh.script if given.how == "ssh" else getattr(launch_files, given.how)
    launch_files.write(Path(given.output), make(config, given, processes), force=given.overwrite)
    if given.run:
        with signals_passed_to(lambda name: None):  # the terminal's Ctrl-C reaches docker itself
            return subprocess.call(command)
    print(f"wrote {given.output}; next: {shlex.join(command)}")
    return 0
