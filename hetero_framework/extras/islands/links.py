"""Links between the coordinators of islands, and the exchanges of messages over them.

All links of an `IslandSession` are new, so nothing of an earlier session can arrive in it. Of two
members, the member whose name comes later dials.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
from torch import Tensor

from hetero_framework.config.host_names import host_and_port, split_address
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import Listener, connect
from hetero_framework.core.identity import Identity
from hetero_framework.core.messages import Message
from hetero_framework.core.stream import Stream
from hetero_framework.core.tensors import from_wire, to_wire
from hetero_framework.core.threads import in_background
from hetero_framework.core.timeouts import LinkDeadlines
from hetero_framework.engine.hosts import ReplicasChanged
from hetero_framework.engine.state_snapshot import in_parts
from hetero_framework.errors import HeteroError, NetworkError, ProtocolError
from hetero_framework.extras.islands import island_messages as im
from hetero_framework.extras.islands.island_messages import Member, ShareKind, View
from hetero_framework.log import event
from hetero_framework.security.acceptor import Acceptor
from hetero_framework.security.access import Access

_log = logging.getLogger(__name__)
Check = Callable[[], None]
SAME_VERSION = "all must have the same version of hetero-framework"
"""Hint for an island whose messages the others do not understand."""
LEAVES = "leaves in order"
"""Beginning of the reason of an island that ends on purpose."""
_MOST_WAITING = 128
_AHEAD = 4
"""How many exchanges a member may be ahead of the last exchange that is over here. Positions and
state, in which not all take part, are two of them, and a member may get a decision before us."""


class MemberLost(ReplicasChanged):
    """An island of the session is gone, or knows other members; the session is over. `has_left`:
    the island announced that it leaves."""

    def __init__(self, name: str, reason: str) -> None:
        self.has_left = reason.startswith(LEAVES)
        super().__init__(f"island {name} {reason}" if self.has_left else f"island {name}: {reason}")
        self.name = name
        self.reason = reason

    @property
    def told(self) -> dict[str, Any]:
        """The loss as an event for the log."""
        what = "island left" if self.has_left else "island lost"
        return event(what, island=self.name, reason=self.reason)


@dataclass
class Received:
    """Copies of the tensors and fields of one kind that a member has sent in one exchange."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    nbytes: int = 0


