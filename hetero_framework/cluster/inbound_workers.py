"""Keeps connections of workers without a port, which dial the coordinator, until a run takes them.

The connection of a worker that has sent CALL is parked until `take`. A second process with the id
of a connected worker is refused. Only the process that owns the link may call again, since that
means that it has lost the link.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import Listener
from hetero_framework.core.fields import WorkerId
from hetero_framework.core.identity import key_owner
from hetero_framework.core.threads import in_background
from hetero_framework.security.acceptor import Acceptor, Greet
from hetero_framework.security.access import Access

_OVER = "the run is over"


@dataclass(frozen=True)
class _Caller:
    connection: Connection
    process: str


class InboundWorkers:
    """The parked connections of the workers `expected`. `greet` is the acceptor's callback for a
    new stream; the connection that it begins passes its CALL to `admit`."""

    def __init__(self, expected: Collection[WorkerId], access: Access, greet: Greet) -> None:
        self._expected = {str(worker): worker for worker in expected}
        self._acceptor = Acceptor(access, greet)
        self._waiting: dict[WorkerId, _Caller] = {}
        self._taken: dict[WorkerId, _Caller] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._listener: Listener | None = None
        self._accepting: Future[None] | None = None

    def listen(self, host: str, port: int) -> None:
        """Accept calls from now on. Raises NetworkError when the port is not available."""
        listener = Listener(host, port)
        self._listener = listener
        self._accepting = in_background(lambda: self._acceptor.run(listener), "accept workers")

    def admit(self, connection: Connection, call: m.Call) -> None:
        """Refuse the worker that sent this CALL, or park its connection for `take`. Runs in a
        reader thread."""
        self._acceptor.gone(connection.stream)
        identity, name = connection.identity, f"worker {call.worker_id}"
        if identity is not None and identity.worker != key_owner(call.worker_id):
            text = f"the certificate is that of {identity}, not {name}"
            connection.refuse("identity", text, "use the key of this machine's own entry")
            return
        worker = self._expected.get(str(call.worker_id))
        if worker is None:
            listed = ", ".join(self._expected)
            text = f"no worker {call.worker_id} is expected to dial (these are: {listed})"
            hint = "use the same configuration on all machines; a worker with a port is dialled"
            connection.refuse("identity", text, hint)
            return
        caller = _Caller(connection, call.process)
        with self._lock:
            if self._closed:
                connection.refuse("busy", _OVER)
                return
            before = [self._taken.get(worker), self._waiting.get(worker)]
            others = [c for c in before if c is not None and not c.connection.closed]
            stranger = next((c for c in others if c.process != call.process), None)
            if stranger is None:
                connection.peer, connection.link.name = worker, name
                self._waiting[worker] = caller
        if stranger is not None:
            text = f"{name} is connected from {stranger.connection.stream.peer}"
            connection.refuse("busy", text, "give each worker an id and a key of its own")
            return
        for other in others:  # the worker has lost this link
            other.connection.close(drain_s=0)

    def take(self, worker: WorkerId) -> Connection | None:
        """The parked connection of a worker, if there is one. Raises the error that ended the
        accepting thread, since without it no worker can come."""
        if self._accepting is not None and self._accepting.done():
            self._accepting.result()
        with self._lock:
            caller = self._waiting.pop(worker, None)
            if caller is None or caller.connection.closed:
                return None
            self._taken[worker] = caller
            return caller.connection

    def gone(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._acceptor.gone(connection.stream)

    def close(self) -> None:
        """Stop accepting, and refuse the parked connections."""
        if self._listener is not None:
            self._listener.close()
        self._acceptor.close()
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for caller in waiting:
            caller.connection.refuse("busy", _OVER)
        if self._accepting is not None:
            self._accepting.result(timeouts.EXIT_S)
