"""Who takes part, by torchft's lighthouse: the only module that imports torchft.

An island counts as living while it sends heartbeats. torchft answers (with a quorum) when all that
live have asked, and gives all the same answer. But it keeps the question of who has died or gives
up, and may count one twice in which somebody new came: an answer can name members that wait for
none. So each asks again and says which answer it has had; a view is what all its members say so of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hetero_framework.core import timeouts
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import (
    ConfigError,
    HeteroError,
    IdentityError,
    NetworkError,
    PeerAwayError,
    UserError,
)
from hetero_framework.islands import notes
from hetero_framework.islands.presence import FORGET_S
from hetero_framework.islands.rendezvous import Finished, Member, Rendezvous, View
from hetero_framework.islands.tunnel import Tunnel
from hetero_framework.security.access import Access

HEARTBEAT_S = 0.4
SETTLE_S = 1.5
"""Nobody who comes asks before it, or others before it, have been at the lighthouse for so long:
one that was started anew knows nobody yet, and would make a view of whoever asks first."""
REACH_S = 60.0
"""A lighthouse that cannot be reached for so long is given up."""
_RPC_S = 2.0
_CLOCKS_S = 0.1
"""So much earlier than by this clock torchft may say that a question's time is over."""
_JOIN_TIMEOUT_S = 7 * 24 * 3600.0
"""Who lives is waited for; islands that stay away end their own heartbeats."""
_FAILED = (RuntimeError, TimeoutError)
"""What torchft's calls raise."""
_ID = re.compile(r"([A-Za-z0-9_.-]{1,64}):([A-Za-z0-9]{1,64})")
_MAX_ADDRESS = 300


class Lighthouse:
    """torchft's server on a free port of the loopback. It asks nobody who he is, and its web page
    has a button that kills members: only `tunnel.py` is to lead to it. An island for which nobody
    has beaten for `presence.FORGET_S` is not waited for any more. One that was only slow loses
    nothing: it comes back by the next view, a second or two later."""

    def __init__(self, min_islands: int = 1) -> None:
        torchft = _torchft()
        self._server = torchft.LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_islands,
            join_timeout_ms=int(_JOIN_TIMEOUT_S * 1000),
            heartbeat_timeout_ms=int(FORGET_S * 1000),
        )
        # Its address has this machine's host name in it, which need not be known to anybody.
        self.port = int(self._server.address().rpartition(":")[2])
        url, patience = f"http://127.0.0.1:{self.port}", timedelta(seconds=_RPC_S)
        self._client: Any = torchft.LighthouseClient(url, connect_timeout=patience)

    def beat(self, id: str) -> None:
        """For the island that is called so here."""
        if (client := self._client) is None:
            return
        with contextlib.suppress(*_FAILED):  # it is ending
            client.heartbeat(id, timedelta(seconds=_RPC_S))

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(self, *_: object) -> None:
        self._client = None  # a connection ends with its client, in torchft
        self._server.shutdown()


