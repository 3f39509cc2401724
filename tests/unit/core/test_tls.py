"""Handshakes that must fail, and the error on each side; and which connections leave TLS. Wrong
peers are made with Python's ssl module and with certificates of their own."""

from __future__ import annotations

import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_framework.core import timeouts, tls
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.core.threads import in_background
from hetero_framework.core.tls import Certificate, TlsStream
from hetero_framework.errors import IdentityError
from tests.certificates import keys_of
from tests.fault_proxy import FaultProxy
from tests.waiting import WAIT_S

Peer = Callable[[socket.socket], Any]


def admit_all(certificate: Certificate, note: dict[str, Any]) -> None:
    return None


@pytest.fixture
def context(tmp_path):
    def made(process: int | str, *, server: bool, of: str = "own") -> ssl.SSLContext:
        keys = keys_of(tmp_path / f"{of}-{process}", process, of=of)
        return tls.context(keys.bundle(process), server=server)

    return made


def accepting(near: socket.socket, made: ssl.SSLContext, admit: Any = admit_all) -> Future[Any]:
    return in_background(lambda: tls.accept(PlainStream(near), made, admit, {}), "accept")


def refused_by_server(made: ssl.SSLContext, peer: Peer) -> BaseException | None:
    """What the accepting side raises when `peer` does what it does."""
    near, far = socket.socketpair()
    far.settimeout(WAIT_S)
    found = accepting(near, made)
    with far:
        peer(far)
        error = found.exception(WAIT_S)
        assert near.fileno() == -1  # closed
        return error


def test_both_sides_of_a_handshake_know_each_other(context):
    near, far = socket.socketpair()
    seen: list[Any] = []

    def admit(certificate: Certificate, note: dict[str, Any]) -> None:
        seen.append((str(certificate.identity), note))

    found = accepting(near, context(1, server=True), admit)
    stream = tls.dial(
        PlainStream(far), context("local", server=False), admit, {"revoked": ["a"]}, "worker 1"
    )
    accepted, certificate = found.result(WAIT_S)
    # The dialling side looks before it sends anything, and at the answer.
    assert seen == [("worker 1", {}), ("the coordinator", {"revoked": ["a"]}), ("worker 1", {})]
    assert certificate.serial > 0
    stream.write(deque([memoryview(b"hello")]))
    view = memoryview(bytearray(5))
    assert accepted.read(view, fill=True) == 5
    assert bytes(view) == b"hello"
    stream.close()
    assert accepted.read(view) == 0
    accepted.close()


def test_a_refused_peer_is_told_why(context):
    near, far = socket.socketpair()
    found = accepting(near, context(1, server=True), lambda *_: "it is Tuesday")
    with pytest.raises(IdentityError, match="worker 1 refused this machine: it is Tuesday"):
        tls.dial(PlainStream(far), context(2, server=False), admit_all, {}, "worker 1")
    with pytest.raises(IdentityError, match="it is Tuesday"):
        found.result(WAIT_S)


def test_the_dialler_sends_nothing_to_a_peer_of_another_identity(context):
    near, far = socket.socketpair()
    notes: list[Any] = []
    found = accepting(near, context(1, server=True), lambda c, note: notes.append(note))
    with pytest.raises(IdentityError, match="worker 2 is not who it should be: no"):
        tls.dial(PlainStream(far), context("local", server=False), lambda *_: "no", {}, "worker 2")
    with pytest.raises(OSError, match="ended the connection"):
        found.result(WAIT_S)
    assert notes == []


def test_other_clusters_do_not_trust_each_other(context):
    near, far = socket.socketpair()
    found = accepting(near, context(1, server=True))
    foreign = context("local", server=False, of="other")
    with pytest.raises(IdentityError, match="worker 1 has keys of another cluster"):
        tls.dial(PlainStream(far), foreign, admit_all, {}, "worker 1")
    with pytest.raises(IdentityError, match="for it this machine has keys of another cluster"):
        found.result(WAIT_S)


def stranger_context(*, alpn: bool = True, **settings: Any) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    if alpn:
        made.set_alpn_protocols([tls.ALPN])
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def in_tls(made: ssl.SSLContext) -> Peer:
    def peer(sock: socket.socket) -> None:
        try:
            with made.wrap_socket(sock) as wrapped:
                wrapped.recv(1)
        except OSError:
            pass

    return peer


def with_keys(folder: Path, of: str = "own", *, alpn: bool = True) -> ssl.SSLContext:
    made = stranger_context(alpn=alpn)
    made.load_cert_chain(keys_of(folder, "local", of=of).bundle("local"))
    return made


