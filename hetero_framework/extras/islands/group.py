"""The group of islands that train together: the members of a view, and their positions.

Islands ask for a view, open new links (`IslandSession`), and send each other their positions. A
member that is behind takes over the state of the source, which is not behind. Two positions are
equal when the same commits led there: `lineage` is a hash of all these commits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_framework.core import failpoints, timeouts
from hetero_framework.core.threads import in_background, wait_for
from hetero_framework.errors import (
    ConfigError,
    GroupFinished,
    IdentityError,
    NetworkError,
    PeerAwayError,
    ProtocolError,
)
from hetero_framework.extras.islands.island_messages import FinishedRun, View
from hetero_framework.extras.islands.lighthouse_client import LighthouseClient
from hetero_framework.extras.islands.links import LEAVES, IslandLinks, IslandSession, MemberLost
from hetero_framework.log import event, one_line
from hetero_framework.units import plural

POSITIONS = 0
"""The number of a session's first exchange."""
STATE = 1
_MEET_S = 1.0
"""Seconds in which a member that has a view comes to the meeting, unless it finishes a step first.
After that time the next view begins the meeting anew, even with the same members."""
_ASK_S = 3600.0
_RETRY_S = 1.0
_log = logging.getLogger(__name__)
Check = Callable[[], None]


