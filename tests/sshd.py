"""A real ssh server of the current user, with keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import WAIT_S

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def needs() -> str | None:
    """Why there can be no ssh server here."""
    there = SSHD and shutil.which("ssh") and shutil.which("ssh-keygen")
    return None if there else "needs ssh and sshd"


@dataclass(frozen=True)
class Server:
    """A running server, and what ssh needs to log in there."""

    process: subprocess.Popen[bytes]
    port: int
    options: tuple[str, ...]
    """Of `hetero launch`."""
    log: Path

    @property
    def user(self) -> str:
        return getpass.getuser()

    def sessions(self) -> list[int]:
        """The server's processes that serve a connection."""
        shown = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return [int(pid) for pid in shown.stdout.split()]


@contextmanager
def ssh_server(
    place: Path, port: int, address: str = "127.0.0.1", enter: Sequence[str] = ()
) -> Iterator[Server]:
    """A server whose files are in `place`; `enter` is put before its command (nsenter)."""
    assert SSHD is not None
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)]
        subprocess.run(made, check=True)
    shutil.copy(place / "user.pub", place / "authorized")
    public = (place / "host.pub").read_text()
    (place / "known").write_text(f"[{address}]:{port} {public}")
    (place / "config").write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {place}/host\nPidFile none\n"
        f"AuthorizedKeysFile {place}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        "MaxStartups 50\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as the package's start script does
    log = place / "log"
    process = subprocess.Popen(
        [*enter, SSHD, "-D", "-E", str(log), "-f", str(place / "config")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    options = (f"Port={port}", f"IdentityFile={place}/user", "IdentitiesOnly=yes")
    options += (f"UserKnownHostsFile={place}/known", "StrictHostKeyChecking=yes")
    try:
        deadline = time.monotonic() + WAIT_S
        while not (log.exists() and "Server listening" in log.read_text()):
            assert process.poll() is None, log.read_text() if log.exists() else "sshd ended"
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)  # nothing announces what another process writes
        yield Server(process, port, options, log)
    finally:
        process.terminate()
        process.wait(WAIT_S)
