"""A Unix socket in place of TLS between two processes of one user on one machine.

TLS has shown each side who the other is. The steps below go through TLS unless they say otherwise,
and an address decides nothing:

1. The dialler's note has its machine and namespaces, and a nonce.
2. If machine and namespaces are the acceptor's, too, its answer has a nonce and the path of a
   socket, in a folder that it has made and that no other user may enter.
3. The dialler connects to the socket, checks that the listener is of its own user (SO_PEERCRED) and
   sends the acceptor's nonce through it. A note says that it has done so, or why not.
4. The acceptor drops every connection of another user or with another nonce. Through the right one
   it sends the dialler's nonce back. The folder is gone before anything else is said.

From then on the link goes through the Unix socket, with its checksums, and TLS is closed. Where a
step fails, both sides know, and TLS stays; a wrong nonce ends the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hetero_framework.core.stream import PlainStream, Stream
from hetero_framework.errors import IdentityError

_log = logging.getLogger(__name__)
OFF = "HETERO_LOCAL_SOCKETS"
"""With "off" in this variable of the environment a process keeps to TLS."""
_KEY = "same_machine"
_PREFIX = "hetero-link-"
_NONCE_BYTES = 32
_NONCE = re.compile(rf"[0-9a-f]{{{_NONCE_BYTES}}}")
_PATH = re.compile(rf"/.*/{_PREFIX}[0-9]+-[a-z0-9_]+/s")
_BACKLOG = 8
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BUFFER_BYTES = 1 << 20


class Encrypted(Stream, Protocol):
    """TLS after its handshake."""

    def send_note(self, note: dict[str, Any], deadline: float) -> None: ...
    def receive_note(self, deadline: float) -> dict[str, Any]: ...


class LocalStream(PlainStream):
    """A Unix socket, called by the address of the connection that it stands for."""

    local = True

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        super().__init__(sock)
        self._name = peer

    @property
    def peer(self) -> str:
        return self._name


def _place() -> str | None:
    """A hash of this machine's boot and of the namespaces of its addresses and users. None where
    Unix sockets do not tell the peer's user, and where they are switched off."""
    if sys.platform != "linux" or os.environ.get(OFF) == "off":
        return None
    try:
        names = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
        whole = Path("/proc/sys/kernel/random/boot_id").read_text() + " ".join(names)
        return hashlib.sha256(whole.encode()).hexdigest()
    except OSError:
        return None


def _fields(note: dict[str, Any], *names: str) -> list[str] | None:
    """These values of a peer's note, if it has all of them."""
    values = note.get(_KEY)
    found = [values.get(name) for name in names] if isinstance(values, dict) else [None]
    return [str(value) for value in found] if all(isinstance(v, str) for v in found) else None


def _user(sock: socket.socket) -> int:
    size = _CREDENTIALS.size
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _says(sock: socket.socket, nonce: str, deadline: float) -> bool | None:
    """Whether `nonce` comes; None when the connection ends before it."""
    got = b""
    while len(got) < _NONCE_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            more = sock.recv(_NONCE_BYTES - len(got))
        except ConnectionError:
            more = b""
        if not more:
            return None
        got += more
    return hmac.compare_digest(got, nonce.encode("ascii", "replace"))