class TorchftRendezvous:
    """`member`, as the lighthouse at `url` is to know it. It counts as living while it asks, and
    while `lively()` says so, which is called from a thread. `trouble()` says why the way there is
    closed, where that is known, and `end()` closes it, so that no question outlives this;
    `ask(line)` is for the lighthouse's notes. After a lighthouse was started again all goes on by
    itself. `where` it is called in errors."""

    def __init__(
        self,
        url: str,
        member: Member,
        lively: Callable[[], bool],
        *,
        trouble: Callable[[], HeteroError | None] = lambda: None,
        end: Callable[[], None] = lambda: None,
        ask: Callable[[bytes], bytes] = lambda line: b"",
        where: str | None = None,
        reach_s: float = REACH_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._torchft = _torchft()
        self._url, self._member, self._where = url, member, where or url
        self._lively, self._trouble, self._end = lively, trouble, end
        self._ask_notes = ask
        self._reach_s, self._settle_s = reach_s, settle_s
        self._id = _id_of(member)
        self._contact = _Contact()
        self._client: Any = None  # opens its connection again by itself
        self._asking = False
        self._count = 0  # of questions
        self._closed = threading.Event()
        self._beating = in_background(self._beat, "heartbeats to the lighthouse")

    def note(self, finished: Finished) -> None:
        self._ask_notes(notes.noting(finished))

    def finished(self, run: str, facts: str, since_s: float) -> Finished | None:
        return notes.found(self._ask_notes(notes.looking(run, facts, since_s)))

    def close(self) -> None:
        self._closed.set()
        self._end()
        wait_for([self._beating], 2 * _RPC_S)

    def _beat(self) -> None:
        while not self._closed.is_set():
            if self._asking or self._lively():
                try:
                    self._heartbeat()
                    self._contact.made()
                except _FAILED as error:
                    self._contact.lost(_short(error))
            self._closed.wait(HEARTBEAT_S)

    def _heartbeat(self) -> None:
        deadline = timedelta(seconds=_RPC_S)
        if self._client is None:
            self._client = self._torchft.LighthouseClient(self._url, connect_timeout=deadline)
        self._client.heartbeat(self._id, deadline)

    def members(self, timeout_s: float) -> View:
        self._asking = True
        try:
            return self._next_view(time.monotonic() + timeout_s)
        finally:
            self._asking = False

    def _next_view(self, deadline: float) -> View:
        agreed, expected = "", frozenset[str]()
        while True:
            self._settle(deadline)
            found = self._ask(agreed, deadline)
            self._check()
            ids = frozenset(one.id for one in found)
            if agreed and ids == expected and all(one.agreed == agreed for one in found):
                members = [one.member for one in found]
                twice = _named_twice(members)
                if self._member.name in twice:
                    self.close()
                    raise _namesake(self._member, members)
                if not twice:
                    return View.of(members)
            agreed, expected = _digest(found), ids

    @property
    def in_reach(self) -> bool:
        return self._contact.seconds() >= 0

    def _settle(self, deadline: float) -> None:
        """Wait until heartbeats have arrived for a while; not where, as the lighthouse says, those
        of others had before this island came. Raises why they do not."""
        has_asked = False
        while (own_s := self._contact.seconds()) < self._settle_s:
            if own_s < 0:
                has_asked = False
            elif not has_asked:
                has_asked = True
                if notes.since_s(self._ask_notes(notes.SINCE)) - own_s >= self._settle_s:
                    return
            self._check()
            trouble = self._trouble()
            if isinstance(trouble, IdentityError):
                raise trouble  # waiting does not help
            if -self._contact.seconds() >= self._reach_s or time.monotonic() >= deadline:
                raise trouble or NetworkError(
                    f"no lighthouse answers at {self._where}: {self._contact.reason}",
                    hint="start `hetero lighthouse` there, or look what else has its port",
                )
            self._closed.wait(timeouts.EXIT_TICK_S)

    def _ask(self, agreed: str, deadline: float) -> list[_Asked]:
        """Who takes part next; nobody where the lighthouse went away meanwhile."""
        asked = in_background(lambda: self._quorum(agreed, deadline), "question to the lighthouse")
        while not wait_for([asked], timeouts.ANSWER_TICK_S):
            self._check()
            trouble = self._trouble()
            if isinstance(trouble, IdentityError):
                raise trouble  # waiting does not help
            if -self._contact.seconds() >= self._reach_s:
                return []  # it is silent; the question ends by itself
        try:
            return [_Asked.read(found) for found in asked.result()]
        except _FAILED as error:
            if time.monotonic() >= deadline - _CLOCKS_S and self._contact.seconds() > 0:
                raise PeerAwayError(
                    f"island {self._member.name} waited in vain: another living island did not come"
                    " to synchronise",
                    hint="see what the other islands say; --resume latest goes on from the last"
                    " checkpoint",
                ) from error
            self._contact.lost(_short(error))
            return []

    def _quorum(self, agreed: str, deadline: float) -> Sequence[Any]:
        self._count += 1
        found = self._client.quorum(
            self._id,
            timedelta(seconds=max(0.0, deadline - time.monotonic())),
            address=self._member.address,
            store_address="",
            step=0,
            world_size=1,
            shrink_only=False,
            data={"count": self._count, "agreed": agreed},
        )
        return list(found.participants)

    def _check(self) -> None:
        if self._closed.is_set():
            raise NetworkError(f"island {self._member.name} has left the others")
        if self._beating.done():
            self._beating.result()  # an error nobody expected


def check_torchft() -> None:
    """Raise UserError where torchft is missing or too old."""
    _torchft()


def rendezvous_at(
    address: tuple[str, int], access: Access, member: Member, lively: Callable[[], bool]
) -> Rendezvous:
    """With the islands that `hetero lighthouse` at `address` knows. Raises UserError without
    torchft."""
    _torchft()
    tunnel = Tunnel(address, access, _id_of(member))
    return TorchftRendezvous(
        tunnel.url,
        member,
        lively,
        trouble=tunnel.trouble,
        end=tunnel.close,
        ask=tunnel.ask,
        where=tunnel.where,
    )


def _id_of(member: Member) -> str:
    """What `_ID` reads."""
    return f"{member.name}:{member.process}"


class _Contact:
    """Since when the lighthouse answers, or does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers = False
        self._since = time.monotonic()
        self.reason = "it was not tried yet"

    def seconds(self) -> float:
        """For how long it has answered; below zero, for how long it has not."""
        with self._lock:
            passed = time.monotonic() - self._since
            return passed if self._answers else -passed

    def made(self) -> None:
        self._set(True)

    def lost(self, reason: str) -> None:
        self.reason = reason
        self._set(False)

    def _set(self, answers: bool) -> None:
        with self._lock:
            if answers != self._answers:
                self._answers, self._since = answers, time.monotonic()


@dataclass(frozen=True)
class _Asked:
    """One participant's question: its how many-th, and the digest of the answer before it."""

    id: str
    member: Member
    count: int
    agreed: str

    @classmethod
    def read(cls, found: Any) -> _Asked:
        """As torchft hands it on from another machine. Raises NetworkError."""
        named = _ID.fullmatch(found.replica_id)
        match found.data:
            case {"count": int(count), "agreed": str(agreed)} if named is not None:
                if 0 < len(found.address) <= _MAX_ADDRESS:
                    return cls(named[0], Member(named[1], named[2], found.address), count, agreed)
        raise NetworkError(
            f"the lighthouse has a member that is no island: {found.replica_id[:80]!r}",
            hint="a lighthouse of `hetero lighthouse` is for islands of this version alone",
        )


def _digest(found: list[_Asked]) -> str:
    """Of one answer: all that it was given to have the same, and no other answer has it."""
    listed = json.dumps(sorted((one.id, one.count) for one in found))
    return hashlib.sha256(listed.encode()).hexdigest() if found else ""


def _named_twice(members: list[Member]) -> set[str]:
    counts = Counter(member.name for member in members)
    return {name for name, count in counts.items() if count > 1}


def _namesake(own: Member, members: list[Member]) -> ConfigError:
    other = next(m for m in members if m.name == own.name and m.process != own.process)
    return ConfigError(
        f"two living islands are called {own.name}: this one at {own.address}, and one at"
        f" {other.address}",
        hint="give each island an island.name of its own, or end the other run",
    )


def _short(error: Exception) -> str:
    """What torchft says without its metadata: it quotes the status of the remote call."""
    quoted = re.search(r'message: "([^"]*)"', str(error))
    return quoted[1] if quoted else str(error).splitlines()[0]


def _torchft() -> Any:
    """torchft's engine of membership. Raises UserError where it is missing or too old."""
    try:
        with _quiet():
            from torchft import coordination
    except ImportError as error:
        raise UserError(f"islands need torchft, and it is not here: {error}", hint=_how()) from None
    client = getattr(coordination, "LighthouseClient", None)
    if not hasattr(client, "quorum") or not hasattr(client, "heartbeat"):
        raise UserError("this torchft is too old for islands", hint=_how())
    return coordination


def _how() -> str:
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return 'pip install "hetero-framework[islands]"'
    return (
        "there is torchft for Linux x86-64 alone: islands and their lighthouse need such machines"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchft reads once, when it is imported, what it may log; it logs each call."""
    before = os.environ.get("RUST_LOG")
    os.environ.setdefault("RUST_LOG", "error")
    try:
        yield
    finally:
        if before is None:
            del os.environ["RUST_LOG"]
