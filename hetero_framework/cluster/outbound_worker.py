"""A worker without a port: it dials the coordinator, and dials again whenever the link is lost."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from hetero_framework.config import CoordinatorConfig, host_and_port
from hetero_framework.core import messages as m
from hetero_framework.core import timeouts
from hetero_framework.core.connection import Connection
from hetero_framework.core.dial import connect
from hetero_framework.core.messages import Message
from hetero_framework.core.stream import Stream
from hetero_framework.errors import HeteroError, NetworkError
from hetero_framework.security.access import Access

_log = logging.getLogger(__name__)


class OutboundWorker:
    """Keeps one connection with the coordinator. `begin(stream)` starts it, and `call` is its first
    message. The reader thread reports to `refused` and `gone`; `run` is the target of a thread."""

    def __init__(
        self,
        coordinator: CoordinatorConfig,
        call: m.Call,
        access: Access,
        begin: Callable[[Stream], Connection],
    ) -> None:
        self._coordinator = coordinator
        self._call = call
        self._access = access
        self._begin = begin
        self._stop = threading.Event()
        self._over = threading.Event()
        self._connection: Connection | None = None
        self._told: str | None = None
        self.where = host_and_port(coordinator.ip, coordinator.port)

    def run(self) -> None:
        """Dial until `close`. Each reason for a failure is logged once."""
        while not self._stop.is_set():
            try:
                if self._hold():
                    continue  # the link worked until now, so dial again at once
            except HeteroError as error:  # keys that do not fit, or no thread
                self._tell(error.message, error.hint)
            except (OSError, MemoryError) as error:  # the stream broke before it was begun
                self._tell(f"cannot talk to the coordinator at {self.where}: {error}", None)
            self._stop.wait(timeouts.CALL_PAUSE_S)

    def close(self) -> None:
        """Have `run` end soon. The owner of the connection closes it."""
        self._stop.set()
        self._over.set()

    def refused(self, connection: Connection, answer: m.Reject) -> bool:
        """Whether the coordinator rejected our call with this answer. Runs in the reader thread."""
        if connection is not self._connection:
            return False
        self._tell(f"the coordinator refused this worker: {answer.message}", answer.hint)
        return True

    def gone(self, connection: Connection) -> None:
        """Note that a connection has ended. Runs in the reader thread."""
        if connection is self._connection:
            self._over.set()

    def _hold(self) -> bool:
        """Dial, call and wait for the end of the connection; return whether HELLO came."""
        stream = self._dial()
        if stream is None:
            return False
        self._over.clear()
        if self._stop.is_set():
            stream.close()
            return False
        with ExitStack() as on_error:
            on_error.callback(stream.close)
            connection = self._connection = self._begin(stream)
            on_error.pop_all()
        with suppress(HeteroError):  # `gone` is called for it
            connection.send(Message(self._call))
        while not (self._over.wait(timeouts.TICK_S) or connection.closed):
            pass
        was_greeted = connection.peer is not None
        if was_greeted:
            self._told = None
        return was_greeted

    def _dial(self) -> Stream | None:
        def on_retry(attempt: int, elapsed_s: float, reason: str) -> None:
            if elapsed_s > timeouts.QUIET_S:
                self._tell(f"waiting for the coordinator at {self.where} ({reason})", None)

        host, port = self._coordinator.ip, self._coordinator.port
        secure = partial(self._access.dialled, process="local")
        try:
            stop, who = self._stop, "the coordinator"
            return connect(host, port, math.inf, on_retry, who=who, stop=stop, secure=secure)
        except NetworkError:
            if self._stop.is_set():
                return None
            raise

    def _tell(self, text: str, hint: str | None) -> None:
        """Log a message once until it changes or the coordinator has been there."""
        if text != self._told:
            self._told = text
            _log.info("%s", f"{text}: {hint}" if hint else text)
