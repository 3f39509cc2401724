"""`hetero launch --ssh`: starts, shows and ends a configuration's processes on their machines.

The processes are started by the system's ssh, and end together. Each has a life line through ssh:
it ends when its ssh process ends in any way.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from hetero_framework._version import __version__
from hetero_framework.cluster.child import describe_exit, end_processes
from hetero_framework.cluster.local_workers import print_lines
from hetero_framework.cluster.stop_signals import signals_passed_to
from hetero_framework.commands.options import key_directory
from hetero_framework.config import Config, process_name
from hetero_framework.core import timeouts
from hetero_framework.errors import NetworkError, StoppedEarly
from hetero_framework.extras.launch.launch_files import Launched, imported, template
from hetero_framework.log import one_line
from hetero_framework.security.keys import FOLDER

_log = logging.getLogger(__name__)
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
_ANSWER_S = 300.0
_AGAIN_S = 5.0
_NO_ANSWER = 255
_REASONS = {
    _NO_ANSWER: "cannot be reached; ssh has to log in there without a question",
    127: "has no {}; --hetero PATH says where it is",
}
"""Why a machine cannot take part, by the exit code of ssh or of the shell there."""


def run(given: Namespace, processes: Sequence[Launched]) -> int:
    """Check all machines and copy their files, then start all processes and wait. Returns the exit
    code of the coordinator. Raises NetworkError with the machines that cannot take part."""
    remote = [process for process in processes if process.host is not None]
    running, stopped = set[subprocess.Popen[bytes]](), threading.Event()

    def stop(name: str) -> None:
        stopped.set()
        for child in list(running):
            child.kill()

    def problem(process: Launched) -> str | None:
        return _problem(given, process, running, stopped)

    with signals_passed_to(stop), ThreadPoolExecutor(max(1, len(remote))) as pool:
        asked = [pool.submit(problem, process) for process in remote]
        # A signal just before a wait without a timeout would be handled only after that wait.
        while wait(asked, timeouts.ANSWER_TICK_S).not_done:
            pass
    problems = [said for one in asked if (said := one.result()) is not None]
    if stopped.is_set():
        raise StoppedEarly("stopped before anything was started")
    if problems:
        raise NetworkError("\n  ".join(["nothing was started", *problems]))
    _log.info("all machines answer, and have the configuration and their keys")
    here = (sys.executable, "-P", "-m", "hetero_framework")
    return _run({process: _start(given, process, here) for process in processes})


def script(config: Config, given: Namespace, processes: Sequence[Launched]) -> dict[str, bytes]:
    """The checks and copies of `run` as a shell script, which prints the processes' commands."""
    remote = [process for process in processes if process.host is not None]
    steps = [step for process in remote for step in _preparations(given, process)]
    filled = template("ssh.sh").substitute(
        preparations="\n".join(f"{shlex.join(c)} < {shlex.quote(str(file))}" for c, file in steps),
        commands="\n".join(shlex.join(_start(given, one, ["hetero"])) for one in processes),
    )
    return {"ssh.sh": filled.encode()}


def _ssh(given: Namespace, process: Launched, command: str) -> list[str]:
    options = [word for text in (*given.ssh_options, *_OPTIONS) for word in ("-o", text)]
    return ["ssh", "-T", *options, "--", str(process.host), command]  # ssh takes a name's first


def _preparations(given: Namespace, process: Launched) -> Iterator[tuple[list[str], Path]]:
    """Commands, each with its input: the version check, run in the directory of the launch, then
    the copies of all files."""
    there = _quoted(given.directory)
    asked = f"umask 077; mkdir -p {there} && cd {there} && exec {_quoted(given.hetero)} --version"
    yield _ssh(given, process, asked), Path("/dev/null")
    sources = {Path(given.config).name: given.config, **imported(given, "imports")}
    sources |= {f"{FOLDER}/{file.name}": file for file in process.keys}
    for name, source in sources.items():
        folder, _, file = f"{given.directory}/{name}".rpartition("/")
        make = f"umask 077; mkdir -p {_quoted(folder)} && cd {_quoted(folder)}"
        file = shlex.quote(file)  # another process of this launch may copy it at the same time
        copy = f"{make} && cat > {file}.$$ && mv {file}.$$ {file}"
        yield _ssh(given, process, copy), Path(source)