class Offer:
    """The side that has dialled; `note` goes to the other side."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(_NONCE_BYTES // 2)
        place = _place()
        self.note = {} if place is None else {_KEY: {"place": place, "nonce": self._nonce}}

    def join(self, stream: Encrypted, answer: dict[str, Any], who: str, deadline: float) -> Stream:
        """The stream to be used: the Unix socket that was offered, or TLS. Raises OSError, and
        IdentityError when the other end of the socket is not the peer."""
        offered = _fields(answer, "path", "nonce") if self.note else None
        if offered is None:
            return stream
        with contextlib.ExitStack() as on_error:
            sock = on_error.enter_context(socket.socket(socket.AF_UNIX))
            why = self._enter(sock, *offered, deadline=deadline)
            stream.send_note({} if why is None else {"stays": why}, deadline)
            if why is None:
                said = _says(sock, self._nonce, deadline)
                if said is False:
                    raise IdentityError(f"{who}: the Unix socket of this machine is another's")
                why = None if said else "the peer has not found this side there"
            if why is not None:
                _log.info("%s is on this machine; the link stays with TLS: %s", who, why)
                return stream
            local = LocalStream(sock, stream.peer)
            on_error.pop_all()
        return _switched(stream, local, who)

    def _enter(self, sock: socket.socket, path: str, nonce: str, *, deadline: float) -> str | None:
        """Connect and send the nonce; the reason if that fails. A peer cannot have anything sent to
        a socket that is not of this module."""
        if not (_PATH.fullmatch(path) and _NONCE.fullmatch(nonce)):
            return "that is no offer of a Unix socket"
        try:
            folder = os.lstat(os.path.dirname(path))
            if folder.st_mode != stat.S_IFDIR | 0o700 or folder.st_uid != os.geteuid():
                return "others may enter the folder of the Unix socket"
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(path)
            if _user(sock) != os.geteuid():
                return "it is of another user"
            sock.sendall(nonce.encode("ascii"))
        except (OSError, ValueError) as error:
            return f"no Unix socket: {getattr(error, 'strerror', None) or error}"
        return None


class Rendezvous:
    """The side that was dialled. It has a Unix socket during the handshake if the dialler's note
    says that the dialler is on this machine."""

    def __init__(self, note: dict[str, Any]) -> None:
        self.note: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._remove: Callable[[], None] = lambda: None
        theirs, here = _fields(note, "place", "nonce"), _place()
        if theirs is None or theirs[0] != here:
            return
        self._theirs, self._nonce = theirs[1], secrets.token_hex(_NONCE_BYTES // 2)
        try:
            self._open()
        except OSError as error:
            _log.info("no Unix socket, and all links stay with TLS: %s", error)
            self.close()

    def _open(self) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        for left in Path(base).glob(f"{_PREFIX}*-*"):  # perhaps of a process killed in a handshake
            process = left.name.removeprefix(_PREFIX).partition("-")[0]
            with contextlib.suppress(OSError):
                if not Path("/proc", process).exists() and left.lstat().st_uid == os.geteuid():
                    shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base)
        self._remove = lambda: shutil.rmtree(folder, ignore_errors=True)
        self._listener = socket.socket(socket.AF_UNIX)
        path = os.path.join(folder, "s")
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        self._listener.settimeout(0)  # the dialler connects before its note comes
        self.note = {_KEY: {"path": path, "nonce": self._nonce}}

    def meet(self, stream: Encrypted, who: str, deadline: float) -> Stream:
        """The stream to be used: the Unix socket if the dialler has come to it, else TLS."""
        if self._listener is None:
            return stream
        why = stream.receive_note(deadline).get("stays")
        found = self._found(self._listener, deadline) if why is None else None
        self.close()
        if found is None:
            why = why or "no process of this user has come with the nonce"
            _log.info("%s is on this machine; the link stays with TLS: %.200s", who, why)
            return stream
        with contextlib.ExitStack() as on_error:
            on_error.callback(found.close)
            found.sendall(self._theirs.encode("ascii", "replace"))
            local = LocalStream(found, stream.peer)
            on_error.pop_all()
        return _switched(stream, local, who)

    def _found(self, listener: socket.socket, deadline: float) -> socket.socket | None:
        for _ in range(_BACKLOG):
            with contextlib.ExitStack() as if_wrong, contextlib.suppress(OSError):
                sock = if_wrong.enter_context(listener.accept()[0])
                soon = min(deadline, time.monotonic() + 1.0)
                if _user(sock) == os.geteuid() and _says(sock, self._nonce, soon):
                    if_wrong.pop_all()
                    return sock
        return None

    def close(self) -> None:
        """Remove the socket and its folder."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._remove()


def _switched(stream: Stream, local: LocalStream, who: str) -> LocalStream:
    stream.close()
    _log.info("%s is on this machine: the link goes through a Unix socket, unencrypted", who)
    return local
