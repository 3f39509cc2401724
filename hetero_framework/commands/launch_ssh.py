"""`hetero launch --ssh`: starts a configuration's processes on their machines with the system's
ssh, shows their lines, and ends them together.

Each remote process has its life line through ssh: it ends when its ssh does, in any way.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hetero_framework._version import __version__
from hetero_framework.cluster.child import describe_exit, end_processes
from hetero_framework.cluster.restart_policy import RestartPolicy
from hetero_framework.cluster.stop_signals import signals_passed_to
from hetero_framework.cluster.supervisor import print_lines
from hetero_framework.commands.launch_plan import Launch, Launched
from hetero_framework.core import timeouts
from hetero_framework.errors import NetworkError, StoppedEarly
from hetero_framework.log import one_line

_log = logging.getLogger(__name__)
_OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=10"),
    *("ServerAliveInterval=15", "ServerAliveCountMax=3"),
)
_ANSWER_S, _COPY_S = 60.0, 600.0
_NO_ANSWER, _NOT_FOUND = 255, 127  # exit codes of ssh, and of a shell
_NO_QUESTION = "ssh has to log in there without a question: a key, a known host (ssh {})"


@dataclass(frozen=True)
class Ssh:
    """The commands of a launch, as argument lists."""

    launch: Launch

    def on(self, host: str, command: str) -> list[str]:
        """`command`, for the shell of the user on that machine."""
        options = [*self.launch.arguments.ssh_options, *_OPTIONS]  # ssh takes the first of a name
        return ["ssh", "-T", *(w for o in options for w in ("-o", o)), "--", host, command]

    def check(self, host: str) -> list[str]:
        """Prints the version of hetero there, as it is found from the launch's directory."""
        return self.on(host, f"umask 077; mkdir -p {self._there} && {self._in_it} --version")

    @property
    def _there(self) -> str:
        return _quoted(self.launch.arguments.directory)

    @property
    def _in_it(self) -> str:
        return f"cd {self._there} && exec {_quoted(self.launch.arguments.hetero)}"

    def files(self, process: Launched) -> Iterator[tuple[list[str], Path]]:
        """For each file that the machine of this process needs: the command, and its input."""
        assert process.host is not None
        launch, keys = self.launch, self.launch.keys
        contents = {launch.file.name: launch.file}
        contents |= dict(zip(self._imports, map(Path, launch.arguments.imports), strict=True))
        if keys is not None:
            contents |= {f"hetero_keys/{n}": keys.path / n for n in launch.key_files(process)}
        for name, source in contents.items():
            path = PurePosixPath(launch.arguments.directory, name)
            folder, target = _quoted(str(path.parent)), _quoted(str(path))
            text = f"umask 077; mkdir -p {folder} && cat > {target}.new && mv {target}.new {target}"
            yield self.on(process.host, text), source

    @property
    def _imports(self) -> list[str]:
        """The files of --import in the directory there; two may have one name."""
        given = self.launch.arguments.imports
        return [f"imports/{i}/{Path(file).name}" for i, file in enumerate(given)]

    def start(self, process: Launched, here: Sequence[str] = ("hetero",)) -> list[str]:
        """The command of a process; `here`: how hetero is called on this machine."""
        launch = self.launch
        if process.host is None:
            imports = [str(Path(file).absolute()) for file in launch.arguments.imports]
            words = launch.words(process, str(launch.file), imports)
            keys = ["--keys", str(launch.keys.path)] if launch.keys is not None else []
            return [*here, words[0], "--life-line", *keys, *words[1:]]
        words = launch.words(process, launch.file.name, self._imports)
        command = shlex.join([words[0], "--life-line", *words[1:]])
        return self.on(process.host, f"{self._in_it} {command}")


def _quoted(path: str) -> str:
    """A path for the shell of another machine; ~ is the home directory there."""
    home = "~/" * path.startswith("~/")
    return home + shlex.quote(path.removeprefix(home))


def script(launch: Launch) -> str:
    """The commands as a shell script, to be read, or changed and run."""
    ssh = Ssh(launch)
    remote = [(process, process.host) for process in launch.processes if process.host is not None]
    start = ssh.on("", "")[:-2]

    def text(command: Sequence[str], source: str | Path = "") -> str:
        words = ["on", *command[len(start) :]] if command[: len(start)] == start else command
        return f"    {shlex.join(words)}" + (f" < {shlex.quote(str(source))}" if source else "")

    lines = ["#!/bin/sh", f"# Starts the processes of {launch.file.name}, each in a terminal:"]
    names = ("prepare", *(process.file_name for process in launch.processes))
    lines += [f"#     sh ssh.sh {name}" for name in names]
    lines += ["# Ctrl-C ends one. `hetero launch --ssh --run` does all of it in one terminal."]
    lines += ["set -eu", f'on() {{ {shlex.join(start)} "$@"; }}', 'case "${1:-}" in', "prepare)"]
    for host in dict.fromkeys(host for _, host in remote):
        lines.append(text(ssh.check(host), "/dev/null"))
    for process, _ in remote:
        lines += [text(command, source.absolute()) for command, source in ssh.files(process)]
    for process in launch.processes:
        lines += ["    ;;", f"{process.file_name})", text(ssh.start(process))]
    return "\n".join([*lines, "    ;;", "*) sed -n '2,/^# Ctrl/p' \"$0\"; exit 2 ;;", "esac", ""])


