"""`hetero lighthouse`: its port and access, its messages, its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import ISLANDS
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, NetworkError, StoppedEarly, UserError
from hetero_framework.extras.islands.commands import lighthouse as command
from hetero_framework.extras.islands.island_messages import Member
from hetero_framework.extras.islands.lighthouse import Lighthouse
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from hetero_framework.security.access import Keyed, KeyOptions
from hetero_framework.security.keys import KeyDirectory
from tests.certificates import keys_of
from tests.extras.islands.optional import need_torchft
from tests.samples import free_ports


@pytest.fixture
def started(monkeypatch):
    """Least numbers of islands of the servers that were started, in place of torchft's; a signal
    comes as soon as one serves."""
    found: list[int] = []

    class Server:
        def __init__(self, min_islands: int) -> None:
            found.append(min_islands)

        def close(self) -> None:
            found.append(0)

    def signalled(self: Lighthouse, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetero_framework.extras.islands.quorums.Quorums", Server)
    monkeypatch.setattr(Lighthouse, "wait", signalled)
    return found


def serve(bind: str, folder: Path, **options: Any) -> list[str]:
    said: list[str] = []
    keys = KeyDirectory(folder, ISLANDS)
    with pytest.raises(StoppedEarly, match="stopped by Ctrl-C") as found:
        command.serve(bind, 2, keys, KeyOptions(**options), said.append)
    assert found.value.exit_code == 75
    return said


def test_the_line_of_a_lighthouse_has_its_address_and_the_invite(tmp_path, started):
    bind = f"127.0.0.1:{free_ports(1)[0]}"
    [line] = serve(bind, tmp_path / "none")
    assert f"the lighthouse is at {bind}, without authentication" in line
    [line] = serve(bind, keys_of(tmp_path / "keys", "local", kind=ISLANDS).path)
    assert f"is at {bind}; `hetero invite --island NAME" in line
    assert started == [2, 0, 2, 0]  # all was closed, also the port


def test_a_lighthouse_that_others_reach_needs_keys(tmp_path, started, logged):
    bind = f"0.0.0.0:{free_ports(1)[0]}"
    with pytest.raises(IdentityError, match=r"the lighthouse is at 0\.0\.0\.0, where others"):
        command.serve(bind, 1, KeyDirectory(tmp_path / "none", ISLANDS), KeyOptions())
    assert not started
    assert serve(bind, keys_of(tmp_path / "keys", "local", kind=ISLANDS).path)
    assert not logged
    assert serve(bind, tmp_path / "none", insecure=True)
    assert "NO ENCRYPTION" in logged[0]


def test_an_address_that_cannot_be_bound_is_refused(tmp_path, started):
    keys = KeyDirectory(tmp_path, ISLANDS)
    with pytest.raises(UserError, match=r"--bind: .* has no port"):
        command.serve("127.0.0.1", 1, keys, KeyOptions())
    with closing(Listener("127.0.0.1", 0)) as taken, pytest.raises(NetworkError, match="in use"):
        command.serve(f"127.0.0.1:{taken.port}", 1, keys, KeyOptions())
    assert not started


class Process:
    """`hetero lighthouse` on all addresses, as a process of its own."""

    def __init__(self, keys: Path, port: int) -> None:
        self.port = port
        words = ["lighthouse", "--bind", f"0.0.0.0:{port}", "--keys", str(keys)]
        self.started = subprocess.Popen(
            [sys.executable, "-m", "hetero_framework", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self.started.stdout.readline()

    def kill(self) -> None:
        self.started.kill()
        self.started.communicate()


@pytest.fixture
def process(tmp_path):
    need_torchft()
    keys_of(tmp_path / "keys" / "islands", "local", kind=ISLANDS)
    found = Process(tmp_path / "keys", free_ports(1)[0])
    try:
        yield found
    finally:
        found.kill()


def island(name: str, folder: Path, port: int) -> LighthouseClient:
    access = Keyed(keys_of(folder / name, name, kind=ISLANDS), name, None)
    member = Member(name, "1", f"{name}.invalid:1")
    return LighthouseClient(("127.0.0.1", port), access, member, lambda: True)


def test_a_lighthouse_opens_one_port_to_others(process, tmp_path):
    started, port = process.started, process.port
    assert f"0.0.0.0:{port}" in process.line
    listening = [
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process(started.pid).net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]
    assert ("0.0.0.0", port) in listening
    assert {ip for ip, other in listening if other != port} == {"127.0.0.1"}
    with closing(island("garage", tmp_path, port)) as garage:
        assert [member.name for member in garage.next_view(30.0).members] == ["garage"]
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=30)
    assert started.returncode == 75
    assert "island garage is here, from 127.0.0.1" in errors
    assert "stopped: by SIGTERM" in errors
    assert "INFO" not in errors  # torchft's own words


@pytest.mark.long
def test_islands_meet_again_after_a_restart_of_the_lighthouse(process, tmp_path):
    with ExitStack() as stack:
        islands = [
            stack.enter_context(closing(island(name, tmp_path, process.port))) for name in "ab"
        ]

        def views() -> set[str]:
            asked = [in_background(partial(island.next_view, 60.0), "ask") for island in islands]
            return {",".join(m.name for m in found.result(60.0).members) for found in asked}

        while views() != {"a,b"}:  # who is there first is alone at first
            pass
        asked = in_background(partial(islands[0].next_view, 60.0), "ask")
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        process.kill()
        stack.callback(Process(tmp_path / "keys", process.port).kill)
        while len(islands[1].next_view(60.0).members) < 2:
            pass
        assert len(asked.result(60.0).members) == 2
