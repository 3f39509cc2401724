"""Who a process of a cluster is, in the words of its certificate. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hetero_framework.core.fields import WorkerId

_URI = re.compile(r"hetero://([0-9a-f]{32})/(?:coordinator|worker/([A-Za-z0-9_.-]{1,64}))")


@dataclass(frozen=True)
class Identity:
    """The coordinator of a cluster, or with `worker` (an id as text) one of its workers."""

    cluster: str
    worker: str | None = None

    @classmethod
    def of(cls, cluster: str, process: WorkerId) -> Identity:
        """`process` is "local" for the coordinator, as in a plan."""
        return cls(cluster, None if process == "local" else str(process))

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Read `uri`. Raises ValueError."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise ValueError(f"{uri!r} names no process of a cluster")
        return cls(match[1], match[2])

    @property
    def uri(self) -> str:
        role = "coordinator" if self.worker is None else f"worker/{self.worker}"
        return f"hetero://{self.cluster}/{role}"

    def __str__(self) -> str:
        return "the coordinator" if self.worker is None else f"worker {self.worker}"