def _start(given: Namespace, process: Launched, here: Sequence[str]) -> list[str]:
    """The command of a process; `here`: how hetero is called on this machine."""
    if process.host is None:
        words = process.words(given, given.config, str(key_directory(given).path), given.imports)
        return [*here, *words, "--life-line"]
    words = process.words(given, Path(given.config).name, FOLDER, imported(given, "imports"))
    command = f"cd {_quoted(given.directory)} && exec {_quoted(given.hetero)}"
    return _ssh(given, process, f"{command} {shlex.join([*words, '--life-line'])}")


def _quoted(path: str) -> str:
    """A path for the shell of another machine; ~ is the home directory there."""
    home = "~/" * path.startswith("~/")
    return home + shlex.quote(path.removeprefix(home))


def _problem(
    given: Namespace,
    process: Launched,
    running: set[subprocess.Popen[bytes]],
    stopped: threading.Event,
) -> str | None:
    """Why a machine cannot take part, with what to do; None once it has its files. `running` holds
    the ssh process that is waited for."""
    where = f"{process_name(process.id)} ({process.host})"
    for number, (command, source) in enumerate(_preparations(given, process)):
        what = f"copying {source.name} failed" if number else "hetero --version failed"
        try:
            with source.open("rb") as data:
                pipe = subprocess.PIPE
                child = subprocess.Popen(
                    command, stdin=data, stdout=pipe, stderr=pipe, start_new_session=True
                )
            running.add(child)
            try:
                if stopped.is_set():
                    child.kill()
                out, wrong = child.communicate(timeout=_ANSWER_S)
            finally:
                child.kill()
                running.discard(child)
        except (subprocess.TimeoutExpired, OSError) as error:
            return f"{where}: {what}: {error}"
        text = (wrong if child.returncode else out).decode("utf-8", "replace")
        lines = map(str.strip, reversed(text.split("\n")))  # ssh ends its lines with \r\n
        said = one_line(next(filter(None, lines), "it said nothing"))
        if child.returncode:
            return f"{where} {_REASONS.get(child.returncode, what).format(given.hetero)}: {said}"
        if not number and said.split()[-1:] != [__version__]:
            return f"{where} has {said}, and here is hetero {__version__}; install the same"
    return None


def _run(commands: dict[Launched, list[str]]) -> int:
    """Run the commands, the coordinator's first, until it has ended or a second signal comes."""
    signals: list[str] = []
    children: dict[Launched, subprocess.Popen[bytes]] = {}
    printers: list[threading.Thread] = []
    due = dict.fromkeys(commands, 0.0)  # when to start them
    with signals_passed_to(signals.append):
        try:
            while len(signals) < 2:
                now = -1.0 if signals and children else time.monotonic()
                for process in [p for p, at in due.items() if at <= now]:
                    del due[process]
                    child = children[process] = subprocess.Popen(
                        commands[process],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a terminal's Ctrl-C is for the launcher alone
                    )
                    name = process_name(process.id)
                    printers.append(print_lines(child, f"{name} | "))
                for process in [p for p, child in children.items() if child.poll() is not None]:
                    code = children.pop(process).returncode
                    if process.id == "local":
                        return code
                    _log.info("%s has ended: %s", process_name(process.id), describe_exit(code))
                    if code == _NO_ANSWER:  # the worker has ended with its connection
                        due[process] = time.monotonic() + _AGAIN_S
                line = next(iter(children.values())).stdin  # the coordinator's
                if signals and line is not None and not line.closed:
                    _log.info("the run is saved, then all end; once more ends them at once")
                    line.close()
                time.sleep(timeouts.ANSWER_TICK_S)
            return StoppedEarly.exit_code
        finally:
            grace_s = 0.0 if len(signals) > 1 else timeouts.RELEASE_S + timeouts.STOP_S
            end_processes([*children.values()], grace_s)
            for printer in printers:
                printer.join(timeouts.STOP_S)
