"""Accepts connections, a few at a time, and authenticates them.

A stranger is a connection that is not authenticated yet. There are at most MAX_STRANGERS; one more
replaces a stranger of the address that has the most. Each TLS handshake has a thread of its own, so
nothing waits for a slow one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, IPv6Network
from typing import Protocol

from hetero_framework import log
from hetero_framework.core import addresses, timeouts
from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import Identity
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background
from hetero_framework.errors import IdentityError, NetworkError, ResourceError

_log = logging.getLogger(__name__)
MAX_STRANGERS = 16
_RATE_PER_S, _BURST = 20.0, 64.0
_MAX_ADDRESSES = 1024

Greet = Callable[[Stream, "Identity | None"], None]


class RateLimit:
    """How often an address may connect. Not safe for several threads."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # by address: connections left, as of when

    def allows(self, address: str, now: float) -> bool:
        left, at = self._left.pop(address, (_BURST, now))
        left = min(_BURST, left + (now - at) * _RATE_PER_S)
        self._left[address] = (left - 1 if left >= 1 else left, now)  # moved to the end
        if len(self._left) > _MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        return left >= 1


@dataclass(frozen=True, eq=False)
class _Stranger:
    plain: Stream  # as it was accepted, later the stream that it has become
    peer: str

    @property
    def group(self) -> str:
        """The address without the port; for IPv6 its /64, all of which one machine may use."""
        address = addresses.parsed(self.peer.rpartition(":")[0])
        if isinstance(address, IPv6Address):
            plain = address.ipv4_mapped
            return str(plain or IPv6Network((int(address), 64), strict=False))
        return str(address)


class Gate(Protocol):
    """The part of an access that decides on peers that dial; see `access.Plaintext`."""

    @property
    def encrypts(self) -> bool: ...
    def accepted(self, stream: Stream) -> tuple[Stream, Identity | None]: ...


class Acceptor:
    """Calls `greet(stream, identity)` for each peer that `access` admits: in a thread per peer, or
    without keys in the thread of `run`. The owner reports the end of each such stream to `gone`."""

    def __init__(self, access: Gate, greet: Greet) -> None:
        self._access = access
        self._greet = greet
        self._rates = RateLimit()
        self._lock = threading.Lock()
        self._closed = False
        self._strangers: dict[Stream, _Stranger] = {}

    @property
    def strangers(self) -> int:
        """The number of strangers now."""
        return len(self._strangers)

    def run(self, listener: Listener) -> None:
        """Accept until the listener is closed."""
        while True:
            try:
                stream = listener.accept()
            except NetworkError:
                return  # the listener was closed
            except OSError as error:
                # No descriptors or memory, or the network's own trouble: it passes.
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(timeouts.ACCEPT_PAUSE_S)
                continue
            self._let_in(stream)

    def gone(self, stream: Stream) -> None:
        """Record that a stranger is known now, or has left."""
        with self._lock:
            self._strangers.pop(stream, None)

    def close(self) -> None:
        """Disconnect all strangers and accept no more connections."""
        with self._lock:
            self._closed = True
            strangers = list(self._strangers.values())
        for stranger in strangers:
            stranger.plain.stop()  # its own thread closes it

    def _let_in(self, plain: Stream) -> None:
        stranger = _Stranger(plain, plain.peer)
        crowded = None
        with self._lock:
            welcome = not self._closed and self._rates.allows(stranger.group, time.monotonic())
            if welcome:
                crowded = self._most_of_one() if self.strangers >= MAX_STRANGERS else None
                self._strangers[plain] = stranger
        if crowded is not None:
            crowded.plain.stop()
        if not welcome:
            plain.close()
        elif self._access.encrypts:
            admitted = in_background(lambda: self._admit(stranger), "handshake")
            admitted.add_done_callback(lambda future: self._failed(stranger, future.exception()))
        else:
            self._admit(stranger)

    def _most_of_one(self) -> _Stranger:
        """Remove and return a random stranger of the address that has the most strangers."""
        counts = Counter(stranger.group for stranger in self._strangers.values())
        [(most, _)] = counts.most_common(1)
        every = [key for key, other in self._strangers.items() if other.group == most]
        return self._strangers.pop(random.choice(every))

    def _admit(self, stranger: _Stranger) -> None:
        try:
            stream, identity = self._access.accepted(stranger.plain)
        except (IdentityError, ResourceError) as error:
            by = log.said_by(stranger.group)
            _log.warning("refused %s: %s", stranger.peer, error.message, extra=by)
            self._refuse(stranger.plain)
            return
        except OSError as error:
            _log.debug("%s: %s", stranger.peer, error)
            self._refuse(stranger.plain)
            return
        with self._lock:
            if self._strangers.pop(stranger.plain, None) is not None:
                self._strangers[stream] = replace(stranger, plain=stream)
        try:
            self._greet(stream, identity)
        except (OSError, NetworkError, MemoryError):
            self._refuse(stream)  # gone before it could be greeted, or no thread or memory for it

    def _failed(self, stranger: _Stranger, error: BaseException | None) -> None:
        """Disconnect a stranger whose handshake met an unexpected error, or had no thread."""
        if error is not None:
            _log.error("cannot admit %s: %r", stranger.peer, error)
            self._refuse(stranger.plain)

    def _refuse(self, stream: Stream) -> None:
        self.gone(stream)
        stream.close()
