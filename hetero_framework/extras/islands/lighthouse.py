"""The lighthouse: knows the islands that are here, and gives all of them the same view.

An island is here as long as its link lives; meanwhile torchft (`quorums.py`) gets heartbeats for
it. The lighthouse asks torchft again, each time under a new number, until a quorum is of all
islands that are here, each waiting for that answer: it is their view. A quorum may lack an island:
torchft answers once all of the last quorum have asked, even if they do not wait any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from hetero_framework.config.host_names import split_address
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import Listener
from hetero_framework.core.identity import Identity
from hetero_framework.core.messages import Message
from hetero_framework.core.stream import Stream
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import HeteroError
from hetero_framework.extras.islands import island_messages as im
from hetero_framework.extras.islands.island_messages import FinishedRun, Member
from hetero_framework.extras.islands.quorums import Quorums
from hetero_framework.extras.islands.settings import island_name
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.access import Access

_log = logging.getLogger(__name__)
SETTLE_S = 1.5
"""Seconds for which islands have to be here, without a break, before a question is asked. A new
lighthouse does not know all islands yet, and would make a view of the first that ask."""
NAMESAKE_S = 3.0
"""Seconds that an island waits for another island of its name to leave: the link of a dead island
lives on for at most 2 seconds."""
_ASK_S = 2.0
_BEAT_S = 0.1
_MAX_ISLANDS = 128
_MAX_FINISHED = 1000


@dataclass(eq=False)
class _Island:
    """A member that is here. `number` is its question's number, if it waits for a view."""

    member: Member
    connection: Connection
    number: int | None = None

    @property
    def id(self) -> str:
        """The name by which torchft knows the island."""
        return f"{self.member.name}:{self.member.process}"


