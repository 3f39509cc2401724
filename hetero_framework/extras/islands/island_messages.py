"""The messages between islands, and between an island and its lighthouse, and their legal order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from hetero_framework.core.frames import MAX_TENSORS
from hetero_framework.core.messages import (
    EITHER,
    Body,
    FrameBytes,
    Greeting,
    Reject,
    Seconds,
    message,
)
from hetero_framework.core.session import Dialogue, Phase, converse

NEWCOMER = "connecting island"
MEMBER = "accepting island"
ISLAND = "island"
LIGHTHOUSE = "lighthouse"
ShareKind = Literal["position", "state", "losses", "gradients", "changes", "vote", "decision"]


@message(70, NEWCOMER)
class IslandHello(Greeting):
    """First message of a link between the coordinators of two islands: who I am, and whom I mean.
    `process` is a random id of the sender's start, `view` stands for the group's members that it
    knows. Answered by ISLAND_WELCOME, once the other island knows the same members, or REJECT."""

    name: str
    process: str
    to: str
    view: str
    max_frame_bytes: FrameBytes


@message(71, MEMBER)
class IslandWelcome(Greeting):
    """Accepts ISLAND_HELLO; SHARE follows in both directions."""


@message(72, EITHER, tensors=(0, MAX_TENSORS), long=True)
class Share(Body):
    """Island to island: a part of the sender's message in exchange `number` of a group's members.
    It has one tensor for each name, and plain values in `info`. `last` marks the last part."""

    number: int
    kind: ShareKind
    last: bool
    names: tuple[str, ...]
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """One start of one island: `process` is drawn at each start, so an island that was started
    again is another member. The others reach it at `address`, "ip:port"."""

    name: str
    process: str
    address: str


@dataclass(frozen=True)
class View:
    """The islands that take part from now on, the same on each of them until they ask for the next
    view."""

    members: tuple[Member, ...]  # sorted by name

    @classmethod
    def of(cls, members: Iterable[Member]) -> View:
        return cls(tuple(sorted(members, key=lambda member: member.name)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def key(self) -> str:
        """A hash that is equal where names and processes are equal."""
        listed = json.dumps([(member.name, member.process) for member in self.members])
        return hashlib.sha256(listed.encode()).hexdigest()


@message(73, ISLAND)
class LighthouseHello(Greeting):
    """Island to lighthouse, first of a connection: who I am. The island counts as living as long as
    the connection lives. Answered by LIGHTHOUSE_WELCOME or REJECT. Without `member` the island only
    asks whether there is a lighthouse, which closes the connection after its answer."""

    member: Member | None = None


@message(74, LIGHTHOUSE)
class LighthouseWelcome(Greeting):
    """Lighthouse to island, accepts LIGHTHOUSE_HELLO; `clock` is its time in seconds since 1970."""

    clock: float


@message(75, ISLAND)
class NextView(Body):
    """Island to lighthouse: which islands take part from now on? Answered by MEMBERS when all
    living islands have asked; not sent again before that."""


@message(76, LIGHTHOUSE)
class Members(Body):
    """Lighthouse to island, answers NEXT_VIEW; each of `members` gets the same answer."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A group whose training is done: `run` is drawn when it begins, `facts` is a digest of what it
    trained, and `islands` have the result."""

    run: str
    facts: str
    step: int
    islands: tuple[str, ...]


@message(77, EITHER)
class Finished(Body):
    """Island to lighthouse: a group has finished; the lighthouse answers with the same message.
    Lighthouse to island: the answer to FIND_FINISHED, without `run` where it knows of none."""

    run: FinishedRun | None = None


@message(78, ISLAND)
class FindFinished(Body):
    """Island to lighthouse: has `run` finished? Without a name: has any group that trains `facts`
    finished within the last `since_s` seconds? Answered by FINISHED."""

    run: str
    facts: str
    since_s: Seconds


class IslandPhase(Enum):
    """Where a connection of an island stands."""

    ISLAND_GREETING = "ISLAND_HELLO is sent; the other island answers"
    TOGETHER = "two islands train one model"
    LIGHTHOUSE_GREETING = "LIGHTHOUSE_HELLO is sent; the lighthouse answers"
    AT_LIGHTHOUSE = "the lighthouse knows the island"
    ASKING = "the island waits for the next view"


_P, _AT_ANY_TIME = IslandPhase, (Finished, FindFinished)
converse(
    Dialogue("between two islands", NEWCOMER, MEMBER),
    {
        Phase.OPEN: {IslandHello: _P.ISLAND_GREETING},
        _P.ISLAND_GREETING: {IslandWelcome: _P.TOGETHER, Reject: Phase.CLOSED},
        _P.TOGETHER: {Share: _P.TOGETHER},
    },
    answers=(IslandWelcome,),
)
converse(
    Dialogue("between an island and its lighthouse", ISLAND, LIGHTHOUSE),
    {
        Phase.OPEN: {LighthouseHello: _P.LIGHTHOUSE_GREETING},
        _P.LIGHTHOUSE_GREETING: {LighthouseWelcome: _P.AT_LIGHTHOUSE, Reject: Phase.CLOSED},
        _P.AT_LIGHTHOUSE: {NextView: _P.ASKING, **dict.fromkeys(_AT_ANY_TIME, _P.AT_LIGHTHOUSE)},
        _P.ASKING: {Members: _P.AT_LIGHTHOUSE, **dict.fromkeys(_AT_ANY_TIME, _P.ASKING)},
    },
    answers=(LighthouseWelcome, Finished),
)
