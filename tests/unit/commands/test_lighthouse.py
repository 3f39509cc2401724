"""`hetero lighthouse`: what it opens to whom, what it says, how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.commands import lighthouse as command
from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import ISLANDS
from hetero_framework.errors import IdentityError, NetworkError, StoppedEarly, UserError
from hetero_framework.islands import lighthouse
from hetero_framework.islands.lighthouse import rendezvous_at
from hetero_framework.islands.rendezvous import Member
from hetero_framework.islands.tunnel import Entrance
from hetero_framework.security.access import Keyed, KeyOptions
from hetero_framework.security.keys import KeyDirectory
from tests.certificates import keys_of
from tests.samples import free_ports


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Least numbers of islands of the servers that were started, in place of torchft's; a signal
    comes as soon as one serves."""
    found: list[int] = []

    class Server:
        port = 1

        def __init__(self, min_islands: int) -> None:
            found.append(min_islands)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            found.append(0)

    def signalled(self: Entrance, seconds: float) -> None:
        assert self.links == 0
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "Lighthouse", Server)
    monkeypatch.setattr(Entrance, "wait", signalled)
    return found


def serve(bind: str, folder: Path, **options: Any) -> list[str]:
    said: list[str] = []
    keys = KeyDirectory(folder, ISLANDS)
    with pytest.raises(StoppedEarly, match="stopped by Ctrl-C") as found:
        command.serve(bind, 2, keys, KeyOptions(**options), said.append)
    assert found.value.exit_code == 75
    return said


def test_line_says_where_it_is_and_how_islands_get_in(tmp_path: Path, started: list[int]) -> None:
    bind = f"127.0.0.1:{free_ports(1)[0]}"
    [line] = serve(bind, tmp_path / "none")
    assert f"the lighthouse is at {bind}, and asks nobody who it is" in line
    [line] = serve(bind, keys_of(tmp_path / "keys", "local", kind=ISLANDS).path)
    assert f"is at {bind}; `hetero invite --island NAME" in line
    assert started == [2, 0, 2, 0]  # all was closed, also the port


def test_others_reach_it_with_keys_alone(
    tmp_path: Path, started: list[int], logged: list[str]
) -> None:
    bind = f"0.0.0.0:{free_ports(1)[0]}"
    with pytest.raises(IdentityError, match=r"the lighthouse is at 0\.0\.0\.0, where others"):
        command.serve(bind, 1, KeyDirectory(tmp_path / "none", ISLANDS), KeyOptions())
    assert not started
    assert serve(bind, keys_of(tmp_path / "keys", "local", kind=ISLANDS).path)
    assert not logged
    assert serve(bind, tmp_path / "none", insecure=True)
    assert "NOTHING IS ENCRYPTED" in logged[0]


def test_address_and_port_that_it_cannot_have_are_said(tmp_path: Path, started: list[int]) -> None:
    keys = KeyDirectory(tmp_path, ISLANDS)
    with pytest.raises(UserError, match=r"--bind: .* has no port"):
        command.serve("127.0.0.1", 1, keys, KeyOptions())
    with closing(Listener("127.0.0.1", 0)) as taken, pytest.raises(NetworkError, match="in use"):
        command.serve(f"127.0.0.1:{taken.port}", 1, keys, KeyOptions())
    assert not started


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with lighthouse._quiet():
        pytest.importorskip("torchft.coordination")
    keys_of(tmp_path / "keys" / "islands", "local", kind=ISLANDS)
    [port] = free_ports(1)
    words = ["lighthouse", "--bind", f"0.0.0.0:{port}", "--keys", str(tmp_path / "keys")]
    started = subprocess.Popen(
        [sys.executable, "-m", "hetero_framework", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started, port
    finally:
        started.kill()
        started.communicate()


def test_islands_meet_at_it_and_nothing_else_of_it_is_open(
    process: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    started, port = process
    assert started.stdout is not None
    assert f"0.0.0.0:{port}" in started.stdout.readline()
    listening = [
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process(started.pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]
    assert ("0.0.0.0", port) in listening
    assert {ip for ip, other in listening if other != port} == {"127.0.0.1"}
    keys = keys_of(tmp_path / "garage", "garage", kind=ISLANDS)
    member = Member("garage", "1", "192.0.2.1:9")
    access = Keyed(keys, "garage", None)
    with closing(rendezvous_at(("127.0.0.1", port), access, member, lambda: True)) as island:
        assert island.members(30.0).members == (member,)
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=30)
    assert started.returncode == 75
    assert "island garage is here, from 127.0.0.1" in errors
    assert "stopped: by SIGTERM" in errors
    assert "INFO" not in errors  # torchft's own words
