"""Bounds the messages of one link that wait to be looked at, whatever the peer sends."""

from __future__ import annotations

import threading
from functools import partial

from hetero_framework.core.messages import Message
from hetero_framework.errors import ProtocolError

MOST_MESSAGES = 100_000
MOST_FIELD_BYTES = 64 << 20
"""Most memory for the fields of waiting messages; no run has come near it. One may pass alone."""


class Waiting:
    """Counts the messages that a link's reader has handed on. Thread-safe. It does not wait: two
    processes that each wait for the other to read would wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages = 0
        self.field_bytes = 0
        self.tensor_bytes = 0
        self.most_tensor_bytes: int | None = None
        """Most bytes of waiting tensors. None: no bound; `Expectation` bounds boundary tensors."""

    def came(self, message: Message) -> None:
        """Count a message until its `seen` is called. Raises ProtocolError where too much waits."""
        with self._lock:
            self.messages += 1
            self.field_bytes += message.field_bytes
            self.tensor_bytes += message.tensor_bytes
            problem = self._problem()
        message.seen = partial(self._seen, message.field_bytes, message.tensor_bytes)
        if problem is not None:
            message.seen()
            message.release()
            raise ProtocolError(f"it sends faster than it is heard: {problem}")

    def _seen(self, field_bytes: int, tensor_bytes: int) -> None:
        with self._lock:
            self.messages -= 1
            self.field_bytes -= field_bytes
            self.tensor_bytes -= tensor_bytes

    def _problem(self) -> str | None:
        if self.messages > MOST_MESSAGES:
            return f"more than {MOST_MESSAGES} messages wait"
        if self.messages > 1 and self.field_bytes > MOST_FIELD_BYTES:
            return f"more than {MOST_FIELD_BYTES >> 20} MiB of fields wait"
        most = self.most_tensor_bytes
        if most is not None and self.messages > 1 and self.tensor_bytes > most:
            return f"more than {most >> 20} MiB of tensors wait"
        return None