def run(launch: Launch) -> int:
    """Check the machines, copy the files, start all processes, and wait for the coordinator; its
    exit code. Raises NetworkError that names the machines that cannot take part."""
    ssh = Ssh(launch)
    hosts = {process.host: process for process in launch.processes if process.host is not None}
    with ThreadPoolExecutor(max(1, len(launch.processes))) as pool:
        _all_or_none(pool.map(lambda p: _unfit(ssh, p), hosts.values()))
        _log.info("all machines answer; configuration and keys are copied to them")
        remote = [process for process in launch.processes if process.host is not None]
        _all_or_none(pool.map(lambda p: _not_copied(ssh, p), remote))
    return _Running(ssh).run()


def _all_or_none(results: Iterator[tuple[str, str] | None]) -> None:
    if wrong := [result for result in results if result is not None]:
        lines = [f"{problem}\n    {hint}" for problem, hint in wrong]
        raise NetworkError("nothing was started\n  " + "\n  ".join(lines))


def _unfit(ssh: Ssh, process: Launched) -> tuple[str, str] | None:
    """Why a machine cannot take part, and what to do."""
    assert process.host is not None
    code, said = _answer(ssh.check(process.host), _ANSWER_S)
    where, hetero = f"{process.name} ({process.host})", ssh.launch.arguments.hetero
    if code == _NO_ANSWER:
        return f"{where} cannot be reached: {said}", _NO_QUESTION.format(process.host)
    if code == _NOT_FOUND:
        return f"{where} has no {hetero}: {said}", "--hetero PATH says where it is installed"
    if code != 0:
        return f"{where}: {hetero} --version ended with exit code {code}: {said}", "install anew"
    if said.split()[-1:] != [__version__]:
        return f"{where} has {said}; here it is hetero {__version__}", "install the same version"
    return None


def _not_copied(ssh: Ssh, process: Launched) -> tuple[str, str] | None:
    for command, source in ssh.files(process):
        code, said = _answer(command, _COPY_S, source)
        if code != 0:
            what = f"{process.name} ({process.host}): {source.name} could not be written"
            return f"{what}: {said}", "make room and rights there, or choose --directory DIR"
    return None


def _answer(command: Sequence[str], limit_s: float, source: Path | None = None) -> tuple[int, str]:
    """Exit code and last line of a command that reads `source`."""
    with open(source or "/dev/null", "rb") as given:
        try:
            done = subprocess.run(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _NO_ANSWER, f"no answer within {limit_s:.0f} s"
        except OSError as error:
            return _NO_ANSWER, f"ssh cannot be run: {error}"
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return done.returncode, one_line(lines[-1]) if lines else describe_exit(done.returncode)


class _Running:
    """The processes of a launch while they run."""

    def __init__(self, ssh: Ssh) -> None:
        self._ssh = ssh
        self._signals = 0
        self._children: dict[Launched, subprocess.Popen[bytes]] = {}
        self._printers: list[threading.Thread] = []
        self._start_at = dict.fromkeys(reversed(ssh.launch.processes), 0.0)
        self._policies = {process: RestartPolicy() for process in ssh.launch.processes}

    def run(self) -> int:
        """The exit code of the coordinator, or 75 after a second signal."""
        coordinator = self._ssh.launch.processes[0]
        with signals_passed_to(self._note):
            try:
                while self._signals < 2:
                    self._start_due()
                    child = self._children.get(coordinator)
                    if child is None:  # the signal came first
                        break
                    if (code := child.poll()) is not None:
                        return code
                    if self._signals and child.stdin is not None:
                        child.stdin.close()
                    for process, child in [*self._children.items()]:
                        if (code := child.poll()) is not None:
                            self._ended(process, code)
                    time.sleep(timeouts.ANSWER_TICK_S)
                return StoppedEarly.exit_code
            finally:
                grace_s = 0.0 if self._signals > 1 else timeouts.RELEASE_S + timeouts.STOP_S
                end_processes([*self._children.values()], grace_s)
                for printer in self._printers:
                    printer.join(timeouts.STOP_S)

    def _note(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            _log.info("%s: the run is saved, then all end; once more ends them at once", name)

    def _start_due(self) -> None:
        due = [p for p, at in self._start_at.items() if at <= time.monotonic()]
        for process in due if not self._signals else ():
            del self._start_at[process]
            child = subprocess.Popen(
                self._ssh.start(process, (sys.executable, "-m", "hetero_framework")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher alone
            )
            self._children[process] = child
            self._printers.append(print_lines(child, f"{process.name} | ", deque(maxlen=1)))

    def _ended(self, process: Launched, code: int) -> None:
        """A worker whose connection was lost has ended with it, and is started again."""
        del self._children[process]
        lost = code == _NO_ANSWER and process.host is not None
        pause_s = self._policies[process].died(time.monotonic()) if lost else None
        if pause_s is None:
            _log.info("%s has ended: %s", process.name, describe_exit(code))
            return
        self._start_at[process] = time.monotonic() + pause_s
        _log.warning("%s: ssh has lost it; it is started again", process.name)