class IslandSession:
    """The members of one view, each with a link to this island. Safe to use from several threads.

    Exchanges are numbered; messages of a later exchange wait. Sending and waiting raise MemberLost
    once a member is gone, and ProtocolError once a member finds what this island sends wrong.
    """

    def __init__(self, me: str, view: View) -> None:
        self.me = me
        self.view = view
        self.members = view.names
        self._links: dict[str, Connection] = {}
        self._received: defaultdict[tuple[int, str, str], Received] = defaultdict(Received)
        self._changed = threading.Condition()
        self._lost: MemberLost | None = None
        self._gone: set[str] = set()
        self.wrong: ProtocolError | None = None
        """Why a member refuses what this island sends; it stays when the session is over."""
        self.refused: dict[str, ProtocolError] = {}
        """Why members were refused, by name."""
        self._done = -1

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(name for name in self.members if name != self.me)

    @property
    def leader(self) -> str:
        """The member that counts votes."""
        return self.members[0]

    def send(
        self,
        number: int,
        kind: ShareKind,
        tensors: Mapping[str, Tensor] | None = None,
        info: Mapping[str, Any] | None = None,
        *,
        last: bool = True,
        to: Iterable[str] | None = None,
    ) -> None:
        """Send this to all others, or only `to` some. The tensors must not change any more."""
        self.check()
        for message in _messages(number, kind, tensors, info, last):
            for name in self.others if to is None else to:
                try:
                    self._links[name].send(message)
                except HeteroError as error:
                    self.lose(name, error.message)
                    self.check()

    def try_send(
        self,
        name: str,
        number: int,
        info: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send a decision to one member, also when others have left: it holds for each member that
        it reaches. Raises nothing."""
        for message in _messages(number, "decision", tensors, info, last=True):
            try:
                self._links[name].send(message)
            except HeteroError as error:
                self.lose(name, error.message)

    def received(self, number: int, kind: ShareKind, name: str) -> Received:
        """This member's part, as far as it has arrived."""
        self.check()
        with self._changed:
            share = self._received.get((number, kind, name)) or Received()
            return Received(dict(share.tensors), dict(share.info), share.is_whole)

    def receive(self, number: int, kind: ShareKind, name: str, check: Check) -> Received:
        """This member's part, once all of it is here; calls `check` while it waits. A part that
        came before the member left counts: the leader may be done after its decision."""

        def lacking() -> str | None:
            if self._received[number, kind, name].is_whole:
                return None
            self.check()
            return name

        self._wait_while(lacking, check)
        return self._received[number, kind, name]

    def _wait_while(self, lacking: Callable[[], str | None], check: Check) -> None:
        """Wait while `lacking` names a member whose part is not here; calls `check` meanwhile."""
        deadline = time.monotonic() + timeouts.ISLAND_S
        while True:
            with self._changed:
                if (name := lacking()) is None:
                    return
                self._changed.wait(timeouts.ANSWER_TICK_S)
            if time.monotonic() > deadline:
                self.lose(name, f"it said nothing for {timeouts.ISLAND_S:.0f} s")
            check()

    @contextmanager
    def judging(self, name: str) -> Iterator[None]:
        """Raise MemberLost in place of a ProtocolError in the block, which is this member's fault:
        the member is told, and ends; the others go on without it."""
        try:
            yield
        except ProtocolError as wrong:
            self.refuse(name, wrong)
            self.check()

    def refuse(self, name: str, wrong: ProtocolError) -> None:
        """Tell this member what it has sent wrong, and count it as lost."""
        self.refused[name] = wrong
        with suppress(HeteroError):
            error = m.Error("ProtocolError", wrong.message, wrong.hint)
            self._links[name].send(Message(error))
        self.lose(name, wrong.message)

    def part_together(self, number: int, check: Check) -> None:
        """Return when all members have called this: then none needs anything of this island any
        more. A member that has called it may leave before others have."""
        self.send(number, "vote")

        def lacking() -> str | None:
            left = [n for n in self.others if not self._received[number, "vote", n].is_whole]
            if left and (self.wrong is not None or self._gone.intersection([self.me, *left])):
                self.check()
            return left[0] if left else None

        self._wait_while(lacking, check)

    def wait_for_more(self, timeout_s: float) -> None:
        """Wait until anything arrives, or the time is over."""
        with self._changed:
            self._changed.wait(timeout_s)

    def forget(self, number: int) -> None:
        """Drop the exchanges up to this one, which are over."""
        with self._changed:
            self._done = max(self._done, number)
            for key in [key for key in self._received if key[0] <= number]:
                del self._received[key]

    @property
    def is_over(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        if self.wrong is not None:
            raise self.wrong
        if self._lost is not None:
            raise self._lost

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that have come in and gone out over the links."""
        links = [link.link.stats for link in list(self._links.values())]
        return sum(s.bytes_in for s in links), sum(s.bytes_out for s in links)

    # -- from the links -------------------------------------------------------------------------

    def add(self, name: str, connection: Connection) -> None:
        with self._changed:
            self._links[name] = connection
            self._changed.notify_all()
        if connection.closed:  # before anybody could be told
            self.lose(name, "its link broke")

    def gone(self, name: str, connection: Connection, reason: str) -> None:
        """Note that a link has ended. The thread that opens a link notes it before it is added."""
        if self._links.get(name) is connection:
            self.lose(name, reason)

    def lacks(self) -> list[str]:
        """Members without a link."""
        return [name for name in self.others if name not in self._links]

    def take(self, name: str, message: Message) -> None:
        """Take in a part of a member's message, in a reader thread. Raises ProtocolError for an
        exchange that no member can be in yet."""
        body = message.expect(im.Share)
        if body.number > self._done + _AHEAD:
            over = f"{self._done} is the last that is over"
            raise ProtocolError(f"island {name} sends exchange {body.number}; {over}")
        tensors = {
            key: from_wire(tensor).clone()
            for key, tensor in zip(body.names, message.tensors, strict=True)
        }
        nbytes = message.tensor_bytes + message.field_bytes
        message.release()
        with self._changed:
            if body.number <= self._done:
                return
            share = self._received[body.number, body.kind, name]
            share.nbytes += nbytes
            held = sum(
                received.nbytes for (_, _, who), received in self._received.items() if who == name
            )
            if held > psutil.virtual_memory().total // 2:
                raise ProtocolError(f"island {name} sends more than half of this memory holds")
            share.tensors.update(tensors)
            share.info.update(body.info)
            share.is_whole = share.is_whole or body.last
            self._changed.notify_all()

    def accuse(self, name: str, error: m.Error) -> None:
        """Note that this member refuses what this island has sent."""
        text = f"island {name} does not take what this island says: {error.message}"
        hint = error.hint or SAME_VERSION
        with self._changed:
            self.wrong = self.wrong or ProtocolError(text, hint=hint)
        self.lose(name, error.message)

    def lose(self, name: str, reason: str) -> None:
        with self._changed:
            self._gone.add(name)
            self._lost = self._lost or MemberLost(name, reason)
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Leave: the others notice at once."""
        self.lose(self.me, reason)
        for link in list(self._links.values()):
            with suppress(HeteroError):
                link.send(Message(m.Bye(reason)))
            link.close(drain_s=timeouts.DRAIN_S if reason else 0)


def check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise ProtocolError for a number of island `name` that is not finite."""
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ProtocolError(f"island {name} sends {key!r}, which is not finite")


def _messages(
    number: int,
    kind: ShareKind,
    tensors: Mapping[str, Tensor] | None,
    info: Mapping[str, Any] | None,
    last: bool,
) -> Iterator[Message]:
    """The messages that carry these tensors and fields, in frames that are not too large."""
    for part in in_parts((name, tensor, {}) for name, tensor in (tensors or {}).items()):
        values = dict(info or {}) if part.last else {}
        body = im.Share(number, kind, last and part.last, tuple(part.tensors), values)
        yield Message(body, tuple(map(to_wire, part.tensors.values())))


class IslandLinks:
    """Accepts and dials the links of this island's present session. `process` is the id of this
    start of the island, `liveness_s` how long another island may be silent."""

    def __init__(
        self,
        name: str,
        process: str,
        access: Access,
        host: str,
        *,
        max_frame_bytes: int,
        liveness_s: float,
    ) -> None:
        access.check_address(host, f"island {name}")
        self._name, self._process, self._access = name, process, access
        self._max_frame_bytes, self._liveness_s = max_frame_bytes, liveness_s
        self._lock = threading.Lock()
        self._came: dict[tuple[str, str, str], Connection] = {}  # by name, process, view
        self._session: IslandSession | None = None
        self._wrong: ProtocolError | None = None  # kept from a session that is over
        self._refused: dict[tuple[str, str], ProtocolError] = {}  # by name, process
        self._of: dict[Connection, tuple[IslandSession, str]] = {}
        self._listener = Listener(host, 0)
        self._acceptor = Acceptor(access, self._greet)
        self._running = in_background(lambda: self._acceptor.run(self._listener), "island door")
        self.member = Member(name, process, host_and_port(host, self._listener.port))

    def meet(self, view: View, timeout_s: float, check: Check) -> IslandSession:
        """Open new links to all other members, which do the same. Raises MemberLost for a member
        that cannot be reached in time, knows other members, or broke the protocol in an earlier
        session; that member is refused once more, since the first refusal may be lost. Raises
        ProtocolError where this island broke the protocol."""
        self.part("the members change")
        if self._wrong is not None:
            raise self._wrong
        session = IslandSession(self._name, view)
        with self._lock:
            self._session = session
            waiting = [key for key in self._came if key[2] == view.key]
            came = {key: self._came.pop(key) for key in waiting}
            strangers, self._came = list(self._came.values()), {}
        for (name, process, _), connection in came.items():
            self._admit(session, name, process, connection)
        for connection in strangers:
            connection.close(drain_s=0)
        deadline = time.monotonic() + timeout_s
        stop = threading.Event()
        earlier = [member for member in view.members if member.name < self._name]
        dialled = [
            in_background(partial(self._dial, session, member, timeout_s, stop), "dial island")
            for member in earlier
        ]
        try:
            while lacking := session.lacks():
                session.check()
                check()
                for member, dialling in zip(earlier, dialled, strict=True):
                    if dialling.done() and (problem := dialling.result()) is not None:
                        raise MemberLost(member.name, problem)
                if time.monotonic() > deadline:
                    raise MemberLost(lacking[0], f"no link to it came up in {timeout_s:.0f} s")
                session.wait_for_more(timeouts.ANSWER_TICK_S)
        finally:
            stop.set()
        for member in view.members:
            if (wrong := self._refused.get((member.name, member.process))) is not None:
                session.refuse(member.name, wrong)
                session.check()
        return session

    @property
    def lacking(self) -> list[str]:
        """Members of the present session to which there is no link."""
        session = self._session
        return session.lacks() if session is not None else []

    def part(self, reason: str) -> None:
        """End the present session; the other members notice."""
        with self._lock:
            session, self._session = self._session, None
            self._of = {}
        if session is None:
            return
        session.close(reason)
        self._wrong = self._wrong or session.wrong
        processes = {member.name: member.process for member in session.view.members}
        for name, wrong in session.refused.items():
            self._refused[name, processes[name]] = wrong

    def close(self, reason: str) -> None:
        self.part(reason)
        self._listener.close()
        self._acceptor.close()
        with self._lock:
            waiting, self._came = list(self._came.values()), {}
        for connection in waiting:
            connection.close(drain_s=0)
        self._running.result(timeouts.EXIT_S)

    # -- inside ---------------------------------------------------------------------------------

    def _dial(
        self, session: IslandSession, member: Member, timeout_s: float, stop: threading.Event
    ) -> str | None:
        """Open a link to this member; return the reason if that failed."""
        who, deadline = f"island {member.name}", time.monotonic() + timeout_s
        try:
            host, port = split_address(member.address)
            self._access.check_address(host, who)
            secure = partial(self._access.dialled, process=member.name)
            stream = connect(host, port, timeout_s, who=who, stop=stop, secure=secure)
        except (NetworkError, ValueError) as error:
            return str(error.args[0])
        connection = self._begin(stream, who, im.NEWCOMER, None)
        hello = im.IslandHello(
            self._name, self._process, member.name, session.view.key, self._max_frame_bytes
        )
        problem = "it did not answer"
        self._belongs(session, member.name, connection)  # a message may follow its answer at once
        try:
            answer = connection.ask(Message(hello), deadline - time.monotonic(), stop)
            if answer is not None and isinstance(answer.body, im.IslandWelcome):
                session.add(member.name, connection)
                return None
            if answer is not None and isinstance(answer.body, (m.Reject, m.Error)):
                problem = answer.body.message
        except HeteroError as error:
            problem = error.message
        connection.close(drain_s=0)
        return problem

    def _greet(self, stream: Stream, identity: Identity | None) -> None:
        self._begin(stream, f"island at {stream.peer}", im.MEMBER, identity)

    def _begin(self, stream: Stream, name: str, role: str, identity: Identity | None) -> Connection:
        connection = Connection(
            stream,
            name,
            role,
            self._received,
            self._lost,
            max_frame_bytes=self._max_frame_bytes,
            deadlines=LinkDeadlines(liveness_s=self._liveness_s),
        )
        connection.identity = identity
        connection.start()
        return connection

    def _received(self, connection: Connection, message: Message) -> None:
        """Take in a message, in a reader thread."""
        if isinstance(message.body, im.IslandHello):
            self._on_hello(connection, message.body)
        elif isinstance(message.body, im.Share):
            known = self._of.get(connection)
            if known is None:
                message.release()  # for a session that is over here
            else:
                known[0].take(known[1], message)
        elif isinstance(message.body, (m.Bye, m.Error, m.Reject)):
            reason = getattr(message.body, "reason", None) or getattr(message.body, "message", "")
            if (known := self._of.get(connection)) is None:
                return
            if isinstance(message.body, m.Error) and message.body.kind == "ProtocolError":
                known[0].accuse(known[1], message.body)
            else:
                known[0].lose(known[1], str(reason))

    def _on_hello(self, connection: Connection, hello: im.IslandHello) -> None:
        self._acceptor.gone(connection.stream)
        identity = connection.identity
        if hello.to != self._name:
            text = f"this is island {self._name}, not {hello.to}"
            connection.refuse("identity", text, "two islands have exchanged their addresses")
        elif identity is not None and str(identity) != f"island {hello.name}":
            connection.refuse("identity", f"the certificate is that of {identity}")
        else:
            connection.link.name = f"island {hello.name}"
            key = hello.name, hello.process, hello.view
            with self._lock:
                session = self._session
                is_now = session is not None and session.view.key == hello.view
                is_now = is_now and hello.name in session.lacks()  # type: ignore[union-attr]
                before = None if is_now else self._came.pop(key, None)
                is_one_more = not is_now and len(self._came) < _MOST_WAITING
                if is_one_more:
                    self._came[key] = connection
            if before is not None:
                before.close(drain_s=0)
            if not (is_now or is_one_more):
                connection.refuse("busy", f"{_MOST_WAITING} islands wait here")
            elif is_now:
                assert session is not None
                self._admit(session, hello.name, hello.process, connection)
            elif session is not None and hello.name in session.members:
                session.lose(hello.name, "it knows of other members")

    def _admit(
        self, session: IslandSession, name: str, process: str, connection: Connection
    ) -> None:
        """Welcome a member of the session."""
        if (name, process) not in {(one.name, one.process) for one in session.view.members}:
            connection.refuse("stale", "the group has another process of this island")
            return
        self._belongs(session, name, connection)
        with suppress(HeteroError):  # its reader reports that it is gone
            connection.send(Message(im.IslandWelcome()))
        session.add(name, connection)  # nothing is sent to it before the welcome

    def _belongs(self, session: IslandSession, name: str, connection: Connection) -> None:
        """Assign this connection's messages to this session, unless that is over."""
        connection.peer = name
        with self._lock:
            if self._session is session:
                self._of[connection] = session, name
                return
        connection.close(drain_s=0)

    def _lost(self, connection: Connection, reason: HeteroError | None) -> None:
        """Note the end of a link, in a reader thread."""
        self._acceptor.gone(connection.stream)
        with self._lock:
            known = self._of.pop(connection, None)
            for key in [key for key, came in self._came.items() if came is connection]:
                del self._came[key]
        if known is not None:
            session, name = known
            session.gone(name, connection, reason.message if reason is not None else "it left")
