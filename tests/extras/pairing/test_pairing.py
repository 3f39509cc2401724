"""Pairing by one pasted line: it gives keys to the invited machine alone."""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hetero_framework.core import timeouts
from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import ISLANDS
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, NetworkError
from hetero_framework.extras.pairing import pairing
from hetero_framework.extras.pairing.pairing import (
    Configuration,
    Inviting,
    PairedMachine,
    Token,
    join,
)
from hetero_framework.security import authority as x509
from hetero_framework.security import certificates
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.keys import KeyDirectory
from tests import certificates as clocks
from tests.waiting import WAIT_S, wait_until

CONFIGURATION = Configuration("cluster.json", '{"any": "text, also ünïcode"}')


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Host:
    """The coordinator's machine while it waits for workers 1 and "two", or the lighthouse's while
    it waits for islands."""

    def __init__(self, folder: Path, *islands: str) -> None:
        self.keys = KeyDirectory(folder, *([ISLANDS] if islands else []))
        self.authority = certificates.ensure_authority(self.keys)[0]
        self.clock = Clock()
        self.told: list[tuple[Any, ...]] = []
        told = (islands, None) if islands else ([1, "two"], self._configure)
        self.inviting = Inviting(self.keys, self.authority, *told, self.clock)
        self.joined: list[str] = []
        self.listener = Listener("127.0.0.1", 0)
        self._acceptor = Acceptor(self.inviting, self._greet)
        self._accepting = in_background(lambda: self._acceptor.run(self.listener), "accept")

    def _configure(self, *told: Any) -> Configuration:
        self.told.append(told)
        return CONFIGURATION

    def _greet(self, stream: Any, identity: Any) -> None:
        self._acceptor.gone(stream)
        stream.close()
        self.joined.append(str(identity))

    def token(self, number: int = 0) -> Token:
        return self.inviting.invitations[number].token

    def join(
        self, token: Token, keep: Callable[[PairedMachine], None] = lambda joined: None
    ) -> PairedMachine:
        return join("127.0.0.1", self.listener.port, token, keep, ["cuda:0", "cuda:1"])

    def outcomes(self) -> list[str | None]:
        return [entry.outcome for entry in self.inviting.invitations]

    def close(self) -> None:
        self._acceptor.close()
        self.listener.close()
        self._accepting.result(WAIT_S)


@pytest.fixture
def host(tmp_path):
    with closing(Host(tmp_path / "host")) as made:
        yield made


def wrong(token: Token) -> Token:
    """As it is after a slip of the hand near its end: it still says which invitation it means."""
    return Token(token.authority, token.secret[:4] + bytes(12))


def stranger(token: Token, number: int) -> Token:
    """What somebody tries who knows no token of this authority."""
    return Token(token.authority, number.to_bytes(16, "big"))


def test_token_is_read_as_it_is_printed():
    token = Token(bytes(range(32)), bytes(range(16)))
    text = str(token)
    assert text.startswith("HT1-")
    assert len(text) == 83
    assert Token.parse(f" {text.upper()}\n") == token


@pytest.mark.parametrize("text", ["", "HT1-a-b", "HT1", "HT2" + "-aa" * 2, "é", "HT1-\n-\n"])
def test_other_texts_are_refused_as_a_token(text):
    with pytest.raises(IdentityError, match="not a token"):
        Token.parse(text)


def test_machine_that_joins_gets_key_identity_and_configuration(host, tmp_path):
    own = KeyDirectory(tmp_path / "box")
    joined = host.join(host.token(), lambda got: own.write_bundle(got.identity, got.bundle))
    assert joined.identity.worker == "1"
    assert joined.configuration == CONFIGURATION
    assert own.identity(1) == joined.identity
    assert x509.bundle_problem(own.read("worker-1.pem"), joined.identity) is None
    [coordinator, worker] = certificates.issued(host.keys)
    assert (coordinator.process, worker.process) == ("local", "1")
    assert int(worker.serial, 16) == x509.serial_of(own.read("worker-1.pem"))
    # Its key was made there, and the host has never seen it.
    private = own.read("worker-1.pem").split(b"-----END PRIVATE")[0][-120:]
    assert not [file for file in host.keys.path.iterdir() if private in file.read_bytes()]
    assert host.join(host.token(1)).identity.worker == "two"
    wait_until(lambda: host.inviting.over)
    assert host.outcomes() == ["used", "used"]
    wait_until(lambda: host.joined == ["worker 1", "worker two"])


def test_invitation_is_good_once(host):
    host.join(host.token())
    with pytest.raises(IdentityError, match="used, over or of another"):
        host.join(host.token())
    assert len(certificates.issued(host.keys)) == 2


def test_invitation_ends_after_15_minutes(host):
    host.clock.now += 15 * 60 + 1
    with pytest.raises(IdentityError, match="used, over or of another"):
        host.join(host.token())
    assert host.inviting.over
    assert len(certificates.issued(host.keys)) == 1


