"""The way between islands and torchft's lighthouse, over the product's own encrypted links.

torchft knows no encryption and asks nobody who he is. So its lighthouse listens on the loopback of
its machine, and its clients connect to a port on the loopback of theirs; between these two, bytes
are handed on as they are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial

from hetero_framework.config import host_and_port
from hetero_framework.core import timeouts
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.identity import Identity
from hetero_framework.core.send_queue import drop_sent
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import HeteroError, IdentityError, NetworkError
from hetero_framework.islands import notes
from hetero_framework.islands.notes import Notes
from hetero_framework.islands.presence import Presence
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.access import LOOPBACK_ONLY, Access

_log = logging.getLogger(__name__)
MAX_LINKS = 128
MAX_LINKS_OF_ONE = 16
"""An island needs one, another one until a broken one has been noticed, and one for a note; without
keys all islands of a machine count as one."""
_DIAL_S = 2.0
"""Who connects tries again by himself; longer, and pauses would grow beyond what islands wait for
each other at a lighthouse that was started again (`SETTLE_S`)."""
_CHUNK_BYTES = 1 << 16


def _nothing() -> None:
    return


class _Passage(ABC):
    """Accepts links on `listener`, for those whom `access` admits, and has them lead onward."""

    def __init__(self, listener: Listener, access: Access, most_of_one: int) -> None:
        self._listener = listener
        self._most_of_one = most_of_one
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[Stream, str] = {}  # who has come on it
        self._carried: set[Future[None]] = set()
        self._acceptor = Acceptor(access, self._greet)
        self._accepting = in_background(
            lambda: self._acceptor.run(listener), "accept in the tunnel"
        )

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def links(self) -> int:
        """How many are open."""
        return len(self._open)

    def wait(self, seconds: float) -> None:
        """Serve for so long. Raises what ended it, if that was an error nobody expected."""
        if wait_for([self._accepting], seconds):
            self._accepting.result()

    def close(self) -> None:
        """Ends all links. Safe to call twice."""
        self._closed.set()
        self._acceptor.close()
        self._listener.close()
        with self._lock:
            carried = set(self._carried)
            for stream in self._open:
                stream.stop()
        wait_for([self._accepting, *carried], timeouts.EXIT_S)

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        self._acceptor.gone(stream)
        who = str(identity) if identity is not None else stream.peer.rpartition(":")[0]
        if not self._add(stream, who):
            stream.close()
            return
        carried = in_background(lambda: self._carry(stream, who), "tunnel")
        with self._lock:
            self._carried.add(carried)
        carried.add_done_callback(lambda done: self._ended(done, stream, who))

    def _add(self, stream: Stream, who: str) -> bool:
        with self._lock:
            if self._closed.is_set():
                return False
            of_one = Counter(self._open.values())[who]
            if self.links >= MAX_LINKS or of_one >= self._most_of_one:
                _log.warning("refused %s: it has %d links already", who, of_one)
                return False
            self._open[stream] = who
        if not of_one:
            self._came(who, stream.peer)
        return True

    def _ended(self, done: Future[None], stream: Stream, who: str) -> None:
        with self._lock:
            self._carried.discard(done)
            del self._open[stream]
            last = who not in self._open.values()
        stream.close()
        if last:
            self._left(who)
        if (error := done.exception()) is not None:
            _log.error("a link of %s ended: %r", who, error)

    @abstractmethod
    def _carry(self, stream: Stream, who: str) -> None:
        """Lead a link onward, until it ends."""

    def _came(self, who: str, peer: str) -> None:
        """The first link of somebody."""
        _log.debug("%s is here, from %s", who, peer)

    def _left(self, who: str) -> None:
        """The last one has ended."""
        _log.debug("%s has left", who)


class Entrance(_Passage):
    """On the lighthouse's machine: the links of islands lead to its `port` of the loopback, and
    while they live `beat(id)` is called for each island. Those that ask for notes are answered
    here."""

    def __init__(
        self,
        listener: Listener,
        access: Access,
        port: int,
        beat: Callable[[str], None] = lambda id: None,
    ) -> None:
        self._port = port
        self._notes = Notes()
        self._presence = Presence(beat)
        super().__init__(listener, access, MAX_LINKS_OF_ONE)

    def close(self) -> None:
        super().close()
        self._presence.close()

    def _carry(self, stream: Stream, who: str) -> None:
        first = _read_line(stream, notes.OPENING, timeouts.LIVENESS_S)
        heard = _nothing
        if first.startswith(notes.OF_ISLAND):
            line, _, first = first.removeprefix(notes.OF_ISLAND).partition(b"\n")
            id = line.decode(errors="replace")
            if who.startswith("island ") and who != f"island {id.partition(':')[0]}":
                _log.warning("refused %s: it says that it is %r", who, id[:80])
                return
            heard = partial(self._presence.heard, stream, id)
        elif first == notes.SINCE:
            _write(stream, notes.since_line(self._presence.since_s()), _DIAL_S)
            return
        elif first.startswith(notes.OPENING):
            _write(stream, self._notes.answer(first), _DIAL_S)
            return
        try:
            local = connect("127.0.0.1", self._port, _DIAL_S, who="torchft", stop=self._closed)
        except HeteroError as error:
            _log.warning("%s", error.message)
            return
        try:
            splice(stream, local, first, heard=heard)
        finally:
            self._presence.gone(stream)

    def _came(self, who: str, peer: str) -> None:
        _log.info("%s is here, from %s", who, peer)

    def _left(self, who: str) -> None:
        _log.info("%s has left", who)


class Tunnel(_Passage):
    """On an island's coordinator: a port of the loopback that leads to the lighthouse at `address`.
    Whatever connects to it is a link of its own, of the island `id` if that is given."""

    def __init__(self, address: tuple[str, int], access: Access, id: str = "") -> None:
        self._address, self._access = address, access
        self._first = notes.OF_ISLAND + id.encode() + b"\n" if id else b""
        self._trouble: HeteroError | None = None
        super().__init__(Listener("127.0.0.1", 0), LOOPBACK_ONLY, MAX_LINKS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def where(self) -> str:
        return host_and_port(*self._address)

    def trouble(self) -> HeteroError | None:
        """Why the last link could not be made."""
        return self._trouble

    def ask(self, question: bytes) -> bytes:
        """The lighthouse's answer to a line for its notes; nothing where none comes."""
        with contextlib.suppress(HeteroError):
            return ask_lighthouse(self._address, self._access, question, self._closed)
        return b""

    def _carry(self, stream: Stream, who: str) -> None:
        port = self._address[1]
        try:
            far = _dial(self._address, self._access, self._closed)
        except IdentityError as error:
            self._trouble = error
            return
        except NetworkError as error:
            hint = f"start `hetero lighthouse` there; the firewall has to let TCP port {port} in"
            self._trouble = NetworkError(error.message, hint=hint)
            return
        self._trouble = None
        _write(far, self._first, _DIAL_S)
        splice(far, stream)


