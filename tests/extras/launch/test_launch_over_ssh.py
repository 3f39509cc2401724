"""`hetero launch --ssh --run` against a real ssh server; the processes that it starts are scripts
which write down what they are given. Real training is in tests/faults/test_launch.py."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework._version import __version__
from hetero_framework.security.keys import AUTHORITY, KeyDirectory
from tests import sshd
from tests.samples import free_ports, plan_of
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.skipif(sshd.needs() is not None, reason=str(sshd.needs()))

# A hetero that notes its command line, and serves until its life line ends, as the real one does.
# Each adds to the same file, in the order in which they end.
STUB = f"""#!/bin/sh
[ "$1" = --version ] && {{ echo "hetero {__version__}"; exit 0; }}
name=coordinator
for word; do case "$word" in --worker-id=*) name=${{word#*=}} ;; esac; done
echo "started: $*"
printf '%s\\n' "$@" > "$HETERO_STUB/$name.args"
case "$1" in $FAILING) exit 5 ;; esac
$UNTIL
echo "$name" >> "$HETERO_STUB/ended"
exit 75
"""


class Place:
    """A coordinator and two workers on one machine behind ssh, by addresses that nobody has."""

    def __init__(self, at: Path, server: sshd.Server) -> None:
        self.at, self.server = at, server
        self.remote, self.seen = at / "there it is", at / "seen"
        self.seen.mkdir(parents=True)
        raw = {
            "coordinator": {"ip": "192.0.2.1"},
            "workers": [{"id": k, "ip": f"192.0.2.{k + 1}", "port": 9000} for k in (1, 2)],
            "shard_plan": plan_of(("local", 1), (1, 2), (2, 3)),
            "model": {"name_or_path": "x"},
            "data": {"train": "x.txt"},
        }
        self.file = at / "my config.json"
        self.file.write_text(json.dumps(raw))
        self.hosts = dict.fromkeys(("local", "1", "2"), f"{server.user}@127.0.0.1")
        self.hetero = at / "hetero"
        self.write_hetero("nothing")

    def write_hetero(self, failing: str, until: str = "cat > /dev/null") -> None:
        text = STUB.replace("$HETERO_STUB", str(self.seen)).replace("$FAILING", failing)
        text = text.replace("$UNTIL", until)
        self.hetero.write_text(text)
        self.hetero.chmod(0o700)

    def command(self, *more: str) -> list[str]:
        words = [sys.executable, "-m", "hetero_framework", "launch", "--ssh", "--run"]
        words += ["--config", str(self.file), "--directory", str(self.remote)]
        words += ["--hetero", str(self.hetero)]
        for name, host in self.hosts.items():
            words += ["--host", f"{name}={host}"]
        for option in self.server.options:
            words += ["--ssh-option", option]
        return [*words, *more]

    def launch(self, *more: str) -> subprocess.CompletedProcess[str]:
        how: Any = {"capture_output": True, "text": True, "timeout": 60, "cwd": self.at}
        return subprocess.run(self.command(*more), **how)

    @contextmanager
    def started(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """A launcher whose processes have all begun."""
        with (self.at / "said").open("wb") as said:
            process = subprocess.Popen(self.command(*more), stderr=said, cwd=self.at)
        try:
            files = [self.seen / f"{name}.args" for name in ("coordinator", "1", "2")]
            wait_until(
                lambda: all(file.exists() for file in files) or process.poll() is not None, "slow"
            )
            assert process.poll() is None, self.said()
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)

    def said(self) -> str:
        return (self.at / "said").read_text()

    def args(self, name: str) -> list[str]:
        return (self.seen / f"{name}.args").read_text().splitlines()

    def ended(self) -> list[str]:
        """The processes whose life lines have ended, in that order."""
        file = self.seen / "ended"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def place(tmp_path):
    with sshd.ssh_server(tmp_path / "sshd", free_ports(1)[0]) as server:
        yield Place(tmp_path / "a home", server)
        wait_until(lambda: not server.sessions(), "an ssh connection outlives the launcher")


def test_ctrl_c_ends_the_coordinator_first_and_then_the_workers(place):
    imported = place.at / "my model.py"
    imported.write_text("")
    options = ("--set", "training.seed=3", "--import", str(imported), "--", "--fresh")
    with place.started(*options) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()
    assert "worker 1 | started: worker" in place.said()
    assert "coordinator | started: train" in place.said()
    assert place.ended()[0] == "coordinator"
    assert sorted(place.ended()) == ["1", "2", "coordinator"]
    common = ["--config=my config.json", "--keys=hetero_keys", "--set=training.seed=3"]
    common += ["--import=imports/0.py"]
    train = ["train", "--role=coordinator", *common, "--fresh", "--life-line"]
    assert place.args("coordinator") == train
    assert place.args("1") == ["worker", "--worker-id=1", *common, "--life-line"]
    assert (place.remote / "my config.json").read_bytes() == place.file.read_bytes()
    assert (place.remote / "imports/0.py").exists()


def test_a_second_ctrl_c_ends_all_at_once(place):
    place.write_hetero("nothing", until="sleep 60 & wait")
    with place.started() as process:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "once more ends" in place.said(), "the first was not heard")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_launcher_leaves_no_process_behind(place):
    with place.started() as process:
        process.kill()
    wait_until(lambda: len(place.ended()) == 3, "not all have ended")


def test_a_lost_connection_of_a_worker_is_made_again(place):
    with place.started() as process:
        (place.seen / "1.args").unlink()
        ssh = next(
            c for c in psutil.Process(process.pid).children() if "--worker-id=1 " in c.cmdline()[-1]
        )
        ssh.send_signal(signal.SIGTERM)
        wait_until((place.seen / "1.args").exists, "worker 1 was not started again")
        assert "worker 1 has ended: exit code 255" in place.said()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()


def test_a_worker_that_ends_is_named_and_the_run_goes_on(place):
    place.write_hetero("worker")
    with place.started() as process:
        wait_until(lambda: "worker 2 has ended: exit code 5" in place.said(), "nobody was told")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 75, place.said()


def test_the_coordinators_exit_code_is_the_launchers(place):
    place.write_hetero("train")
    done = place.launch()
    assert done.returncode == 5, done.stderr
    assert sorted(place.ended()) == ["1", "2"]


def test_machines_that_cannot_take_part_are_named_before_anything_starts(place):
    place.hosts |= {"1": "nobody.invalid", "2": "stranger@127.0.0.1"}
    done = place.launch()
    assert done.returncode == 2
    assert "nothing was started" in done.stderr
    said = "worker 1 (nobody.invalid) cannot be reached; ssh has to log in there without"
    assert said in done.stderr
    # A server that asks for a password gets no answer.
    assert "worker 2 (stranger@127.0.0.1) cannot be reached;" in done.stderr
    assert "Permission denied" in done.stderr
    assert "coordinator (" not in done.stderr
    assert not [*place.seen.iterdir()]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, "has no"),
        ("echo hetero 0.0.1", "has hetero 0.0.1, and here is hetero"),
        ("echo No module named x >&2; exit 1", "hetero --version failed: No module named x"),
    ],
)
def test_another_installation_is_told_before_anything_starts(place, program, problem):
    if program is None:
        place.hetero.unlink()
    else:
        place.hetero.write_text(f"#!/bin/sh\n{program}\n")
    done = place.launch()
    assert done.returncode == 2
    assert problem in done.stderr
    assert "nothing was started" in done.stderr


def test_the_authoritys_key_is_never_sent(place, monkeypatch):
    """All that goes into ssh is kept: its words and its input."""
    place.write_hetero("train")
    tools, sent = place.at / "tools", place.at / "sent"
    tools.mkdir()
    wrapper = tools / "ssh"
    program, into = shlex.quote(str(shutil.which("ssh"))), shlex.quote(str(sent))
    wrapper.write_text(f"""#!/bin/sh
printf '%s\\n' "$@" >> {into}
case "$*" in *'cat > '*) tee -a {into} | {program} "$@" ;; *) exec {program} "$@" ;; esac
""")
    wrapper.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    done = place.launch()
    assert done.returncode == 5, done.stderr
    keys = KeyDirectory(place.at / "hetero_keys")
    assert keys.read("worker-1.pem") in sent.read_bytes()
    assert keys.read("coordinator.pem") in sent.read_bytes()
    secret = keys.read(AUTHORITY).split(b"-----")[2]
    assert len(secret) > 100
    for file in [sent, *(file for file in place.remote.rglob("*") if file.is_file())]:
        assert secret not in file.read_bytes(), file
    there = place.remote / "hetero_keys"
    assert there.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in there.iterdir()} == {0o600}
    assert not (there / AUTHORITY).exists()