@pytest.mark.parametrize("tries", [4, 5])
def test_five_wrong_tries_end_the_named_invitation(tries, host):
    for _ in range(tries):
        with pytest.raises(IdentityError, match="not invited"):
            host.join(wrong(host.token()))
    if tries == 4:
        assert host.join(host.token()).identity.worker == "1"
        return
    with pytest.raises(IdentityError, match="not invited"):
        host.join(host.token())
    assert host.outcomes() == ["somebody tried 5 wrong tokens", None]
    assert host.join(host.token(1)).identity.worker == "two"


def test_tokens_without_an_invitation_change_no_invitation(host):
    before = [dict(vars(entry)) for entry in host.inviting.invitations]
    for number in range(12):
        with pytest.raises(IdentityError, match="not invited"):
            host.join(stranger(host.token(), number))
    assert [vars(entry) for entry in host.inviting.invitations] == before
    assert host.join(host.token()).identity.worker == "1"


def test_nothing_is_sent_to_another_authority_than_the_tokens(host):
    other = x509.Authority.make()
    received: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(WAIT_S)
            der = other.certificate_der
            sock.sendall(struct.pack(">I", len(der)) + der)
            received.append(sock.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = in_background(lambda: impostor(listener), "impostor")
        with pytest.raises(IdentityError, match="did not make this token"):
            join("127.0.0.1", listener.getsockname()[1], host.token(), lambda joined: None)
        served.result(WAIT_S)
    assert received == [b""]


def test_worker_of_the_cluster_cannot_invite(host, tmp_path):
    """It has a certificate of the right authority, but not the coordinator's."""
    keys = KeyDirectory(tmp_path / "thief")
    issued = certificates.issue_pem(host.keys, host.authority, 7)
    keys.write("coordinator.pem", b"# \n" + issued)
    host.inviting._keys = keys
    with pytest.raises(IdentityError, match="worker 7 answers there"):
        host.join(host.token())


def test_a_machine_that_cannot_save_its_key_does_not_confirm(host):
    def full(joined: PairedMachine) -> None:
        raise IdentityError("the disk is full")

    with pytest.raises(IdentityError, match="the disk is full"):
        host.join(host.token(), full)
    assert host.joined == []
    with pytest.raises(IdentityError, match="not invited"):
        host.join(host.token())


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"invitation": "", "request": 3, "proof": ""},
        {"invitation": 1, "request": "AAAA", "proof": ""},
        {"invitation": "", "request": "AAAA", "proof": "ü"},
        "right proof",
    ],
)
def test_an_invalid_request_gets_no_answer(request_, host):
    if request_ == "right proof":
        token = host.token()
        proof = token.proof(bytes(3))
        request_ = {"invitation": token.name, "request": "AAAA", "proof": proof}
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols([pairing._ALPN])
    with socket.create_connection(("127.0.0.1", host.listener.port), WAIT_S) as sock:
        (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
        sock.recv(length, socket.MSG_WAITALL)
        with made.wrap_socket(sock) as wrapped:
            data = json.dumps(request_).encode()
            wrapped.sendall(struct.pack(">I", len(data)) + data)
            answer = b""
            try:
                while more := wrapped.recv(4096):
                    answer += more
            except OSError:
                pass
    assert b"CERTIFICATE" not in answer
    assert len(certificates.issued(host.keys)) == 1


def test_lighthouse_invites_islands_without_a_configuration(tmp_path):
    own = KeyDirectory(tmp_path / "own", ISLANDS)
    with closing(Host(tmp_path / "host", "garage")) as host:
        found = host.join(host.token(), lambda got: own.write_bundle(got.identity, got.bundle))
        wait_until(lambda: host.joined == ["island garage"])
    assert (found.identity.island, found.configuration) == ("garage", None)
    assert own.identity("garage") == found.identity
    assert own.processes() == ["garage"]
    assert [entry.process for entry in certificates.issued(host.keys)] == ["local", "garage"]
    assert host.keys.processes() == ["local"]
    assert (host.keys.path / "lighthouse.pem").is_file()


def test_joining_without_an_open_invitation_is_an_error(monkeypatch):
    """Nothing listens, or what does waits for us: a run whose port that is."""
    token = Token(bytes(32), bytes(16))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(timeouts, "STRANGER_S", 0.1)
        with pytest.raises(NetworkError, match=f"nobody is inviting at 127.0.0.1:{port}") as found:
            join("127.0.0.1", port, token, lambda joined: None, timeout_s=0.1)
        assert "hetero invite ID" in str(found.value.hint)
    with pytest.raises(NetworkError, match=f"nobody is inviting at 127.0.0.1:{port}") as found:
        join("127.0.0.1", port, token, lambda joined: None, timeout_s=0.1)
    assert "hetero invite ID" in str(found.value.hint)
    with pytest.raises(NetworkError, match=r"cannot reach the inviting machine at nowhere\."):
        join("nowhere.invalid", port, token, lambda joined: None, timeout_s=0.1)


@pytest.mark.parametrize(("year", "here", "there"), clocks.YEARS)
def test_a_wrong_clock_is_reported_on_both_sides(year, here, there, tmp_path, monkeypatch, logged):
    clocks.keys_of_year(monkeypatch, year)
    with closing(Host(tmp_path / "host")) as host, pytest.raises(IdentityError, match=here):
        host.join(host.token())
    assert [line for line in logged if re.search(there, line)]