STRANGERS: dict[str, tuple[Callable[[Path], Peer], str]] = {
    "plaintext": (lambda _: lambda s: s.sendall(bytes(64)), "does not speak TLS"),
    "text": (lambda _: lambda s: s.sendall(b"HELO there, this is mail\r\n"), "not speak TLS"),
    "HTTP": (lambda _: lambda s: s.sendall(b"GET / HTTP/1.1\r\n\r\n"), "HTTP"),
    "TLS 1.2": (
        lambda _: in_tls(stranger_context(maximum_version=ssl.TLSVersion.TLSv1_2)),
        "does not speak TLS 1.3",
    ),
    "no certificate": (lambda _: in_tls(stranger_context()), "shows no certificate"),
    "other cluster": (lambda folder: in_tls(with_keys(folder, "other")), "another cluster"),
    "other protocol": (lambda folder: in_tls(with_keys(folder, alpn=False)), "another protocol"),
    "hangs up": (lambda _: lambda s: s.shutdown(socket.SHUT_WR), "ended the connection"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_stranger_is_refused_with_the_reason(kind, tmp_path, context):
    peer, reason = STRANGERS[kind]
    error = refused_by_server(context(1, server=True), peer(tmp_path / "stranger"))
    assert isinstance(error, OSError if kind == "hangs up" else IdentityError)
    assert reason in str(error)


def test_a_silent_peer_times_out(context, monkeypatch):
    monkeypatch.setattr(timeouts, "STRANGER_S", 0.0)
    error = refused_by_server(context(1, server=True), lambda sock: None)
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("text", IdentityError, "worker 1 does not speak TLS"),
        ("TLS 1.2", IdentityError, "worker 1 does not speak TLS 1.3"),
        ("no answer", OSError, "handshake"),
    ],
)
def test_the_dialler_reports_the_kind_of_peer(kind, error, words, context):
    near, far = socket.socketpair()
    near.settimeout(WAIT_S)

    def serve() -> None:
        with near:
            if kind == "TLS 1.2":
                made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                made.maximum_version = ssl.TLSVersion.TLSv1_2
                made.wrap_socket(near, server_side=True)
            near.recv(1)
            if kind == "text":
                near.sendall(b"220 mail ready, what do you want\r\n")
                near.recv(1)

    served = in_background(serve, "serve")
    with pytest.raises(error, match=words):
        tls.dial(PlainStream(far), context("local", server=False), admit_all, {}, "worker 1")
    served.exception(WAIT_S)


def pair_of_streams(context: Any) -> tuple[TlsStream, TlsStream, socket.socket, socket.socket]:
    """Who dialled, who accepted, and their sockets."""
    near, far = socket.socketpair()
    found = accepting(near, context(1, server=True))
    stream = tls.dial(PlainStream(far), context("local", server=False), admit_all, {}, "worker 1")
    return stream, found.result(WAIT_S)[0], far, near


def test_byte_that_was_changed_on_its_way_ends_the_stream(context):
    writer, reader, far, near = pair_of_streams(context)
    writer.write(deque([memoryview(b"x" * 100)]))
    record = bytearray(near.recv(4096))
    record[50] ^= 1
    # What the reader gets instead: over a second pair, since the first has been read.
    one, other = socket.socketpair()
    reader._plain = PlainStream(other)
    one.sendall(record)
    with pytest.raises(ConnectionError, match=r"changed on its way \(DECRYPTION_FAILED"):
        reader.read(memoryview(bytearray(100)))
    for sock in (one, other, far, near):
        sock.close()


def test_last_byte_counts_as_written_when_all_that_was_encrypted_is_sent(context):
    """Else the end of a frame could stay behind on an idle link."""
    writer, reader, _, _ = pair_of_streams(context)
    plain, room = writer._plain, 50

    def narrow(buffers: deque[memoryview], most: int = 0) -> int:
        nonlocal room
        count = plain.write(deque([buffers[0][:room]])) if room else 0
        room -= count
        return count

    writer._plain = SimpleNamespace(write=narrow, try_write=narrow)  # type: ignore[assignment]
    data = memoryview(bytes(range(250)) * 4)
    assert writer.try_write(deque([data]), 1 << 16) == 999
    assert writer.write(deque([data[999:]])) == 0
    room = 1 << 16
    assert writer.write(deque([data[999:]])) == 1
    view = memoryview(bytearray(1000))
    assert reader.read(view, fill=True) == 1000
    assert view == data
    plain.close()
    reader.close()


