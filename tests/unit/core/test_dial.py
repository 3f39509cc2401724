from __future__ import annotations

import errno
import socket
import threading
from contextlib import closing
from typing import Any

import pytest

from hetero_framework.core import dial
from hetero_framework.core.dial import Listener, connect
from hetero_framework.errors import NetworkError
from tests.cases import raising
from tests.samples import free_ports
from tests.waiting import WAIT_S


def test_the_error_for_a_port_in_use_names_the_address():
    with closing(Listener("127.0.0.1", 0)) as first:
        said = rf"127.0.0.1:{first.port}: the port is in use\n.*\"port\""
        with pytest.raises(NetworkError, match=said):
            Listener("127.0.0.1", first.port)


def test_port_can_be_taken_again_after_a_connection(stack):
    with closing(Listener("127.0.0.1", 0)) as first:
        port = first.port
        near = stack.enter_context(connect("127.0.0.1", port, WAIT_S)._socket)
        far = first.accept()
    far.close()  # this side closes first: its port lingers in TIME_WAIT
    assert near.recv(1) == b""
    near.close()
    Listener("127.0.0.1", port).close()


def test_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(NetworkError, match=r"does not have the address 198\.51\.100\.7"):
        Listener("198.51.100.7", 0)


@pytest.mark.skipif(not hasattr(socket, "TCP_MAXSEG"), reason="needs TCP_MAXSEG")
def test_a_handshake_that_goes_unanswered_is_tried_with_small_packets(stack, monkeypatch, logged):
    """A network that drops large packets without telling, at both ends."""
    tried: list[int] = []
    monkeypatch.setattr(dial, "_UNANSWERED_S", -1.0)

    def segment(stream: Any) -> int:
        return stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)

    def secure(stream: Any) -> Any:
        tried.append(segment(stream))
        if len(tried) == 1:
            stream.close()
            raise TimeoutError(errno.ETIMEDOUT, "nothing came")
        return stream

    with closing(Listener("127.0.0.1", 0)) as listener:
        stream = connect("127.0.0.1", listener.port, WAIT_S, secure=secure)
        stack.enter_context(stream._socket)
        far = [stack.enter_context(listener.accept()._socket) for _ in tried]
        assert tried[0] > dial.SMALL_SEGMENT_BYTES >= tried[1]
        assert far[1].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= tried[1]
    assert len(logged) == 1
    assert "came about with small packets only" in logged[0]


def test_accept_ends_when_closed():
    listener = Listener("127.0.0.1", 0)
    closer = threading.Timer(0.05, listener.close)
    closer.start()
    with pytest.raises(NetworkError, match="closed"):
        listener.accept()
    closer.join()


def test_connect_waits_for_a_listener_that_starts_later(stack):
    (port,) = free_ports(1)
    started: list[Listener] = []
    retries: list[tuple[int, float, str]] = []

    def on_retry(attempt: int, elapsed_s: float, reason: str) -> None:
        retries.append((attempt, elapsed_s, reason))
        if attempt == 2:
            started.append(stack.enter_context(closing(Listener("127.0.0.1", port))))

    stack.enter_context(closing(connect("127.0.0.1", port, WAIT_S, on_retry)))
    stack.enter_context(closing(started[0].accept()))
    assert [attempt for attempt, _, _ in retries] == [1, 2]
    assert "nothing listens" in retries[0][2]


def test_a_refused_connect_names_peer_address_time_and_advice():
    (port,) = free_ports(1)
    with pytest.raises(NetworkError) as caught:
        connect("127.0.0.1", port, 0.3, who="worker 2")
    assert f"cannot reach worker 2 at 127.0.0.1:{port}: the machine answers" in str(caught.value)
    assert "start the worker there" in str(caught.value)


def test_connect_failures_have_different_texts(monkeypatch):
    texts = set()
    for error in (
        TimeoutError(),
        ConnectionRefusedError(),
        socket.gaierror(socket.EAI_NONAME, "unknown"),
        OSError(101, "Network is unreachable"),
        OSError(5, "Input/output error"),
    ):
        monkeypatch.setattr(socket, "create_connection", raising(error))
        with pytest.raises(NetworkError) as caught:
            connect("box", 9999, 0.05)
        texts.add(str(caught.value).partition("(tried")[0])
    assert len(texts) == 5


@pytest.mark.parametrize("host", ["box..lan", "x" * 64 + ".lan"])
def test_connect_to_a_name_that_cannot_be_encoded_says_it_is_not_known(host):
    with pytest.raises(NetworkError, match="is not known here"):
        connect(host, 9999, 0.05)


def test_connect_can_be_stopped():
    (port,) = free_ports(1)
    stop = threading.Event()
    with pytest.raises(NetworkError):
        connect("127.0.0.1", port, 600, lambda *retry: stop.set(), stop=stop)


def test_accept_that_the_system_cannot_serve_leaves_the_listener_usable(monkeypatch):
    with closing(Listener("127.0.0.1", 0)) as listener:
        real = listener._socket

        class NoDescriptors:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def accept(self) -> Any:
                raise OSError(errno.EMFILE, "Too many open files")

        listener._socket = NoDescriptors()  # type: ignore[assignment]
        with pytest.raises(OSError, match="Too many open files"):
            listener.accept()
        listener._socket = real
        with closing(connect("127.0.0.1", listener.port, WAIT_S)):
            listener.accept().close()