class FinishedRuns:
    """The last groups that have finished, for islands that come back too late: alone they would
    train once more what the others have trained."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, FinishedRun]] = deque(maxlen=_MAX_FINISHED)

    def keep(self, finished: FinishedRun) -> None:
        if all(one.run != finished.run for _, one in list(self._kept)):
            self._kept.append((time.monotonic(), finished))

    def find(self, run: str, facts: str, since_s: float) -> FinishedRun | None:
        """See `LighthouseClient.find_finished`."""
        earliest = time.monotonic() - since_s
        for at, one in reversed(list(self._kept)):
            if one.facts == facts and (one.run == run if run else at >= earliest):
                return one
        return None


class Lighthouse:
    """Serves the islands that come in by `listener` and that `access` admits."""

    def __init__(self, listener: Listener, access: Access, quorums: Quorums) -> None:
        self._listener, self._quorums = listener, quorums
        self._lock = threading.Lock()
        self._islands: dict[Connection, _Island] = {}
        self._since = time.monotonic()  # if an island is here, one has been since then
        self._numbers = count(1)
        self._finished = FinishedRuns()
        self._closed = threading.Event()
        self._acceptor = Acceptor(access, self._greet)
        self._running: set[Future[None]] = {
            in_background(lambda: self._acceptor.run(listener), "accept islands"),
            in_background(self._beat, "heartbeats for islands"),
        }

    @property
    def port(self) -> int:
        return self._listener.port

    def wait(self, seconds: float) -> None:
        """Serve for this long. Raises an unexpected error that ended a thread."""
        self._closed.wait(seconds)
        for future in [one for one in list(self._running) if one.done()]:
            self._running.discard(future)
            future.result()

    def close(self) -> None:
        """End the service. Safe to call twice."""
        self._closed.set()
        self._acceptor.close()
        self._listener.close()
        for connection in list(self._islands):
            connection.close(drain_s=0)
        wait_for(list(self._running), timeouts.EXIT_S)

    # -- links, in their reader threads ---------------------------------------------------------

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        name, handlers = f"island at {stream.peer}", (self._received, self._lost)
        deadlines = timeouts.LIGHTHOUSE_LINK
        connection = Connection(stream, name, im.LIGHTHOUSE, *handlers, deadlines=deadlines)
        connection.identity = identity
        connection.start()

    def _received(self, connection: Connection, message: Message) -> None:
        match message.body:
            case im.LighthouseHello(member=None):
                connection.send(Message(im.LighthouseWelcome(time.time())))
                connection.link.end()
            case im.LighthouseHello(member=Member() as member):
                self._acceptor.gone(connection.stream)
                self._join(_Island(member, connection))
            case im.NextView() if (island := self._islands.get(connection)) is not None:
                island.number = next(self._numbers)
                ask = partial(self._ask, island, island.number)
                self._running.add(in_background(ask, f"question of {island.id}"))
            case im.Finished(run=FinishedRun() as finished):
                self._finished.keep(finished)
                connection.send(Message(im.Finished(finished)))
            case im.FindFinished(run=run, facts=facts, since_s=since_s):
                connection.send(Message(im.Finished(self._finished.find(run, facts, since_s))))

    def _join(self, island: _Island) -> None:
        member, connection = island.member, island.connection
        try:
            island_name(member.name)
            split_address(member.address)
        except ValueError as error:
            connection.refuse("protocol", str(error))
            return
        identity, until = connection.identity, time.monotonic() + NAMESAKE_S
        if identity is not None and identity.island != member.name:
            connection.refuse("identity", f"the certificate is that of {identity}")
            return
        while (other := self._added(island)) is not None:
            if other.id == island.id:
                other.connection.link.end(0)  # its end has not been noticed here
            elif self._closed.is_set() or time.monotonic() >= until:
                text = f"another living island is called {member.name}, at {other.member.address}"
                if other.member.name != member.name:
                    text = f"there are {_MAX_ISLANDS} islands here"
                hint = "give each island an island.name of its own, or end that one's run"
                connection.refuse("busy", text, hint)
                return
            self._closed.wait(timeouts.EXIT_TICK_S)
        connection.peer, connection.link.name = member.name, f"island {member.name}"
        connection.send(Message(im.LighthouseWelcome(time.time())))
        _log.info("island %s is here, from %s", member.name, connection.stream.peer)

    def _added(self, island: _Island) -> _Island | None:
        """Add the island, or return the one that has its name; any if there are too many."""
        with self._lock:
            for other in self._islands.values():
                if other.member.name == island.member.name or len(self._islands) >= _MAX_ISLANDS:
                    return other
            if not self._islands:
                self._since = time.monotonic()
            self._islands[island.connection] = island
            return None

    def _lost(self, connection: Connection, reason: HeteroError | None) -> None:
        self._acceptor.gone(connection.stream)
        with self._lock:
            island = self._islands.pop(connection, None)
        if island is not None:
            _log.info("island %s has left", island.member.name)

    # -- views ----------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            for island in list(self._islands.values()):
                self._quorums.beat(island.id)

    def _ask(self, island: _Island, asked: int | None) -> None:
        """Ask torchft until the island has a view or has left."""
        self._closed.wait(self._since + SETTLE_S - time.monotonic())
        while (asked := self._renewed(island, asked)) is not None:
            quorum = self._quorums.ask(island.id, asked, _ASK_S)
            # torchft may fail, or answer without others, at once.
            if (quorum is not None and self._answer(quorum)) or self._closed.wait(_BEAT_S):
                return

    def _renewed(self, island: _Island, number: int | None) -> int | None:
        """The number of a new question in place of question `number`; None when that has been
        answered, or the island has left."""
        with self._lock:
            if island.number != number or island.connection not in self._islands:
                return None
            island.number = next(self._numbers)
            return island.number

    def _answer(self, quorum: Mapping[str, int]) -> bool:
        """Give all islands their view, if each waits for this quorum; return whether they do."""
        with self._lock:
            here = list(self._islands.values())
            if {island.id: island.number for island in here} != quorum:
                return False
            for island in here:
                island.number = None
        members = Message(im.Members(tuple(island.member for island in here)))
        for island in here:
            with suppress(HeteroError):  # it is gone, as the others will notice
                island.connection.send(members)
        return True
