"""Two processes of one machine: the Unix socket, who gets into it, and what stays with TLS."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.core import same_machine, timeouts, tls
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.same_machine import OFF, LocalStream, Rendezvous
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.core.threads import in_background
from hetero_framework.core.tls import TlsStream
from hetero_framework.errors import IdentityError
from tests.certificates import keys_of
from tests.waiting import WAIT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED")


@pytest.fixture(autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets are."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv(OFF, raising=False)
    return folder


@pytest.fixture
def meet(tmp_path: Path, stack: ExitStack) -> Callable[[], tuple[Stream, Stream]]:
    """The streams of the dialler and of the acceptor."""
    keys = keys_of(tmp_path, "local", 1)

    def met() -> tuple[Stream, Stream]:
        near, far = socket.socketpair()
        server = tls.context(keys.bundle(1), server=True)
        accepted = in_background(
            lambda: tls.accept(PlainStream(near), server, lambda *_: None, {})[0], "accept"
        )
        client = tls.context(keys.bundle("local"), server=False)
        try:
            dialled = tls.dial(PlainStream(far), client, lambda *_: None, {}, "worker 1")
            stack.callback(dialled.close)
        finally:
            if accepted.exception(WAIT_S) is None:
                stack.callback(accepted.result().close)
        return dialled, accepted.result()

    return met


def passes(one: Stream, other: Stream) -> bool:
    """Whether bytes pass in both directions."""
    for near, far in ((one, other), (other, one)):
        view = memoryview(bytearray(5))
        assert near.write(deque([memoryview(b"hello")])) == 5
        assert far.read(view, fill=True) == 5
        assert bytes(view) == b"hello"
    return True


def test_both_ends_go_over_to_the_unix_socket_and_leave_no_file(
    meet: Any, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    switched, left = same_machine._switched, []

    def noted(*found: Any) -> LocalStream:
        left.append(list(base.iterdir()))
        return switched(*found)

    monkeypatch.setattr(same_machine, "_switched", noted)
    dialled, accepted = meet()
    assert left == [[], []]  # a process that is killed from now on leaves nothing
    assert {type(dialled), type(accepted)} == {LocalStream}
    assert passes(dialled, accepted)
    assert list(base.iterdir()) == []
    for who in ("worker 1", "the coordinator"):
        assert f"{who} is on this machine: the link goes through a Unix socket" in caplog.text


@pytest.mark.parametrize("places", [("a", None), (None, "a"), (None, None), ("a", "b")])
def test_other_machines_and_namespaces_stay_with_tls(
    places: tuple[str | None, str | None], meet: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(places)  # of the dialler, then of the acceptor
    monkeypatch.setattr(same_machine, "_place", lambda: next(found, None))
    dialled, accepted = meet()
    assert {type(dialled), type(accepted)} == {TlsStream}
    assert passes(dialled, accepted)
    assert list(base.iterdir()) == []


def test_it_can_be_switched_off(meet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF, "off")
    assert isinstance(meet()[0], TlsStream)


@pytest.mark.parametrize("who", ["the listener", "the one that comes"])
def test_another_user_stays_with_tls(who: str, meet: Any, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    users = itertools.chain([os.geteuid()] * (who != "the listener"), itertools.repeat(4321))
    monkeypatch.setattr(same_machine, "_user", lambda sock: next(users))
    dialled, accepted = meet()
    assert {type(dialled), type(accepted)} == {TlsStream}
    assert passes(dialled, accepted)
    assert caplog.text.count("the link stays with TLS") == 2


def test_who_comes_without_the_nonce_is_dropped_and_the_peer_is_found(
    meet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers: list[socket.socket] = []
    opened = Rendezvous._open

    def crowded(self: Rendezvous) -> None:
        opened(self)
        for said in (b"x" * 32, b"", b"short"):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(self.note["same_machine"]["path"])
            strangers[-1].sendall(said)
            if said != b"x" * 32:
                strangers[-1].shutdown(socket.SHUT_WR)

    monkeypatch.setattr(Rendezvous, "_open", crowded)
    dialled, accepted = meet()
    assert isinstance(dialled, LocalStream)
    assert passes(dialled, accepted)
    for stranger in strangers:
        stranger.settimeout(WAIT_S)
        assert stranger.recv(1) == b""
        stranger.close()


def test_a_listener_without_the_dialler_s_nonce_ends_the_connection(
    meet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Rendezvous.__init__

    def wrong(self: Rendezvous, note: dict[str, Any]) -> None:
        made(self, {"same_machine": {**note["same_machine"], "nonce": "f" * 32}})

    monkeypatch.setattr(Rendezvous, "__init__", wrong)
    with pytest.raises(IdentityError, match="the Unix socket of this machine is another's"):
        meet()


@pytest.mark.parametrize(
    ("folder", "mode", "nonce", "why"),
    [
        ("hetero-link-1-abc", 0o755, "0" * 32, "others may enter"),
        ("hetero-link-1-abc", 0o770, "0" * 32, "others may enter"),
        ("systemd", 0o700, "0" * 32, "no offer"),
        ("hetero-link-1-abc", 0o700, "rm -r $HOME\n", "no offer"),
        ("hetero-link-1-abc", 0o700, "0" * 31, "no offer"),
    ],
)
def test_a_peer_cannot_make_the_dialler_enter_another_socket(
    folder: str, mode: int, nonce: str, why: str, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (base / folder).mkdir()
    (base / folder).chmod(mode)
    with socket.socket(socket.AF_UNIX) as victim:
        victim.bind(str(base / folder / "s"))
        victim.listen()
        victim.settimeout(0)
        dialler, notes = same_machine.Offer(), Notes()
        offer = {"same_machine": {"path": str(base / folder / "s"), "nonce": nonce}}
        assert dialler.join(notes, offer, "it", time.monotonic() + WAIT_S) is notes  # type: ignore[arg-type,comparison-overlap]
        assert why in notes.sent[0]["stays"]
        with pytest.raises(BlockingIOError):
            victim.accept()


class Notes:
    """TLS, of which only notes are used."""

    peer = "1.2.3.4:5"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send_note(self, note: dict[str, Any], deadline: float) -> None:
        self.sent.append(note)


@pytest.mark.parametrize("said", [None, 1, [], {}, {"place": 1, "nonce": "a"}, {"place": "x"}])
def test_a_note_of_another_form_is_no_offer(said: Any, base: Path) -> None:
    tls_ = Notes()
    assert Rendezvous({"same_machine": said}).note == {}
    assert same_machine.Offer().join(tls_, {"same_machine": said}, "it", 0.0) is tls_  # type: ignore[arg-type,comparison-overlap]
    assert (tls_.sent, list(base.iterdir())) == ([], [])


def test_without_a_place_for_the_socket_tls_stays(meet: Any, base: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / ("long" * 40)))
    assert isinstance(meet()[0], TlsStream)


def test_what_a_killed_process_left_is_removed_by_the_next_one(meet: Any, base: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(WAIT_S)
    left = base / f"hetero-link-{gone.pid}-abc"
    alive = base / f"hetero-link-{os.getppid()}-abc"
    for folder in (left, alive):
        folder.mkdir(0o700)
        (folder / "s").touch()
    meet()
    assert list(base.iterdir()) == [alive]


_PEER = """
import sys, time
from collections import deque
from pathlib import Path
from hetero_framework.core import tls
from hetero_framework.core.dial import Listener, connect
keys, side, port = sys.argv[1:]
if side == "accepts":
    listener = Listener("127.0.0.1", 0)
    print(listener.port, flush=True)
    made = tls.context(Path(keys) / "worker-1.pem", server=True)
    stream = tls.accept(listener.accept(), made, lambda *_: None, {})[0]
