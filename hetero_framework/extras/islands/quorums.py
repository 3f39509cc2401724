"""torchft's lighthouse, which decides on quorums of islands: the only module that imports torchft.

A replica counts as living while heartbeats for it come in. A question is answered with a quorum
when all living replicas have asked. torchft keeps the questions of replicas that have died, so a
quorum can name a replica that waits for no answer. The caller compares the questions' numbers.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hetero_framework.errors import UserError

FORGET_S = 0.8
"""Time after its last heartbeat at which a replica counts as dead. Beside six busy processes on one
core heartbeats were 0.12 s apart at most."""
_HEARTBEAT_S = 2.0
_JOIN_TIMEOUT_S = 7 * 24 * 3600.0
"""How long living replicas that do not ask are waited for; an island that stalls leaves."""
_FAILED = (RuntimeError, TimeoutError)
"""Errors of torchft's calls when time is up, and when the server is ending."""


class Quorums:
    """torchft's server on a free port of the loopback, and the client that asks it. The server has
    neither encryption nor authentication, and its web page has a button that kills members: no
    other machine may reach it. Raises UserError as `import_torchft` does."""

    def __init__(self, min_islands: int = 1) -> None:
        torchft = import_torchft()
        self._server = torchft.LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_islands,
            join_timeout_ms=int(_JOIN_TIMEOUT_S * 1000),
            heartbeat_timeout_ms=int(FORGET_S * 1000),
        )
        # Its address has this machine's host name in it, which may not be known to any resolver.
        self.port = int(self._server.address().rpartition(":")[2])
        url = f"http://127.0.0.1:{self.port}"
        self._client: Any = torchft.LighthouseClient(url, timedelta(seconds=_HEARTBEAT_S))

    def beat(self, id: str) -> None:
        """Count this replica as living for another FORGET_S."""
        if (client := self._client) is not None:
            with suppress(*_FAILED):
                client.heartbeat(id, timedelta(seconds=_HEARTBEAT_S))

    def ask(self, id: str, number: int, timeout_s: float) -> dict[str, int] | None:
        """The next quorum with this replica: each member and the number of its question; None when
        not all have asked in time. Blocks; for one thread of each replica at a time."""
        if (client := self._client) is not None:
            with suppress(*_FAILED):
                quorum = client.quorum(
                    id,
                    timedelta(seconds=timeout_s),
                    address="",
                    store_address="",
                    step=0,
                    world_size=1,
                    shrink_only=False,
                    data={"number": number},
                )
                return {one.replica_id: one.data["number"] for one in quorum.participants}
        return None

    def close(self) -> None:
        self._client = None  # a connection ends with its client, in torchft
        self._server.shutdown()


def import_torchft() -> Any:
    """torchft's engine of quorums. Raises UserError where it is missing or too old."""
    os.environ.setdefault("RUST_LOG", "error")  # read once, at the import; else each call is logged
    try:
        from torchft import coordination
    except ImportError as error:
        text = f"a lighthouse needs torchft, and it is not here: {error}"
        raise UserError(text, hint=_how()) from None
    if not hasattr(getattr(coordination, "LighthouseClient", None), "quorum"):
        raise UserError("this torchft is too old for a lighthouse", hint=_how())
    return coordination


def _how() -> str:
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return 'pip install "hetero-framework[islands]"'
    return "there is torchft for Linux x86-64 alone: start `hetero lighthouse` on such a machine"
