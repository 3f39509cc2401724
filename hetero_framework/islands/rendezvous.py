"""How islands learn which of them take part: what any engine of membership has to offer. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Member:
    """One start of one island; `address`, "ip:port", is where the others reach it."""

    name: str
    process: str  # drawn at each start: an island that was started again is another member
    address: str


@dataclass(frozen=True)
class View:
    """Who takes part until somebody asks again: the same for all that take part."""

    members: tuple[Member, ...]  # by name

    @classmethod
    def of(cls, members: list[Member]) -> View:
        return cls(tuple(sorted(members, key=lambda member: member.name)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def key(self) -> str:
        """Equal where names and processes are."""
        listed = json.dumps([(member.name, member.process) for member in self.members])
        return hashlib.sha256(listed.encode()).hexdigest()


@dataclass(frozen=True)
class Finished:
    """A group whose training is done: `run` is drawn when it begins, `facts` are a digest of what
    it trained, and `islands` those that have the result."""

    run: str
    facts: str
    step: int
    islands: tuple[str, ...]


class Rendezvous(Protocol):
    """One island's side of it. For one thread at a time."""

    def members(self, timeout_s: float) -> View:
        """The next view, of this island and those that ask as well; all living ones have to. Raises
        NetworkError when it cannot be asked for, PeerAwayError when the others did not ask in time,
        and ConfigError when another living island has this one's name."""

    @property
    def in_reach(self) -> bool:
        """Whether an answer can be expected soon after all have asked."""
        return True

    def note(self, finished: Finished) -> None:
        """Leave word of it for members that come when all others are gone. Raises nothing."""

    def finished(self, run: str, facts: str, since_s: float) -> Finished | None:
        """Whether `run` has finished; without a name, whether any that trains `facts` has within
        the last `since_s` seconds. None also where nobody knows."""

    def close(self) -> None:
        """This island takes part no more. Safe to call twice, and from other threads."""