else:
    made = tls.context(Path(keys) / "coordinator.pem", server=False)
    stream = connect("127.0.0.1", int(port), 10.0,
        secure=lambda plain: tls.dial(plain, made, lambda *_: None, {}, "it"))
assert stream.local
stream.write(deque([memoryview(b"x")]))
time.sleep(60)
"""


@pytest.mark.parametrize("side", ["accepts", "dials"])
def test_a_killed_peer_is_noticed_at_once_and_leaves_no_file(
    side: str, base: Path, tmp_path: Path
) -> None:
    keys = keys_of(tmp_path, "local", 1)
    listener = Listener("127.0.0.1", 0)
    command = [sys.executable, "-c", _PEER, str(keys.path), side, str(listener.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        if side == "accepts":
            assert peer.stdout is not None
            port = int(peer.stdout.readline())
            client = tls.context(keys.bundle("local"), server=False)
            stream: Stream = connect(
                "127.0.0.1",
                port,
                WAIT_S,
                secure=lambda plain: tls.dial(plain, client, lambda *_: None, {}, "it"),
            )
        else:
            server = tls.context(keys.bundle(1), server=True)
            stream = tls.accept(listener.accept(), server, lambda *_: None, {})[0]
        assert stream.local
        view = memoryview(bytearray(1 << 20))
        assert stream.read(view[:1], fill=True) == 1
        peer.send_signal(signal.SIGKILL)
        peer.wait(WAIT_S)
        assert stream.read(view) == 0
        assert list(base.iterdir()) == []
    stream.close()
    listener.close()


def test_the_dialler_does_not_wait_for_ever(meet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STRANGER_S", 0.5)
    monkeypatch.setattr(Rendezvous, "_found", lambda *_: time.sleep(1.0))
    with pytest.raises(TimeoutError):
        meet()