def ask_lighthouse(
    address: tuple[str, int],
    access: Access,
    question: bytes,
    stop: threading.Event | None = None,
) -> bytes:
    """The answer of the lighthouse at `address` to a line for its notes; nothing where it is none.
    Raises NetworkError, and IdentityError where keys are wrong."""
    with closing(_dial(address, access, stop)) as far:
        _write(far, question, _DIAL_S)
        return _read_line(far, b"", _DIAL_S)


def _dial(address: tuple[str, int], access: Access, stop: threading.Event | None) -> Stream:
    return connect(
        *address,
        _DIAL_S,
        who="the lighthouse",
        stop=stop,
        secure=lambda plain: access.dialled(plain, "local"),
    )


def splice(
    network: Stream,
    local: Stream,
    first: bytes = b"",
    patience_s: float = timeouts.LIVENESS_S,
    heard: Callable[[], None] = _nothing,
) -> None:
    """Hand on `first`, and what comes on either until one of them ends, or nothing came from the
    network for `patience_s` seconds: who is there beats; `heard` is called when something does.
    `network` is closed then, and both have ended."""

    def end() -> None:
        network.stop()
        local.stop()

    heard()  # `first` has come
    back = in_background(lambda: _copy(local, network, float("inf"), end), "tunnel, other way")
    try:
        if _write(local, first, patience_s):
            _copy(network, local, patience_s, end, heard)
    finally:
        end()
        wait_for([back], timeouts.EXIT_S)
        network.close()
        local.close()
    back.result()


def _copy(
    source: Stream,
    sink: Stream,
    patience_s: float,
    end: Callable[[], None],
    heard: Callable[[], None] = _nothing,
) -> None:
    room = memoryview(bytearray(_CHUNK_BYTES))
    heard_at = time.monotonic()
    try:
        while (count := source.read(room)) != 0:
            if count is None:
                if time.monotonic() - heard_at > patience_s:
                    return
                continue
            heard_at = time.monotonic()
            heard()
            if not _write(sink, room[:count], patience_s):
                return
    except OSError:
        pass  # one of the two is gone
    finally:
        end()


def _write(sink: Stream, data: bytes | memoryview, patience_s: float) -> bool:
    """Whether all of it was taken, in time."""
    began = time.monotonic()
    pending = deque([memoryview(data)] if len(data) else [])
    try:
        while pending:
            drop_sent(pending, sink.write(pending))
            if time.monotonic() - began > patience_s:
                return False
    except OSError:
        return False
    return True


def _read_line(source: Stream, opening: bytes, patience_s: float) -> bytes:
    """What comes first: a whole line where it begins with `opening`, else as much as is there.
    Less where the link ends, or nothing more comes for so long."""
    room = memoryview(bytearray(notes.MAX_BYTES))
    length, began = 0, time.monotonic()
    with contextlib.suppress(OSError):
        while length < len(room) and time.monotonic() - began <= patience_s:
            if (count := source.read(room[length:])) == 0:
                break
            length += count or 0
            said = bytes(room[:length])
            if length and (b"\n" in said or not opening.startswith(said[: len(opening)])):
                break
    return bytes(room[:length])