@dataclass(frozen=True)
class Position:
    """A member's place in its training: steps done, and the commits that led there. `trains`: since
    its start the member has taken part in a commit, or has the state of a member that had.
    `is_done`: all steps are done. `run`, which is not sent, tells one run from another. `facts`
    must be equal on all members, `says` need not."""

    step: int = 0
    lineage: str = ""
    trains: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    is_done: bool = False
    run: str = ""

    @property
    def facts_text(self) -> str:
        """The facts as text, which is the same on all islands."""
        return json.dumps(self.facts, skipkeys=True, default=str)

    @property
    def facts_digest(self) -> str:
        return hashlib.sha256(self.facts_text.encode()).hexdigest()

    def as_info(self) -> dict[str, Any]:
        """The position as plain values, for `of` on another island."""
        info = {"step": self.step, "lineage": self.lineage, "trains": self.trains}
        return info | {"done": self.is_done, "facts": dict(self.facts), "says": dict(self.says)}

    def after_commit(self, step: int, view: View) -> Position:
        text = f"{self.lineage} {step} {view.key}"
        lineage = hashlib.sha256(text.encode()).hexdigest()[:32]
        return replace(self, step=step, lineage=lineage, trains=True)

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Position:
        """The position that a member sent. Raises ProtocolError."""
        try:
            step, lineage = info["step"], info["lineage"]
            trains, is_done = info["trains"], info["done"]
            facts, says = dict(info["facts"]), dict(info["says"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"an island sends no position: {error!r}") from error
        typed = type(step) is int and isinstance(lineage, str)
        typed = typed and type(trains) is bool and type(is_done) is bool
        if not typed or not 0 <= step < 2**53:
            raise ProtocolError("an island sends no position")
        return cls(step, lineage, trains, facts, says, is_done)


def source_of(positions: Mapping[str, Position]) -> str:
    """The member whose state the others take over: the furthest of the members that train, or of
    all where none trains. Among equally far members it is the first by name of the largest set
    that agrees on lineage and facts."""
    those = {name: p for name, p in positions.items() if p.trains} or dict(positions)
    furthest = max(p.step for p in those.values())
    at = {n: (p.lineage, p.facts_text) for n, p in sorted(those.items()) if p.step == furthest}
    agreeing = Counter(at.values())
    return max(at, key=lambda name: agreeing[at[name]])  # the first of equals


def behind(positions: Mapping[str, Position], source: str) -> list[str]:
    """The members that take over the source's state: members whose position differs, and new
    members, so that all begin with the same bits."""
    where = positions[source]
    return [
        name
        for name, p in sorted(positions.items())
        if name != source and not (p.lineage and (p.step, p.lineage) == (where.step, where.lineage))
    ]


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of the facts that differ."""
    return [one_line(key) for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


@dataclass(frozen=True)
class SessionStart:
    """A session that has begun, its source, and the members that take over the source's state."""

    session: IslandSession
    source: str
    behind: tuple[str, ...]
    positions: Mapping[str, Position]


class Group:
    """This island's place among the others, from view to view. `check` is called while it waits; an
    error in it ends the waiting. Fewer than `min_islands` wait at most `wait_s` seconds."""

    def __init__(
        self,
        lighthouse: LighthouseClient,
        links: IslandLinks,
        min_islands: int,
        check: Check,
        wait_s: float = math.inf,
    ) -> None:
        self._lighthouse = lighthouse
        self._links = links
        self._min_islands = min_islands
        self._check = check
        self._wait_s = wait_s
        self._opened = time.monotonic()
        self._asking: Future[View] | None = None
        self._answered: View | None = None
        self._has_met = False  # whether the lighthouse has ever answered
        self.session: IslandSession | None = None
        self._waiting_since: float | None = None

    @property
    def waits(self) -> bool:
        """Whether this island waits for the others, and so does not stall."""
        return self._waiting_since is not None

    def stay(self) -> bool:
        """Whether the members are the same before a step, as far as is known. Does not wait for a
        lighthouse that is away. Asks for the next view, which comes while the step runs, so that
        others can join."""
        session = self.session
        if session is None:
            return False
        view = self._asked()
        if view is not None and view.key != session.view.key:
            self._answered = view
            return False
        try:
            session.check()
        except MemberLost:
            self._answered = view  # the others have not dropped it either
            return False
        self._ask()
        return True

    def join(self, position: Position) -> SessionStart:
        """Join the members of the next view over new links, and learn all positions. Begins again
        while members come and go. Raises ConfigError where this island trains something else than
        the others, GroupFinished where they are done, PeerAwayError where too few came, and what
        `check` raises."""
        self._waiting_since = began = time.monotonic()
        _log.info("", extra=event("waiting for islands"))
        seen: View | None = None
        try:
            while True:
                view, self._answered = self._answered or self._view(), None
                if seen is None or view.key != seen.key:
                    self._check_unfinished(position)
                try:
                    joined = self._met(view, position)
                except MemberLost as lost:
                    _log.info("%s; looking who is there", lost, extra=lost.told)
                    continue
                if self._may_begin(joined):
                    self.session = joined.session
                    self._ask()  # members that waited for this meeting have asked
                    members = ", ".join(view.names)
                    _log.info("islands: %s", members, extra=event("islands", members=members))
                    return joined
                self._wait_for_more(view, seen, time.monotonic() - began)
                seen = view
        finally:
            self._waiting_since = None

    def finish(self, session: IslandSession, position: Position, step: int) -> None:
        """Tell the lighthouse, for islands that come later, that the members have done all steps
        and need nothing of each other."""
        run, facts = position.run, position.facts_digest
        self._lighthouse.note_finished(FinishedRun(run, facts, step, session.members))

    def leave(self, reason: str) -> None:
        """End the present session here; the others notice at once."""
        self.session = None
        self._links.part(reason)

    def close(self, reason: str) -> None:
        self.leave(f"{LEAVES} ({reason})")
        self._lighthouse.close()
        self._links.close(reason)

    # -- inside ---------------------------------------------------------------------------------

    def _asked(self) -> View | None:
        """The answer to the question of `stay`; None where the lighthouse has not given one."""
        if self._asking is None:
            return None
        self._wait(self._asking, lambda: self._lighthouse.in_reach)
        if not self._asking.done():
            return None  # the answer comes when the lighthouse is there again
        asking, self._asking = self._asking, None
        error = asking.exception()
        if isinstance(error, (NetworkError, PeerAwayError)):
            _log.warning("%s; the members stay as they are", error.message)
            return None
        return asking.result()

    def _view(self) -> View:
        """The next view, asked for until there is one. Raises errors that asking again repeats."""
        told = False
        while True:
            asking, self._asking = self._ask(), None
            self._wait(asking)
            error = asking.exception()
            if error is None:
                self._has_met = True
                return asking.result()
            if not isinstance(error, (NetworkError, PeerAwayError)):
                raise error
            # Asking again helps neither where keys are wrong, nor where it has never answered.
            is_vain = not self._has_met or isinstance(error, IdentityError)
            if is_vain and not isinstance(error, PeerAwayError):
                raise error
            if not told:
                _log.warning("%s; asking again until it answers", error.message)
            told = True
            self._pause(_RETRY_S)

    def _wait(self, asking: Future[View], helps: Callable[[], bool] = lambda: True) -> None:
        before, self._waiting_since = self._waiting_since, self._waiting_since or time.monotonic()
        try:
            while not asking.done() and helps():
                self._check()
                wait_for([asking], timeouts.ANSWER_TICK_S)
        finally:
            self._waiting_since = before

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check()
            threading.Event().wait(min(left, timeouts.ANSWER_TICK_S))

    def _met(self, view: View, position: Position) -> SessionStart:
        failpoints.hit("island-meet")
        session = self._links.meet(view, _ASK_S, self._newer_view(view))
        session.send(POSITIONS, "position", info=position.as_info())
        positions = {session.me: position}
        for name in session.others:
            received = session.receive(POSITIONS, "position", name, self._check).info
            with session.judging(name):
                positions[name] = Position.of(received)
        source = source_of(positions)
        ours, theirs = position.facts, positions[source].facts
        if other := differing(theirs, ours):
            key = other[0]
            raise ConfigError(
                f"island {session.me} does not train what island {source} does: {key} is"
                f" {ours.get(key)!r} here, and {theirs.get(key)!r} there",
                hint="the configurations of all islands must agree in all but machines and plan",
            )
        return SessionStart(session, source, tuple(behind(positions, source)), positions)

    def _may_begin(self, joined: SessionStart) -> bool:
        """Whether enough members are here. One is enough, once a member has done all steps."""
        enough = len(joined.session.members) >= self._min_islands
        return enough or any(p.is_done for p in joined.positions.values())

    def _wait_for_more(self, view: View, seen: View | None, waited_s: float) -> None:
        have = plural(len(view.members), "island")
        if seen is None or len(seen.members) != len(view.members):
            text = "waiting for other islands: %s here, %d are wanted"
            _log.info(text, have, self._min_islands)
        if waited_s > self._wait_s:
            raise PeerAwayError(
                f"of the {self._min_islands} islands that this run wants there were {have} for"
                f" {self._wait_s:.0f} s: {', '.join(view.names)}",
                hint="start the others, or lower island.min_islands; island.wait_s is how long"
                " they are waited for",
            )
        self._pause(_RETRY_S)

    def _check_unfinished(self, position: Position) -> None:
        """Raise GroupFinished where the others have trained all steps and left."""
        since_s = time.monotonic() - self._opened
        finished = self._lighthouse.find_finished(position.run, position.facts_digest, since_s)
        if finished is None:
            return
        raise GroupFinished(
            f"the islands have finished their training after step {finished.step}, without island"
            f" {self._links.member.name}",
            hint=f"the result is with {', '.join(finished.islands)}; to train once more: --fresh",
        )

    def _ask(self) -> Future[View]:
        """The question for the next view. A question that is under way stays the only one."""
        if self._asking is None:
            self._asking = in_background(lambda: self._lighthouse.next_view(_ASK_S), "next view")
        return self._asking

    def _newer_view(self, view: View) -> Check:
        """A check that ends a meeting to which not all members come, since they died or wait for
        the next view. This island asks for the next view, too. Members that finish a step first
        have not asked, so there is no next view before they are here."""
        began = time.monotonic()

        def check() -> None:
            self._check()
            asked = self._ask()
            is_late = time.monotonic() - began > _MEET_S
            if not asked.done():
                return
            # The answer may be this view, or a view of the same members.
            if is_late or asked.exception() is not None or asked.result().key != view.key:
                lacking = [*self._links.lacking, self._links.member.name]
                raise MemberLost(lacking[0], "no link to it came up, and the members may be others")

        return check
