"""The islands that take part in a training from now on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from hetero_framework.extras.islands.island_messages import Member


@dataclass(frozen=True)
class View:
    """One view, the same on each of its members until they ask for the next view."""

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
