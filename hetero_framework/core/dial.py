"""Connecting two processes: `connect` dials with growing pauses, `Listener` accepts."""

from __future__ import annotations

import errno
import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hetero_framework.core import addresses, timeouts
from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.errors import NetworkError
from hetero_framework.units import plural

_log = logging.getLogger(__name__)
SMALL_SEGMENT_BYTES = 1200
"""Fits the smallest packets that IPv6 allows (1,280 bytes), and those of usual VPNs."""
_UNANSWERED_S = 5.0
"""A handshake that fails later than this was not refused: no answer came."""
DROPS_LARGE = "the network in between drops large packets without telling"
MTU_ADVICE = (
    "lower the MTU of the network interface that they pass, a VPN's for instance, on both machines"
    " (Linux: ip link set dev NAME mtu 1280)"
)
HANDSHAKE_HINT = (
    "it runs an old version, without keys or with --insecure-plaintext, or another program has "
    "this port, or passes it on to a machine where nothing listens"
)
REFUSED = "the machine answers, but nothing listens on that port"
"""The reason that `on_retry` is given when no process has the port."""


def connect(
    host: str,
    port: int,
    timeout_s: float,
    on_retry: Callable[[int, float, str], None] | None = None,
    *,
    who: str = "the peer",
    stop: threading.Event | None = None,
    secure: Callable[[Stream], Stream] = lambda stream: stream,
    small_packets: bool = False,
) -> Stream:
    """A connection to host:port, tried for `timeout_s` seconds, or until `stop` is set.
    `on_retry(attempt, elapsed_s, reason)` is called after each failed attempt that will be
    repeated. `secure` turns the plain stream into the stream to be used; an OSError from it is a
    failed attempt. With `small_packets` both ends send at most SMALL_SEGMENT_BYTES in one packet,
    where the system can. An attempt after an unanswered handshake does so too, since some networks
    drop large packets without telling. Raises NetworkError, which says what to check, and other
    errors of `secure`."""
    stop = stop or threading.Event()
    attempt, small, started = 0, small_packets, time.monotonic()
    while True:
        attempt += 1
        elapsed = time.monotonic() - started
        try:
            stream = _connect_once(host, port, min(10.0, max(0.1, timeout_s - elapsed)), small)
        except (OSError, UnicodeError) as error:
            reason, advice = _explain_connect(error, host, port)
        else:
            connected = time.monotonic()
            try:
                secured = secure(stream)
            except OSError as error:
                reason, advice = error.strerror or str(error), HANDSHAKE_HINT
                small = small_packets or time.monotonic() - connected > _UNANSWERED_S
            else:
                if small > small_packets:
                    text = "the handshake with %s at %s:%d came about with small packets only: %s"
                    _log.warning(text, who, host, port, f"{DROPS_LARGE}; {MTU_ADVICE}")
                return secured
        elapsed = time.monotonic() - started
        pause = min(5.0, 0.1 * 1.6 ** min(attempt, 20)) * random.uniform(0.5, 1.0)
        if elapsed + pause >= timeout_s or stop.is_set():
            raise NetworkError(
                f"cannot reach {who} at {host}:{port}: {reason} "
                f"(tried {plural(attempt, 'time')} in {elapsed:.1f} s)",
                hint=advice,
            )
        if on_retry is not None:
            on_retry(attempt, elapsed, reason)
        stop.wait(pause)


def _connect_once(host: str, port: int, timeout_s: float, small_packets: bool) -> PlainStream:
    sock = _open_socket(host, port, timeout_s, small_packets)
    if sock.getsockname() == sock.getpeername():
        # On the loopback a free port in the ephemeral range can connect to itself.
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    return _stream(sock)


def _open_socket(host: str, port: int, timeout_s: float, small_packets: bool) -> socket.socket:
    """As socket.create_connection: connect to the first address of the name that accepts."""
    if not small_packets:
        return socket.create_connection((host, port), timeout=timeout_s)
    failed = OSError("getaddrinfo returned nothing")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        with suppress(OSError, AttributeError):  # Windows cannot
            # It counts for both directions only where it is set before the connection.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            failed = error
        else:
            return sock
    raise failed


def _stream(sock: socket.socket) -> PlainStream:
    try:
        return PlainStream(sock)
    except OSError:
        sock.close()  # it was reset before it could be set up
        raise


def _explain_connect(error: OSError | UnicodeError, host: str, port: int) -> tuple[str, str]:
    """(what happened, what to check) for a failed connection attempt."""
    if isinstance(error, (socket.gaierror, UnicodeError)):  # "box..lan" is no name at all
        return (
            f"the name {host!r} is not known here",
            "check the spelling, or give the machine's IP address in the configuration",
        )
    if isinstance(error, ConnectionRefusedError):
        return REFUSED, f"start the worker there and check that its port is {port}"
    if isinstance(error, TimeoutError):
        return (
            "no answer",
            f"check that the machine is on, that {host} is its address, and that its firewall "
            f"lets TCP port {port} in",
        )
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN):
        return (
            "there is no route to that address",
            f"check the network connection of this machine and that {host} is in a network that "
            "it can reach",
        )
    return error.strerror or str(error), f"check the address {host} and the port {port}"


_BACKLOG = 128
"""Most connections that wait to be accepted. For one more the system drops the first packet, and
the sender tries again after a second."""


class Listener:
    """A listening socket; `port` 0 takes a free one. Raises NetworkError that says what to do."""

    def __init__(self, host: str, port: int) -> None:
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise _explain_listen(error, host, port) from error
        try:
            # Allows a restart while old connections linger, but never two listeners on one port, as
            # SO_REUSEADDR would on Windows.
            if sys.platform == "win32":
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise _explain_listen(error, host, port) from error
        self._socket.settimeout(timeouts.TICK_S)
        self._closed = False
        self._in_use = threading.Lock()  # a socket closed inside accept could be another's by then
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> PlainStream:
        """The next connection. Raises NetworkError when the listener was closed, by any thread, and
        OSError when the system has no descriptor or memory: pause, then call again."""
        while not self._closed:
            try:
                with self._in_use:
                    if not self._closed:
                        return _stream(self._socket.accept()[0])
            except (TimeoutError, ConnectionAbortedError, ConnectionResetError):
                continue  # no connection, or one that was given up before it was accepted
        raise NetworkError(f"the listener on {self.host}:{self.port} is closed")

    def close(self) -> None:
        self._closed = True
        with self._in_use:
            self._socket.close()


def _explain_listen(error: OSError, host: str, port: int) -> NetworkError:
    what, hint = error.strerror or str(error), None
    # Windows says "not permitted" for a port that another program has exclusively.
    taken = sys.platform == "win32" and error.errno == errno.EACCES
    if error.errno == errno.EADDRINUSE or taken:
        what = "the port is in use"
        hint = (
            f"stop the program that uses port {port} (another worker?), or change this "
            'entry\'s "port" in the configuration, on all machines'
        )
    elif isinstance(error, socket.gaierror):
        what = f"the name {host!r} is not known here"
        hint = 'give an IP address of this machine in its entry\'s "ip"'
    elif error.errno == errno.EADDRNOTAVAIL:
        what = f"this machine does not have the address {host}"
        hint = (
            "change this entry's \"ip\" in the configuration to one of this machine's addresses; it"
            f" has {', '.join(addresses.addresses_for_others()[:6])}"
        )
    elif error.errno in (errno.EACCES, errno.EPERM):
        what, hint = "not permitted", 'ports below 1024 need special rights; choose a higher "port"'
    return NetworkError(f"cannot listen on {host}:{port}: {what}", hint=hint)
