"""The identity of a process in a cluster, as its certificate states it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero_framework.core.fields import WorkerId


@dataclass(frozen=True)
class ClusterKind:
    """The names of processes in one kind of cluster. The `keeper` has the id "local", and its
    machine has the authority. A `member` has a name of its own."""

    keeper: str
    member: str
    option: str = ""

    def called(self, process: WorkerId) -> str:
        return f"the {self.keeper}" if process == "local" else f"{self.member} {process}"

    @property
    def invite(self) -> str:
        """The command that makes a key for a member, and the machine on which to run it."""
        what = f"hetero invite {self.option}" + ("NAME" if self.option else "ID")
        return f"{what} on the {self.keeper}'s machine"


STAR = ClusterKind("coordinator", "worker")
ISLANDS = ClusterKind("lighthouse", "island", "--island ")
"""A cluster of coordinators, each of which has a cluster of workers, too."""
_KINDS = {kind.member: kind for kind in (STAR, ISLANDS)}
_KEEPERS = {kind.keeper: kind for kind in _KINDS.values()}
_URI = re.compile(
    rf"hetero://([0-9a-f]{{32}})/(?:({'|'.join(_KEEPERS)})|"
    rf"({'|'.join(_KINDS)})/(?!local$)([A-Za-z0-9_.-]{{1,64}}))"
)


def key_owner(process: WorkerId) -> str:
    """The name under which a process has its key: "box" for "box@2", the second card of "box"."""
    return str(process).partition("@")[0]


@dataclass(frozen=True)
class Identity:
    """A process of a cluster: its keeper, "local", or a member by its name."""

    cluster: str
    process: str = "local"
    kind: ClusterKind = STAR

    @classmethod
    def of(cls, cluster: str, process: WorkerId, kind: ClusterKind = STAR) -> Identity:
        """The identity of a process; "local" is the coordinator, as in a plan. All cards of a
        machine have one identity."""
        return cls(cluster, key_owner(process), kind)

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Read `uri`. Raises ValueError."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri!r} names no process of a cluster")
        cluster, keeper, member, name = match.groups()
        return cls(cluster, kind=_KEEPERS[keeper]) if keeper else cls(cluster, name, _KINDS[member])

    @property
    def keeps(self) -> bool:
        """Whether this is the keeper, whose word on certificates counts."""
        return self.process == "local"

    @property
    def worker(self) -> str | None:
        """The process's id if it is a worker, else None."""
        return None if self.keeps or self.kind != STAR else self.process

    @property
    def island(self) -> str | None:
        """The process's name if it is an island, else None."""
        return None if self.keeps or self.kind != ISLANDS else self.process

    @property
    def uri(self) -> str:
        role = self.kind.keeper if self.keeps else f"{self.kind.member}/{self.process}"
        return f"hetero://{self.cluster}/{role}"

    def __str__(self) -> str:
        return self.kind.called(self.process)