def test_tls_sends_no_readable_bytes(context):
    writer, reader, _, near = pair_of_streams(context)
    secret = b"the quick brown fox jumps over it"
    writer.write(deque([memoryview(secret)]))
    sent = near.recv(4096)
    assert len(sent) > len(secret)
    assert not any(secret[at : at + 8] in sent for at in range(len(secret) - 8))
    writer.close()
    reader.close()


@pytest.mark.parametrize("damage", ["cut", "two keys", "empty"])
def test_damaged_key_file_is_named(damage, tmp_path):
    keys = keys_of(tmp_path / "keys", 1, 2)
    file = keys.bundle(1)
    text = file.read_bytes()
    _, rest = text.split(b"-----BEGIN CERT", 1)
    other = keys.bundle(2).read_bytes().split(b"-----BEGIN CERT", 1)[0]
    changed = {"cut": text[:300], "two keys": other + b"-----BEGIN CERT" + rest, "empty": b""}
    file.write_bytes(changed[damage])
    with pytest.raises(IdentityError, match=r"worker-1\.pem is damaged: .") as found:
        tls.context(file, server=True)
    assert found.value.exit_code == 3
    assert "hetero invite" in str(found.value.hint)


@pytest.fixture
def meet(context, stack):
    """The streams of the dialler and of the acceptor, over TCP. `proxied`: a program stands in
    between."""

    def met(*, proxied: bool = False) -> list[Stream]:
        listener = stack.enter_context(closing(Listener("127.0.0.1", 0)))
        port = listener.port
        if proxied:
            proxy = FaultProxy(("127.0.0.1", port), follows_frames=False)
            stack.callback(proxy.stop)
            port = proxy.port
        server, client = context(1, server=True), context("local", server=False)
        accepted = in_background(
            lambda: tls.accept(listener.accept(), server, admit_all, {})[0], "accept"
        )
        dialled = connect(
            "127.0.0.1",
            port,
            WAIT_S,
            secure=lambda plain: tls.dial(plain, client, admit_all, {}, "worker 1"),
        )
        stack.callback(dialled.close)
        stack.callback(accepted.result(WAIT_S).close)
        return [dialled, accepted.result()]

    return met


def kinds(streams: list[Stream]) -> set[type]:
    """The streams' types, once bytes have passed both ways."""
    for near, far in (streams, streams[::-1]):
        view = memoryview(bytearray(5))
        assert near.write(deque([memoryview(b"hello")])) == 5
        assert far.read(view, fill=True) == 5
        assert bytes(view) == b"hello"
    return {type(stream) for stream in streams}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_connection_within_one_machine_leaves_tls(meet, monkeypatch, caplog):
    monkeypatch.setenv(tls.OFF, "on")
    caplog.set_level("INFO")
    streams = meet()
    assert kinds(streams) == {PlainStream}
    assert [stream.local for stream in streams] == [True, True]
    for who in ("worker 1", "the coordinator"):
        assert f"{who} is on this machine: the link goes on without encryption" in caplog.text


def test_a_connection_through_another_program_keeps_tls(meet):
    assert kinds(meet(proxied=True)) == {TlsStream}


@pytest.mark.parametrize(
    "places", [("a", None), (None, "a"), (None, None), ("a", "b"), ({"nonce": "a"}, "a")]
)
def test_other_machines_and_namespaces_keep_tls(places, meet, monkeypatch):
    found = iter(places)  # of the dialler, then of the acceptor
    monkeypatch.setattr(tls, "_place", lambda plain: next(found))
    assert kinds(meet()) == {TlsStream}


@pytest.mark.parametrize("ends", [[], [("10.0.0.1", 1), ("10.0.0.2", 2)]])
def test_ends_on_two_hosts_are_no_place(ends, monkeypatch):
    monkeypatch.setenv(tls.OFF, "on")
    monkeypatch.setattr(PlainStream, "ends", lambda stream: ends)
    one, other = socket.socketpair()
    with one, other:
        assert tls._place(PlainStream(one)) is None


def test_leaving_tls_can_be_switched_off(meet, monkeypatch):
    monkeypatch.setenv(tls.OFF, "off")
    assert kinds(meet()) == {TlsStream}


def test_the_acceptor_does_not_wait_for_ever_for_the_dialler_to_leave(meet, monkeypatch):
    monkeypatch.setattr(tls, "_place", lambda plain: "here")
    monkeypatch.setattr(tls, "_say_left", lambda plain, deadline: None)
    monkeypatch.setattr(timeouts, "STRANGER_S", 0.5)
    with pytest.raises(TimeoutError, match="did not complete the handshake in time"):
        meet()
